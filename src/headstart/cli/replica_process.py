"""The process of one of the replicas of `headstart serve --replicas N`, started by gateway/replicas/subprocesses.py.

Its options come as one line of JSON on stdin, so that keys are neither in argv nor in the environment nor in a file. It
ends as after SIGTERM when stdin does: then the process that started it is gone.
"""

import os
import signal
import sys
import threading
import time

import msgspec

from headstart.cli.build_engine import build_engine
from headstart.config.options import EngineOptions, ServerOptions
from headstart.http.logs import Log
from headstart.server.run_server import serve

_STDIN = 0
ORPHAN_SECONDS = 30.0  # for a gentle end when nobody is there to be served


def encode_options(engine: EngineOptions, server: ServerOptions, on_terminal: bool = False) -> bytes:
    """The line for stdin, without its end; `on_terminal`: what the process writes is passed on to a terminal."""
    return msgspec.json.encode((engine, server, on_terminal))


def read_options() -> tuple[EngineOptions, ServerOptions, bool]:
    """The first line of stdin; from then on this process ends when its parent does. Raises EOFError."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(_STDIN, 65536)  # not sys.stdin: its buffer has a lock that the thread would hold at the end
        if not part:
            raise EOFError("no options came on stdin; this is started by headstart serve --replicas")
        line += part
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    return msgspec.json.decode(line, type=tuple[EngineOptions, ServerOptions, bool])


def _end_with_parent() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Serve until it is told to end; the exit codes of server.serve."""
    engine, server, on_terminal = read_options()
    return serve(build_engine, engine, server, Log(is_terminal=on_terminal))


if __name__ == "__main__":
    sys.exit(main())
