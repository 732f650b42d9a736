"""LongWork: runs the parsing and tokenizing of large bodies on threads, and of the largest ones one at a time.

Parsing JSON and tokenizing briefly need a multiple of a body's size: a text of 4 MB takes about 800 MB in the
tokenizer. So the largest bodies are processed one after another; parsing holds the GIL anyway.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

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

    async def run(self, num_bytes: int, work: Callable[[], _Result], *, waits: bool = False) -> _Result:
        """Return the result of `work`; `num_bytes` is the length of the body that it processes.

        `waits`: the work waits for another process, as rendering a chat does, and always runs on a thread.
        """
        if num_bytes <= self._long_bytes and not waits:
            return work()
        if num_bytes <= self._huge_bytes:
            return await asyncio.to_thread(work)
        async with self._huge:
            return await asyncio.to_thread(work)
