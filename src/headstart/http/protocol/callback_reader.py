"""CallbackReader: reads a replica's event stream in the callbacks of the event loop, without waking a task per piece.

While a task waits in `read`, it is the protocol of the replica's connection, in front of the HTTP client's own one,
which still parses the response. Each piece is first offered to `take`; `read` returns those that it did not take.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp


class CallbackReader(asyncio.Protocol):
    """The body of one response. The creator closes it before the response.

    `take` processes a piece and returns True, or changes nothing and returns False. It is called only while `read`
    waits, and what it raises is raised by `read`.
    """

    def __init__(self, response: aiohttp.ClientResponse, take: Callable[[bytes], bool]) -> None:
        self._content, self._take = response.content, take
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._piece = b""  # received, but not taken
        self._heard_at = 0.0  # on the loop's clock
        self._seconds: float | None = None  # longest silence
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = True  # perhaps: the client's protocol does not tell
        self._is_resumed = False  # since then more may have been parsed
        self._transport: asyncio.Transport | None = None
        connection = response.connection
        if connection is not None and connection.transport is not None:  # otherwise the response is complete
            self._take_over(connection.transport, connection.protocol)

    async def read_untaken(self) -> bytes:
        """Return the next bytes that were not taken; empty at the end. Raises ClientError and TimeoutError."""
        content = self._content
        while not (piece := content.read_nowait()):
            if content.at_eof():
                break
            if self._transport is None:
                raise _lost()
            self._heard_at = self._loop.time()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._piece:
                piece, self._piece = self._piece, b""
                break
        return piece

    def close(self) -> None:
        """Give the connection back to the HTTP client. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport, self._transport = self._transport, None
        if transport is not None:
            del self._client.pause_reading, self._client.resume_reading
            if transport.get_protocol() is self:
                transport.set_protocol(self._client)

    def _take_over(self, transport: asyncio.Transport, client: Any) -> None:
        self._transport, self._client = transport, client
        self._seconds = client.read_timeout
        client.read_timeout = None  # it would set a timer per piece
        client.start_timeout()
        self._pause, self._resume = client.pause_reading, client.resume_reading
        client.pause_reading, client.resume_reading = self._pause_reading, self._resume_reading
        transport.set_protocol(self)
        if self._seconds:
            self._timer = self._loop.call_later(self._seconds, self._check)

    # -------------------------------------------------------------------------------------- callbacks of the event loop

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._client.data_received(data)
        self._offer()

    def eof_received(self) -> bool | None:
        return self._client.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost(exc)
        self._offer()
        self.close()
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # aiohttp reports no end of a body with an invalid chunk
            waiter.set_exception(_lost())

    def pause_writing(self) -> None:
        self._client.pause_writing()

    def resume_writing(self) -> None:
        self._client.resume_writing()

    def _offer(self) -> None:
        """Pass on what was received if a task waits for it; wake the task for what only it can handle."""
        waiter, content = self._waiter, self._content
        is_eof = content.is_eof()
        if is_eof:
            self.close()  # the client may use the connection for another request
        if waiter is None or waiter.done():
            return
        try:
            piece = content.read_nowait()
            if piece and not self._take(piece):
                self._piece = piece
        except Exception as error:
            waiter.set_exception(error)
            return
        if is_eof or self._piece or self._is_resumed:
            self._is_resumed = False
            waiter.set_result(None)

    # ---------------------------------------------------------------------------------------- of the client's protocol

    def _pause_reading(self) -> None:
        self._is_paused = True
        self._pause()

    def _resume_reading(self, *args: Any, **options: Any) -> None:
        """Resume if reading is paused: aiohttp calls this after every read, and its method parses again."""
        if self._is_paused:
            self._is_paused, self._is_resumed = False, True
            self._resume(*args, **options)

    def _check(self) -> None:
        """Let `read` fail once it has waited for `_seconds`."""
        assert self._seconds is not None
        waiter, now = self._waiter, self._loop.time()
        is_waiting = waiter is not None and not waiter.done()
        left = self._heard_at + self._seconds - now if is_waiting else self._seconds
        if is_waiting and left <= 0:
            assert waiter is not None
            waiter.set_exception(aiohttp.SocketTimeoutError("nothing was received from the replica"))
        else:
            self._timer = self._loop.call_later(left, self._check)


def _lost() -> aiohttp.ClientPayloadError:
    return aiohttp.ClientPayloadError("the connection was lost within the response")
