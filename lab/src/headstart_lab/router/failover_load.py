"""A load of requests that are sent once, without retries: streams and complete responses in turn."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from headstart.bench.streamed_request import open_session, parse_event

REQUEST_SECONDS = 1800.0
IDLE_SECONDS = 15.0
_PREFIXES = 16


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times on the clock of time.monotonic."""

    is_stream: bool
    sent_at: float
    status: int | None = None
    replica: str = ""  # from the router's response header
    started: bool = False  # the client has received a part of the answer
    ended: bool = False  # the client has received all of it
    typed: bool = False  # the client has received an error with type and code instead
    error: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether it failed before the client received any part of an answer."""
        return not self.ended and not self.started


@dataclass(slots=True)
class Load:
    """A client of one URL. `outcomes` are in completion order."""

    url: str
    rng: Random
    output_tokens: int
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    num_sent: int = 0

    async def closed(self, workers: int, goes_on: Callable[[], bool]) -> None:
        """Keep `workers` requests in flight as long as `goes_on()`."""
        async with open_session(REQUEST_SECONDS, idle_seconds=IDLE_SECONDS) as session:

            async def work() -> None:
                while goes_on():
                    await self._one(session)

            await asyncio.gather(*(work() for _ in range(workers)))

    async def open(self, rate: float, goes_on: Callable[[], bool]) -> None:
        """Send `rate` requests per second with Poisson arrivals, as long as `goes_on()`."""
        async with open_session(REQUEST_SECONDS, idle_seconds=IDLE_SECONDS) as session:
            tasks: list[asyncio.Task[None]] = []
            due = time.monotonic()
            while goes_on():
                due += self.rng.expovariate(rate)
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                tasks.append(asyncio.create_task(self._one(session)))
            await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        self.num_sent += 1
        outcome = Outcome(self.num_sent % 2 == 0, time.monotonic())
        body: dict[str, Any] = {
            "prompt": self._prompt(),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": outcome.is_stream,
        }
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                outcome.status, outcome.replica = response.status, response.headers.get("x-headstart-replica", "")
                if outcome.is_stream and response.status == 200:
                    await _read_stream(response, outcome)
                else:
                    await _read_whole(response, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        self.outcomes.append(outcome)

    def _prompt(self) -> str:
        shared = self.rng.randrange(_PREFIXES)
        return f"{shared}: " + "what they have in common " * 8 + f"request {self.num_sent}"


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for line in response.content:
        event = parse_event(line)
        if event is None:
            outcome.ended = not outcome.error
            return
        if "error" in event:
            outcome.typed = is_typed(event)
            outcome.error = str(event["error"])
        elif event.get("choices"):
            outcome.started = True
    outcome.error = outcome.error or "the stream ended without [DONE]"


async def _read_whole(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    document = json.loads(await response.read())
    if response.status == 200 and document.get("choices"):
        outcome.started = outcome.ended = True
    else:
        outcome.typed = is_typed(document)
        outcome.error = str(document.get("error", document))


def is_typed(document: dict[str, Any]) -> bool:
    """Return whether the document is an error in OpenAI's form with message, type and code."""
    error = document.get("error")
    return isinstance(error, dict) and all(isinstance(error.get(key), str) for key in ("message", "type", "code"))
