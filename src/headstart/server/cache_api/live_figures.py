"""LiveFigures: the frames of /v1/cache/live: load, speed, sources of prompts, and losses by cause with their remedy.

Rates cover the last RATE_SECONDS, losses the last LOSS_SECONDS. A tenant sees its own tokens and losses only.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine import EngineStats
from headstart.http.auth import Principal
from headstart.http.packed_metrics import quantile
from headstart.openai.responses import CACHE_SOURCES, Json
from headstart.reuse.causes import CAUSES
from headstart.server.prompt_doctor import AvoidableCounts
from headstart.server.server_metrics import blocks_by_state
from headstart.server.server_state import Model, ServerState

SAMPLE_SECONDS = 2.0
RATE_SECONDS = 10.0
LOSS_SECONDS = 300.0
EVICTED = (
    "the cache is too small for this traffic: more memory for KV, a store on disk (--kv-store), pinned prefixes, "
    '"cache": "read-only" for prompts that do not come again'
)
MAX_TENANTS = 20
NEW = "text that the cache has not seen: nothing to mend"


class Sample(NamedTuple):
    """The counters at one moment. `at` in seconds of the monotonic clock."""

    at: float
    stats: EngineStats
    tenants: dict[str, PromptTokenBreakdown]
    evicted: dict[str, int]  # by tenant
    examined: int  # prompt tokens of the doctor's sample
    causes: dict[str, int]  # avoidable ones among them, by cause
    ttft: tuple[int, ...]  # requests by bucket


class LiveFigures:
    """The latest samples of one server, and the frames made of them."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._samples: deque[Sample] = deque(maxlen=int(LOSS_SECONDS / SAMPLE_SECONDS))

    async def sample_regularly(self) -> None:
        """Add a sample every SAMPLE_SECONDS, until cancelled. The model must be loaded."""
        while True:
            self._samples.append(self._sample(self._state.loaded_model))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def frame(self, principal: Principal) -> Json:
        """Return the figures that the caller may see. Raises as ServerState.check_ready."""
        model = self._state.check_ready()
        now = self._sample(model)
        speed = now.stats.compute_tokens_per_s
        answer: Json = {
            "object": "cache.figures",
            "model": model.name,
            "tenant": None if principal.is_admin else principal.tenant,
            "ms_per_prompt_token": round(1000 / speed, 4) if speed else None,
        }
        long = self._before(now, LOSS_SECONDS)
        if not principal.is_admin:
            tenant = principal.tenant
            return answer | _own(
                now.tenants.get(tenant, PromptTokenBreakdown()),
                long.tenants.get(tenant, PromptTokenBreakdown()),
                model.doctor.tenants.get(tenant, AvoidableCounts()),
                now.at - long.at,
            )
        return answer | self._all(model, self._before(now, RATE_SECONDS), long, now)

    def _sample(self, model: Model) -> Sample:
        counts, stats = model.doctor.counts, self._state.engine.stats
        causes, ttft = dict(counts.causes), model.metrics.time_to_first_token.counts
        tenants, evicted = dict(model.metrics.tenants), dict(model.metrics.evicted_of_tenants)
        return Sample(time.monotonic(), stats, tenants, evicted, counts.prompt_tokens, causes, ttft)

    def _before(self, now: Sample, seconds: float) -> Sample:
        """Return the newest sample that is at least that old, else the oldest; without any, one of the start."""
        for sample in reversed(self._samples):
            if now.at - sample.at >= seconds:
                return sample
        if self._samples:
            return self._samples[0]
        return now._replace(
            stats=EngineStats(), tenants={}, evicted={}, examined=0, causes={}, ttft=(0,) * len(now.ttft)
        )

    def _all(self, model: Model, before: Sample, long: Sample, now: Sample) -> Json:
        elapsed = max(now.at - before.at, 1e-3) if before.at < now.at else RATE_SECONDS
        counters, earlier = now.stats.counters, before.stats.counters
        counts = [b - a for a, b in zip(before.ttft, now.ttft, strict=True)]
        histogram, size = model.metrics.time_to_first_token, model.info.block_size
        ttft = {name: quantile(histogram.bounds, counts, share) for name, share in (("p50", 0.5), ("p95", 0.95))}
        return {
            "running": now.stats.num_running,
            "waiting": now.stats.num_waiting,
            "prompt_tokens_per_s": round((counters.prompt_tokens - earlier.prompt_tokens) / elapsed, 1),
            "output_tokens_per_s": round((counters.generation_tokens - earlier.generation_tokens) / elapsed, 1),
            "ttft_ms": {name: None if value is None else round(1000 * value, 1) for name, value in ttft.items()},
            "kv_tokens": {name: count * size for name, count in blocks_by_state(now.stats).items()},
            "evicted_blocks": now.stats.pool.total_evictions - long.stats.pool.total_evictions,
            "num_steps": now.stats.num_steps,
            "window_seconds": round(now.at - long.at, 1),
            **_sources(_breakdown(long.stats), _breakdown(now.stats)),
            "losses": _losses(long, now),
            "tenants": _tenants(long, now, model.doctor.tenants),
        }


