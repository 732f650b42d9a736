"""WriteWatch: aborts a connection whose client does not read what was written to it."""

import asyncio

from headstart.http.sse import WRITE_SECONDS

MIN_WRITE_BYTES = 16 * 1024  # what a client must read in WRITE_SECONDS


class WriteWatch:
    """A timer on the write buffer of one transport, active between `start` and `stop`."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._timer: asyncio.TimerHandle | None = None
        self._unwritten = 0  # bytes, when the timer was started

    def start(self) -> None:
        """Start or restart: abort unless the buffer shrinks by MIN_WRITE_BYTES every WRITE_SECONDS, until `stop`."""
        self.stop()
        self._unwritten = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(WRITE_SECONDS, self._check)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() > self._unwritten - MIN_WRITE_BYTES:
            self._transport.abort()
        else:
            self.start()
