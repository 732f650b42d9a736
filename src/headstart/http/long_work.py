"""InlineOrThreadRunner: runs the parsing and tokenizing of large bodies on threads, and of the largest ones one at a
time.

Parsing JSON and tokenizing briefly need a multiple of a body's size: a text of 4 MB takes about 800 MB in the
tokenizer. So the largest bodies are processed one after another; parsing holds the GIL anyway. Work that has not begun
when its client disconnects is dropped.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

from headstart.core.errors import QueueFullError
from headstart.http.http_errors import ClientGoneError

LONG_BODY_BYTES = 32 * 1024  # larger bodies are parsed and tokenized off the event loop
HUGE_BODY_BYTES = 256 * 1024
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4) - 2  # of asyncio's; two are left for other work

_Result = TypeVar("_Result")


class TenantFairSlots:
    """Places for work, of which the waiting tenants get one in turn; within a tenant in order of arrival."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the tenant whose turn is next comes first

    @asynccontextmanager
    async def turn(self, tenant: str, seconds: float | None = None) -> AsyncGenerator[None]:
        """Hold a place while the block runs. Raises QueueFullError if there is none within `seconds`."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant, seconds)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, tenant: str, seconds: float | None) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            async with asyncio.timeout(seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # it was given a place in the same moment
                self._release()
            if isinstance(error, TimeoutError):
                raise QueueFullError("too many requests wait for the same work; try again later") from None
            raise

    def _release(self) -> None:
        """Give the place to the next tenant."""
        while self._waiting:
            tenant, places = next(iter(self._waiting.items()))
            place = places.popleft()
            del self._waiting[tenant]
            if places:
                self._waiting[tenant] = places
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1


class InlineOrThreadRunner:
    """A runner of blocking work: on the event loop or on a thread, by the size of the body."""

    def __init__(self, long_bytes: int = LONG_BODY_BYTES, huge_bytes: int = HUGE_BODY_BYTES) -> None:
        """Bodies above `long_bytes` go to a thread, those above `huge_bytes` one at a time."""
        self._long_bytes = long_bytes
        self._huge_bytes = huge_bytes
        self._long = TenantFairSlots(NUM_THREADS)
        self._huge = TenantFairSlots(1)

    async def run(
        self,
        num_bytes: int,
        work: Callable[[], _Result],
        *,
        tenant: str = "",
        waits: bool = False,
        receive: Receive | None = None,
    ) -> _Result:
        """Return the result of `work`; `num_bytes` is the length of the body that it processes.

        `waits`: the work waits for another process, as rendering a chat does, and always runs on a thread. `receive`:
        of the request, whose body has been read. Raises ClientGoneError if the client has disconnected.
        """
        if num_bytes <= self._long_bytes and not waits:
            return work()
        gone = asyncio.Event()

        async def watch(receive: Receive) -> None:
            await wait_for_disconnect(receive)
            gone.set()

        watcher = None if receive is None else asyncio.create_task(watch(receive))

        def wanted() -> _Result:
            if gone.is_set():
                raise ClientGoneError
            return work()

        try:
            async with (self._long if num_bytes <= self._huge_bytes else self._huge).turn(tenant):
                result = await asyncio.to_thread(wanted)
        finally:
            if watcher is not None:
                watcher.cancel()
        if gone.is_set():
            raise ClientGoneError
        return result


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client of a request, whose body has been read, has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
