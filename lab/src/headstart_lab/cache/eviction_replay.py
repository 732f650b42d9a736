"""Experiment: eviction policies over recorded traffic, beside the best that any policy can do.

The prompts of a trace, in order, on the engine's own BlockPool; no model and no clock. Redundancy is prompt tokens
computed over those that an infinite cache would compute; the bound is that of Belady's policy (workload/belady.py),
which knows the future.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.idle_blocks import EVICTION_POLICIES
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.block_paths import BlockPaths, overlap_sessions, trace_block_paths
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import TraceUnits

ROOT = BlockHash(b"root")


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """`pools` in per cent of the trace's distinct blocks; `concurrency`: requests that hold their blocks at a time.

    `at_once` > 0: the sessions of an agent trace overlap, so many at a time, with `stretch` times the recorded pauses.
    """

    pools: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0)
    concurrency: int = 1
    at_once: int = 0
    stretch: float = 1.0
    trace_block_size: int = 0  # tokens per id; 0: recognised
    trace_time_unit: str = ""  # empty: recognised


def run_eviction(trace: Path, config: EvictionConfig = EvictionConfig(), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Replay a trace with every eviction policy and pool. Raises ConfigError for an unreadable trace."""
    recorded = read_trace_path(trace, TraceUnits(config.trace_block_size, config.trace_time_unit))
    if config.at_once:
        recorded = overlap_sessions(recorded, config.at_once, config.stretch)
    prompts = trace_block_paths(recorded)
    bar.start_stage(trace.name, len(config.pools))
    rows: list[dict[str, Any]] = []
    for share in config.pools:
        rows.append(measure(prompts, max(int(share / 100 * prompts.num_distinct), 1), config.concurrency))
        rows[-1] = {"pool_percent": share, **rows[-1]}
        bar.advance()
    longest = max(map(len, prompts.paths))
    return BenchmarkReport(
        "lab eviction",
        {
            "requests": len(prompts.paths),
            "blocks": sum(map(len, prompts.paths)),
            "distinct_blocks": prompts.num_distinct,
            "longest_prompt_blocks": longest,
            "infinite_hit_tokens": sum(prompts.lengths) - prompts.computed_tokens(infinite_cache_hits(prompts.paths)),
            "prompt_tokens": sum(prompts.lengths),
            "pools": rows,
        },
        threads=1,
        setup={
            "trace": trace.name,
            "block_size": prompts.block_size,
            "concurrency": config.concurrency,
            "sessions_at_once": config.at_once,
            "pauses_times": config.stretch,
        },
        sheets=[_sheet(trace.name, rows, longest)],
        charts=[_chart(rows)],
    )


def measure(prompts: BlockPaths, num_blocks: int, concurrency: int = 1) -> dict[str, Any]:
    """Return the redundancy of the bound and of every policy in a pool of `num_blocks`, and each over the bound."""
    least = prompts.computed_tokens(infinite_cache_hits(prompts.paths))
    bound = prompts.computed_tokens(belady_hit_blocks_per_request(prompts.paths, num_blocks)) / least
    redundancy = {
        policy: prompts.computed_tokens(replay(prompts, policy, num_blocks, concurrency)) / least
        for policy in EVICTION_POLICIES
    }
    return {
        "pool_blocks": num_blocks,
        "bound": round(bound, 4),
        "redundancy": {policy: round(value, 4) for policy, value in redundancy.items()},
        "over_bound": {policy: round(value / bound, 4) for policy, value in redundancy.items()},
    }


def replay(prompts: BlockPaths, policy: str, num_blocks: int, concurrency: int = 1) -> list[int]:
    """Return the leading blocks of each prompt found in a pool of `num_blocks`, the longest of them cut to the pool.

    `concurrency` requests hold their blocks at a time, fewer if there is no space; each publishes its blocks before the
    lookup of the next one.
    """
    pool = BlockPool(num_blocks + 1, eviction_policy=policy)
    held: deque[list[int]] = deque()
    hits: list[int] = []
    for path in prompts.paths:
        hashes = [BlockHash(block.to_bytes(8, "little")) for block in path[:num_blocks]]
        while held and len(held) >= concurrency:
            pool.release(held.popleft())
        hit = pool.match_prefix(hashes, ROOT, b"", 0)
        hits.append(len(hit))
        new = len(hashes) - len(hit)
        while held and new > pool.num_available_after_acquire(hit):
            pool.release(held.popleft())
        pool.acquire(hit)
        blocks = hit + pool.allocate(new)
        for index in range(len(hit), len(blocks)):
            pool.publish(blocks[index], hashes[index], hashes[index - 1] if index else ROOT, b"")
        held.append(blocks)
    while held:
        pool.release(held.popleft())
    return hits


def _sheet(name: str, rows: Sequence[dict[str, Any]], longest: int) -> ReportTable:
    columns = ("pool, % of distinct", "blocks", "bound", *(f"{policy} / bound" for policy in EVICTION_POLICIES))
    return ReportTable(
        f"{name}: prompt tokens computed, over those of an infinite cache; longest prompt {longest:,} blocks",
        columns,
        tuple((row["pool_percent"], row["pool_blocks"], row["bound"], *row["over_bound"].values()) for row in rows),
    )


def _chart(rows: Sequence[dict[str, Any]]) -> ReportChart:
    series = {name: tuple(row["redundancy"][name] for row in rows) for name in EVICTION_POLICIES}
    x = tuple(row["pool_percent"] for row in rows)
    bound = tuple(row["bound"] for row in rows)
    return ReportChart("prefill redundancy", "pool, % of distinct blocks", "", x, {"bound": bound, **series})
