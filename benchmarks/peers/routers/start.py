"""The common part of all router starters: the command line, the line with name and version, and the exec.

`PYTHON STARTER.py --environment FOLDER --port N --folder DIR [--policy NAME] --replica URL ... [-- FLAG ...]` prints
one JSON line (name, version, `ready`: the path of the readiness check) and then replaces itself with that router.
Standard library only: any interpreter works. The counterpart is `headstart_lab.runners.route_process`.
"""

import argparse
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Order:
    """The launch settings of a router. `policy` is in the router's own terms; empty: its default."""

    environment: Path
    port: int
    folder: Path  # for files of the router
    policy: str
    replicas: tuple[str, ...]
    flags: tuple[str, ...]

    def script(self, name: str) -> str:
        """Return the path of an executable of its environment."""
        return str(self.environment / "bin" / name)

    def spare_port(self) -> int:
        """Return a port of this machine that is currently unused."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def addresses(self) -> list[tuple[str, int]]:
        """Return (host, port) of each replica."""
        parts = [urlsplit(url) for url in self.replicas]
        return [(part.hostname or "127.0.0.1", part.port or 80) for part in parts]


def start(distribution: str, ready: str, command: Callable[[Order], list[str]]) -> None:
    """Print name and version and exec `command(order)`. Exits with 2 if the package is not in its environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--policy", default="")
    parser.add_argument("--replica", action="append", required=True)
    parser.add_argument("flags", nargs="*", help="more flags of the router, behind --")
    given = parser.parse_args()
    packages = [str(path) for path in given.environment.glob("lib/python*/site-packages")]
    found = next(iter(distributions(name=distribution, path=packages)), None)
    if found is None:
        parser.error(f"{given.environment} has no {distribution}; see benchmarks/peers/setup.sh")
    order = Order(given.environment, given.port, given.folder, given.policy, tuple(given.replica), tuple(given.flags))
    words = command(order)
    print(json.dumps({"name": distribution, "version": found.version, "ready": ready}), flush=True)
    os.execv(words[0], words)
