"""Process of one replica of `headstart serve --replicas N`, started by gateway/replicas/subprocesses.py.

It reads its options as one line of JSON from stdin, so that keys are not in argv, in the environment or in a file. At
the end of stdin, when its parent is gone, it shuts down as after SIGTERM.
"""

import os
import signal
import sys
import threading
import time
from typing import NamedTuple

import msgspec

from headstart.cli.build_engine import build_engine
from headstart.config.options import EngineOptions, ServerOptions
from headstart.http.logs import Log
from headstart.server.run_server import serve

_STDIN = 0
ORPHAN_SECONDS = 30.0  # for a graceful shutdown after the parent is gone; then SIGKILL


class ReplicaOptions(NamedTuple):
    """The options of one replica process."""

    engine: EngineOptions
    server: ServerOptions
    on_terminal: bool = False  # its output is passed on to a terminal
    num_replicas: int = 1  # on this machine


def encode_options(options: ReplicaOptions) -> bytes:
    """Return the line for stdin without its newline."""
    return msgspec.json.encode(options)


def read_options() -> ReplicaOptions:
    """Return the options from the first line of stdin; later, the end of stdin ends this process. Raises EOFError."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(_STDIN, 65536)  # not sys.stdin: the thread would hold its buffer's lock at exit
        if not part:
            raise EOFError("no options came on stdin; this is started by headstart serve --replicas")
        line += part
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    return msgspec.json.decode(line, type=ReplicaOptions)


def _end_with_parent() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Serve until SIGTERM or the end of stdin; return the exit code of server.run_server.serve."""
    options = read_options()
    log = Log(is_terminal=options.on_terminal)
    num_shares = options.num_replicas + 1  # the router holds requests, too
    return serve(build_engine, options.engine, options.server, log, num_shares=num_shares)


if __name__ == "__main__":
    sys.exit(main())
