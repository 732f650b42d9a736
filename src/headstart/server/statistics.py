"""The statistics line: the engine's activity, logged every few seconds unless it is idle.

A JSON object with all figures; on a terminal a text with the most important ones, at most MAX_COLUMNS wide, and below
it the prompt tokens that were not reused, by cause.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from headstart.core.engine_info import EngineStats
from headstart.openai.responses import CACHE_SOURCES
from headstart.server.server_state import ServerState
from headstart.server.store_metrics import store_statistics_changes

MAX_COLUMNS = 120 - len("[r99] ")  # lines of replicas are prefixed with their names
_UNITS = ("", "k", "M", "G", "T")


async def log_statistics_regularly(state: ServerState) -> None:
    """Log a line every `stats_interval` seconds with activity, until cancelled; return at once if it is 0."""
    interval = state.options.stats_interval
    if interval <= 0:
        return
    last, at, seen = state.engine.stats, time.monotonic(), (0, 0)
    while True:
        await asyncio.sleep(interval)
        stats, now = state.engine.stats, time.monotonic()
        if stats.num_steps == last.num_steps and not state.num_jobs:
            last, at = stats, now
            continue
        counts = state.loaded_model.doctor.counts
        examined = counts.prompt_tokens, counts.avoidable_tokens
        lost = compute_prefix_losses(last, stats, seen, examined)
        fields = _fields(last, stats, now - at) | ({} if lost is None else lost.share_fields())
        state.log.event("statistics", fields, text=activity_text(last, stats, now - at))
        if lost is not None and state.log.is_terminal:
            state.log.event("losses", {}, text=lost.text())
        last, at, seen = stats, now, examined


def _growth(last: EngineStats, stats: EngineStats) -> Callable[[str], int]:
    """Return a function that returns how much a counter has grown."""
    return lambda name: getattr(stats.counters, name) - getattr(last.counters, name)


def _fields(last: EngineStats, stats: EngineStats, elapsed: float) -> dict[str, object]:
    since = _growth(last, stats)
    steps, prompts, ideal = stats.num_steps - last.num_steps, since("prompt_tokens"), since("ideal_tokens")
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "prompt_tokens_per_s": round(prompts / elapsed, 1),
        "computed_tokens_per_s": round(since("computed_tokens") / elapsed, 1),
        "generated_tokens_per_s": round(since("generation_tokens") / elapsed, 1),
        "hit_rate": _share(since("cached_tokens"), prompts),
        **{f"hit_rate_{source}": _share(since(f"{source}_tokens"), prompts) for source in CACHE_SOURCES},
        "prefill_redundancy": _share(since("prefill_tokens"), ideal),
        "kv_usage": round(1 - stats.pool.num_free / max(stats.pool.num_blocks, 1), 3),
        "step_ms": round((stats.step_seconds - last.step_seconds) / steps * 1000, 2) if steps else None,
        "preemptions": since("num_preemptions"),
        "evictions": stats.pool.total_evictions - last.pool.total_evictions,
        **store_statistics_changes(last, stats),
    }


class PrefixLosses(NamedTuple):
    """Prompt tokens that were not reused, by cause. `num_front`: behind a changing front, by the sample; None: none."""

    num_prompt_tokens: int
    num_computed: int
    num_evicted: int
    num_front: int | None

    def share_fields(self) -> dict[str, object]:
        """Return the shares of the prompt tokens."""
        front = None if self.num_front is None else _share(self.num_front, self.num_prompt_tokens)
        return {"evicted_share": _share(self.num_evicted, self.num_prompt_tokens), "avoidable_share": front}

    def text(self) -> str:
        """Return the shares in per cent; those of the causes add up to the first but for rounding."""
        total, rest = self.num_prompt_tokens, self.num_computed - self.num_evicted
        parts = {"new": rest - (self.num_front or 0), "evicted": self.num_evicted}
        if self.num_front is not None:
            parts = {"changing front": self.num_front, **parts}
        shown = ", ".join(f"{name} {100 * part / total:.0f}" for name, part in parts.items())
        return f"not reused {_percent(self.num_computed, total)}: {shown}"


def compute_prefix_losses(
    last: EngineStats, stats: EngineStats, seen: tuple[int, int], examined: tuple[int, int]
) -> PrefixLosses | None:
    """Return what was not reused since `last`; None if no prompt was computed.

    `seen` and `examined`: prompt tokens of the doctor's sample and the avoidable ones among them, then and now. Without
    a prompt examined since, all of the sample counts.
    """
    since = _growth(last, stats)
    prompts, computed = since("prompt_tokens"), since("prompt_computed_tokens")
    if not prompts:
        return None
    evicted = min(since("evicted_tokens"), computed)
    sample, avoidable = examined[0] - seen[0], examined[1] - seen[1]
    if not sample:
        sample, avoidable = examined
    front = None if not sample else min(round(prompts * avoidable / sample), computed - evicted)
    return PrefixLosses(prompts, computed, evicted, front)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def activity_text(last: EngineStats, stats: EngineStats, elapsed: float) -> str:
    """Return the engine's activity in the `elapsed` seconds since `last` as text for people, without the time."""
    since, steps = _growth(last, stats), stats.num_steps - last.num_steps
    prompts, outputs, cached = since("prompt_tokens"), since("generation_tokens"), since("cached_tokens")
    preempted = since("num_preemptions")
    if stats.store is not None and stats.store.degraded:
        more = " | store degraded"
    elif preempted:
        more = f" | preempt {compact_number(preempted)}"
    else:
        more = f" | step {compact_number((stats.step_seconds - last.step_seconds) / steps * 1000)} ms" if steps else ""
    return (
        f"running {compact_number(stats.num_running)}, waiting {compact_number(stats.num_waiting)}"
        f" | tok/s: prompt {compact_number(prompts / elapsed)}, output {compact_number(outputs / elapsed)}"
        f" | hit {_percent(cached, prompts)}"
        f" | KV {_percent(stats.pool.num_blocks - stats.pool.num_free, stats.pool.num_blocks)}{more}"
    )


def compact_number(number: float) -> str:
    """Return a number of at least 0 in three digits and a unit, at most five characters: 7, 42.5, 1.23k, 999M."""
    for unit in _UNITS:
        for decimals, limit in ((2, 9.995), (1, 99.95), (0, 999.5)):
            if number < limit:
                text = f"{number:.{decimals}f}"
                return (text.rstrip("0").rstrip(".") if decimals else text) + unit
        number /= 1000
    return ">999T"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
