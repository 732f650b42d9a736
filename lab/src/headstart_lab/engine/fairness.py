"""Experiment: latency cost of longest-prefix-match. k-LPM against first come, first served, in virtual time.

Most arrivals are hot and hit 96 % of their prompts; a few are cold and hit nothing. Under plain longest prefix match
the cold ones wait until no hot one is left. k-LPM bounds that (arXiv 2502.04677): a request with r older ones ahead of
it is admitted within k(r + 1) admissions. The scheduler is the real one; step times are modelled.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable
from headstart.workload.request_record import RequestRecord, percentile
from headstart.workload.synthetic import random_tokens, unit_poisson_arrivals
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
COST = StepCost(step=0.012, token=0.00038)
"""About the cost of llama-100m on two cores: 12 ms for the weights, 0.38 ms for a token."""
DEFAULT_K = EngineOptions().lpm_k
COLUMNS = ("policy", "mean s", "hot p99 s", "cold p50 s", "cold p99 s", "mean / fcfs", "p99 / fcfs", "late / bound")


@dataclass(frozen=True, slots=True)
class FairnessConfig:
    """One stream of requests; lengths in tokens. With the defaults, prefill is most of the work.

    With long outputs and few slots decode is most of it, and cold requests cost hardly more than hot ones.
    """

    requests: int = 10_000
    cold_share: float = 0.05
    prompt: int = 1000
    shared: int = 960  # of a hot prompt: 96 %
    hot_prefixes: int = 8
    output: int = 8
    load: float = 0.97  # share of the throughput of `fcfs_key` with all requests queued at once
    budget: int = 512  # max_num_batched_tokens
    max_seqs: int = 64
    ks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # the default and infinity are added


QUICK = FairnessConfig(requests=1000)


@dataclass(slots=True)
class _Traffic:
    """The same requests for every policy: prompts, arrival times, and ids of the cold ones."""

    warm_up: list[Request] = field(default_factory=list[Request])
    requests: list[Request] = field(default_factory=list[Request])
    due: list[float] = field(default_factory=list[float])
    cold: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class _Served:
    """The result of one policy."""

    policy: str
    k: int  # 1 for fcfs
    run: RunResult
    displacements: list[float]  # per request: admissions from its arrival to its own / (r + 1)

    def ttfts(self, names: "set[str] | None" = None) -> list[float]:
        records = (record for record in self.run.records if names is None or record.request_id in names)
        return [record.ttft for record in records if record.ttft is not None]


def run_fairness(seed: int, config: FairnessConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Serve one stream under fcfs and under k-LPM for several k. Deterministic: one seed gives the same figures."""
    traffic = _make_traffic(config, Random(seed))
    infinity = config.requests + len(traffic.warm_up) + 1  # only the first admission is of the oldest request
    bar.start_stage("capacity", config.requests // 4)
    rate = config.load * _capacity(config, traffic, bar)
    traffic.due = [time / rate for time in unit_poisson_arrivals(config.requests, Random(f"{seed}/arrivals"))]
    served: list[_Served] = []
    for policy, k in (("fcfs", 1), *(("lpm", k) for k in (*sorted({*config.ks, DEFAULT_K}), infinity))):
        bar.start_stage(_label(policy, k, config.requests), config.requests)
        served.append(_serve(policy, k, config, traffic, bar))
    return _report(seed, config, rate, traffic, served)


def _make_traffic(config: FairnessConfig, rng: Random) -> _Traffic:
    """Return the stream, and one short request for each hot prefix that fills the cache before it."""
    traffic = _Traffic()
    hot = [random_tokens(config.shared, VOCAB_SIZE, rng) for _ in range(config.hot_prefixes)]
    prompts = list[Any]()
    for index in range(config.requests):
        if rng.random() < config.cold_share:
            traffic.cold.add(f"r-{index}")
            prompts.append(random_tokens(config.prompt, VOCAB_SIZE, rng))
        else:
            prompts.append(rng.choice(hot) + random_tokens(config.prompt - config.shared, VOCAB_SIZE, rng))
    sampling = SamplingParams(max_tokens=config.output, temperature=0.0)
    traffic.requests = requests_from_prompts(prompts, sampling, "r")
    traffic.warm_up = requests_from_prompts(hot, SamplingParams(max_tokens=1, temperature=0.0), "warm")
    return traffic


def _capacity(config: FairnessConfig, traffic: _Traffic, bar: ProgressBar) -> float:
    """Return the requests per second for a quarter of the stream, queued at once: no step lacks work."""
    some = traffic.requests[: max(config.requests // 4, 1)]
    return len(some) / _drive("fcfs", 1, config, traffic.warm_up, some, None, bar)[0].seconds


def _serve(policy: str, k: int, config: FairnessConfig, traffic: _Traffic, bar: ProgressBar) -> _Served:
    run, admitted_at = _drive(policy, k, config, traffic.warm_up, traffic.requests, traffic.due, bar)
    return _Served(policy, k, run, displacements(admitted_at, traffic.requests, traffic.due))


def displacements(admitted_at: dict[str, float], requests: Sequence[Request], due: Sequence[float]) -> list[float]:
    """Return for each request the admissions after its arrival, including its own, / (r + 1); r: older ones waiting.

    `admitted_at` is in the order of admission. k-LPM guarantees at most k. Requests that were skipped to wait for
    blocks being computed would have to be left out. There are none here: the hot prefixes are cached before the stream
    starts, and the cold prompts are all different.
    """
    times = list(admitted_at.values())
    places = {request_id: place for place, request_id in enumerate(admitted_at, 1)}
    found: list[float] = []
    for index, (request, arrival) in enumerate(zip(requests, due, strict=True)):
        before = bisect_left(times, arrival)  # admitted before its arrival; all other older ones were waiting
        found.append((places[request.request_id] - before) / (index - before + 1))
    return found


def _drive(
    policy: str,
    k: int,
    config: FairnessConfig,
    warm_up: list[Request],
    requests: list[Request],
    due: list[float] | None,
    bar: ProgressBar,
) -> tuple[RunResult, dict[str, float]]:
    """Return (the run, admission time of each request) on a warm engine with a pool that never evicts a prefix."""
    blocks = (config.max_seqs + config.hot_prefixes) * (-(-(config.prompt + config.output) // BLOCK_SIZE) + 1) * 2
    limits = Limits(config.budget, config.max_seqs, max_model_len=config.prompt + config.output)
    scheduler = Scheduler(
        SchedulerConfig(blocks, BLOCK_SIZE, limits, policy=policy, lpm_k=k, eviction_policy="lru", tenant_floor=0.0)
    )
    clock = VirtualClock()
    executor = VirtualExecutor(blocks, BLOCK_SIZE, VOCAB_SIZE, COST, clock)
    engine = Engine(scheduler, executor)
    run_requests(engine, warm_up, clock=clock)
    executor.first_chunks.clear()
    start = clock.now()
    run = run_requests(engine, requests, due=due, bar=bar, clock=clock)
    return run, {request_id: time - start for request_id, time in executor.first_chunks.items()}


def _label(policy: str, k: int, requests: int) -> str:
    return policy if policy == "fcfs" else f"lpm k={k if k <= requests else 'inf'}"


def _report(
    seed: int, config: FairnessConfig, rate: float, traffic: _Traffic, served: list[_Served]
) -> BenchmarkReport:
    fcfs, *others = served
    hot = {request.request_id for request in traffic.requests} - traffic.cold
    rows = [_row(found, fcfs, config, hot, traffic.cold) for found in served]
    bounded = [row for row, found in zip(rows, served, strict=True) if found.k <= config.requests]
    default = next(row for row, found in zip(rows, served, strict=True) if found in others and found.k == DEFAULT_K)
    values = {
        "max_displacement_over_bound": max(row["displacement_over_bound"] for row in bounded),
        "cold_p99_over_fcfs": default["cold_p99_over_fcfs"],
        "mean_ttft_over_fcfs": default["mean_ttft_over_fcfs"],
        "k": DEFAULT_K,
        "rate": rate,
        "policies": rows,
    }
    keys = ("policy", "mean_ttft_s", "hot_p99_s", "cold_p50_s", "cold_p99_s", "mean_ttft_over_fcfs")
    keys += ("cold_p99_over_fcfs", "displacement_over_bound")
    ks = tuple(row["policy"] for row in rows)
    series = {key: tuple(row[key] for row in rows) for key in ("mean_ttft_over_fcfs", "cold_p99_over_fcfs")}
    report = BenchmarkReport(
        "lab fairness",
        values,
        seed=seed,
        threads=1,
        setup={
            "step_s": COST.step,
            "token_s": COST.token,
            **{name: getattr(config, name) for name in FairnessConfig.__dataclass_fields__},
        },
        sheets=[
            ReportTable(
                f"time to first token: {config.requests} requests at {rate:.3g}/s, {config.load:.0%} of capacity",
                COLUMNS,
                tuple(tuple(row[key] for key in keys) for row in rows),
            )
        ],
        charts=[ReportChart("time to first token, over fcfs", "policy", "ratio", ks, series)],
        problems=[problem for found in served for problem in _problems(found, config)],
    )
    if values["max_displacement_over_bound"] > 1:
        report.problems.append(f"a request was admitted {values['max_displacement_over_bound']:.3g} bounds late")
    return report


def _row(found: _Served, fcfs: _Served, config: FairnessConfig, hot: set[str], cold: set[str]) -> dict[str, Any]:
    mean, fcfs_mean = (sum(times) / len(times) for times in (found.ttfts(), fcfs.ttfts()))
    cold_p99, fcfs_p99 = (percentile(served.ttfts(cold), 99) for served in (found, fcfs))
    worst = max(found.displacements)
    return {
        "policy": _label(found.policy, found.k, config.requests),
        "mean_ttft_s": mean,
        "hot_p99_s": percentile(found.ttfts(hot), 99),
        "cold_p50_s": percentile(found.ttfts(cold), 50),
        "cold_p99_s": cold_p99,
        "mean_ttft_over_fcfs": mean / fcfs_mean,
        "cold_p99_over_fcfs": cold_p99 / fcfs_p99,
        "max_displacement": worst,
        "displacement_over_bound": worst / found.k if found.k <= config.requests else None,
        "hit_rate": _hit_rate(found.run.records),
    }


def _hit_rate(records: list[RequestRecord]) -> float:
    return sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)


def _problems(found: _Served, config: FairnessConfig) -> list[str]:
    label = _label(found.policy, found.k, config.requests)
    problems = found.run.problems(label)
    if found.run.preemptions:
        problems.append(f"{label}: {found.run.preemptions} preemptions: the pool is too small for this experiment")
    return problems
