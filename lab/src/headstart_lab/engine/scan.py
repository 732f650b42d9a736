"""Experiment: a hot prefix between scans. One-off prompts of three times the pool arrive between uses of one prefix.

Every eviction policy runs the same requests through a real scheduler. LRU evicts the prefix each time; a scan-resistant
policy protects it at the second use, and the prefix hits from the third use on. No policy can evict blocks that running
requests need: `concurrency` of them together must leave space for the prefix.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.inprocess import requests_from_prompts, run_requests
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.null_executor import NullExecutor

VOCAB_SIZE = 32_000
TARGET = 0.9


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """Sizes in tokens; the pool in blocks."""

    prefix: int = 2048
    own: int = 32  # behind the prefix, different at each use
    uses: int = 40
    counted_from: int = 3  # first use that counts; a policy needs two uses to detect reuse
    one_off: int = 1024
    concurrency: int = 4  # requests that run at a time
    pools: int = 3  # tokens of one-off prompts between two uses, in pools
    num_blocks: int = 512
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of one eviction policy."""

    hot_hit_rate: float  # of the prefix, from the first counted use on
    first_hit: int | None  # first use with a hit on the whole prefix, from 1
    computed_tokens: int
    evictions: int


def run_scan(seed: int, config: ScanConfig = ScanConfig(), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Send the hot prompt `uses` times with a scan before each but the first, once per eviction policy."""
    found: dict[str, _Found] = {}
    problems: list[str] = []
    for policy in EVICTION_POLICIES:
        bar.start_stage(f"eviction policy {policy}", config.uses)
        found[policy] = _run(policy, seed, config, bar, problems)
    hot, lru = found["2q"], found["lru"]
    values: dict[str, Any] = {
        "hot_hit_rate": hot.hot_hit_rate,
        "lru_hot_hit_rate": lru.hot_hit_rate,
        "first_hit_use": hot.first_hit,
        "tokens_computed": hot.computed_tokens,
        "lru_tokens_computed": lru.computed_tokens,
    }
    if hot.hot_hit_rate < TARGET:
        problems.append(f"2q hits {hot.hot_hit_rate:.3f} of the hot prefix; the minimum is {TARGET}")
    rows = tuple((name, f.hot_hit_rate, f.first_hit, f.computed_tokens, f.evictions) for name, f in found.items())
    title = f"{config.prefix:,} hot tokens, {config.uses} uses, scans of {config.pools} pools between them"
    columns = ("policy", "hit rate of the prefix", "first full hit at use", "tokens computed", "evictions")
    return BenchmarkReport(
        "lab scan",
        values,
        seed=seed,
        threads=1,
        setup={
            "prefix_tokens": config.prefix,
            "own_tokens": config.own,
            "uses": config.uses,
            "counted_from_use": config.counted_from,
            "one_off_tokens": config.one_off,
            "concurrency": config.concurrency,
            "scan_tokens": config.pools * _pool_tokens(config),
            "pool_tokens": _pool_tokens(config),
            "block_size": config.block_size,
        },
        sheets=[ReportTable(title, columns, rows)],
        problems=problems,
    )


def _run(policy: str, seed: int, config: ScanConfig, bar: ProgressBar, problems: list[str]) -> _Found:
    limits = Limits(
        max_batched_tokens=8192,
        max_seqs=config.concurrency,
        max_model_len=config.prefix + config.own + config.one_off,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            config.num_blocks, config.block_size, limits, policy="lpm", eviction_policy=policy, tenant_floor=0.0
        )
    )
    engine = Engine(scheduler, NullExecutor(config.num_blocks, config.block_size, VOCAB_SIZE))
    rng = Random(seed)
    prefix = random_tokens(config.prefix, VOCAB_SIZE, rng)
    cached: list[int] = []
    for use in range(config.uses):
        if use:
            problems += run_requests(engine, list(_one_offs(config, use, rng))).problems(f"scan before use {use + 1}")
        prompt = prefix + random_tokens(config.own, VOCAB_SIZE, rng)
        run = run_requests(engine, requests_from_prompts([prompt], _greedy(), f"hot{use}"))
        problems += run.problems(f"use {use + 1}")
        cached.append(min(run.records[0].cached_tokens, config.prefix))
        bar.advance()
    counted = cached[config.counted_from - 1 :]
    stats = engine.stats()
    return _Found(
        hot_hit_rate=sum(counted) / (len(counted) * config.prefix),
        first_hit=cached.index(config.prefix) + 1 if config.prefix in cached else None,
        computed_tokens=stats.counters.computed_tokens,
        evictions=stats.pool.total_evictions,
    )


def _one_offs(config: ScanConfig, use: int, rng: Random) -> Iterator[Request]:
    """Yield one-off prompts, all together `pools` times the pool."""
    left, number = config.pools * _pool_tokens(config), 0
    while left > 0:
        length = min(config.one_off, left)
        prompt: array[int] = random_tokens(length, VOCAB_SIZE, rng)
        yield Request(f"scan{use}-{number}", prompt, _greedy())
        left -= length
        number += 1


def _pool_tokens(config: ScanConfig) -> int:
    return (config.num_blocks - 1) * config.block_size


def _greedy() -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0)
