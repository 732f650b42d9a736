"""The driver's side of the protocol in README.md: JSON lines on stdin and stdout, one workload at a time.

Standard library only: every driver runs in its own environment. Output of libraries goes to stderr.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TextIO

GIVEN_UP = "given up"
POLL = 0.0005  # seconds between two checks of the clock while no job is due
Run = Callable[[list["Job"], int, float | None], dict[str, Any]]


class Sampling(NamedTuple):
    """Sampling parameters: `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are no limits."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = Sampling()


class Job(NamedTuple):
    """One request of exactly `output` tokens; arrives `at` seconds after the start."""

    prompt: list[int]
    output: int
    at: float
    sampling: Sampling = GREEDY


class News(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    new_tokens: int
    cached_tokens: int | None = None  # None: unchanged
    is_finished: bool = False
    error: str | None = None


class Stepper(Protocol):
    """An engine that computes in steps, in this thread."""

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None: ...

    def step(self) -> Sequence[News]: ...

    def abort(self, request_ids: list[str]) -> None: ...


@dataclass(slots=True)
class Flight:
    """One request in flight, from the client's view. Times in seconds after the start of the run."""

    arrival: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0

    def take(self, new_tokens: int, now: float) -> None:
        """Record tokens received at `now`."""
        if not new_tokens:
            return
        if self.first_token is None:
            self.first_token = now
        elif self.last_token is not None:
            self.longest_gap = max(self.longest_gap, now - self.last_token)
        self.last_token = now
        self.output_tokens += new_tokens

    def record(self, error: str | None = None) -> dict[str, Any]:
        """Return the record of the protocol; `error` is the reason if it did not complete as requested."""
        return {
            "arrival": self.arrival,
            "first_token": self.first_token,
            "finish": None if error else self.last_token,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "longest_gap": self.longest_gap,
            "error": error,
        }


def drive(engine: Stepper, jobs: list[Job], concurrency: int = 0, give_up_after: float | None = None) -> dict[str, Any]:
    """Run all jobs on an engine that computes in steps: each at its arrival time, or `concurrency` at a time."""
    waiting = deque(enumerate(jobs))
    flights: dict[str, Flight] = {}
    records: dict[int, dict[str, Any]] = {}
    start = time.perf_counter()
    while waiting or flights:
        now = time.perf_counter() - start
        if give_up_after is not None and now >= give_up_after:
            break
        while waiting and (len(flights) < concurrency if concurrency else waiting[0][1].at <= now):
            index, job = waiting.popleft()
            flights[str(index)] = Flight(now if concurrency else job.at, len(job.prompt))
            engine.add(str(index), job.prompt, job.output, job.sampling)
        if not flights:
            time.sleep(max(waiting[0][1].at - now, POLL))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for news in outputs:
            flight = flights[news.request_id]
            flight.take(news.new_tokens, now)
            if news.cached_tokens is not None:
                flight.cached_tokens = news.cached_tokens
            if news.is_finished:
                del flights[news.request_id]
                asked = jobs[int(news.request_id)].output
                short = None if flight.output_tokens == asked else f"{flight.output_tokens} of {asked} tokens received"
                records[int(news.request_id)] = flight.record(news.error or short)
    seconds = time.perf_counter() - start
    if flights:
        engine.abort(list(flights))
    records |= {int(request_id): flight.record(GIVEN_UP) for request_id, flight in flights.items()}
    records |= {index: Flight(job.at, len(job.prompt)).record(GIVEN_UP) for index, job in waiting}
    return {"records": [records[index] for index in range(len(jobs))], "seconds": seconds, "computed_tokens": None}


def claim_stdout() -> TextIO:
    """Return a stream to the real stdout; from now on all other output, including that of C code, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def serve(answers: TextIO, about: dict[str, Any], reset: Callable[[], bool], run: Run) -> None:
    """Report ready, then answer one line after the other until a quit message or the end of stdin.

    `about` is the content of `ready`; `run` takes jobs, concurrency and the time limit in seconds.
    """
    print(json.dumps({"ready": about}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        match message["op"]:
            case "reset":
                answer: dict[str, Any] = {"reset": reset()}
            case "run":
                jobs = [
                    Job(job["prompt"], job["output"], job.get("at", 0.0), Sampling(**job.get("sampling", {})))
                    for job in message["jobs"]
                ]
                answer = run(jobs, message.get("concurrency", 0), message.get("give_up_after"))
            case "quit":
                return
            case other:
                answer = {"error": f"no operation is called {other!r}"}
        print(json.dumps(answer), file=answers, flush=True)
