"""Experiment: a pinned prefix of 900 tokens. The first request hits it, and a flood of prompts does not evict it.

The same prompt with the cache bypassed must give the same tokens: the pinned KV equals the computed one.
"""

import time
from array import array
from dataclasses import replace
from random import Random
from typing import Any

from headstart.core.cache.pinned_prefix import PrefixState
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, SamplingParams
from headstart.measurement.inprocess import RunResult, requests_from_prompts, run_requests
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.synthetic import random_tokens

PREFIX = 900
OWN = 100
OUTPUT = 8
NUM_BLOCKS = 256
POOLS = 3  # of one-off prompts
AT_LEAST = 896  # whole blocks of 16 in 900 tokens


def run_pinned(setup: EngineSetup, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Pin the prefix, send the first prompt that begins with it, flood the pool, and send another."""
    bar.start_stage("loading the model", None)
    engine, info = setup.build(setup.options(num_blocks=NUM_BLOCKS))
    rng = Random(setup.seed)

    def tokens(num: int) -> "array[int]":
        return random_tokens(num, info.vocab_size, rng)

    fixed = tokens(PREFIX)
    first_prompt, second_prompt = fixed + tokens(OWN), fixed + tokens(OWN)
    flood = [tokens(PREFIX + OWN) for _ in range(-(-POOLS * NUM_BLOCKS * info.block_size // (PREFIX + OWN)))]

    def send(label: str, *prompts: "array[int]", cache: CacheMode = CacheMode.READ_WRITE) -> RunResult:
        bar.start_stage(label, len(prompts))
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
        requests = [replace(request, cache=cache) for request in requests_from_prompts(prompts, sampling, label)]
        return run_requests(engine, requests, bar=bar)

    cold = send("cold", tokens(PREFIX + OWN))
    bar.start_stage("warming", None)
    warm_seconds = _pin(engine, fixed)
    runs = {
        "cold": cold,
        "first": send("first", first_prompt),
        "flood": send("flood", *flood),
        "after": send("after", second_prompt),
        "bypass": send("bypass", first_prompt, cache=CacheMode.BYPASS),
    }
    evictions = engine.stats().pool.total_evictions
    report = _report(setup, runs, {"warm_ms": 1e3 * warm_seconds, "evicted_blocks": evictions})
    report.threads = info.threads
    report.setup = {"prefix_tokens": PREFIX, "own_tokens": OWN, "flood_pools": POOLS, **describe_engine(info)}
    if report.values["differing_tokens"] and info.dtype == "float32":
        report.problems.append("the first answer differs in float32 from the one without the cache")
    return report


def _pin(engine: Engine, fixed: "array[int]") -> float:
    """Pin the prefix and return the seconds until it is warm."""
    start = time.perf_counter()
    engine.add_prefix("fixed", fixed)
    while engine.list_prefixes()[0].state is PrefixState.WARMING:
        engine.step(time.perf_counter())
    return time.perf_counter() - start


def _report(setup: EngineSetup, runs: dict[str, RunResult], more: dict[str, Any]) -> BenchmarkReport:
    first, after = runs["first"], runs["after"]
    values: dict[str, Any] = {
        "cached_tokens": first.records[0].cached_tokens,
        "cached_tokens_after_flood": after.records[0].cached_tokens,
        "first_ttft_ms": _ttft_ms(first),
        "cold_ttft_ms": _ttft_ms(runs["cold"]),
        **more,
        "differing_tokens": sum(a != b for a, b in zip(first.outputs[0], runs["bypass"].outputs[0], strict=True)),
    }
    rows: list[tuple[Any, ...]] = []
    for label, run in runs.items():
        cached = sum(record.cached_tokens for record in run.records)
        rows.append((label, len(run.records), run.computed_tokens, cached, _ttft_ms(run)))
    columns = ("run", "requests", "tokens computed", "tokens cached", "first TTFT, ms")
    problems = [problem for label, run in runs.items() for problem in run.problems(label)]
    for key in ("cached_tokens", "cached_tokens_after_flood"):
        if values[key] < AT_LEAST:
            problems.append(f"{key} is {values[key]} instead of at least {AT_LEAST}")
    sheet = ReportTable(f"a pinned prefix of {PREFIX} tokens, prompts of {PREFIX + OWN}", columns, tuple(rows))
    return BenchmarkReport(
        "lab pinned", values, model=setup.label, seed=setup.seed, runs=1, sheets=[sheet], problems=problems
    )


def _ttft_ms(run: RunResult) -> float | None:
    """Return the TTFT of the first request; None if that failed."""
    ttft = run.records[0].ttft
    return None if ttft is None else 1e3 * ttft
