"""SandboxPool: processes that work on possibly hostile input, and are killed if they take too much time or memory.

`ask` blocks: call it off the event loop. A killed process is replaced with the next request.
"""

import marshal
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.core.errors import ConfigError, HeadstartError, InvalidRequestError, QueueFullError
from headstart.openai.sandbox.sandbox_process import CONFIG_ERROR, DATA, ERROR, HEADER, READY, TEXT, send

MAX_PROCESSES = 2  # one request that uses its whole time limit must not block all others
STALL_SECONDS = 60.0  # of time, however little CPU time a process gets on a busy machine
KILL_SECONDS = 0.5  # in addition to the time limit of a request, which most handlers check themselves
WAIT_SECONDS = 10.0  # for an idle process
MAX_FAILURES = 3  # kills in a row, before a pause
PAUSE_SECONDS = 5.0
EVERYBODY = "/"  # no tenant's name: a failure that no request has caused pauses all
_PLAIN = re.compile(
    r"PATH|HOME|TMPDIR|TZ|TZDIR|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV"
    r"|PYTHON(HOME|HASHSEED|MALLOC|UTF8|DONTWRITEBYTECODE|PYCACHEPREFIX)|MALLOC_\w+|GLIBC_TUNABLES|OMP_NUM_THREADS"
)


class SandboxLostError(HeadstartError):
    """A process was killed or has ended; the message is the reason, in the form "takes too long"."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The processes of one pool: the module they run, what it is built from, and its limits."""

    module: str  # calls sandbox_process.serve
    setup: Any  # plain data for its `build`
    subject: str  # of messages: "the model's chat template"
    requests: str  # of messages, in the plural: "conversations"
    max_setup_seconds: float  # of CPU time, of `build`
    max_seconds: float  # of CPU time, of one request
    max_bytes: int  # of memory of one process, in addition to what an idle one needs
    max_answer_bytes: int


