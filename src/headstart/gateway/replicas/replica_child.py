"""ReplicaChild: the process of one replica on this machine, from its options on stdin to its last line of output.

Its stdin is a pipe that stays open as long as this process lives: so it detects the end of this process, whatever the
cause.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headstart.config.options import EngineOptions, ServerOptions
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.lifecycle import EXIT_CONFIG
from headstart.http.logs import ServerLog

_READY = re.compile(r"(Headstart \S+ serves .*) at (http://\S+:(\d+))/v1$")
_MESSAGE_PREFIX = "headstart: "  # prefix of a server's messages before it ends, or while it loads
_FOR_CLIENTS = (
    "  page ",
    "  keys ",
    "  try ",
    "            -d ",
)  # lines of a replica's banner: clients must use the router


class ReplicaOptions(NamedTuple):
    """The options of one replica process."""

    engine: EngineOptions
    server: ServerOptions
    on_terminal: bool = False  # its output is passed on to a terminal
    num_replicas: int = 1  # on this machine
    memory_share: float = 1.0  # of the free memory, where the engine options set no limit


def encode_replica_options(options: ReplicaOptions) -> bytes:
    """Return the line for stdin without its newline."""
    return msgspec.json.encode(options)


def replica_command() -> tuple[str, ...]:
    """Return the command of a replica's process, which reads its options from stdin."""
    return (sys.executable, "-P", "-m", "headstart.cli.replica_process")


def replica_environment(threads: int) -> dict[str, str]:
    """Return this process's environment with its sys.path as PYTHONPATH and `threads` for OpenMP and MKL."""
    path = os.pathsep.join(part for part in sys.path if part)
    count = str(threads)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}


@dataclass(frozen=True, slots=True)
class ReplicaLaunch:
    """One process to start."""

    command: tuple[str, ...]
    options: bytes  # the first line on its stdin
    environment: Mapping[str, str]
    events: str | None = None  # endpoints of its KV events and of their replay
    replay: str | None = None


class ReplicaChild:
    """One process, and the thread that relays its output. Events are set in `loop`."""

    def __init__(self, name: str, launch: ReplicaLaunch, loop: asyncio.AbstractEventLoop, log: ServerLog) -> None:
        self.address: ReplicaAddress | None = None  # once it is ready
        self.settled = asyncio.Event()  # ready, or over
        self.over = asyncio.Event()
        self.is_leaving = False
        self.last_message = ""
        self._name, self._launch, self._loop, self._log = name, launch, loop, log
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            launch.command,
            env=dict(launch.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # this process handles Ctrl-C
        )
        self._thread = threading.Thread(target=self._converse, name=f"replica-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    @property
    def accepts_requests(self) -> bool:
        """Whether requests may be sent there."""
        return self.address is not None and not self.is_leaving and not self.over.is_set()

    @property
    def exit_description(self) -> str:
        """A description of its end, as the rest of a sentence."""
        return f"ended with code {self.exit_code}" + (self.last_message and f" ({self.last_message})")

    @property
    def uptime_seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_at

    def terminate(self) -> None:
        """Request it to drain and end, if it still runs."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it, and with it its engine, if it still runs."""
        self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait until it has ended and all its output is relayed."""
        self._thread.join(timeout)

    def _converse(self) -> None:
        """Run in a thread: send the options and relay the process's output, until it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # it has ended already
            stdin.write(self._launch.options + b"\n")
            stdin.flush()
        held_line = ""
        for raw in stdout:
            if held_line:
                self._relay(held_line)
            line, held_line = raw.decode(errors="replace").rstrip("\n"), ""
            if line.startswith(_MESSAGE_PREFIX) and self.address is None:
                held_line = line  # possibly its last message
            else:
                self._relay(line)
        code = self._process.wait()
        if code == EXIT_CONFIG:
            self.last_message = held_line.removeprefix(_MESSAGE_PREFIX)
        elif held_line:
            self._relay(held_line)
        with suppress(BrokenPipeError):
            stdin.close()
        self._set(self.over, self.settled)

    def _relay(self, line: str) -> None:
        ready = _READY.match(line)
        if ready is not None:
            self.address = ReplicaAddress(ready[2], self._launch.events, self._launch.replay)
            self._set(self.settled)
            line = f"{ready[1]}, behind the router at port {ready[3]}"  # no address: the first one must be the router's
        if not line.startswith(_FOR_CLIENTS):
            self._log.write_line(label_output_line(self._name, line))

    def _set(self, *events: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing waits for the event
            self._loop.call_soon_threadsafe(lambda: [event.set() for event in events])


def label_output_line(name: str, line: str) -> str:
    """Return a line of a replica's output with its name: a field of a JSON object, else in front."""
    if line.startswith("{"):
        with suppress(ValueError):
            return json.dumps({**json.loads(line), "replica": name})
    return f"[{name}] {line}"
