"""BoundedHttpProtocol: uvicorn's HTTP/1.1 parser with a limit on the head of a request, in bytes and in time."""

import asyncio
from uuid import uuid4

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headstart.server.protocol import encode, error_object

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_SECONDS = 10.0  # from the first moment of a connection, or of a further request, to the end of its headers
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
_TOO_LARGE = (431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes; send less")


class _HeadTooLargeError(Exception):
    """Stops the parser."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP, or too much of it, gets an OpenAI error object and the connection closed."""

    _in_head = True
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:  # else the bytes are, at least in part, of a body
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(*_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._arm()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refusal = _TOO_LARGE
            raise _HeadTooLargeError
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever its parser does not accept."""
        self._refuse(*(self._refusal or (400, "this is not a valid HTTP/1.1 request")))

    def _refuse(self, status: int, message: str) -> None:
        code = {408: "timeout", 431: "headers_too_large"}.get(status, "invalid_http")
        body = encode(error_object(message, status=status, code=code))
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: req-{uuid4().hex}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes:
            self._refuse(408, f"the headers did not come within {HEAD_SECONDS:.0f} s")
        else:
            self.transport.close()
