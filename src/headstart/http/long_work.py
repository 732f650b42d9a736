"""LongWork: reading large bodies off the event loop, and the largest ones one at a time.

Parsing JSON and tokenizing hold many times a body's bytes for a moment: a text of 4 MB takes about 800 MB in the
tokenizer. So bodies of HUGE_BODY_BYTES wait for each other.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_BODY_BYTES = 32 * 1024  # from here on, parsing and tokenizing leave the event loop
HUGE_BODY_BYTES = 256 * 1024

_Result = TypeVar("_Result")


class LongWork:
    """Runs work here or on a thread, by its size."""

    def __init__(self) -> None:
        self._huge = asyncio.Semaphore(1)

    async def run(self, num_bytes: int, work: Callable[[], _Result], *, waits: bool = False) -> _Result:
        """Return what `work` returns; `num_bytes` is the length of the body it works on.

        `waits`: it waits for another process, as rendering a chat does, and leaves the event loop whatever its size.
        """
        if num_bytes <= LONG_BODY_BYTES and not waits:
            return work()
        if num_bytes <= HUGE_BODY_BYTES:
            return await asyncio.to_thread(work)
        async with self._huge:
            return await asyncio.to_thread(work)
