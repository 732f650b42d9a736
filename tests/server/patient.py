"""`headstart serve` whose engine prefers its store to computing, always, and never gives a load up.

Otherwise it is what users run. See patience.py for why.
"""

import sys

import patience

from headstart.cli import build_engine as cli_engine
from headstart.cli import main as cli
from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo

COMMAND = [sys.executable, "-c", "from server.patient import main; main()"]
"""In place of `python -m headstart`."""

_build = cli_engine.build_engine


def build_engine(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """As cli_engine.build_engine; in the engine process, which finds it by its name."""
    patience.prefer_the_store(setattr)
    return _build(options)


def main() -> None:
    """Does what `headstart` would with these arguments."""
    cli_engine.build_engine = build_engine
    sys.exit(cli.main(sys.argv[1:]))
