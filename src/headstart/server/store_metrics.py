"""Figures of the store: its metrics, and its part of /v1/cache/stats and of the statistics line.

Reasons come from a closed set, so that every series exists from the first scrape. Access: `may_see_store`.
"""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineStats
from headstart.http.auth import Principal
from headstart.http.packed_metrics import MetricFamilyFactory
from headstart.openai.responses import Json
from headstart.store.disk import MISSES
from headstart.store.writer import LOST


def may_see_store(principal: Principal) -> bool:
    """Return whether a caller may see figures of the store: they cover all tenants and all servers on the folder."""
    return principal.is_admin or not principal.tenant


class StoreCollector(Collector):
    """Metrics of the store from the last heartbeat; none without a store."""

    def __init__(self, latest: Callable[[], EngineStats], model_name: str) -> None:
        self._latest = latest
        self._families = MetricFamilyFactory(model_name, "headstart:kv_store_")

    def collect(self) -> Iterable[Metric]:
        stats = self._latest()
        store = stats.store
        if store is None:
            return
        families = self._families
        yield families.make_gauge("blocks", "Blocks in the store that this model could load.", store.num_blocks)
        yield families.make_gauge("bytes", "Bytes of all files in its folder.", store.num_bytes)
        yield families.make_gauge(
            "max_bytes", "Current limit of kv_store_bytes, lower on a full disk.", store.max_bytes
        )
        yield families.make_gauge("segments", "Files with blocks in its folder.", store.num_segments)
        yield families.make_gauge("pending_blocks", "Blocks waiting to be written.", store.num_pending)
        yield families.make_gauge("pending_seconds", "Since the first of them was computed.", store.pending_seconds)
        yield families.make_gauge("loading_blocks", "Blocks being loaded from the store.", stats.pool.num_loading)
        yield families.make_gauge(
            "degraded", "1 while the store is not used, in full or in part.", bool(store.degraded)
        )
        yield families.make_counter("degradations", "Times that the store became degraded.", store.num_degraded)
        yield families.make_counter("loaded_blocks", "Blocks loaded.", store.loaded_blocks)
        yield families.make_counter("loaded_bytes", "Bytes loaded.", store.loaded_bytes)
        yield families.make_counter("written_blocks", "Blocks written.", store.written_blocks)
        yield families.make_counter("written_bytes", "Bytes written.", store.written_bytes)
        yield families.make_counter("evicted_blocks", "Blocks evicted for space.", store.evicted_blocks)
        yield families.labelled_counter(
            "misses", "Loads that ended early, and damage found.", "reason", failed_loads_by_reason(store)
        )
        lost = "Blocks that were to be written and were not."
        yield families.labelled_counter("lost_writes", lost, "reason", lost_writes_by_reason(store))
        yield families.make_gauge("load_bytes_per_second", "While loading; 0: not measured.", store.load_bytes_per_s)
        yield families.make_gauge("write_bytes_per_second", "While writing; 0: not measured.", store.write_bytes_per_s)
        text = "Computing, which loading competes with; 0: not measured."
        yield families.make_gauge("compute_tokens_per_second", text, stats.compute_tokens_per_s)


def failed_loads_by_reason(store: StoreStats) -> dict[str, int]:
    """Return the number of failed loads by reason, with all reasons present."""
    return dict.fromkeys(MISSES, 0) | store.misses


def lost_writes_by_reason(store: StoreStats) -> dict[str, int]:
    """Return the number of blocks that were not written by reason, with all reasons present."""
    return dict.fromkeys(LOST, 0) | store.lost_writes


def store_stats_json(stats: EngineStats) -> Json | None:
    """Return the store's part of /v1/cache/stats, None without a store; blocks and bytes unless the key says so."""
    store = stats.store
    if store is None:
        return None
    return {
        "blocks": store.num_blocks,
        "bytes": store.num_bytes,
        "max_bytes": store.max_bytes,
        "segments": store.num_segments,
        "pending_blocks": store.num_pending,
        "pending_seconds": store.pending_seconds,
        "loading_blocks": stats.pool.num_loading,
        "loaded_blocks": store.loaded_blocks,
        "loaded_bytes": store.loaded_bytes,
        "misses": failed_loads_by_reason(store),
        "written_blocks": store.written_blocks,
        "written_bytes": store.written_bytes,
        "lost_writes": lost_writes_by_reason(store),
        "evicted_blocks": store.evicted_blocks,
        "degraded": store.degraded or None,
        "degradations": store.num_degraded,
        "load_bytes_per_s": store.load_bytes_per_s,
        "write_bytes_per_s": store.write_bytes_per_s,
        "compute_tokens_per_s": stats.compute_tokens_per_s,
    }


def store_statistics_changes(last: EngineStats, stats: EngineStats) -> dict[str, object]:
    """Return the store's part of a statistics line: the changes since `last`; {} without a store."""
    store, before = stats.store, last.store or StoreStats()
    if store is None:
        return {}
    return {
        "store_loaded": store.loaded_blocks - before.loaded_blocks,
        "store_missed": sum(store.misses.values()) - sum(before.misses.values()),
        "store_written": store.written_blocks - before.written_blocks,
        "store_lost": sum(store.lost_writes.values()) - sum(before.lost_writes.values()),
        "store_pending": store.num_pending,
        "store_bytes": store.num_bytes,
        "store_degraded": store.degraded or None,
    }
