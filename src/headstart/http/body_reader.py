"""BudgetedBodyReader: reads request bodies with limits on size, time between two pieces, and total time."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from headstart.http.access_record import tenant_of_scope
from headstart.http.byte_budget import ByteBudget, ByteLease
from headstart.http.http_errors import ClientGoneError, HttpError
from headstart.http.spooled_body import SpooledBody, body_bytes, spool_to_file

BODY_SECONDS = 30.0  # limit between two pieces of a body; for the whole body plus size / MIN_BODY_RATE
MIN_BODY_RATE = 16 * 1024  # bytes per second
HELD_BYTES = 24 << 20  # of all bodies that are being read, parsed and tokenized
SPOOL_BYTES = 1 << 20  # of one body; larger ones are kept in files until they are parsed
ROOM_SECONDS = 5.0  # how long a partially read body waits while others hold the whole budget
ROOM_POLL_SECONDS = 0.02
MAX_WAITING = 64  # bodies; the others are refused at once


class BudgetedBodyReader:
    """A reader of bodies of at most `max_bytes`; all together hold at most max(`held_bytes`, 2 * `max_bytes`).

    One more body may exceed this budget; others wait for free bytes, and are refused after ROOM_SECONDS.
    """

    def __init__(self, max_bytes: int, held_bytes: int = HELD_BYTES) -> None:
        """`held_bytes`: the budget for all bodies that are being read or processed."""
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max(held_bytes, 2 * max_bytes), "request bodies")
        self._beyond: ByteLease | None = (
            None  # of the one body that may exceed the budget, so that one always completes
        )
        self._num_waiting = 0

    @property
    def total_held_bytes(self) -> int:
        """Bytes of all bodies that are being read or processed."""
        return self._budget.held_bytes

    async def read(self, request: Request) -> bytes:
        """Return the body. Raises HttpError 413, 415, 408, QueueFullError, and ClientGoneError."""
        async with self.read_and_hold_body(request) as body:
            return body_bytes(body)

    async def read_spooling_if_large(self, request: Request, max_memory: int = SPOOL_BYTES) -> bytes | SpooledBody:
        """Return the body, in a file if it has more than `max_memory` bytes. Raises as `read`.

        While it arrives it is counted as held, wherever it is. Where no file can be written it stays in memory.
        """
        async with self._collected(request, max_memory) as body:
            return body.take()

    @asynccontextmanager
    async def read_and_hold_body(
        self, request: Request, max_memory: int = SPOOL_BYTES
    ) -> AsyncGenerator[bytes | SpooledBody]:
        """Yield the body as `read_spooling_if_large` returns it; until the block ends it counts as held and is open."""
        async with self._collected(request, max_memory) as body:
            yield body.peek()

    @asynccontextmanager
    async def _collected(self, request: Request, max_memory: int) -> "AsyncGenerator[_Body]":
        lease, body = self._budget.lease(tenant=tenant_of_scope(request.scope)), _Body(max_memory)
        try:
            await self._collect(request, lease, body)
            yield body
        finally:
            body.close()
            self._release(lease)

    async def _collect(self, request: Request, lease: ByteLease, body: "_Body") -> None:
        _check_headers(request.scope["headers"], self._max_bytes)
        start, size, is_last = time.monotonic(), 0, False
        while not is_last:
            piece, is_last = await _next_piece(request, start + BODY_SECONDS + size / MIN_BODY_RATE)
            size += len(piece)
            if size > self._max_bytes:
                raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
            start += await self._hold(lease, len(piece))
            body.append(piece)

    async def _hold(self, lease: ByteLease, more: int) -> float:
        """Wait until `more` bytes fit in the budget and hold them; return the seconds waited. Raises QueueFullError.

        Meanwhile nothing is read from the connection, so its client waits too.
        """
        began = time.monotonic()
        while not self._budget.has_room(more, lease):
            if self._beyond in (None, lease):
                self._beyond = lease
                lease.force_resize(lease.num_bytes + more)
                return time.monotonic() - began
            if self._num_waiting >= MAX_WAITING or time.monotonic() - began >= ROOM_SECONDS:
                break
            self._num_waiting += 1
            try:
                await asyncio.sleep(ROOM_POLL_SECONDS)
            finally:
                self._num_waiting -= 1
        lease.grow(more)
        return time.monotonic() - began

    def _release(self, lease: ByteLease) -> None:
        lease.release()
        if self._beyond is lease:
            self._beyond = None


class _Body:
    """A body while it arrives: in memory, or beyond `max_memory` bytes in a file."""

    def __init__(self, max_memory: int) -> None:
        self._max_memory = max_memory
        self._pieces: list[bytes] = []
        self._num_bytes = 0  # in memory
        self._file: SpooledBody | None = None

    def append(self, piece: bytes) -> None:
        """Add a piece."""
        if self._file is not None:
            try:
                self._file.append(piece)
                return
            except OSError:  # no space: back into memory, for good
                self._pieces, self._num_bytes, self._max_memory = [self._file.read()], len(self._file), sys.maxsize
                self.close()
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_memory:
            self._file = spool_to_file(self.in_memory())
            self._max_memory = sys.maxsize
            if self._file is not None:
                self._pieces.clear()

    def in_memory(self) -> bytes:
        """Return what is in memory."""
        if len(self._pieces) > 1:
            self._pieces[:] = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def peek(self) -> bytes | SpooledBody:
        """Return the body."""
        return self.in_memory() if self._file is None else self._file

    def take(self) -> bytes | SpooledBody:
        """Return the body; the caller closes it if it is a file."""
        body, self._file = self.peek(), None
        return body

    def close(self) -> None:
        """Close the file, unless it was taken."""
        if self._file is not None:
            self._file.close()
            self._file = None


_CLOSE = {"connection": "close"}


async def _next_piece(request: Request, deadline: float) -> tuple[bytes, bool]:
    """Return the next bytes, and whether they are the last; `deadline` is the deadline of the body read so far."""
    seconds = min(BODY_SECONDS, deadline - time.monotonic())
    try:
        async with asyncio.timeout(seconds):
            message = await request.receive()
    except TimeoutError:
        text = f"the body did not come within {BODY_SECONDS:.0f} s; send at least {MIN_BODY_RATE} bytes per second"
        raise HttpError(408, text, code="timeout", headers=_CLOSE) from None
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), not message.get("more_body")


def _check_headers(headers: Sequence[tuple[bytes, bytes]], max_bytes: int) -> None:
    """Raise HttpError 413 or 415 by the first header of each name; `headers` as in an ASGI scope."""
    found = dict(headers[::-1])
    kind = found.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        message = "the body must be JSON; send it with the header Content-Type: application/json"
        raise HttpError(415, message, code="unsupported_media_type", headers=_CLOSE)
    if found.get(b"content-encoding", b"identity").lower() != b"identity":
        message = "compressed bodies are not read; send the body without Content-Encoding"
        raise HttpError(415, message, code="unsupported_media_type", headers=_CLOSE)
    length = found.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(length[:20].decode(), max_bytes)


def _too_large(size: str, max_bytes: int) -> HttpError:
    message = f"the body has {size} bytes; at most {max_bytes} are read: send less, or raise --max-body-bytes"
    return HttpError(413, message, code="body_too_large", headers=_CLOSE)
