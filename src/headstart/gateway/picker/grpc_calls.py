"""Calls: the calls of one gRPC connection: those that wait for their first message, and those that run."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStream, Outlet, Status
from headstart.gateway.picker.peer_limits import Callers

MAX_WAITING = 1_024  # calls of one connection without a first message
WAITING_SECONDS = 10.0  # for the preface of a connection, and for the first message of a call

Handler = Callable[[GrpcStream], Coroutine[Any, Any, None] | None]
"""Begins a call when its first message is there; returns the rest of it, None: the call has ended."""


class Calls:
    """The calls of `connection`. `open`: those that neither side has ended, by stream id."""

    def __init__(
        self,
        connection: Outlet,
        handlers: Mapping[str, Handler],
        callers: Callers,
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

    @property
    def num_tasks(self) -> int:
        """The number of calls that run."""
        return len(self._tasks)

    def add(self, stream_id: int, path: str, *, is_over: bool) -> bool:
        """Add a call, which begins with its first message; return whether there is room for it."""
        if len(self._waiting) >= MAX_WAITING or not self._callers.add_call(self._connection):
            return False
        stream = self.open[stream_id] = GrpcStream(self._connection, stream_id)
        self._waiting[stream_id] = (path, self._loop.time() + WAITING_SECONDS)
        if is_over:
            stream.ended()
        if is_over or path not in self._handlers:
            self.begin(stream_id)
        return True

    def begin(self, stream_id: int) -> bool:
        """Begin a call that waits; return whether it was accepted. Most answers of replicas end theirs at once."""
        if stream_id not in self._waiting:
            return False
        stream, handler = self.open[stream_id], self._handlers.get(self._waiting.pop(stream_id)[0])
        try:
            if handler is None:
                raise GrpcError(Status.UNIMPLEMENTED, "there is no such method")
            rest = handler(stream)
        except GrpcError as error:
            self._close(stream_id, error.status, str(error))
            return False
        if rest is None:
            self._close(stream_id, Status.OK, "")
            return True
        task = self._tasks[stream_id] = asyncio.create_task(self._run(stream_id, rest))
        task.add_done_callback(lambda _: self._ended(stream_id, stream))  # it may be cancelled before it begins
        return True

    def end(self, stream_id: int, status: Status, message: str) -> None:
        """End a call that may be running: it is cancelled."""
        self._close(stream_id, status, message)
        self._cancel(stream_id)

    def end_late(self, now: float) -> None:
        """End the calls whose first message did not come in time."""
        for stream_id in [stream_id for stream_id, (_, deadline) in self._waiting.items() if deadline <= now]:
            self.end(stream_id, Status.DEADLINE_EXCEEDED, "no message came")

    def reset(self, stream_id: int) -> None:
        """End a call that the client gives up."""
        stream = self._drop(stream_id)
        if stream is not None and stream.ends_gently:
            stream.ended()
        else:
            self._cancel(stream_id)

    def close(self) -> None:
        """Cancel all calls."""
        for stream_id in tuple(self.open):
            self._drop(stream_id)
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, stream_id: int, rest: Coroutine[Any, Any, None]) -> None:
        status, message = Status.OK, ""
        try:
            await rest
        except GrpcError as error:
            status, message = error.status, str(error)
        except Exception as error:
            self._failed(error)
            status = Status.INTERNAL
        self._close(stream_id, status, message)

    def _ended(self, stream_id: int, stream: GrpcStream) -> None:
        self._tasks.pop(stream_id, None)
        stream.release()

    def _close(self, stream_id: int, status: Status, message: str) -> None:
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
                stream.release()
        return stream

    def _cancel(self, stream_id: int) -> None:
        task = self._tasks.get(stream_id)
        if task is not None:
            task.cancel()
