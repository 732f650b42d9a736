"""One HTTP connection of a fake replica: requests are answered in order, one at a time."""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from headstart.http.answer_report import REPORT_HEADER

JSON = b"application/json"


class Leaving(Protocol):
    """A response in progress that can be cancelled."""

    def leave(self) -> None:
        """Cancel the response: the client has disconnected."""
        ...


Serve = Callable[["Connection", str, str, bytes], Leaving | None]
"""(connection, method, path, body) -> None if it called `respond`, else the object that responds later."""


class Connection(asyncio.Protocol):
    """An HTTP/1.1 server connection; bodies and responses may be chunked. A disconnect cancels the response."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._waiting: deque[tuple[str, str, bytes]] = deque()
        self._answer: Leaving | None = None
        self.wants_report = False  # the last request has the header by which a proxy asks for usage in a header
        self._is_last = False  # the client requested that the connection closes after the response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        if self._answer is not None:
            self._answer.leave()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_last = True
            if self._answer is None:
                self.respond(400, JSON, json.dumps({"error": {"message": str(error)}}).encode())
            elif self._transport is not None:
                self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body, self.wants_report = b"", [], False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == REPORT_HEADER:
            self.wants_report = True
        elif name.lower() == b"expect":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.decode().partition("?")[0]
        self._is_last = not self._parser.should_keep_alive()
        self._waiting.append((self._parser.get_method().decode(), path, b"".join(self._body)))
        self._serve_next()

    def respond(self, status: int, kind: bytes, body: bytes) -> None:
        """Send a complete response."""
        reason = b"OK" if status == 200 else b"Error"
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, reason, kind, len(body)) + body)
        self._finish()

    def open_stream(self, report: bytes = b"") -> None:
        """Send the head of a chunked response, with a report of its usage if one is given."""
        own = b"%b: %b\r\n" % (REPORT_HEADER, report) if report else b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        self._write(head + own + b"\r\n")

    def write_chunk(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a chunk of such a response, and its end if it is the last."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_last else b""))
        if is_last:
            self._finish()

    def _finish(self) -> None:
        self._answer = None
        if self._waiting:
            self._serve_next()
        elif self._is_last and self._transport is not None:
            self._transport.close()

    def _serve_next(self) -> None:
        if self._answer is None and self._waiting:
            answer = self._serve(self, *self._waiting.popleft())
            if answer is not None:
                self._answer = answer

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
