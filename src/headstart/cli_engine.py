"""What builds the engine in its own process: importing this is cheap, so that the HTTP process stays free of torch."""

from headstart.core.engine import Engine, EngineInfo
from headstart.model.threads import prepare_threads
from headstart.options import EngineOptions


def build_engine(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """assembly.build_engine, imported only when called, and after the thread settings that torch reads on import."""
    prepare_threads(options.threads)
    from headstart.assembly import build_engine as build

    return build(options)
