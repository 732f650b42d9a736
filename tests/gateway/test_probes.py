"""Pages by which replicas describe themselves: pages of three engines, and pages of nonsense."""

from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, run
from hypothesis import given
from hypothesis import strategies as st
from server.harness import until

from headstart.core.engine_info import EngineInfo, EngineStats, PoolStats
from headstart.gateway.replicas.probes import (
    ModelCard,
    ScrapedMetrics,
    metrics_in_cards,
    parse_metrics,
    parse_models,
    parse_sglang_cache_size,
)
from headstart.server.server_metrics import ServerMetrics as ServerMetrics

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="1234",x="a,b \\"c\\""} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters=""} 1.7e9
process_start_time_seconds 1.7e9
"""


class Engine:
    """An engine that runs something, as a scrape sees it."""

    info = EngineInfo("m", "m", 100, 512, 16, 777, 1, "float32", "cpu", 1, "reference", ())
    stats = EngineStats(pool=PoolStats(num_blocks=100, num_free=75), num_waiting=4, num_running=2)
    last_heard = 0.0


def test_vllms_page_is_read() -> None:
    found = parse_metrics(VLLM)
    assert found == ScrapedMetrics("vllm", 32, 1234, 1, 5, 0.25, frozenset({"a", "b"}), frozenset(), 4)
    assert found.to_replica_report(9.0).at == 9.0 and found.to_replica_report(9.0).running == 5


def test_our_own_page_is_read() -> None:
    metrics = ServerMetrics("m", ("/health",))
    metrics.register_engine_collectors(Engine())
    found = parse_metrics(metrics.expose().decode())
    assert (found.kind, found.block_size, found.num_blocks) == ("headstart", 16, 777)
    assert (found.waiting, found.running, found.kv_usage) == (4, 2, 0.25)
    assert parse_metrics(metrics.render_load_metrics().decode()) == found, "what a router reads is the same"


@pytest.mark.parametrize(("engine", "later"), [("headstart", "load"), ("vllm", "")])
def test_only_our_own_replicas_are_asked_for_their_load_alone(engine: str, later: str) -> None:
    asked: list[str] = []

    async def noted(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/metrics":
            asked.append(request.query_string)
        return await handler(request)

    async def ask() -> None:
        replica = Replica()
        replica.engine, replica.middleware = engine, noted
        async with front(replica, health_interval=0.05, scrape_interval=0.01) as router:
            await router.up(1)
            await until(lambda: len(asked) >= 3)

    run(ask())
    assert asked[0] == "" and {*asked[1:]} == {later}


def test_a_size_is_read_from_models_where_metrics_are_refused() -> None:
    card = {"id": "m", "owned_by": "headstart", "block_size": 16, "num_gpu_blocks": 777}
    assert metrics_in_cards(parse_models({"data": [{"id": "x"}, card]})) == ScrapedMetrics("headstart", 16, 777)
    (card_of_ours,) = parse_models({"data": [{**card, "max_num_batched_tokens": 2048}]})
    assert card_of_ours.max_step_tokens == 2048
    for wrong in (None, -1, "x", 2**40, [8]):
        (other,) = parse_models({"data": [{**card, "max_num_batched_tokens": wrong}]})
        assert other.max_step_tokens == 0
    for wrong in (
        {},
        {"block_size": 16},
        {"block_size": 0, "num_gpu_blocks": 7},
        {"block_size": [], "num_gpu_blocks": -1},
    ):
        assert metrics_in_cards(parse_models({"data": [{"id": "m", "owned_by": 7, **wrong}]})) is None


def test_sglangs_page_and_server_info_are_read() -> None:
    page = 'sglang:num_running_reqs{model_name="m"} 2.0\nsglang:num_queue_reqs 3.0\nsglang:token_usage 0.5\n'
    found = parse_metrics(page)
    assert (found.kind, found.running, found.waiting, found.kv_usage, found.num_blocks) == ("sglang", 2, 3, 0.5, 0)
    assert parse_sglang_cache_size({"page_size": 64, "max_total_num_tokens": 6400}) == (64, 100)
    assert parse_sglang_cache_size({"internal_states": [{"max_total_num_tokens": 50}]}) == (1, 50)
    assert parse_sglang_cache_size([]) == parse_sglang_cache_size({"page_size": "x"}) == (0, 0)


@given(st.text(alphabet='vllm:cache_config_info{}=",0.1 9eNa-\\\n#', max_size=300))
def test_no_page_is_too_odd(text: str) -> None:
    parse_metrics(text)
    parse_metrics(f"vllm:kv_cache_usage_perc {text}\nvllm:cache_config_info{{{text}}} 1\n")


def test_numbers_that_are_none_count_as_nothing() -> None:
    page = "vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting +Inf\nvllm:num_requests_running -1e99\n"
    assert parse_metrics(page) == ScrapedMetrics("vllm")


def test_models_and_adapters_are_read() -> None:
    adapter = {"id": "tuned", "parent": "m"}
    found = parse_models({"data": [{"id": "m", "parent": None}, adapter, {"id": 7}, None]})
    assert found == (ModelCard("m", None, {"id": "m", "parent": None}), ModelCard("tuned", "m", adapter))
    assert parse_models([]) == parse_models({"data": 1}) == parse_models(None) == ()
