"""Process of one replica of `headstart serve --replicas N`, started by gateway/replicas/replica_child.py.

It reads its options as one line of JSON from stdin, so that keys are not in argv, in the environment or in a file. At
the end of stdin, when its parent is gone, it shuts down as after SIGTERM.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import msgspec

from headstart.cli.build_engine import build_engine
from headstart.config.options import EngineOptions
from headstart.gateway.replicas.replica_child import ReplicaOptions
from headstart.http.logs import ServerLog
from headstart.model.setup.gpus import count_gpus
from headstart.model.setup.sizes import cpu_memory
from headstart.server.run_server import serve

_STDIN = 0
ORPHAN_SECONDS = 30.0  # for a graceful shutdown after the parent is gone; then SIGKILL


def read_options_from_stdin() -> ReplicaOptions:
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
    options = read_options_from_stdin()
    log = ServerLog(is_terminal=options.on_terminal)
    num_shares = options.num_replicas + 1  # the router holds requests, too
    engine = options.engine
    if options.memory_share < 1:
        engine = options_with_cpu_memory_limit(engine, options.memory_share, num_gpus=count_gpus(engine.device))
    return serve(build_engine, engine, options.server, log, num_shares=num_shares)


def options_with_cpu_memory_limit(
    engine: EngineOptions, share: float, available: int | None = None, *, num_gpus: int
) -> EngineOptions:
    """Return the options with a limit of `share` of the available bytes (None: those of now), where none is set.

    The limit is that of the memory of the CPU: on a GPU there is none.
    """
    is_set = engine.memory_limit or engine.kv_cache_memory or engine.num_gpu_blocks_override
    if is_set or num_gpus or engine.device.startswith("cuda"):
        return engine
    limit = cpu_memory().available if available is None else available
    return replace(engine, memory_limit=str(max(int(limit * share), 1)))


if __name__ == "__main__":
    sys.exit(main())