def _breakdown(stats: EngineStats) -> PromptTokenBreakdown:
    counters = stats.counters
    cached = [getattr(counters, f"{source}_tokens") for source in CACHE_SOURCES]
    return PromptTokenBreakdown(*cached, computed=counters.prompt_computed_tokens)


def _sources(before: PromptTokenBreakdown, now: PromptTokenBreakdown) -> Json:
    since = PromptTokenBreakdown(*(b - a for a, b in zip(before, now, strict=True)))
    return {"sources": since._asdict(), "hit_rate": since.cached / sum(since) if sum(since) else None}


def _own(now: PromptTokenBreakdown, before: PromptTokenBreakdown, counts: AvoidableCounts, seconds: float) -> Json:
    """Return the figures of a tenant; its losses are those since the start, as far as its prompts were examined."""
    return {
        "window_seconds": round(seconds, 1),
        **_sources(before, now),
        "losses": _rows(counts.causes, 1.0),
    }


def _tenants(before: Sample, now: Sample, examined: Mapping[str, AvoidableCounts]) -> list[Json]:
    """Return the tenants with prompts in a window, those with the most computed tokens first.

    `cause`: what ends most of a tenant's reuse since the start, as far as its prompts were examined.
    """
    rows: list[Json] = []
    for tenant, total in now.tenants.items():
        found = PromptTokenBreakdown(
            *(b - a for a, b in zip(before.tenants.get(tenant, PromptTokenBreakdown()), total, strict=True))
        )
        evicted = now.evicted.get(tenant, 0) - before.evicted.get(tenant, 0)
        causes = examined[tenant].causes.most_common(1) if tenant in examined else []
        row = {"tenant": tenant, "prompt_tokens": sum(found), "cached_tokens": found.cached}
        rows.append({**row, "evicted_tokens": evicted, "cause": causes[0][0] if causes and causes[0][1] else None})
    rows.sort(key=lambda row: row["cached_tokens"] - row["prompt_tokens"])
    return [row for row in rows if row["prompt_tokens"]][:MAX_TENANTS]


def _losses(before: Sample, now: Sample) -> list[Json]:
    """Return the prompt tokens that were computed in a window, by cause; those of the doctor's sample are scaled."""
    counters, earlier = now.stats.counters, before.stats.counters
    prompts = counters.prompt_tokens - earlier.prompt_tokens
    computed = counters.prompt_computed_tokens - earlier.prompt_computed_tokens
    evicted = min(counters.evicted_tokens - earlier.evicted_tokens, computed)
    causes = {cause: count - before.causes.get(cause, 0) for cause, count in now.causes.items()}
    examined = now.examined - before.examined
    rows = _rows(causes, prompts / examined if examined else 0.0)
    rest = computed - evicted - max((row["tokens"] for row in rows), default=0)
    more = {"evicted": (evicted, EVICTED), "new": (max(rest, 0), NEW)}
    rows += [{"cause": name, "tokens": tokens, "remedy": text} for name, (tokens, text) in more.items() if tokens]
    return rows


def _rows(causes: Mapping[str, int], scale: float) -> list[Json]:
    rows = [(cause, round(count * scale)) for cause, count in causes.items()]
    rows.sort(key=lambda row: -row[1])
    return [{"cause": cause, "tokens": tokens, "remedy": CAUSES[cause]} for cause, tokens in rows if tokens]
