"""EndpointRunner: any OpenAI endpoint as a Runner, in an open loop (requests at their arrival times) or a closed one.

Latencies count from the arrival time of a request. The server is never reset: prompts must be new to be cold.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from headstart.bench.streamed_request import (
    FAILURES,
    EndpointTarget,
    PreparedRequest,
    RefusedError,
    StreamedReply,
    StreamFailedError,
    open_session,
    probe_cached_tokens,
    request_body_of_job,
    send_streamed_request,
)
from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import JobsResult
from headstart.workload.jobs import Job, JobDependencies
from headstart.workload.request_record import RequestRecord
from headstart.workload.synthetic import random_tokens

PROBE_TOKENS = 300
"""Two blocks of the largest block size in use (128), so that a repeated probe has a prefix cache hit."""
NEEDS = "the suite sends prompts of token ids to /v1/completions, streamed, with ignore_eos"

GiveUp = Callable[[RequestRecord], bool]
T = TypeVar("T")


class EndpointRunner:
    """A runner that sends jobs over HTTP. Made by `connect`, which checks that the server can be measured."""

    def __init__(self, target: EndpointTarget, vocab_size: int) -> None:
        self.target = target
        self.label = urlsplit(target.url).netloc
        self.vocab_size = vocab_size
        self.about: dict[str, Any] = {"against": target.base}
        self.model = target.model
        self.reports_cached = False  # whether any response reported cached tokens
        self._loop = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._runs = 0

    @classmethod
    def connect(cls, target: EndpointTarget, vocab_size: int, rng: Random) -> "EndpointRunner":
        """Return a runner of a reachable server that accepts the requests of the suite.

        Sends a small prompt, twice if the first response does not report cached tokens. Raises ConfigError.
        """
        if urlsplit(target.url).scheme not in ("http", "https"):
            raise ConfigError(f"--against {target.url!r} is not an http:// or https:// URL")
        runner = cls(target, vocab_size)
        try:
            runner._wait(runner._open(rng))
        except BaseException:
            runner.close()
            raise
        return runner

    def try_clear_prefix_cache(self) -> bool:
        return False

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int = 0,
        bar: ProgressBar = QUIET,
        give_up: GiveUp | None = None,
    ) -> JobsResult:
        self._runs += 1
        calls = [
            PreparedRequest(f"run{self._runs}-{i}", job, request_body_of_job(job, self.model))
            for i, job in enumerate(jobs)
        ]
        replies, is_cut = self._wait(self._serve(calls, concurrency, bar, give_up))
        records = [reply.record for reply in replies]
        self.reports_cached = self.reports_cached or any(reply.cached_tokens is not None for reply in replies)
        seconds = max((record.finish for record in records if record.finish is not None), default=0.0)
        return JobsResult(records, seconds, is_cut, self.reports_cached)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._loop.run(session.close())
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    async def _serve(
        self, calls: Sequence[PreparedRequest], concurrency: int, bar: ProgressBar, give_up: GiveUp | None
    ) -> tuple[list[StreamedReply], bool]:
        """Return (replies in call order, whether the run ended early). An early end leaves out open requests."""
        session, start = self._session, time.perf_counter()
        assert session is not None, "connect() first"
        slots = asyncio.Semaphore(concurrency) if concurrency else None
        replies: dict[int, StreamedReply] = {}
        enough = asyncio.Event()
        waits = JobDependencies([call.job for call in calls])
        due: list[asyncio.Future[float]] = [asyncio.get_running_loop().create_future() for _ in calls]
        for call, future in zip(calls, due, strict=True):
            if not call.job.after:
                future.set_result(call.job.at)

        async def serve(index: int, call: PreparedRequest) -> None:
            if slots is None:
                at = await due[index]
                await asyncio.sleep(max(start + at - time.perf_counter(), 0.0))
                reply = await send_streamed_request(session, self.target, call, at, start)
            else:
                async with slots:
                    reply = await send_streamed_request(session, self.target, call, time.perf_counter() - start, start)
            replies[index] = reply
            bar.advance()
            for at, waiting in waits.release_dependents(index, time.perf_counter() - start):
                due[waiting].set_result(at)
            if give_up is not None and give_up(reply.record):
                enough.set()

        all_served = asyncio.gather(*(serve(index, call) for index, call in enumerate(calls)))
        stop = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait({all_served, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_cut = not all_served.done()
            stop.cancel()
            all_served.cancel()
            await asyncio.gather(all_served, stop, return_exceptions=True)
        if not is_cut:
            all_served.result()  # raises only our own errors: failures of the server are in the records
        return [replies[index] for index in sorted(replies)], is_cut

    async def _open(self, rng: Random) -> None:
        """Find the model and send it a probe. Raises ConfigError."""
        self._session = open_session(self.target.timeout, headers=self.target.headers)
        await self._find_model(self._session)
        length = min(PROBE_TOKENS, (self.about["max_model_len"] or 4096) // 2)
        job = Job(random_tokens(length, self.vocab_size, rng), 2)
        for _ in range(2):
            cached = await self._probe(self._session, job)
            self.reports_cached = cached is not None
            if self.reports_cached:
                break

    async def _find_model(self, session: aiohttp.ClientSession) -> None:
        url = f"{self.target.base}/models"
        try:
            async with session.get(url) as response:
                status, text = response.status, await response.text()
                found = (await response.json(content_type=None))["data"] if status == 200 else []
        except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
            raise ConfigError(f"cannot reach {url}: {error or type(error).__name__}") from error
        except FAILURES as error:
            found, status = [], 404
            text = str(error)
        if status != 200 and not self.model:
            raise ConfigError(f"{url} answered with HTTP {status}: {text[:300]}")
        self.model = self.model or next((str(card["id"]) for card in found), "")
        if not self.model:
            raise ConfigError(f"{url} lists no model; name one with --model")
        lengths = [card.get("max_model_len") for card in found if card.get("id") == self.model]
        self.about |= {"model": self.model, "max_model_len": next((int(length) for length in lengths if length), None)}

    async def _probe(self, session: aiohttp.ClientSession, job: Job) -> int | None:
        """Return the cached tokens reported by one response. Raises ConfigError that names what the server rejects."""
        try:
            return await probe_cached_tokens(session, self.target, request_body_of_job(job, self.model))
        except RefusedError as error:
            reason = await self._reason(session, job, error.status)
            raise ConfigError(f"{self.target.base}/completions refused a request: {error}. {reason}") from error
        except StreamFailedError as error:
            raise ConfigError(f"{self.target.base}/completions: {error}") from error
        except FAILURES as error:
            raise ConfigError(
                f"{self.target.base}/completions does not answer as OpenAI's API does: {error or type(error).__name__}"
            ) from error

    async def _reason(self, session: aiohttp.ClientSession, job: Job, status: int) -> str:
        """Return the remedy for a refusal, found by leaving out one field at a time."""
        if status in (401, 403):
            return "Give a key with --api-key or OPENAI_API_KEY"
        if status in (404, 405):
            return f"Is there such a model, and does the server have this path? {NEEDS}"
        if status not in (400, 422):
            return "Is the server ready?"
        if await self._takes(session, Job(job.prompt, 2), ignore_eos=None):
            return f"It does not take ignore_eos, without which no output has a fixed length; {NEEDS}"
        if await self._takes(session, job, prompt="a few words"):
            if await self._takes(session, Job(array("i", range(3, 35)), 2)):
                return f"It takes smaller token ids: lower --vocab-size ({self.vocab_size})"
            return f"It does not take prompts of token ids; {NEEDS}"
        return NEEDS[0].upper() + NEEDS[1:]

    async def _takes(self, session: aiohttp.ClientSession, job: Job, **changes: object) -> bool:
        try:
            await probe_cached_tokens(session, self.target, request_body_of_job(job, self.model, **changes))
        except (*FAILURES, StreamFailedError):
            return False
        return True
