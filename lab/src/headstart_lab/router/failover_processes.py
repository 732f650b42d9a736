"""Servers that are killed and restarted with the same command on the same port, and a router in front of them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil

import headstart
from headstart.core.errors import ConfigError

START_SECONDS = 1800.0  # only for a server that hangs: one that ends is noticed at once
FLEET_SECONDS = 600.0
_POLL_SECONDS = 0.01
_BANNER = re.compile(r" at (http://\S+)/v1")


class Served:
    """One server across its successive processes. Its log goes to `folder`."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.url = ""
        self._command, self._folder = list(command), folder
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._processes: list[psutil.Process] = []

    def start(self) -> None:
        """Start a process without waiting for it."""
        self._log = self._folder / f"{self.name}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=_environment(),
                cwd=self._folder,  # so that no headstart.toml is read
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def ready(self) -> bool:
        """Return whether it has printed its ready message. Raises ConfigError if it has ended instead."""
        assert self._process is not None, "never started"
        ended = self._process.poll()
        found = _BANNER.search(self.log)
        if found is not None:
            self.url = found[1]
            return True
        if ended is not None:
            raise ConfigError(f"{self.name} ended with code {ended}: {self.log.strip()[-500:]}")
        return False

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises ConfigError on a timeout."""
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.name} was not ready after {START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    @property
    def log(self) -> str:
        """Return the output of the last process."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill all its processes with SIGKILL, at once. Idempotent."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(psutil.Error):
            front = psutil.Process(self._process.pid)
            self._processes = [front, *front.children(recursive=True)]
        for one in self._processes:
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, so that it drains and ends; do not wait."""
        assert self._process is not None, "never started"
        self._process.terminate()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()


def router_command(replicas: Sequence[str], port: int, decisions: Path, envoy: str = "") -> list[str]:
    """Return the command line of a router, with Envoy if its binary is given."""
    words = [sys.executable, "-m", "headstart", "route", "--port", str(port), "--no-access-log"]
    words += ["--decision-log", str(decisions), *(["--envoy", envoy] if envoy else [])]
    return [*words, *(word for url in replicas for word in ("--replica", url))]


def replica_command(model: str, port: int, threads: int) -> list[str]:
    """Return the command line of a replica; `model` is empty (the bundled one), a folder, or a hub id."""
    words = [sys.executable, "-m", "headstart", "serve", *([model] if model else []), "--port", str(port)]
    return [*words, "--no-access-log", "--stats-interval", "0", "--threads", str(threads), "--num-blocks", "2048"]


def null_command(port: int) -> list[str]:
    """Return the command line of a replica without a model."""
    code = "import sys; from headstart_lab.runners.null_replica import main; sys.exit(main())"
    return [sys.executable, "-c", code, "--port", str(port)]


def fleet_of(url: str) -> dict[str, dict[str, Any]]:
    """Return the router's entries for its replicas, by URL. Raises OSError and ValueError."""
    with urllib.request.urlopen(f"{url}/v1/fleet", timeout=FLEET_SECONDS) as response:
        return {entry["url"]: entry for entry in json.loads(response.read())["replicas"]}


def takes_requests(entry: dict[str, Any] | None) -> bool:
    """Return whether the router sends requests to the replica of this entry."""
    return entry is not None and entry["state"] == "up" and not entry.get("ejected", True)


def pauses(
    clock: Random, mean_seconds: float, until: float, now: Callable[[], float] = time.monotonic
) -> Iterator[float]:
    """Yield the pauses before the events of a Poisson clock; it ends before the first event after `until`."""
    while (pause := clock.expovariate(1 / mean_seconds)) < until - now():
        yield pause


def quiet_ports(count: int) -> list[int]:
    """Return free ports outside the ephemeral range, so that they stay free while a server on them restarts.

    Processes that search at the same time, with adjacent process ids, start far from one another.
    """
    found: list[int] = []
    first = os.getpid() * 7_919 % 12_000
    for step in range(12_000):
        port = 20_000 + (first + step) % 12_000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ConfigError("no ports are free between 20000 and 32000")


def _environment() -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if not key.startswith("HEADSTART_")}
    source = str(Path(headstart.__file__).parents[1])
    found["PYTHONPATH"] = os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path)
    return found
