"""Drives one Engine in this process: adds each request at its arrival time, steps, records the results.

Time is real unless another clock is given, such as the one moved by a `virtual_time.VirtualExecutor`.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple, Protocol

from headstart.config.options import EngineOptions
from headstart.core.batch import RequestStepOutput
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.request import Request, SamplingParams
from headstart.measurement.deferred_interrupt import deferred_interrupt
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import EngineSetup, JobsResult, describe_engine
from headstart.workload.jobs import Job, JobDependencies
from headstart.workload.request_record import RequestRecord

Tokens = tuple[int, ...]


class EngineRunner:
    """A runner that steps one engine, and checks reported cached tokens against its count of computed ones."""

    def __init__(self, engine: Engine, info: EngineInfo, model: str, label: str = "headstart") -> None:
        self.engine = engine
        self.info = info
        self.label = label
        self.vocab_size = info.vocab_size
        self.about: dict[str, Any] = {
            "model": model,
            "max_model_len": info.max_model_len,
            "settings": {**describe_engine(info), "threads": info.threads},
        }
        self._runs = 0

    @classmethod
    def from_setup(cls, setup: EngineSetup, options: EngineOptions) -> "EngineRunner":
        """Load a model; `close` frees it."""
        engine, info = setup.build(options)
        return cls(engine, info, setup.label)

    def try_clear_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int = 0,
        bar: ProgressBar = QUIET,
        give_up: Callable[[RequestRecord], bool] | None = None,
    ) -> JobsResult:
        due = [inf if job.after else job.at for job in jobs]
        requests, waits = self._requests(jobs), JobDependencies(jobs)
        run = run_requests(
            self.engine, requests, due=due, waits=waits, concurrency=concurrency, bar=bar, give_up=give_up
        )
        seconds = max((record.finish for record in run.records if record.finish is not None), default=run.seconds)
        problems = [] if run.errors else run.problems("in process")  # the records tell of requests that failed
        return JobsResult(run.records, seconds, is_cut=run.given_up, problems=problems)

    def close(self) -> None:
        self.engine.close()

    def _requests(self, jobs: Sequence[Job]) -> list[Request]:
        self._runs += 1
        return [Request(f"run{self._runs}-{index}", job.prompt, _sampling(job)) for index, job in enumerate(jobs)]


def _sampling(job: Job) -> SamplingParams:
    chosen = job.sampling
    return SamplingParams(max_tokens=job.output, temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k)


class Clock(Protocol):
    """A clock in seconds, with a way to wait."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The system clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


REAL = RealClock()


class TimedStep(NamedTuple):
    """One engine step: its duration in seconds, and the tokens it computed."""

    seconds: float
    executor_seconds: float  # part of `seconds` spent in the executor; the rest is scheduling
    computed_tokens: int


@dataclass(slots=True)
class RunResult:
    """The results of a list of requests, in order."""

    records: list[RequestRecord]
    outputs: list[Tokens]  # token ids generated, per request
    steps: list[TimedStep]
    seconds: float
    computed_tokens: int
    preemptions: int = 0
    given_up: bool = False  # `give_up` ended the run: records are those finished by then

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    def problems(self, label: str) -> list[str]:
        """Return the reasons why this run is invalid; empty if it is valid."""
        if self.errors:
            return [f"{label}: {len(self.errors)} requests failed, the first with: {self.errors[0]}"]
        due = sum(record.prompt_tokens - record.cached_tokens + record.output_tokens - 1 for record in self.records)
        if due == self.computed_tokens or self.given_up or self.preemptions:
            return []
        return [f"{label}: {self.computed_tokens} tokens computed, but the requests account for {due}"]