class SandboxPool:
    """The processes of one sandbox. Thread-safe. Processes start with a request or `start`."""

    def __init__(self, sandbox: SandboxSpec) -> None:
        self._sandbox = sandbox
        self._free = threading.Condition()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._num_starting = 0
        self._failures: dict[str, int] = {}  # in a row, by tenant
        self._paused_until: dict[str, float] = {}
        self.close: Callable[[], object] = weakref.finalize(self, _kill_all, self._all)

    def prestart_process(self) -> None:
        """Start a process, so that the first request does not wait. Raises ConfigError if it cannot be built."""
        self._give_back(self._take(EVERYBODY), EVERYBODY)

    def ask(self, request: Any, tenant: str = "") -> str:
        """Return the answer to `request`, which is plain data.

        Raises the InvalidRequestError of the handler; SandboxLostError if the process exceeds its limits; ValueError
        for data that are not plain; ConfigError if no process can be built; QueueFullError if no process is idle in
        time, and for PAUSE_SECONDS after MAX_FAILURES consecutive failures of requests of the same `tenant`.
        """
        data = marshal.dumps(request)
        try:
            process = self._take(tenant)
        except ConfigError:  # of a pool that was not started before
            self._note_failure(EVERYBODY)
            raise
        try:
            kind, answer = process.exchange(data, self._sandbox.max_seconds + KILL_SECONDS)
        except SandboxLostError:
            self._discard(process, tenant)
            raise
        except BaseException:  # an interrupt: the response of the process will not be read
            self._discard(process)
            raise
        self._give_back(process, tenant)
        if kind == ERROR:
            param, _, message = answer.partition("\n")
            raise InvalidRequestError(message, param=param or None)
        return answer

    def _take(self, tenant: str) -> "_Process":
        """Return a process for the caller's exclusive use."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._free:
            while True:
                now = time.monotonic()
                until = max(self._paused_until.get(name, 0.0) for name in (tenant, EVERYBODY))
                if now < until:
                    message = f"{self._sandbox.subject} took too long {MAX_FAILURES} times in a row; try again later"
                    raise QueueFullError(message, retry_after=until - now)
                while self._idle:
                    process = self._idle.pop()
                    if process.is_alive():
                        return process
                    self._all.discard(process)
                if len(self._all) + self._num_starting < MAX_PROCESSES:
                    break
                if not self._free.wait(deadline - now):
                    message = f"too many {self._sandbox.requests} wait for {self._sandbox.subject}; try again later"
                    raise QueueFullError(message)
            self._num_starting += 1
        try:
            process = _Process(self._sandbox)
            self._all.add(process)
            return process
        finally:
            with self._free:
                self._num_starting -= 1
                self._free.notify()

    def _give_back(self, process: "_Process", tenant: str) -> None:
        with self._free:
            self._failures.pop(tenant, None)
            self._failures.pop(EVERYBODY, None)
            self._idle.append(process)
            self._free.notify()

    def _discard(self, process: "_Process", tenant: str | None = None) -> None:
        """Kill a process; `tenant`: whose request is the cause."""
        process.kill()
        with self._free:
            self._all.discard(process)
            self._free.notify()
        if tenant is not None:
            self._note_failure(tenant)

    def _note_failure(self, tenant: str) -> None:
        with self._free:
            failures = self._failures[tenant] = self._failures.get(tenant, 0) + 1
            if failures >= MAX_FAILURES:
                self._paused_until[tenant] = time.monotonic() + PAUSE_SECONDS
                self._free.notify_all()


class _Process:
    """A process that is ready for requests. The constructor raises ConfigError if it cannot be built."""

    def __init__(self, sandbox: SandboxSpec) -> None:
        self._max_answer_bytes = sandbox.max_answer_bytes
        self._stream, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(sandbox.module, theirs.fileno())
        try:
            self._receive(STALL_SECONDS)
            limits = sandbox.max_setup_seconds, sandbox.max_seconds, sandbox.max_bytes
            send(self._stream, DATA, marshal.dumps((sandbox.setup, *limits)))
            kind, answer = self._receive(sandbox.max_setup_seconds + KILL_SECONDS)
        except (SandboxLostError, OSError) as error:
            self.kill()
            raise ConfigError(f"{sandbox.subject} does not compile: its process {error}") from None
        except BaseException:
            self.kill()
            raise
        if kind == CONFIG_ERROR:
            self.kill()
            raise ConfigError(answer)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: bytes, max_seconds: float) -> tuple[bytes, str]:
        """Return the kind and the text of the response. Raises SandboxLostError; then the process must be killed."""
        try:
            self._stream.settimeout(STALL_SECONDS)
            send(self._stream, DATA, request)
        except TimeoutError:
            raise SandboxLostError("takes too long") from None
        except OSError:
            raise SandboxLostError("ended its process") from None
        return self._receive(max_seconds)

    def kill(self) -> None:
        self._stream.close()
        self._process.kill()
        self._process.wait()

    def _cpu_seconds(self) -> float:
        """Return the CPU time that the process has taken; its clock is that of clock_getcpuclockid(3)."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)
        except OSError:
            raise SandboxLostError("ended its process") from None

    def _receive(self, max_seconds: float) -> tuple[bytes, str]:
        """Return a response that takes `max_seconds` of the process's CPU time at most."""
        limits = self._cpu_seconds() + max_seconds, time.monotonic() + STALL_SECONDS
        kind, size = HEADER.unpack(self._exactly(HEADER.size, limits))
        if kind not in (READY, TEXT, ERROR, CONFIG_ERROR) or size > self._max_answer_bytes:
            raise SandboxLostError("gives an invalid response")
        return kind, self._exactly(size, limits).decode("utf-8", "surrogatepass")

    def _exactly(self, size: int, limits: tuple[float, float]) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = min(limits[0] - self._cpu_seconds(), limits[1] - time.monotonic())
            self._stream.settimeout(max(left, 0.01))
            try:
                piece = self._stream.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                if left > 0:
                    continue
                raise SandboxLostError("takes too long") from None
            except OSError:
                piece = b""
            if not piece:
                raise SandboxLostError("ended its process")
            data += piece
        return bytes(data)


def _spawn(module: str, descriptor: int) -> "subprocess.Popen[bytes]":
    """Start the process: same modules, own process group (so it gets no Ctrl-C), no other descriptors, no secrets."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(descriptor)],
        env={**minimal_environment(os.environ), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )


def minimal_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs to run at all: none that may hold a key, a token or a password."""
    return {name: value for name, value in environ.items() if _PLAIN.fullmatch(name)}


def _kill_all(processes: "set[_Process]") -> None:
    for process in list(processes):
        process.kill()
