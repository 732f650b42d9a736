"""LiveFigures: the frames of /v1/cache/live: load, speed, sources of prompts, and losses by cause with their remedy.

Rates cover the last RATE_SECONDS, losses the last LOSS_SECONDS. A tenant sees its own tokens and losses only.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine_info import EngineStats
from headstart.http.auth import Principal
from headstart.http.packed_metrics import histogram_quantile
from headstart.openai.responses import CACHE_SOURCES, Json
from headstart.reuse.causes import CAUSES
from headstart.server.server_metrics import blocks_by_state
from headstart.server.server_state import ServedModel, ServerState

SAMPLE_SECONDS = 2.0
RATE_SECONDS = 10.0
LOSS_SECONDS = 300.0
EVICTED = (
    "the cache is too small for this traffic: more memory for KV, a store on disk (--kv-store), pinned prefixes, "
    '"cache": "read-only" for prompts that do not come again'
)
MAX_TENANTS = 20
MAX_EVICTORS = 3  # of a tenant, those that needed the most space
NEW = "text that the cache has not seen: nothing to mend"


class AvoidableTokenSample(NamedTuple):
    """The doctor's sample: computed prompt tokens that were not evicted earlier, and the avoidable ones by cause."""

    computed: int = 0
    causes: Mapping[str, int] = MappingProxyType({})

    def estimate_avoidable_by_cause(self, before: "AvoidableTokenSample", computed: int) -> dict[str, int]:
        """Return the avoidable ones of `computed` tokens by cause, the most first: as many as in the sample since."""
        examined = self.computed - before.computed
        counts = {cause: count - before.causes.get(cause, 0) for cause, count in self.causes.items()}
        found = {cause: round(count * computed / examined) for cause, count in counts.items() if count}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


class CounterSample(NamedTuple):
    """The counters at one moment. `at` in seconds of the monotonic clock."""

    at: float
    stats: EngineStats
    tenants: dict[str, PromptTokenBreakdown]
    evicted: dict[str, Mapping[str, int]]  # by tenant, then by the tenant that needed the space
    examined: dict[str, AvoidableTokenSample]  # by tenant; "": of all
    ttft: tuple[int, ...]  # requests by bucket