@dataclass(slots=True)
class _Flight:
    """A request in flight."""

    arrival: float
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0
    cached_tokens: int = 0

    def take(self, output: RequestStepOutput, now: float) -> None:
        """Record the output of one step."""
        self.cached_tokens = output.num_cached_tokens
        if not output.token_ids:
            return
        self.token_ids += output.token_ids
        if self.first_token is None:
            self.first_token = now
        elif self.last_token is not None:
            self.longest_gap = max(self.longest_gap, now - self.last_token)
        self.last_token = now

    def record(self, request_id: str, error: str | None) -> RequestRecord:
        return RequestRecord(
            request_id,
            self.arrival,
            self.first_token,
            self.last_token if error is None else None,
            self.prompt_tokens,
            self.cached_tokens,
            len(self.token_ids),
            self.longest_gap,
            error,
        )


def requests_from_prompts(prompts: "Sequence[array[int]]", sampling: SamplingParams, label: str) -> list[Request]:
    """Return one request per prompt with the id `label-i`; no request with such an id may be running on the engine."""
    return [Request(f"{label}-{index}", prompt, sampling) for index, prompt in enumerate(prompts)]


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    *,
    due: Sequence[float] | None = None,
    waits: JobDependencies | None = None,
    concurrency: int = 0,
    bar: ProgressBar = QUIET,
    give_up: Callable[[RequestRecord], bool] | None = None,
    on_step: Callable[[int], None] | None = None,
    clock: Clock = REAL,
) -> RunResult:
    """Run all requests to completion.

    `due` is the arrival time of each request in seconds after the start (None: all at once); those that wait for others
    (`waits`) have infinity, and arrive when these have ended and their pause is over. With
    `concurrency`, at most that many are in flight: the next one arrives when one ends. `give_up` receives every
    finished record and may end the run early: requests in flight are aborted. Ctrl-C aborts them too.
    `on_step` receives the number of finished steps after each step; requests it aborts have no record.
    """
    flights: dict[str, _Flight] = {}
    finished: dict[str, tuple[RequestRecord, Tokens]] = {}
    steps: list[TimedStep] = []
    indices = {request.request_id: index for index, request in enumerate(requests)}
    arriving = [(0.0 if due is None else due[index], index) for index in range(len(requests))]
    arriving = [one for one in arriving if one[0] < inf]
    heapify(arriving)
    before = stats = engine.stats()
    given_up, start = False, clock.now()
    try:
        while (arriving or engine.has_work) and not given_up:
            now = clock.now() - start
            while arriving and arriving[0][0] <= now and not 0 < concurrency <= len(flights):
                at, index = heappop(arriving)
                request = requests[index]
                flights[request.request_id] = _Flight(now if concurrency else at, len(request.prompt))
                with deferred_interrupt():
                    engine.add_request(request)
            if not engine.has_work:
                clock.sleep(max(arriving[0][0] - now, 0.0))
                continue
            begin = clock.now()
            with deferred_interrupt():
                outputs = engine.step(begin)
            end = clock.now()
            last, stats = stats, engine.stats()
            computed = stats.counters.computed_tokens - last.counters.computed_tokens
            steps.append(TimedStep(end - begin, stats.step_seconds - last.step_seconds, computed))
            for output in outputs:
                flight = flights[output.request_id]
                flight.take(output, end - start)
                if output.finish_reason is not None:
                    record = flights.pop(output.request_id).record(output.request_id, output.error)
                    finished[output.request_id] = (record, tuple(flight.token_ids))
                    given_up = given_up or (give_up is not None and give_up(record))
                    for one in (
                        waits.release_dependents(indices[output.request_id], end - start) if waits is not None else ()
                    ):
                        heappush(arriving, one)
                    bar.advance()
            if on_step is not None:
                on_step(len(steps))
    finally:
        with deferred_interrupt():
            for request_id in flights:
                engine.abort(request_id)
    done = [finished[request.request_id] for request in requests if request.request_id in finished]
    return RunResult(
        records=[record for record, _ in done],
        outputs=[tokens for _, tokens in done],
        steps=steps,
        seconds=clock.now() - start,
        computed_tokens=stats.counters.computed_tokens - before.counters.computed_tokens,
        preemptions=stats.counters.num_preemptions - before.counters.num_preemptions,
        given_up=given_up,
    )
