"""Calls: the calls of one gRPC connection: those that wait for their first message, and those that run.

Limits of all that a gRPC client controls: connections, calls, bytes of messages, and frames that carry no message.

The client is a proxy, but its port may be open to others. Memory is charged as it is held, and work as it costs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStatusCode, GrpcStream
from headstart.http.protocol.connections import ConnectionTable

if TYPE_CHECKING:
    from headstart.gateway.picker.grpc_connection import GrpcConnection

MAX_WAITING = 1_024  # calls of one connection without a first message
WAITING_SECONDS = 10.0  # for the preface of a connection, and for the first message of a call

Handler = Callable[[GrpcStream], Coroutine[Any, Any, None] | None]
"""Begins a call when its first message is there; returns the rest of it, None: the call has ended."""
MAX_CONNECTIONS = 256  # an Envoy has one per worker thread
MAX_CALLS = 16_384  # of all connections: each stays open until its request has ended
MAX_HELD_BYTES = 64 << 20  # of messages of all calls that are incomplete or not read yet
MAX_TURN = 1_024  # frames, messages and units of headers of all connections in one turn of the event loop
BURST = 4_096  # frames without a message that a connection may send at once
REFILL = 256.0  # of them per second, and for each call, message and frame of ours:
PER_CALL, PER_MESSAGE, PER_SENT = 16, 2, 4
EARNING_BYTES = 1 << 10  # of a client's data, for one more


class GrpcConnectionTable:
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
        self._open: set[GrpcConnection] = set()
        self._queue: deque[GrpcConnection] = deque()  # connections with frames to be handled
        self._work = 0  # done in this turn
        self._turn: asyncio.Handle | None = None  # the next one

    def admit(self, connection: "GrpcConnection") -> bool:
        """Add a connection; return whether there is room for it. The longest idle one is closed for it."""
        if not self.table.admit(connection):
            return False
        self._open.add(connection)
        return True

    def remove(self, connection: "GrpcConnection") -> None:
        """Remove a connection. Idempotent."""
        self.table.remove(connection)
        self._open.discard(connection)

    def admit_call(self, connection: "GrpcConnection") -> bool:
        """Count a new call; return whether there is room for it."""
        if self.num_calls >= self.max_calls:
            return False
        self.num_calls += 1
        self.table.set_busy(connection)
        return True

    def remove_call(self, connection: "GrpcConnection", *, is_last: bool) -> None:
        """Count a call no longer; `is_last`: its connection has no other."""
        self.num_calls -= 1
        if is_last:
            self.table.set_idle(connection)

    def handle_or_queue_frames(self, connection: "GrpcConnection") -> None:
        """Have a connection handle its frames: in this turn of the event loop, if it has not done too much already."""
        self._queue.append(connection)
        self._handle()

    def _handle(self) -> None:
        while self._queue and self._work < MAX_TURN:
            connection = self._queue.popleft()
            work, is_more = connection.handle_some_frames()
            self._work += work
            if is_more:
                self._queue.append(connection)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._turn, self._work = None, 0
        if self._queue:
            self._handle()

    def count_bytes_shedding_calls(self, num_bytes: int) -> None:
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
            call.fail(GrpcStatusCode.RESOURCE_EXHAUSTED, "too many bytes unread")

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._open):
            connection.close()


class ConnectionFrameBudget:
    """The frames that one connection may send beside those that calls need; not a limit on calls and their bytes."""

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._left = float(BURST)
        self._at = now

    def refill(self, now: float) -> None:
        """Add what the time since the last call allows."""
        self.grant_frames((now - self._at) * REFILL)
        self._at = now

    def grant_frames(self, count: float) -> None:
        """Allow more frames, up to a burst of them."""
        self._left = min(self._left + count, BURST)

    def spend_frames(self, count: float) -> bool:
        """Take frames out of the budget; return whether it had them."""
        self._left -= count
        return self._left >= 0


class GrpcConnectionCalls:
    """The calls of `connection`. `open`: those that neither side has ended, by stream id."""

    def __init__(
        self,
        connection: "GrpcConnection",
        handlers: Mapping[str, Handler],
        callers: GrpcConnectionTable,
        failed: Callable[[Exception], None],
    ) -> None:
        self.open: dict[int, GrpcStream] = {}
        self._connection = connection
        self._handlers = handlers
        self._callers = callers
        self._failed = failed
        self._waiting: dict[int, tuple[str, float]] = {}  # calls without a message yet: paths, deadlines
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def try_add(self, stream_id: int, path: str, *, is_over: bool) -> bool:
        """Add a call, which begins with its first message; return whether there is room for it."""
        if len(self._waiting) >= MAX_WAITING or not self._callers.admit_call(self._connection):
            return False
        stream = self.open[stream_id] = GrpcStream(self._connection, stream_id)
        self._waiting[stream_id] = (path, self._loop.time() + WAITING_SECONDS)
        if is_over:
            stream.on_client_end()
        if is_over or path not in self._handlers:
            self.begin_waiting_call(stream_id)
        return True

    def begin_waiting_call(self, stream_id: int) -> bool:
        """Begin a call that waits; return whether it was accepted. Most answers of replicas end theirs at once."""
        if stream_id not in self._waiting:
            return False
        stream, handler = self.open[stream_id], self._handlers.get(self._waiting.pop(stream_id)[0])
        try:
            if handler is None:
                raise GrpcError(GrpcStatusCode.UNIMPLEMENTED, "there is no such method")
            rest = handler(stream)
        except GrpcError as error:
            self._close(stream_id, error.status, str(error))
            return False
        if rest is None:
            self._close(stream_id, GrpcStatusCode.OK, "")
            return True
        task = self._tasks[stream_id] = asyncio.create_task(self._run(stream_id, rest))
        task.add_done_callback(lambda _: self._ended(stream_id, stream))  # it may be cancelled before it begins
        return True

    def end(self, stream_id: int, status: GrpcStatusCode, message: str) -> None:
        """End a call that may be running: it is cancelled."""
        self._close(stream_id, status, message)
        self._cancel(stream_id)

    def end_calls_without_message(self, now: float) -> None:
        """End the calls whose first message did not come in time."""
        for stream_id in [stream_id for stream_id, (_, deadline) in self._waiting.items() if deadline <= now]:
            self.end(stream_id, GrpcStatusCode.DEADLINE_EXCEEDED, "no message came")

    def on_stream_reset(self, stream_id: int) -> None:
        """End a call that the client gives up."""
        stream = self._drop(stream_id)
        if stream is not None and stream.ends_gently:
            stream.on_client_end()
        else:
            self._cancel(stream_id)

    def close(self) -> None:
        """Cancel all calls."""
        for stream_id in tuple(self.open):
            self._drop(stream_id)
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, stream_id: int, rest: Coroutine[Any, Any, None]) -> None:
        status, message = GrpcStatusCode.OK, ""
        try:
            await rest
        except GrpcError as error:
            status, message = error.status, str(error)
        except Exception as error:
            self._failed(error)
            status = GrpcStatusCode.INTERNAL
        self._close(stream_id, status, message)

    def _ended(self, stream_id: int, stream: GrpcStream) -> None:
        self._tasks.pop(stream_id, None)
        stream.release_held_bytes()

    def _close(self, stream_id: int, status: GrpcStatusCode, message: str) -> None:
        """Send the end of a call, unless the client has reset it."""
        stream = self._drop(stream_id)
        if stream is not None:
            stream.close(status, message)

    def _drop(self, stream_id: int) -> GrpcStream | None:
        """Remove a call from the open ones and return it; None: it is not open."""
        self._waiting.pop(stream_id, None)
        stream = self.open.pop(stream_id, None)
        if stream is not None:
            self._callers.remove_call(self._connection, is_last=not self.open)
            if not stream.ends_gently:
                stream.release_held_bytes()
        return stream

    def _cancel(self, stream_id: int) -> None:
        task = self._tasks.get(stream_id)
        if task is not None:
            task.cancel()
