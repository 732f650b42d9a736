"""WriteProgressTimer and ConnectionResetPoller: abort a connection whose client does not read what was written to
it, or is gone."""

import asyncio
import socket

from headstart.http.sse import WRITE_SECONDS

MIN_WRITE_BYTES = 16 * 1024  # what a client must read in WRITE_SECONDS
RESET_SECONDS = 0.02, 1.0  # between two looks: at first, and at most
_TCP_CLOSED = 7  # the first byte of Linux's struct tcp_info


class WriteProgressTimer:
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


class ConnectionResetPoller:
    """Looks whether a connection was reset whose client has ended its half: event loops read it no longer."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float = RESET_SECONDS[0]) -> None:
        """Look after `seconds` and then ever more rarely, until `stop`."""
        self._timer = self._loop.call_later(seconds, self._check, seconds)

    def stop(self) -> None:
        """Look no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, seconds: float) -> None:
        if is_connection_reset(self._transport):
            self._transport.abort()
        else:
            self.start(min(2 * seconds, RESET_SECONDS[1]))


def is_connection_reset(transport: asyncio.BaseTransport) -> bool:
    """Return whether the client of a TCP connection has reset it. Linux only; elsewhere False."""
    sock = transport.get_extra_info("socket")
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED
    except (OSError, AttributeError):  # a Unix socket: writing to one whose client is gone fails at once
        return False