class LiveFigures:
    """The latest samples of one server, and the frames made of them."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._samples: deque[CounterSample] = deque(maxlen=int(LOSS_SECONDS / SAMPLE_SECONDS))

    async def sample_regularly(self) -> None:
        """Add a sample every SAMPLE_SECONDS, until cancelled. The model must be loaded."""
        while True:
            self._samples.append(self._sample(self._state.loaded_model))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def live_frame(self, principal: Principal) -> Json:
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
            return answer | _own(now, long, tenant)
        return answer | self._all(model, self._before(now, RATE_SECONDS), long, now)

    def _sample(self, model: ServedModel) -> CounterSample:
        doctor, stats, metrics = model.doctor, self._state.engine.stats, model.metrics
        counts = {**doctor.tenants, "": doctor.counts}
        examined = {name: AvoidableTokenSample(one.computed_tokens, one.causes) for name, one in counts.items()}
        tenants, evicted = dict(metrics.tenants), dict(metrics.evicted_of_tenants)
        return CounterSample(time.monotonic(), stats, tenants, evicted, examined, metrics.time_to_first_token.counts)

    def _before(self, now: CounterSample, seconds: float) -> CounterSample:
        """Return the newest sample that is at least that old, else the oldest; without any, one of the start."""
        for sample in reversed(self._samples):
            if now.at - sample.at >= seconds:
                return sample
        if self._samples:
            return self._samples[0]
        return now._replace(stats=EngineStats(), tenants={}, evicted={}, examined={}, ttft=(0,) * len(now.ttft))

    def _all(self, model: ServedModel, before: CounterSample, long: CounterSample, now: CounterSample) -> Json:
        elapsed = max(now.at - before.at, 1e-3) if before.at < now.at else RATE_SECONDS
        counters, earlier = now.stats.counters, before.stats.counters
        counts = [b - a for a, b in zip(before.ttft, now.ttft, strict=True)]
        histogram, size = model.metrics.time_to_first_token, model.info.block_size
        ttft = {
            name: histogram_quantile(histogram.bounds, counts, share) for name, share in (("p50", 0.5), ("p95", 0.95))
        }
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
            **_sources(_since(_breakdown(long.stats), _breakdown(now.stats))),
            "losses": _losses(long, now),
            "tenants": _tenants(long, now),
        }


def _breakdown(stats: EngineStats) -> PromptTokenBreakdown:
    counters = stats.counters
    cached = [getattr(counters, f"{source}_tokens") for source in CACHE_SOURCES]
    return PromptTokenBreakdown(*cached, computed=counters.prompt_computed_tokens)


def _since(before: PromptTokenBreakdown, now: PromptTokenBreakdown) -> PromptTokenBreakdown:
    return PromptTokenBreakdown(*(b - a for a, b in zip(before, now, strict=True)))


def _sources(since: PromptTokenBreakdown) -> Json:
    return {"sources": since._asdict(), "hit_rate": since.num_cached / sum(since) if sum(since) else None}


def _own(now: CounterSample, before: CounterSample, tenant: str) -> Json:
    """Return the figures of a tenant; of others it learns how many of its tokens were evicted for them."""
    evicted, causes, since = _lost(before, now, tenant)
    own = evicted.pop(tenant, 0)
    by = {name: tokens for name, tokens in ((tenant, own), ("another tenant", sum(evicted.values()))) if tokens}
    more = [{"cause": "evicted", "tokens": sum(by.values()), "remedy": EVICTED, "by": by}] if by else []
    return {
        "window_seconds": round(now.at - before.at, 1),
        **_sources(since),
        "losses": [*_rows(causes), *more],
    }


def _lost(
    before: CounterSample, now: CounterSample, tenant: str
) -> tuple[dict[str, int], dict[str, int], PromptTokenBreakdown]:
    """Return a tenant's evicted prompt tokens by tenant, its avoidable ones by cause, and all by source, since then."""
    earlier = before.evicted.get(tenant, {})
    evicted = {name: count - earlier.get(name, 0) for name, count in now.evicted.get(tenant, {}).items()}
    evicted = {name: count for name, count in evicted.items() if count}
    since = _since(before.tenants.get(tenant, PromptTokenBreakdown()), now.tenants.get(tenant, PromptTokenBreakdown()))
    rest = max(since.computed - sum(evicted.values()), 0)
    causes = now.examined.get(tenant, AvoidableTokenSample()).estimate_avoidable_by_cause(
        before.examined.get(tenant, AvoidableTokenSample()), rest
    )
    return evicted, causes, since


def _tenants(before: CounterSample, now: CounterSample) -> list[Json]:
    """Return the tenants with prompts in a window, those with the most computed tokens first.

    `cause`: of most of a tenant's losses in the window: that of its examined prompts, or that its blocks were evicted.
    """
    rows: list[Json] = []
    for tenant in now.tenants:
        evicted, causes, since = _lost(before, now, tenant)
        count = sum(evicted.values())
        cause = next(iter(causes), None)
        row = {
            "tenant": tenant,
            "prompt_tokens": sum(since),
            "cached_tokens": since.num_cached,
            "evicted_tokens": count,
        }
        by = dict(sorted(evicted.items(), key=lambda item: -item[1])[:MAX_EVICTORS])
        rows.append({**row, "evicted_by": by, "cause": "evicted" if count > causes.get(cause or "", 0) else cause})
    rows.sort(key=lambda row: row["cached_tokens"] - row["prompt_tokens"])
    return [row for row in rows if row["prompt_tokens"]][:MAX_TENANTS]


def _losses(before: CounterSample, now: CounterSample) -> list[Json]:
    """Return the prompt tokens that were computed in a window, by cause; evicted ones were counted.

    The others are the doctor's shares of the computed tokens that were not evicted, so no cause has more than these.
    """
    counters, earlier = now.stats.counters, before.stats.counters
    computed = counters.prompt_computed_tokens - earlier.prompt_computed_tokens
    evicted = min(counters.evicted_tokens - earlier.evicted_tokens, computed)
    causes = now.examined[""].estimate_avoidable_by_cause(
        before.examined.get("", AvoidableTokenSample()), computed - evicted
    )
    rest = computed - evicted - max(causes.values(), default=0)
    more = {"evicted": (evicted, EVICTED), "new": (rest, NEW)}
    rows = [{"cause": name, "tokens": tokens, "remedy": text} for name, (tokens, text) in more.items() if tokens]
    return _rows(causes) + rows


def _rows(causes: Mapping[str, int]) -> list[Json]:
    return [{"cause": cause, "tokens": tokens, "remedy": CAUSES[cause]} for cause, tokens in causes.items() if tokens]
