"""The gaps between events of unconstrained streams, seen by a client of its own: gaps.py URL ENGINE_PID SERVER_PID.

Streams one completion after the other until its stdin is closed, and prints a JSON object with percentiles. Beside each
gap stands the CPU time that the engine process and the server process used in it, all threads of each together: on a
machine with other work a gap is long also because the processes wait for a core.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp

BODY = {"prompt": "gaps", "max_tokens": 256, "ignore_eos": True, "stream": True, "temperature": 1}
PROCESS_CPU = 2  # CPUCLOCK_SCHED of Linux, for the clock of another process


class Gap(NamedTuple):
    """The time between two events of one stream in seconds: elapsed, and CPU time of the two processes."""

    elapsed: float
    engine: float
    server: float


class Gaps:
    """A client that keeps the gaps between the events of its responses."""

    def __init__(self, url: str, *pids: int) -> None:
        self.gaps: list[Gap] = []
        self.failures: list[str] = []
        self._url = url
        self._clocks = [(~pid << 3) | PROCESS_CPU for pid in pids]

    async def run(self) -> None:
        """Stream one response after the other until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            while True:
                try:
                    async with session.post(self._url + "/v1/completions", json=BODY) as response:
                        if response.status != 200:
                            raise ConnectionError(await response.text())
                        await self._read(response.content.iter_any())
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    self.failures.append(repr(error)[:300])
                    await asyncio.sleep(0.1)

    async def _read(self, pieces: AsyncIterator[bytes]) -> None:
        last = None
        async for piece in pieces:
            now = [time.perf_counter(), *map(time.clock_gettime, self._clocks)]
            if b"event: error" in piece:
                raise ConnectionError(piece.decode(errors="replace"))
            if last is not None:
                self.gaps.append(Gap(*(new - old for new, old in zip(now, last, strict=True))))
            last = now

    def report(self) -> dict[str, Any]:
        """Return the percentiles of the gaps in milliseconds, elapsed and of the CPU time of each process."""
        facts = {"count": len(self.gaps), "failures": self.failures[:10]}
        columns = zip(*self.gaps, strict=True) if self.gaps else ((0.0,),) * len(Gap._fields)
        return facts | dict(zip(Gap._fields, map(percentiles, columns), strict=True))


def percentiles(seconds: tuple[float, ...]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))] * 1e3, 1) for name, share in at.items()}


async def main() -> None:
    gaps = Gaps(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    task = asyncio.create_task(gaps.run())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    task.cancel()
    await asyncio.wait([task])
    print(json.dumps(gaps.report()))


if __name__ == "__main__":
    asyncio.run(main())
