"""Experiment: cost of a long waiting queue per step. 2,000 prompts wait, and none or one can be admitted; no model.

The figure is the time of a step beyond the same step without the queue: with the same sequences running, and with the
admitted request, if any, waiting alone. Adding requests is excluded: block hashes are computed on arrival.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

from headstart.core.engine import Engine
from headstart.core.errors import ConfigError
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.waiting_queue import POLICIES
from headstart.measurement.inprocess import requests_from_prompts
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.workload.request_record import median
from headstart.workload.synthetic import prompts_with_prefix, random_tokens
from headstart_lab.runners.null_executor import NullExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
DECODES = 16
OUTPUT = 64  # tokens of a decode: measured steps, and the ones before
MAX_US = 1000
COLUMNS = ("form", "step without queue", "step", "order", "order, mean")
Prompts = list["array[int]"]


@dataclass(frozen=True, slots=True)
class OrderConfig:
    """Sizes of the experiment; lengths in tokens."""

    waiting: int = 2000
    prompt: int = 4096
    steps: int = 48  # measured, while sequences of OUTPUT tokens run
    cap: int = 256  # long_prefill_token_threshold of the twins, whose leader takes prompt / cap steps
    policy: str = "lpm"
    runs: int = 3


QUICK = OrderConfig(waiting=200, runs=1)


@dataclass(frozen=True, slots=True)
class _Case:
    """One form: the running and the waiting prompts, and the admissions of a step."""

    name: str
    decodes: Prompts
    waiting: Prompts
    admits: int  # in each step
    num_blocks: int  # usable
    steps: int
    cap: int = 0


@dataclass(slots=True)
class _Cost:
    """Seconds of the steps of one form without and with the queue, all runs; `order` is the difference, per run."""

    alone: list[float] = field(default_factory=list[float])
    queued: list[float] = field(default_factory=list[float])
    order: list[float] = field(default_factory=list[float])  # of the medians
    order_mean: list[float] = field(default_factory=list[float])  # of the means: includes rare slow steps

    def add(self, alone: list[float], queued: list[float]) -> None:
        self.alone.append(median(alone))
        self.queued.append(median(queued))
        self.order.append(median(queued) - median(alone))
        self.order_mean.append(mean(queued) - mean(alone))


def run_order(seed: int, config: OrderConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure every form: none fits, one is admitted in each step, twins wait for blocks that their leader computes.

    Raises ConfigError for an unknown policy, and for a queue that would be empty before the last step.
    """
    if config.waiting <= config.steps:
        raise ConfigError(f"--waiting {config.waiting}: {config.steps} steps admit one each; request more")
    if config.policy not in POLICIES:
        raise ConfigError(f"--scheduling-policy {config.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
    log, costs, problems = ContentionLog.empty(), dict[str, _Cost](), list[str]()
    for number, make in enumerate(FORMS):
        bar.start_stage(f"queues {number + 1}/{len(FORMS)}", 2 * config.runs)
        for run in range(config.runs):
            for case in make(config, Random(f"{seed}/{run}")):
                steps = measure_uncontended(lambda c=case: _measure(c, config), log)
                costs.setdefault(case.name, _Cost()).add(steps.alone, steps.queued)
                if steps.admitted != case.admits * case.steps:
                    problems.append(f"{case.name}: {steps.admitted} requests admitted in {case.steps} steps")
                bar.advance()
    return _report(seed, config, costs, problems, log)


# ----------------------------------------------------------------------------------------------------------- forms


def _distinct(config: OrderConfig, rng: Random) -> list[_Case]:
    """Return prompts without a common prefix; nothing is cached."""
    waiting = [random_tokens(config.prompt, VOCAB_SIZE, rng) for _ in range(config.waiting)]
    return _cases("all distinct", config, _own(config, rng), waiting)


def _hot(config: OrderConfig, rng: Random) -> list[_Case]:
    """Return prompts with one prefix up to the last block, which running sequences hold."""
    prefix = random_tokens(config.prompt - BLOCK_SIZE, VOCAB_SIZE, rng)
    decodes = prompts_with_prefix(prefix, DECODES, BLOCK_SIZE, VOCAB_SIZE, rng)
    return _cases(
        "one hot prefix", config, decodes, prompts_with_prefix(prefix, config.waiting, BLOCK_SIZE, VOCAB_SIZE, rng)
    )


def _half(config: OrderConfig, rng: Random) -> list[_Case]:
    """Return prompts whose first half is one of 16 prefixes held by running sequences; the second half is unshared."""
    half = config.prompt // 2
    prefixes = [random_tokens(half, VOCAB_SIZE, rng) for _ in range(DECODES)]
    decodes = [prefix + random_tokens(BLOCK_SIZE, VOCAB_SIZE, rng) for prefix in prefixes]
    waiting = [
        prefixes[index % DECODES] + random_tokens(config.prompt - half, VOCAB_SIZE, rng)
        for index in range(config.waiting)
    ]
    return _cases("half matched", config, decodes, waiting)


def _twins(config: OrderConfig, rng: Random) -> list[_Case]:
    """Return prompts with one new prefix, computed by the first in chunks; there are slots and blocks for all."""
    prefix = random_tokens(config.prompt - BLOCK_SIZE, VOCAB_SIZE, rng)
    waiting = prompts_with_prefix(prefix, config.waiting, BLOCK_SIZE, VOCAB_SIZE, rng)
    decodes = _own(config, rng)
    blocks = _held(decodes) + (DECODES + 2) * config.prompt // BLOCK_SIZE
    steps = config.prompt // config.cap - 1  # after the one in which the leader is admitted
    return [_Case("twins of a leader, none admitted", decodes, waiting, 0, blocks, steps, config.cap)]


FORMS: tuple[Callable[[OrderConfig, Random], list[_Case]], ...] = (_distinct, _hot, _half, _twins)


def _cases(name: str, config: OrderConfig, decodes: Prompts, waiting: Prompts) -> list[_Case]:
    """Return a case with a pool that the running sequences fill, and one with blocks for a few more prompts."""
    full, spare = _held(decodes), 4 * config.prompt // BLOCK_SIZE
    return [
        _Case(f"{name}, none admitted", decodes, waiting, 0, full, config.steps),
        _Case(f"{name}, one admitted", decodes, waiting, 1, full + spare, config.steps),
    ]


def _own(config: OrderConfig, rng: Random) -> Prompts:
    """Return distinct prompts for decodes; together they hold slightly more blocks than one waiting prompt needs."""
    return [random_tokens(config.prompt // DECODES, VOCAB_SIZE, rng) for _ in range(DECODES)]


def _held(decodes: Prompts) -> int:
    """Return the blocks of the running sequences at their end: each different block once."""
    full = {prompt[:end].tobytes() for prompt in decodes for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)}
    return len(full) + len(decodes) * (OUTPUT // BLOCK_SIZE)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class _Steps:
    """Seconds of every measured step, without the executor."""

    alone: list[float]
    queued: list[float]
    admitted: int  # from the queue


def _measure(case: _Case, config: OrderConfig) -> _Steps:
    """Measure the same steps with and without the queue, in turn, so that noise on the machine affects both."""
    requests = requests_from_prompts(case.waiting, SamplingParams(max_tokens=1, temperature=0.0), "w")
    fed = requests[: case.admits * case.steps]  # added one by one to the engine without a queue
    alone, queued = (_started(case, config, queue) for queue in (requests[: case.cap and 1], requests))
    waiting = queued.stats().num_waiting
    steps = _Steps([], [], 0)
    for index in range(case.steps):
        if fed:
            alone.add_request(fed[index])
        steps.alone.append(_timed_step(alone))
        steps.queued.append(_timed_step(queued))
    return replace(steps, admitted=waiting - queued.stats().num_waiting)


def _started(case: _Case, config: OrderConfig, queue: Sequence[Request]) -> Engine:
    """Return an engine with running decodes and that queue; with twins, the leader is already admitted."""
    engine = _engine(case, config)
    for request in requests_from_prompts(case.decodes, SamplingParams(max_tokens=OUTPUT, temperature=0.0), "d"):
        engine.add_request(request)
    while engine.stats().last_batch_tokens != DECODES:
        engine.step()
    for request in queue:
        engine.add_request(request)
    if case.cap:
        engine.step()
    return engine


def _engine(case: _Case, config: OrderConfig) -> Engine:
    """Return an engine with slots for the decodes and as many others, or one other where each step admits one."""
    seats = DECODES + 1 if case.admits else 2 * DECODES
    limits = Limits(2 * config.prompt, seats, max_model_len=2 * config.prompt, long_prefill_threshold=case.cap)
    scheduler = Scheduler(
        SchedulerConfig(
            case.num_blocks + 1, BLOCK_SIZE, limits, policy=config.policy, eviction_policy="lru", tenant_floor=0.0
        )
    )
    return Engine(scheduler, NullExecutor(case.num_blocks + 1, BLOCK_SIZE, VOCAB_SIZE))


def _timed_step(engine: Engine) -> float:
    """Return the seconds of one step minus those of the executor."""
    before = engine.stats().step_seconds
    start = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - start
    return seconds - (engine.stats().step_seconds - before)


def _report(
    seed: int, config: OrderConfig, costs: dict[str, _Cost], problems: list[str], log: ContentionLog
) -> BenchmarkReport:
    rows = [
        {
            "form": name,
            "alone_us": 1e6 * median(cost.alone),
            "step_us": 1e6 * median(cost.queued),
            "order_us": 1e6 * median(cost.order),
            "order_mean_us": 1e6 * median(cost.order_mean),
        }
        for name, cost in costs.items()
    ]
    worst = max(rows, key=lambda row: row["order_us"])
    names = tuple(row["form"] for row in rows)
    return BenchmarkReport(
        "lab order",
        {"order_us_per_step": worst["order_us"], "worst_form": worst["form"], "max_us": MAX_US, "forms": rows},
        seed=seed,
        runs=config.runs,
        threads=1,
        spread={"order_us_per_step": [1e6 * value for value in min_and_max(costs[worst["form"]].order)]},
        setup={
            "waiting": config.waiting,
            "prompt_tokens": config.prompt,
            "decodes": DECODES,
            "block_size": BLOCK_SIZE,
            "policy": config.policy,
            "long_prefill_token_threshold": config.cap,
        },
        contention=log.as_dict(),
        sheets=[
            ReportTable(
                f"{config.waiting} prompts of {config.prompt} tokens wait ({config.policy}), microseconds per step",
                COLUMNS,
                tuple(tuple(row.values()) for row in rows),
            )
        ],
        charts=[
            ReportChart("ordering, per step", "form", "us", names, {"order": tuple(row["order_us"] for row in rows)})
        ],
        problems=problems,
    )
