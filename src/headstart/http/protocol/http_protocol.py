"""BoundedHttpProtocol: uvicorn's HTTP/1.1 protocol with limits on everything except the body of a request.

Limited in bytes and in time: the head of a request, trailers and chunk framing, pipelined requests, data read after a
refusal, and responses that a client does not read. The body is limited by body_reader.py. Trailers are dropped: a
header counts only if it comes before the body.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstart.http.protocol.body_writer import add_writer_to_scope
from headstart.http.protocol.connections import ConnectionTable
from headstart.http.protocol.http_refusals import (
    FRAMING,
    INVALID,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    TOO_LARGE,
    TOO_MANY,
    UPGRADE,
    refusal_response,
)
from headstart.http.protocol.write_watch import ConnectionResetPoller, WriteProgressTimer

HEAD_SECONDS = 10.0  # from the start of a connection, or of its next request, to the end of the headers
HEAD_SLICE, CHUNKED_SLICE = 1024, 4096  # bytes parsed at a time; few requests fit into a slice
CHUNK_BYTES = 16  # allowed framing per chunk beside twice its data, as in Go's net/http (CVE-2023-39326)
LINGER_SECONDS = 2.0  # how long data is read after a refusal, so that the refusal reaches the client
LINGER_BYTES = 8 * 1024 * 1024


_FRAMES = (b"content-length", b"transfer-encoding")  # headers of requests with a body


class _RefusedError(Exception):
    """An exception that stops the parser."""


class _Flow(FlowControl):
    """Flow control that does not resume reading while received bytes are held unparsed."""

    is_holding = False

    def resume_reading(self) -> None:
        if not self.is_holding:
            super().resume_reading()


class _Line:
    """The transport passed to a request's cycle; `close` calls the connection's own handler instead."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Unchunked(_Line):
    """The same for a client of HTTP/1.0, which knows no chunks: the end of the connection ends the body."""

    __slots__ = ("_is_chunked", "_send")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__(transport, close)
        self._is_chunked: bool | None = None  # not known before the head
        self._send = transport.write
        self.write = self._write  # pyrefly: ignore[bad-assignment]  # uvicorn passes bytes

    def _write(self, data: bytes) -> None:
        """Send the head without its framing, then the contents of whole chunks."""
        if self._is_chunked is None:
            head = data.replace(b"transfer-encoding: chunked\r\n", b"", 1)
            self._is_chunked = len(head) < len(data)
            self._send(head)
        elif self._is_chunked:
            self._send(b"".join(_chunks(data)))
        else:
            self._send(data)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the contents of whole chunks."""
    at = 0
    while at < len(data):
        begin = data.index(b"\r\n", at) + 2
        size = int(data[at : begin - 2], 16)
        yield data[begin : begin + size]
        at = begin + size + 2


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Invalid or too large HTTP gets an OpenAI error object, and the connection is closed.

    A connection is also closed after a response that was sent before the end of the request's body.
    """

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._in_body = False  # False: in a head, or between two requests
        self._has_begun = False  # a head has begun
        self._body_left: int | None = None  # bytes left of a body with a Content-Length
        self._keep_alive = False  # whether the client keeps the connection open after the request in self.cycle
        self._held = b""  # received bytes that are not parsed yet
        self._is_last = False  # nothing after the request in self.cycle is read
        self._is_refused = False  # the data after the request in self.cycle is refused
        self._closing = False
        self._overhead = self._dropped = 0  # bytes
        self._slice = self._slice_body = self._slice_chunks = 0
        self._deadline: asyncio.TimerHandle | None = None  # of a head
        self._lingering: asyncio.TimerHandle | None = None
        self._refusal = INVALID

    # --------------------------------------------------------------------------------------------- life of a connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._line = _Line(transport, self._close_behind_answer)
        self.flow = self._flow = _Flow(transport)
        self._watch = WriteProgressTimer(transport, self.loop)
        self._reset_watch = ConnectionResetPoller(transport, self.loop)
        if self._table.admit(self):
            self._arm()
            return
        transport.write(refusal_response(503, f"{self._table.max_connections} connections are open; try again later"))
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._table.remove(self)
        self._disarm()
        self._stop_lingering()
        self._watch.stop()
        self._reset_watch.stop()
        self._unset_keepalive_if_required()
        self._disconnect()
        self._held = b""
        super().connection_lost(exc)

    def close_idle(self) -> None:
        """Close the connection, which has no request in flight."""
        self._close()

    def shutdown(self) -> None:
        """Close the connection after the response in flight. Called by uvicorn when the server stops."""
        self._keep_alive = False
        if self._running is None:
            self._close()
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection. Called by uvicorn when no further request arrives in time."""
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._closing:
            self._watch.stop()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that ended only its own half behind a request whose answer has not begun.

        One that is gone resets the connection when something is sent to it: a 100, which clients ignore. In an answer
        that has begun nothing of this kind can be sent, so there every client counts as gone.
        """
        running = self._running
        if self._closing or running is None or self._in_body or self._has_begun or self._held:
            return False
        if running.response_started or running.scope["http_version"] == "1.0":
            return False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._keep_alive, self.cycle.keep_alive, self._is_last = False, False, True
        self._reset_watch.start()
        return True

    # --------------------------------------------------------------------------------------------------- bytes received

    def data_received(self, data: bytes) -> None:
        if self._closing or self._is_last:
            self._drop(len(data))
        elif self._held or self.pipeline:
            self._hold(data)
        elif len(data) <= HEAD_SLICE and not self._in_body:
            self._parse_slice(data)
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not (self._closing or self._is_last):
            if self.pipeline:
                self._hold(data[at:])
                return
            size = (self._body_left or CHUNKED_SLICE) if self._in_body else HEAD_SLICE
            piece = data[at : at + size]
            at += len(piece)
            self._parse_slice(piece)

    def _parse_slice(self, piece: bytes) -> None:
        self._slice, self._slice_body, self._slice_chunks = len(piece), 0, 0
        super().data_received(piece)
        if self._closing or self._is_last:
            return
        more = len(piece) - 3 * self._slice_body - CHUNK_BYTES * self._slice_chunks
        self._overhead = max(0, self._overhead + more)
        if self._overhead > MAX_HEAD_BYTES:
            self._refuse(*(FRAMING if self._in_body else TOO_LARGE))
        elif self._running is None and not self._in_body:
            self._arm()  # bytes between two requests, such as empty lines, have the time limit of a head

    def _hold(self, data: bytes) -> None:
        """Keep pipelined bytes until the requests before them are answered."""
        self._held += data
        self._flow.is_holding = True
        self._flow.pause_reading()

    def _release(self) -> bytes:
        held, self._held = self._held, b""
        self._flow.is_holding = False
        self._flow.resume_reading()
        return held

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self._disconnect()
            self._close()

    # ------------------------------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._overhead = -self._slice
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = TOO_MANY
            raise _RefusedError
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_upgrade() and any(name in _FRAMES and value != b"0" for name, value in self.headers):
            self._refusal = UPGRADE
            raise _RefusedError
        self._has_begun = False
        self._overhead = -self._slice
        self._disarm()
        super().on_headers_complete()
        self._in_body = True
        line = self._line
        if self.scope["http_version"] == "1.0":
            line = _Unchunked(self.transport, self._close_behind_answer)
        self.cycle.transport = line  # type: ignore[assignment]  # it calls only these three
        self._keep_alive = self.cycle.keep_alive and not self._is_upgrade()
        self.cycle.keep_alive = False  # until the body is complete: a response before that closes the connection
        length = dict(self.headers).get(b"content-length")  # the parser refuses a second one
        self._body_left = None if length is None else int(length)

    def _is_upgrade(self) -> bool:
        """Return whether the parser stops after this head; the request is then answered as HTTP/1.1 without a body."""
        return self.parser is not None and self.parser.should_upgrade()

    def on_chunk_header(self) -> None:
        self._slice_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._slice_body += len(body)
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._overhead = -self._slice
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        self._is_last = not self._keep_alive
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        add_writer_to_scope(cycle.scope, cycle)  # type: ignore[arg-type]  # extensions are dicts by ASGI's types
        self._table.set_busy(self)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._running = None
        if self._closing:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._running is None:
            self._table.set_idle(self)
        if self._held and not self.pipeline:
            self._parse(self._release())

    # ------------------------------------------------------------------------------------------------ refusing, closing

    def send_400_response(self, msg: str) -> None:
        """Refuse the request. Called by uvicorn when the parser fails."""
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        """Respond with an error and close the connection; complete requests before it are answered first."""
        running = self._running
        if running is not None and not self.cycle.more_body:
            self.cycle.keep_alive, self._is_last, self._is_refused = False, True, True
            return
        can_respond = running is None or (running is self.cycle and not running.response_started)
        self._disconnect()
        if can_respond:
            self.transport.write(refusal_response(status, message))
            self._linger()
        else:
            self._close()

    def _disconnect(self) -> None:
        """Mark all requests of this connection as disconnected, and wake their handlers."""
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _close_behind_answer(self) -> None:
        """Close the connection. Called by a cycle whose response is the last of this connection."""
        if self._is_refused or (self._running is not None and self._running.more_body):
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Close for writing, then read and drop a bounded amount of data before closing the connection.

        Closing with unread data resets the connection, and the client may lose the response.
        """
        if self._closing or self.transport.is_closing():
            return
        self._closing = True
        self._disarm()
        self.transport.write_eof()
        self._release()
        self._watch.stop()
        self._lingering = self.loop.call_later(LINGER_SECONDS, self._close)

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def _close(self) -> None:
        """Close after all data is written; WriteProgressTimer aborts if the client does not read it in time."""
        self._closing = True
        self._disarm()
        self._stop_lingering()
        if not self.transport.is_closing():
            self.transport.close()
            self._watch.start()

    # ----------------------------------------------------------------------------------------------------------- timers

    def _arm(self) -> None:
        if self._deadline is None and not self._closing:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self._running is not None:
            self._arm()  # the rest of the head may be among the held bytes
        elif self._has_begun:
            self._refuse(408, f"the headers did not come within {HEAD_SECONDS:.0f} s")
        else:
            self._close()
