"""The gaps between events of unconstrained streams, seen by a client in a process of its own: gaps.py URL.

Streams one completion after the other until its stdin is closed, and prints a JSON object with percentiles.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

BODY = {"prompt": "gaps", "max_tokens": 256, "ignore_eos": True, "stream": True, "temperature": 1}


class Gaps:
    """A client that keeps the seconds between two events of one response."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._url = url

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
            now = time.perf_counter()
            if b"event: error" in piece:
                raise ConnectionError(piece.decode(errors="replace"))
            if last is not None:
                self.seconds.append(now - last)
            last = now

    def report(self) -> dict[str, Any]:
        """Return the percentiles of the gaps in milliseconds."""
        ordered = sorted(self.seconds) or [0.0]
        at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
        percentiles = {name: round(ordered[int(share * (len(ordered) - 1))] * 1e3, 1) for name, share in at.items()}
        return {"count": len(self.seconds), "failures": self.failures[:10], **percentiles}


async def main() -> None:
    gaps = Gaps(sys.argv[1])
    task = asyncio.create_task(gaps.run())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    task.cancel()
    await asyncio.wait([task])
    print(json.dumps(gaps.report()))


if __name__ == "__main__":
    asyncio.run(main())
