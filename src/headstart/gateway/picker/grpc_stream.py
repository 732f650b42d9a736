"""GrpcStream: one call of a gRPC client: messages in both directions, and its end."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from headstart.gateway.picker import http2_frames as h2

if TYPE_CHECKING:
    from headstart.gateway.picker.grpc_connection import GrpcConnection

STREAM_WINDOW = 1 << 20  # bytes that a client may send on one stream before they are read
MAX_MESSAGE_BYTES = 16 << 20  # Envoy sends a body in pieces, by default of up to 1 MiB
MAX_QUEUED = 8  # messages of one stream that are not read yet; beyond, its window is not enlarged
OBJECT_BYTES = 64  # that a message takes beside its own, in a list
_OPENING = h2.STATUS_200 + h2.hpack_literal_header("content-type", "application/grpc")


class GrpcStatusCode(IntEnum):
    """Status codes of gRPC."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class GrpcError(Exception):
    """A call ends with this status."""

    def __init__(self, status: GrpcStatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class GrpcStream:
    """One call: messages as bytes. A call that the client cancels is cancelled, unless it `ends_gently`."""

    _connection: "GrpcConnection"
    _id: int
    send_window: int = 0  # beyond the client's window of a new stream
    ends_gently: bool = False  # a client that cancels ends its messages; the call is not cancelled
    held_bytes: int = 0  # of messages that are incomplete or not read yet
    is_released: bool = False  # nothing is counted any more: the call has ended
    _buffer: bytearray = field(default_factory=bytearray)
    _messages: deque[bytes] | list[bytes] = field(default_factory=list)  # an empty deque takes ten times as much
    _is_over: bool = False  # the client sends no more
    _is_open: bool = False  # the head of the response was sent
    _window: int = STREAM_WINDOW  # bytes that the client may still send
    _uncredited: int = 0  # received bytes by which the client's window is not enlarged again
    _news: "asyncio.Future[None] | None" = None

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns at once."""
        return bool(self._messages) or self._is_over

    def take_first(self) -> bytes | None:
        """Return the first message, of a stream that is ready; None: there is none."""
        return self._taken() if self._messages else None

    async def read(self) -> bytes | None:
        """Return the next message; None at the end."""
        while not self._messages:
            if self._is_over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._taken()

    async def write(self, *messages: bytes) -> None:
        """Send messages together; waits while the client takes no more."""
        data = b"".join([b"\0" + len(message).to_bytes(4) + message for message in messages])
        opening = b"" if self._is_open else self._opening()
        await self._connection.send_data(self, self._id, opening, data)

    def close(self, status: GrpcStatusCode, message: str) -> None:
        """End the call."""
        trailers = h2.hpack_literal_header("grpc-status", str(int(status)))
        if message:
            trailers += h2.hpack_literal_header(
                "grpc-message", message.encode("ascii", "replace").decode()[:100].replace("%", " ")
            )
        opening = b"" if self._is_open else self._opening()
        last = h2.make_frame(h2.HEADERS, h2.END_STREAM | h2.END_HEADERS, self._id, trailers)
        self._connection.send_later(opening + last)

    def feed_data(self, data: bytes, num_bytes: int) -> int:
        """Take a part of the client's messages, of a frame with `num_bytes`; return the number of complete ones.

        Raises GrpcError for a message that is compressed or too long, Http2Error for data beyond the client's window.
        """
        self._window -= num_bytes
        if self._window < 0:
            raise h2.Http2Error(h2.FLOW_CONTROL_ERROR, "more data than the window of a stream allows")
        buffer, start, count = self._buffer, 0, 0
        buffer += data
        self._uncredited += num_bytes
        while len(buffer) - start >= 5:
            end = start + 5 + int.from_bytes(buffer[start + 1 : start + 5])
            if buffer[start] or end - start > MAX_MESSAGE_BYTES:
                is_compressed = buffer[start] != 0
                raise GrpcError(
                    GrpcStatusCode.UNIMPLEMENTED if is_compressed else GrpcStatusCode.RESOURCE_EXHAUSTED,
                    "compressed, or too long",
                )
            if end > len(buffer):
                break
            self._append(bytes(buffer[start + 5 : end]))
            count += 1
            start = end
        if start:
            del buffer[:start]
        self._credit()
        self._wake()
        self._hold(len(data) + count * (OBJECT_BYTES - 5))
        return count

    def fail(self, status: GrpcStatusCode, message: str) -> None:
        """End the call, which is cancelled if it is running."""
        self._connection.end_call(self._id, status, message)

    async def abort(self, status: GrpcStatusCode, message: str) -> NoReturn:
        """End the call, from within it. Raises CancelledError."""
        self.fail(status, message)
        await asyncio.get_running_loop().create_future()
        raise asyncio.CancelledError

    def release_held_bytes(self) -> None:
        """Hold nothing any more. Idempotent."""
        self._hold(-self.held_bytes)
        self.is_released = self._is_over = True
        self._messages, self._buffer = [], bytearray()

    def inject_message(self, message: bytes) -> None:
        """Let `read` return a message that came another way."""
        self._append(message)
        self._wake()
        self._hold(len(message) + OBJECT_BYTES)

    def on_client_end(self) -> None:
        """Note that the client sends no more."""
        self._is_over = True
        self._wake()

    def _opening(self) -> bytes:
        self._is_open = True
        return h2.make_frame(h2.HEADERS, h2.END_HEADERS, self._id, _OPENING)

    def _append(self, message: bytes) -> None:
        if not self._messages:
            self._messages = [message]
        elif isinstance(self._messages, list):
            self._messages = deque((*self._messages, message))
        else:
            self._messages.append(message)

    def _taken(self) -> bytes:
        """Return the first message, which is there."""
        messages = self._messages
        message = messages.pop() if isinstance(messages, list) else messages.popleft()
        self._hold(-len(message) - OBJECT_BYTES)
        self._credit()
        return message

    def _hold(self, num_bytes: int) -> None:
        if num_bytes and not self.is_released:
            self.held_bytes += num_bytes
            self._connection.count_held_bytes(num_bytes)

    def _credit(self) -> None:
        if self._uncredited >= STREAM_WINDOW // 4 and len(self._messages) < MAX_QUEUED and not self._is_over:
            self._connection.send(h2.window_update_frame(self._id, self._uncredited))
            self._window += self._uncredited
            self._uncredited = 0

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
