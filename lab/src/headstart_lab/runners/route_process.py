"""A router process, ours or a peer's: started in front of replicas, awaited and stopped, all in the same way.

Peers are started by the scripts in benchmarks/peers/routers, each in its own environment (made by setup.sh).
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import headstart
from headstart.core.errors import ConfigError

STARTERS = Path(headstart.__file__).parents[2] / "benchmarks" / "peers" / "routers"
START_SECONDS = 120.0
STOP_SECONDS = 5.0
_BANNER = re.compile(r" at (http://\S+)/v1")
_PROBE_SECONDS = 5.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # all of it is on this machine


@dataclass(frozen=True, slots=True)
class Entrant:
    """A router that can be started. `environment`: the folder of a peer's environment; None: our router."""

    name: str
    environment: Path | None = None
    policy: str = ""  # in the router's own terms; empty: its default
    flags: tuple[str, ...] = ()  # additional flags of the router

    def command(self, port: int, folder: Path, replicas: Sequence[str]) -> list[str]:
        """Return the command line of the router. Raises ConfigError for an unknown peer."""
        if self.environment is None:
            words = [sys.executable, "-m", "headstart", "route", "--host", "127.0.0.1", "--port", str(port)]
            words += ["--routing-policy", self.policy] if self.policy else []
            return [*words, "--no-access-log", *_repeated("--replica", replicas), *self.flags]
        peer = self.name.partition(":")[0]
        starter = STARTERS / f"{peer.replace('-', '_')}.py"
        if not starter.is_file():
            raise ConfigError(f"no peer {peer!r}: {starter} is not there (peers need a source checkout)")
        words = [sys.executable, str(starter), "--environment", str(self.environment.resolve())]
        words += ["--port", str(port), "--folder", str(folder), "--policy", self.policy]
        return [*words, *_repeated("--replica", replicas), "--", *self.flags]


OURS = Entrant("ours")


def parse_peer(text: str) -> Entrant:
    """Parse `NAME=ENVIRONMENT` or `NAME:POLICY=ENVIRONMENT` of the command line. Raises ConfigError."""
    name, _, folder = text.partition("=")
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"--peer {text!r}: write NAME=FOLDER, a peer and its environment (benchmarks/peers/setup.sh)")
    return Entrant(name, Path(folder), policy=name.partition(":")[2])


class RouterProcess:
    """A running router. `close()` ends it."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.version = ""
        self.url = ""
        self._process = process
        self._log = log

    @property
    def log(self) -> str:
        """Return its output on stdout and stderr."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self, program: str = "") -> float:
        """Return the CPU time of its processes so far, or of those that run one program."""
        return sum(_cpu_seconds(one) for one in self._everyone() if not program or _program(one) == program)

    def close(self) -> None:
        """Terminate it, and kill processes that do not end. Idempotent."""
        everyone = self._everyone()
        if self.is_alive:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        for one in everyone:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self._process.wait()

    def _everyone(self) -> list[psutil.Process]:
        try:
            leader = psutil.Process(self._process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def start_router(entrant: Entrant, replicas: Sequence[str], folder: Path) -> RouterProcess:
    """Start a router that is ready to serve all `replicas`; its log goes to `folder`. Raises ConfigError on failure."""
    port = 0 if entrant.environment is None else _spare_port()
    command = entrant.command(port, folder, replicas)
    log = folder / f"router-{entrant.name}-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(ours=entrant.environment is None),
            cwd=folder,  # so that no headstart.toml is read
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    router = RouterProcess(entrant.name, process, log)
    try:
        ready = _introduced(router, port)
        _wait(router, lambda: _serves_all(router.url + ready, len(replicas)))
    except BaseException:
        router.close()
        raise
    return router


@contextlib.contextmanager
def running_router(entrant: Entrant, replicas: Sequence[str], folder: Path) -> Generator[RouterProcess]:
    """Start a router for the length of a block."""
    router = start_router(entrant, replicas, folder)
    try:
        yield router
    finally:
        router.close()


def _introduced(router: RouterProcess, port: int) -> str:
    """Wait for its name, version and URL, store them, and return the path of its readiness check."""
    if port == 0:
        router.version = headstart.__version__
        router.url = _wait(router, lambda: _BANNER.search(router.log))[1]
        return "/v1/fleet"
    line = _wait(router, lambda: router.log.partition("\n")[0] if "\n" in router.log else "")
    try:
        hello = json.loads(line)
        router.name, router.version = router.name or hello["name"], hello["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{router.name} did not start: {router.log.strip()[-500:]}") from error
    router.url = f"http://127.0.0.1:{port}"
    return hello["ready"]


def _wait(router: RouterProcess, probe: Any) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        alive = router.is_alive
        found = probe()
        if found:
            return found
        if not alive:
            raise ConfigError(f"{router.name} ended before it was ready: {router.log.strip()[-500:]}")
        time.sleep(0.02)
    raise ConfigError(f"{router.name} was not ready after {START_SECONDS:.0f} s: {router.log.strip()[-500:]}")


def _serves_all(url: str, num_replicas: int) -> bool:
    """Return whether it responds, with all replicas healthy if it reports a count."""
    try:
        with _NO_PROXY.open(url, timeout=_PROBE_SECONDS) as response:
            found = json.loads(response.read() or b"{}")
    except (OSError, ValueError):
        return False
    if not isinstance(found, dict):
        return True
    if "replicas" in found:  # our router
        return sum(one.get("state") == "up" for one in found["replicas"]) == num_replicas
    return found.get("healthy_workers", num_replicas) == num_replicas


def _environment(*, ours: bool) -> dict[str, str]:
    """Return the environment of the process: ours finds this package, a peer finds only its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADSTART_")}
    path = environment.pop("PYTHONPATH", "")
    if ours:
        source = str(Path(headstart.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (source, path) if part)
    return environment


def _spare_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _repeated(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _program(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system
