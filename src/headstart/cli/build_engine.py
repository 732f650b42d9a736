"""What builds the engine in its own process: importing this is cheap, so that the HTTP process stays free of torch."""

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine, EngineInfo
from headstart.model.setup.threads import prepare_threads


def build_engine(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """assembly.build_engine, imported only when called, after thread settings and the checks that need no torch."""
    prepare_threads(options.threads)
    from headstart.engine_checks import checked_model_folder

    folder = checked_model_folder(options)
    from headstart.assembly import build_engine as build

    return build(options, folder)
