"""Absurd pages of replicas: what is believed of them is bounded, and so is the work."""

import pytest

from headstart.gateway.replicas.probes import (
    MAX_BLOCK_SIZE,
    MAX_CARDS,
    MAX_NUM_BLOCKS,
    ScrapedMetrics,
    parse_json_or_none,
    parse_metrics,
    parse_models,
    parse_sglang_cache_size,
)

PAGE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\nvllm:num_requests_waiting 3\n'
WELL = ScrapedMetrics("vllm", 16, 100, 3)


@pytest.mark.parametrize("value", ["1e308", "9" * 400, "10000000", "1" * 5_000])
def test_a_pool_is_believed_up_to_a_bound(value: str) -> None:
    found = parse_metrics(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{value}"}} 1.0\n')
    assert 0 <= found.num_blocks <= MAX_NUM_BLOCKS


@pytest.mark.parametrize("size", [MAX_BLOCK_SIZE + 1, 10**30])
def test_a_block_size_that_no_engine_has_counts_as_not_said(size: int) -> None:
    assert parse_metrics(f'vllm:cache_config_info{{block_size="{size}"}} 1.0\n').block_size == 0
    assert parse_sglang_cache_size({"page_size": size, "max_total_num_tokens": 6400}) == (1, 6400)


@pytest.mark.parametrize("value", ["-5", "-1e11", "NaN", "-Inf", "1e308", "+Inf", "1_0"])
def test_loads_are_never_negative_nor_infinite(value: str) -> None:
    page = f"vllm:num_requests_waiting {value}\nvllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"
    found = parse_metrics(page)
    assert 0 <= found.waiting <= 1e6 and 0 <= found.running <= 1e6 and 0 <= found.kv_usage <= 1


@pytest.mark.parametrize(
    "filler",
    [
        "vllm:a{\n" * 200_000,  # each opens a bracket that is never closed
        "vllm:cache_config_info{" + "a" * 1_000_000 + "} 1\n",
        "vllm:cache_config_info{" + 'a="b' * 200_000 + "} 1\n",
        "vllm:cache_config_info{" + 'a="' + "\\\\" * 500_000 + "} 1\n",
        "vllm:" + "a" * 1_000_000 + "\n",
        "".join(f"vllm:metric_{number} 1\n" for number in range(50_000)),
        "vllm:lora_requests_info{" + 'running_lora_adapters="' + ",".join(map(str, range(100_000))) + '"} 1\n',
    ],
)
def test_the_work_for_a_page_grows_with_its_length_only(filler: str) -> None:
    """A pattern that looks again from every position would take hours."""
    found = parse_metrics(filler + PAGE)
    assert (found.block_size, found.num_blocks, found.waiting) == (16, 100, 3)
    assert len(found.adapters) <= 10_000


def test_other_lines_do_not_change_what_is_read() -> None:
    assert parse_metrics("nonsense\n" + PAGE + "sglang:cut") == WELL


def test_models_are_bounded_in_number_and_length() -> None:
    many = {"data": [{"id": str(number)} for number in range(2 * MAX_CARDS)]}
    assert len(parse_models(many)) == MAX_CARDS
    assert [card.id for card in parse_models({"data": [{"id": "x" * 100_000}, {"id": "m"}]})] == ["m"]
    (card,) = parse_models({"data": [{"id": "m", "parent": "x" * 100_000}]})
    assert card.parent is None


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b"{", b"NaN"])
def test_a_body_that_is_no_json_is_nothing(body: bytes) -> None:
    assert parse_json_or_none(body) is None


@pytest.mark.parametrize("tokens", [10**30, 1e308, -5, True, "9" * 5_000, [[]]])
def test_server_info_is_bounded(tokens: object) -> None:
    size, pages = parse_sglang_cache_size({"page_size": 1, "max_total_num_tokens": tokens})
    assert 0 <= size <= MAX_BLOCK_SIZE and 0 <= pages <= MAX_NUM_BLOCKS
