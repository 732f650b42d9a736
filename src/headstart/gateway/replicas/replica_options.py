"""ReplicaOptions: what starts the process of one replica (cli/replica_process.py): command, options, environment."""

import os
import sys
from typing import NamedTuple

import msgspec

from headstart.config.options import EngineOptions, ServerOptions


class ReplicaOptions(NamedTuple):
    """The options of one replica process."""

    engine: EngineOptions
    server: ServerOptions
    on_terminal: bool = False  # its output is passed on to a terminal
    num_replicas: int = 1  # on this machine
    memory_share: float = 1.0  # of the free memory, where the engine options set no limit


def encode_options(options: ReplicaOptions) -> bytes:
    """Return the line for stdin without its newline."""
    return msgspec.json.encode(options)


def replica_command() -> tuple[str, ...]:
    """Return the command of a replica's process, which reads its options from stdin."""
    return (sys.executable, "-P", "-m", "headstart.cli.replica_process")


def environment(threads: int) -> dict[str, str]:
    """Return this process's environment with its sys.path as PYTHONPATH and `threads` for OpenMP and MKL."""
    path = os.pathsep.join(part for part in sys.path if part)
    count = str(threads)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
