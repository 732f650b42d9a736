"""Serves sessions in virtual time and counts: the scheduler and pool of the engine, no model, no clock of the machine.

A session is a list of turns; a turn arrives a pause after the end of the one before. Not a benchmark itself: the
scripts beside it are. Everything is deterministic; the same input gives the same counts on any machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import median
from typing import Any, NamedTuple

from headstart.core.engine import Engine
from headstart.core.request import DEFAULT_RETENTION, Request, RetentionHint, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.workload.jobs import Job
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16


class Turn(NamedTuple):
    """One prompt of a session, and the pause in seconds before it; the first pause counts from the start."""

    pause: float
    job: Job


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other, with what all their requests have in common."""

    turns: tuple[Turn, ...]
    retention: RetentionHint = DEFAULT_RETENTION
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """The settings of one run."""

    num_blocks: int  # usable ones
    eviction: str = "2q"
    policy: str = "lpm"
    token_seconds: float = 1.0  # a step takes this times its tokens and `step_tokens`
    step_tokens: int = 0
    max_seqs: int = 32
    max_batched_tokens: int = 256
    queued_refs: bool = True  # False: the pool ignores which blocks waiting requests will take over


class Counts(NamedTuple):
    """The counts of one run, in tokens unless the name says otherwise."""

    computed: int  # prompt tokens, those computed again after a preemption included
    hit_rate: float  # share of prompt tokens found in the pool
    ideal: int  # prompt tokens that an infinite cache computes
    preemptions: int  # number
    waiting: int  # number of waiting requests, mean over steps


def serve(server: Server, sessions: Sequence[Session]) -> Counts:
    """Serve all sessions to their end and return the counts."""
    longest = max(len(turn.job.prompt) + turn.job.output for session in sessions for turn in session.turns)
    limits = Limits(
        max_batched_tokens=server.max_batched_tokens, max_seqs=server.max_seqs, max_model_len=longest + BLOCK_SIZE
    )
    config = SchedulerConfig(
        server.num_blocks + 1,
        BLOCK_SIZE,
        limits,
        policy=server.policy,
        eviction_policy=server.eviction,
        tenant_floor=0.0,
    )
    clock = VirtualClock()
    cost = StepCost(server.step_tokens * server.token_seconds, server.token_seconds)
    executor = VirtualExecutor(config.num_blocks, BLOCK_SIZE, VOCAB_SIZE, cost, clock)
    scheduler = Scheduler(config)
    scheduler.waiting.references = server.queued_refs  # by default with `fcfs_key` only
    engine = Engine(scheduler, executor)
    waiting = steps = 0
    due = [(session.turns[0].pause, index, 0) for index, session in enumerate(sessions)]
    heapify(due)
    while due or engine.has_work:
        while due and due[0][0] <= clock.now():
            _, index, number = heappop(due)
            engine.add_request(_request(sessions[index], index, number))
        if not engine.has_work:
            clock.sleep(due[0][0] - clock.now())
            continue
        waiting, steps = waiting + len(engine.scheduler.waiting), steps + 1
        for output in engine.step(clock.now()):
            assert output.error is None, output.error
            if output.finish_reason is not None:
                index, number = map(int, output.request_id.split("-"))
                if number + 1 < len(sessions[index].turns):
                    pause = sessions[index].turns[number + 1].pause
                    heappush(due, (clock.now() + pause, index, number + 1))
    counters = engine.stats().counters
    return Counts(
        computed=counters.prefill_tokens,
        hit_rate=counters.cached_tokens / counters.prompt_tokens,
        ideal=counters.ideal_tokens,
        preemptions=counters.num_preemptions,
        waiting=round(waiting / steps),
    )


def singles(jobs: Sequence[Job], retention: RetentionHint = DEFAULT_RETENTION) -> list[Session]:
    """Return a session of one turn per job, at its own arrival time."""
    return [Session((Turn(job.at, job),), retention) for job in jobs]


def distinct_blocks(sessions: Sequence[Session]) -> int:
    """Return the number of different full prompt blocks: what an infinite pool would hold of the prompts."""
    prompts = (turn.job.prompt for session in sessions for turn in session.turns)
    hashes = set[int]()
    for prompt in prompts:
        parent = 0
        for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash((parent, prompt[start : start + BLOCK_SIZE].tobytes()))
            hashes.add(parent)
    return len(hashes)


def longest_blocks(sessions: Sequence[Session]) -> int:
    """Return the blocks of the longest prompt with its output."""
    longest = max(len(turn.job.prompt) + turn.job.output for session in sessions for turn in session.turns)
    return -(-longest // BLOCK_SIZE)


def saved(without: Counts, with_it: Counts) -> float:
    """Return the share of computed prompt tokens that the mechanism saves; negative: it costs some."""
    return 1 - with_it.computed / without.computed


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Return median, smallest and largest."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def greedy(job: Job) -> SamplingParams:
    """Return the sampling parameters that generate exactly the tokens of a job."""
    return SamplingParams(max_tokens=job.output, temperature=0.0)


def _request(session: Session, index: int, number: int) -> Request:
    job = session.turns[number].job
    return Request(f"{index}-{number}", job.prompt, greedy(job), priority=session.priority, retention=session.retention)
