"""ChatRenderer: renders conversations with a model's chat template in separate processes (chat_process.py).

The result equals that of ChatTemplate in this process, which is the oracle in tests. A template comes from the model's
folder and may be hostile: `{{ 'a' * 2000000000 }}` or nested loops cannot be bounded from inside. A process that takes
too much time or memory is killed, and a new one is started. `render` blocks: call it off the event loop.
"""

import marshal
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from headstart.core.errors import ConfigError, InvalidRequestError, QueueFullError
from headstart.openai.chat.chat_process import CONFIG_ERROR, DATA, ERROR, HEADER, READY, TEXT, send
from headstart.openai.chat.chat_template import MAX_CHARS, MAX_SECONDS, check_source

MAX_PROCESSES = 2  # one conversation that uses its whole time limit must not block all others
MAX_BYTES = 512 * 1024 * 1024  # of one process; 16 Mi characters of a wide text take 64 MiB, several times
START_SECONDS = 60.0  # of an interpreter, also on a busy machine
KILL_SECONDS = 0.5  # in addition to the time limit of a conversation, which most templates check themselves
WAIT_SECONDS = 10.0  # for an idle process
MAX_FAILURES = 3  # kills in a row, before a pause
PAUSE_SECONDS = 5.0
_MAX_ANSWER_BYTES = 4 * MAX_CHARS + 4096


class _LostError(Exception):
    """The process must be killed or has ended; the message is the reason."""


class ChatRenderer:
    """Renderer for the chat template of one model. Thread-safe. Processes start with a conversation or `start`."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        *,
        max_seconds: float = MAX_SECONDS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Raise ConfigError for a template that is too long or is not valid Jinja."""
        check_source(source)
        self._setup = marshal.dumps((source, dict(named_tokens), max_seconds, max_bytes))
        self._max_seconds = max_seconds
        self._free = threading.Condition()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._num_starting = 0
        self._failures = 0  # in a row
        self._paused_until = 0.0
        self.close: Callable[[], object] = weakref.finalize(self, _kill_all, self._all)

    def start(self) -> None:
        """Start a process, so that the first conversation does not wait. Raises ConfigError if it cannot compile."""
        self._give_back(self._take())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the prompt, as ChatTemplate.render does.

        Raises InvalidRequestError if the template rejects the messages or exceeds its limits. Raises QueueFullError if
        no process is idle in time, and for PAUSE_SECONDS after MAX_FAILURES consecutive failures.
        """
        try:
            request = marshal.dumps(
                (messages, add_generation_prompt, continue_final_message, dict(options or {}), tools)
            )
        except ValueError:
            raise InvalidRequestError(
                "messages or tools hold values that are not plain JSON", param="messages"
            ) from None
        try:
            process = self._take()
        except ConfigError as error:  # from a template that was not started before
            self._note_failure()
            raise InvalidRequestError(str(error), param="messages") from None
        try:
            kind, answer = process.exchange(request, time.monotonic() + self._max_seconds + KILL_SECONDS)
        except _LostError as error:
            self._discard(process)
            message = f"the model's chat template {error} for this conversation; send fewer or shorter messages"
            raise InvalidRequestError(message, param="messages") from None
        except BaseException:  # an interrupt: the response of the process will not be read
            self._discard(process, is_failure=False)
            raise
        self._give_back(process)
        if kind == ERROR:
            param, _, message = answer.partition("\n")
            raise InvalidRequestError(message, param=param or None)
        return answer

    def _take(self) -> "_Process":
        """Return a process for the caller's exclusive use."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._free:
            while True:
                now = time.monotonic()
                if now < self._paused_until:
                    message = f"the model's chat template took too long {MAX_FAILURES} times in a row; try again later"
                    raise QueueFullError(message, retry_after=self._paused_until - now)
                while self._idle:
                    process = self._idle.pop()
                    if process.is_alive():
                        return process
                    self._all.discard(process)
                if len(self._all) + self._num_starting < MAX_PROCESSES:
                    break
                if not self._free.wait(deadline - now):
                    raise QueueFullError("too many conversations wait for the chat template; try again later")
            self._num_starting += 1
        try:
            process = _Process(self._setup, self._max_seconds + KILL_SECONDS)
            self._all.add(process)
            return process
        finally:
            with self._free:
                self._num_starting -= 1
                self._free.notify()

    def _give_back(self, process: "_Process") -> None:
        with self._free:
            self._failures = 0
            self._idle.append(process)
            self._free.notify()

    def _discard(self, process: "_Process", *, is_failure: bool = True) -> None:
        process.kill()
        with self._free:
            self._all.discard(process)
            self._free.notify()
        if is_failure:
            self._note_failure()

    def _note_failure(self) -> None:
        with self._free:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                self._free.notify_all()


class _Process:
    """A process that has compiled the template. The constructor raises ConfigError if it cannot."""

    def __init__(self, setup: bytes, seconds: float) -> None:
        self._stream, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno())
        try:
            self._receive(time.monotonic() + START_SECONDS)
            send(self._stream, DATA, setup)
            kind, answer = self._receive(time.monotonic() + seconds)
        except (_LostError, OSError) as error:
            self.kill()
            raise ConfigError(
                f"the model's chat template does not compile: the process that renders it {error}"
            ) from None
        except BaseException:
            self.kill()
            raise
        if kind == CONFIG_ERROR:
            self.kill()
            raise ConfigError(answer)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: bytes, deadline: float) -> tuple[bytes, str]:
        """Return the kind and the text of the response. Raises _LostError; then the process must be killed."""
        try:
            self._stream.settimeout(max(deadline - time.monotonic(), 0.001))
            send(self._stream, DATA, request)
        except TimeoutError:
            raise _LostError("takes too long") from None
        except OSError:
            raise _LostError("ended its process") from None
        return self._receive(deadline)

    def kill(self) -> None:
        self._stream.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, deadline: float) -> tuple[bytes, str]:
        kind, size = HEADER.unpack(self._exactly(HEADER.size, deadline))
        if kind not in (READY, TEXT, ERROR, CONFIG_ERROR) or size > _MAX_ANSWER_BYTES:
            raise _LostError("gives an invalid response")
        return kind, self._exactly(size, deadline).decode("utf-8", "surrogatepass")

    def _exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._stream.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                piece = self._stream.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                raise _LostError("takes too long") from None
            except OSError:
                piece = b""
            if not piece:
                raise _LostError("ended its process")
            data += piece
        return bytes(data)


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start the process: same modules, own process group (so it gets no Ctrl-C), no other descriptors."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headstart.openai.chat.chat_process", str(descriptor)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )


def _kill_all(processes: "set[_Process]") -> None:
    for process in list(processes):
        process.kill()
