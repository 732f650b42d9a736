"""The inner side of a sandboxed process: serves requests of its parent within limits of time and memory.

Messages in both directions: one byte for the kind, four for the length, then the data. To this process: marshal of
plain data. From it: text only, since the parent must not trust a process that works on possibly hostile input. An
alarm ends the process if a request takes too long and its parent has died; the parent kills it earlier otherwise.
"""

import marshal
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headstart.allocator import configure_malloc, trim_heap
from headstart.core.errors import ConfigError, InvalidRequestError

HEADER = struct.Struct("!cI")
READY, DATA, TEXT, ERROR, CONFIG_ERROR = b"R", b"D", b"T", b"E", b"C"
TRIM_BYTES = 256 << 10  # of an answer, after which the heap is trimmed
ALARM_SECONDS = 1.0  # in addition to the time limit of a request

Handler = Callable[[Any], str]  # may raise InvalidRequestError


def serve(build: Callable[[Any], Handler], too_large: InvalidRequestError) -> None:
    """Serve the parent process, over the socket argv[1], until it closes its end.

    `build` makes the handler of requests from the parent's setup; it may raise ConfigError. `too_large`: the error for
    a request whose answer does not fit into memory.
    """
    configure_malloc()
    stream = socket.socket(fileno=int(sys.argv[1]))
    with stream, suppress(ConnectionError, EOFError):
        send(stream, READY, b"")
        setup, max_setup_seconds, max_seconds, max_bytes = marshal.loads(receive(stream))
        _limit_memory(max_bytes)
        with _alarm(max_setup_seconds):
            try:
                handler = build(setup)
            except ConfigError as error:
                send(stream, CONFIG_ERROR, encode_utf8(str(error)))
                return
        send(stream, READY, b"")
        while True:
            request = marshal.loads(receive(stream))
            with _alarm(max_seconds):
                kind, answer = _answer(handler, request, too_large)
            send(stream, kind, answer)
            is_large = len(answer) > TRIM_BYTES
            del request, answer
            if is_large:
                trim_heap()


def send(stream: socket.socket, kind: bytes, data: bytes) -> None:
    """Send one message."""
    stream.sendall(HEADER.pack(kind, len(data)) + data)


def receive(stream: socket.socket) -> bytes:
    """Return the data of the next message. Raises EOFError at the end of the stream."""
    _, size = HEADER.unpack(_exactly(stream, HEADER.size))
    return _exactly(stream, size)


def encode_utf8(text: str) -> bytes:
    """Return a text as bytes, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = stream.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) < size:
        raise EOFError
    return data


def _answer(handler: Handler, request: Any, too_large: InvalidRequestError) -> tuple[bytes, bytes]:
    try:
        return TEXT, encode_utf8(handler(request))
    except InvalidRequestError as error:
        return ERROR, encode_utf8(f"{error.param or ''}\n{error}")
    except MemoryError:  # outside of what the handler catches, as when its answer is encoded
        return ERROR, encode_utf8(f"{too_large.param or ''}\n{too_large}")


@contextmanager
def _alarm(seconds: float) -> Generator[None]:
    """Let the kernel end this process if the block takes too long, in case the parent died."""
    signal.setitimer(signal.ITIMER_PROF, seconds + ALARM_SECONDS)  # CPU time
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process to `max_bytes` in addition to the memory mapped so far, and disable core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + max_bytes, mapped + max_bytes))
