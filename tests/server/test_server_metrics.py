"""Metrics: exact counts, names that dashboards know, and series that no client can multiply."""

from prometheus_client.parser import text_string_to_metric_families
from server.harness import Server, wait_for


def samples(server: Server) -> dict[str, float]:
    """Sum per sample name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_ten_requests_of_ten_tokens_are_counted_exactly(server: Server) -> None:
    before = samples(server)
    for i in range(10):
        body = {"prompt": [i, *range(40)], "max_tokens": 10}
        assert server.post("/v1/completions", json=body).status_code == 200
    name = "vllm:generation_tokens_total"
    wait_for(lambda: samples(server)[name] - before[name] == 100)
    after = samples(server)
    for name, expected in {
        "vllm:prompt_tokens_total": 410,
        "vllm:request_success_total": 10,
        "vllm:time_to_first_token_seconds_count": 10,
        "vllm:inter_token_latency_seconds_count": 90,
        "vllm:e2e_request_latency_seconds_count": 10,
        "vllm:request_prompt_tokens_sum": 410,
        "vllm:request_generation_tokens_sum": 100,
        "vllm:request_params_n_sum": 10,
        "vllm:request_params_max_tokens_sum": 100,
        "vllm:request_time_per_output_token_seconds_count": 10,
        "vllm:iteration_tokens_total_count": 100,
    }.items():
        assert after[name] - before[name] == expected, name


def test_the_names_that_gateways_read_are_there(server: Server) -> None:
    found = samples(server)
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:cache_config_info", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        *("vllm:num_preemptions_total", "vllm:prompt_tokens_cached_total", "headstart:kv_blocks"),
        *("headstart:tokens_total", "headstart:heartbeat_age_seconds", "headstart:step_seconds_total"),
    ):
        assert name in found
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
    assert 0 <= found["headstart:heartbeat_age_seconds"] < 30


def test_no_client_can_make_series_grow(server: Server) -> None:
    def attack(number: int) -> None:
        with server.client() as client:
            for i in range(number):
                client.request(f"M{i}", f"/path{i}")
                client.post("/v1/completions", json={"prompt": "a", "model": f"m{i}", "user": f"u{i}"})
                client.get(f"/v1/models/x{i}", headers={"x-request-id": f"r{i}"})

    attack(3)
    before = server.get("/metrics").text.count("\n")
    attack(60)
    assert server.get("/metrics").text.count("\n") == before
