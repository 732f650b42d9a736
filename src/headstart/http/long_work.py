"""LongWork: runs the parsing and tokenizing of large bodies on threads, and of the largest ones one at a time.

Parsing JSON and tokenizing briefly need a multiple of a body's size: a text of 4 MB takes about 800 MB in the
tokenizer. So the largest bodies are processed one after another; parsing holds the GIL anyway. Work that has not begun
when its client disconnects is dropped.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Receive

from headstart.http.http_errors import ClientGoneError

LONG_BODY_BYTES = 32 * 1024  # larger bodies are parsed and tokenized off the event loop
HUGE_BODY_BYTES = 256 * 1024

_Result = TypeVar("_Result")


class LongWork:
    """A runner of blocking work: on the event loop or on a thread, by the size of the body."""

    def __init__(self, long_bytes: int = LONG_BODY_BYTES, huge_bytes: int = HUGE_BODY_BYTES) -> None:
        """Bodies above `long_bytes` go to a thread, those above `huge_bytes` one at a time."""
        self._long_bytes = long_bytes
        self._huge_bytes = huge_bytes
        self._huge = asyncio.Semaphore(1)

    async def run(
        self,
        num_bytes: int,
        work: Callable[[], _Result],
        *,
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
        watcher = None if receive is None else asyncio.create_task(_watch(receive, gone))

        def wanted() -> _Result:
            if gone.is_set():
                raise ClientGoneError
            return work()

        try:
            if num_bytes <= self._huge_bytes:
                result = await asyncio.to_thread(wanted)
            else:
                async with self._huge:
                    result = await asyncio.to_thread(wanted)
        finally:
            if watcher is not None:
                watcher.cancel()
        if gone.is_set():
            raise ClientGoneError
        return result


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()
