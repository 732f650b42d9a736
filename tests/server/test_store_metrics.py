"""Metrics of the store: in numbers that add up, and to whom."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.harness import Inside, inside, until

from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineStats
from headstart.server.banner import store_banner_text
from headstart.server.store_metrics import store_statistics_changes, store_stats_json
from headstart.store.disk import MISSES
from headstart.store.writer import LOST

PREFIX = "headstart:kv_store_"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def scrape(server: Inside, key: str = "") -> dict[str, float]:
    """Every sample of the store, by name and reason, once the engine has been heard."""
    await until(lambda: server.engine.stats.pool.num_blocks)
    answer = await server.client.get("/metrics", headers=bearer(key))
    assert answer.status_code == 200
    return {
        sample.name.removeprefix(PREFIX) + "".join(f" {sample.labels[r]}" for r in ("reason",) if r in sample.labels): (
            sample.value
        )
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


async def stats(server: Inside, key: str = "") -> dict[str, Any]:
    return (await server.client.get("/v1/cache/stats", headers=bearer(key))).json()


def test_metrics_and_statistics_say_what_the_store_said(folder: str) -> None:
    async def scenario() -> None:
        async with inside(f"{folder}?store=2") as server:
            assert (await server.complete("the fox", max_tokens=3)).status_code == 200
            shown, told = await scrape(server), (await stats(server))["store"]
            for name in ("blocks", "bytes", "max_bytes", "segments", "pending_blocks", "loading_blocks"):
                assert shown[name] == told[name], name
            for name in ("loaded_blocks", "loaded_bytes", "written_blocks", "written_bytes", "evicted_blocks"):
                assert shown[f"{name}_total"] == told[name], name
            assert {r: shown[f"misses_total {r}"] for r in MISSES} == told["misses"]
            assert told["misses"] == {"gone": 1, "corrupt": 2, "mismatch": 0, "io": 3, "slow": 3}
            assert {r: shown[f"lost_writes_total {r}"] for r in LOST} == told["lost_writes"]
            assert (shown["degraded"], told["degraded"]) == (1, "writing: the disk is full")
            assert shown["degradations_total"] == told["degradations"] == 5
            assert (shown["load_bytes_per_second"], shown["compute_tokens_per_second"]) == (1e9, 500)
            assert (shown["blocks"], shown["loaded_blocks_total"], shown["loading_blocks"]) == (7, 3, 2)

    asyncio.run(scenario())


def test_without_a_store_there_is_no_series_and_no_object(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder) as server:
            assert await scrape(server) == {} and (await stats(server))["store"] is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("keys", "asker", "is_told"),
    [
        ({}, "", True),
        ({"admin_api_key": ("root",)}, "root", True),
        ({"api_key": ("a",), "admin_api_key": ("root",)}, "root", True),
        ({"api_key": ("a", "b")}, "a", False),  # no administrator: tenants may look, but not at what is about others
    ],
)
def test_no_tenant_is_told_of_the_store(folder: str, keys: dict[str, Any], asker: str, is_told: bool) -> None:
    async def scenario() -> None:
        async with inside(f"{folder}?store=1", **keys) as server:
            assert bool(await scrape(server, asker)) is is_told
            assert ("store" in await stats(server, asker)) is is_told

    asyncio.run(scenario())


def test_a_statistics_line_counts_since_the_last_one() -> None:
    before = StoreStats(loaded_blocks=10, written_blocks=5, misses={"gone": 1}, lost_writes={"overload": 2})
    after = StoreStats(
        num_bytes=99,
        num_pending=4,
        loaded_blocks=13,
        written_blocks=6,
        misses={"gone": 2, "slow": 1},
        lost_writes={"overload": 2},
        degraded="reading: it is gone",
    )
    assert store_statistics_changes(EngineStats(store=before), EngineStats(store=after)) == {
        "store_loaded": 3,
        "store_missed": 2,
        "store_written": 1,
        "store_lost": 0,
        "store_pending": 4,
        "store_bytes": 99,
        "store_degraded": "reading: it is gone",
    }
    assert store_statistics_changes(EngineStats(), EngineStats()) == {} and store_stats_json(EngineStats()) is None


def test_the_banner_says_where_the_store_is_and_what_of_it_is_of_use() -> None:
    found = StoreStats(num_blocks=1200, num_bytes=3 * 2**20, max_bytes=20 * 2**30)
    assert store_banner_text("/kv", found) == "/kv: 1,200 blocks of this model; 3.0 MiB of 20.0 GiB used"
    assert "nothing of this model yet" in store_banner_text("/kv", StoreStats())
    assert store_banner_text("/kv", StoreStats(degraded="it is full")).endswith("NOT IN USE: it is full")


def test_a_reset_clears_the_store_only_if_it_is_told_to(folder: str) -> None:
    async def scenario() -> None:
        async with inside(f"{folder}?store=1") as server:
            for query, left in (
                ("", 7),
                ("?pinned=true", 7),
                ("?reset_external=false", 7),
                ("?reset_external=true", 0),
            ):
                assert (await server.client.post(f"/reset_prefix_cache{query}")).status_code == 200
                assert (await stats(server))["store"]["blocks"] == left, query
            answer = await server.client.post("/reset_prefix_cache?reset_external=1")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_external")

    asyncio.run(scenario())
