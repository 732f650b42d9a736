"""Limits of all that a gRPC client controls: connections, calls, bytes of messages, and frames that carry no message.

The client is a proxy, but its port may be open to others. Memory is charged as it is held, and work as it costs.
"""

import asyncio
from collections import deque

from headstart.gateway.picker.grpc_stream import Outlet, Status
from headstart.http.protocol.connections import ConnectionTable

MAX_CONNECTIONS = 256  # an Envoy has one per worker thread
MAX_CALLS = 16_384  # of all connections: each stays open until its request has ended
MAX_HELD_BYTES = 64 << 20  # of messages of all calls that are incomplete or not read yet
MAX_TURN = 1_024  # frames, messages and units of headers of all connections in one turn of the event loop
BURST = 4_096  # frames without a message that a connection may send at once
REFILL = 256.0  # of them per second, and for each call, message and frame of ours:
PER_CALL, PER_MESSAGE, PER_SENT = 16, 2, 4
EARNING_BYTES = 1 << 10  # of a client's data, for one more


class Callers:
    """The connections of one server, their calls and the bytes that these hold."""

    def __init__(
        self,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_calls: int = MAX_CALLS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.table = ConnectionTable(max_connections)
        self.max_calls = max_calls
        self.num_calls = 0
        self.held_bytes = 0
        self._max_held_bytes = max_held_bytes
        self._open: set[Outlet] = set()
        self._queue: deque[Outlet] = deque()  # connections with frames to be handled
        self._work = 0  # done in this turn
        self._turn: asyncio.Handle | None = None  # the next one

    def admit(self, connection: Outlet) -> bool:
        """Add a connection; return whether there is room for it. The longest idle one is closed for it."""
        if not self.table.admit(connection):
            return False
        self._open.add(connection)
        return True

    def remove(self, connection: Outlet) -> None:
        """Remove a connection. Idempotent."""
        self.table.remove(connection)
        self._open.discard(connection)

    def add_call(self, connection: Outlet) -> bool:
        """Count a new call; return whether there is room for it."""
        if self.num_calls >= self.max_calls:
            return False
        self.num_calls += 1
        self.table.set_busy(connection)
        return True

    def remove_call(self, connection: Outlet, *, is_last: bool) -> None:
        """Count a call no longer; `is_last`: its connection has no other."""
        self.num_calls -= 1
        if is_last:
            self.table.set_idle(connection)

    def queue(self, connection: Outlet) -> None:
        """Have a connection handle its frames: in this turn of the event loop, if it has not done too much already."""
        self._queue.append(connection)
        self._handle()

    def _handle(self) -> None:
        while self._queue and self._work < MAX_TURN:
            connection = self._queue.popleft()
            work, is_more = connection.handle_slice()
            self._work += work
            if is_more:
                self._queue.append(connection)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._turn, self._work = None, 0
        if self._queue:
            self._handle()

    def hold(self, num_bytes: int) -> None:
        """Count bytes of messages; negative ones are freed. Beyond the limit the largest calls end.

        An eighth is freed at once, so that few of many small messages have to look for the largest.
        """
        self.held_bytes += num_bytes
        if num_bytes < 0 or self.held_bytes <= self._max_held_bytes:
            return
        calls = sorted((call for one in self._open for call in one.calls()), key=lambda call: -call.held_bytes)
        for call in calls:
            if self.held_bytes <= self._max_held_bytes // 8 * 7 or not call.held_bytes:
                return
            call.fail(Status.RESOURCE_EXHAUSTED, "too many bytes unread")

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._open):
            connection.close()


class FrameBudget:
    """The frames that one connection may send beside those that calls need; not a limit on calls and their bytes."""

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._left = float(BURST)
        self._at = now

    def refill(self, now: float) -> None:
        """Add what the time since the last call allows."""
        self.earn((now - self._at) * REFILL)
        self._at = now

    def earn(self, count: float) -> None:
        """Allow more frames, up to a burst of them."""
        self._left = min(self._left + count, BURST)

    def spend(self, count: float) -> bool:
        """Take frames out of the budget; return whether it had them."""
        self._left -= count
        return self._left >= 0
