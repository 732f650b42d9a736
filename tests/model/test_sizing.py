from pathlib import Path
from typing import Any

import pytest
import torch
from cgroup_tree import GIB
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headstart.core.errors import ConfigError
from headstart.model.setup.sizes import cpu_memory
from headstart.model.setup.sizing import (
    KVPlan,
    apply_threads,
    check_weights_fit,
    checkpoint_bytes,
    memory,
    plan_kv_pool,
)


def plan(**changes: Any) -> KVPlan:
    """12 KiB per token, 10 GiB beside 2 GiB of weights: 3.2 GiB of pool."""
    default: dict[str, Any] = {
        "kv_bytes_per_token": 12 * 1024,
        "block_size": 16,
        "weight_bytes": 2 * GIB,
        "max_model_len": 32_768,
        "available_bytes": 10 * GIB,
    }
    return plan_kv_pool(**{**default, **changes})


def test_pool_is_forty_percent_of_what_is_left_and_says_so() -> None:
    got = plan()
    assert got.kv_bytes <= 0.4 * 8 * GIB < got.kv_bytes + 16 * 12 * 1024
    assert got.kv_bytes == got.num_blocks * 16 * 12 * 1024
    assert got.text == f"KV 3.2 GiB = {(got.num_blocks - 1) * 16:,} tokens = 8.5 x max_model_len"


def test_pool_of_a_tiny_model_ends_where_all_running_sequences_are_full() -> None:
    tiny = plan(kv_bytes_per_token=512, max_model_len=100, max_num_seqs=20)
    assert tiny.num_blocks == 20 * 7 + 1
    assert plan(kv_bytes_per_token=512, max_model_len=100, max_num_seqs=1).num_blocks == 16 * 7 + 1
    assert tiny.text.endswith("= 22 x max_model_len")


def test_given_size_and_given_blocks_are_taken() -> None:
    assert plan(kv_cache_memory="6GiB").num_blocks == 6 * GIB // (16 * 12 * 1024)
    assert plan(num_blocks_override=5).num_blocks == 5  # even if one sequence of max_model_len needs more


def test_refusal_names_the_longest_sequence_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"set --max-model-len to (\d+) or less") as caught:
        plan(max_model_len=1_000_000)
    fits = int(str(caught.value).split("--max-model-len to ")[1].split()[0])
    assert plan(max_model_len=fits).num_blocks == fits // 16 + 1
    with pytest.raises(ConfigError):
        plan(max_model_len=fits + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_memory": "9GiB"}, "a KV pool of 9.0 GiB does not fit: 8.0 GiB .* lower --kv-cache-memory"),
        ({"kv_cache_memory": "1MiB"}, "needs 384.2 MiB of KV, more than the pool of 1.0 MiB"),
        ({"num_blocks_override": 10**6}, "1000000 KV blocks .* lower --num-blocks"),
        ({"num_blocks_override": 1}, "at least 2"),
        ({"weight_bytes": 11 * GIB}, "more than the pool of 0 B .*0 B left.*--kv-cache-memory"),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers_and_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**changes)


@settings(max_examples=200)
@given(
    per_token=st.integers(1, 10**6),
    block_size=st.sampled_from([16, 32, 128]),
    weights=st.integers(0, 12 * GIB),
    length=st.integers(1, 10**6),
)
def test_pool_never_takes_more_than_its_share_and_always_holds_one_sequence(
    per_token: int, block_size: int, weights: int, length: int
) -> None:
    try:
        got = plan(
            kv_bytes_per_token=per_token,
            block_size=block_size,
            weight_bytes=weights,
            max_model_len=length,
        )
    except ConfigError:
        return
    assert got.kv_bytes / 0.4 + weights <= 10 * GIB + 10
    assert (got.num_blocks - 1) * block_size >= length


def test_weights_that_do_not_fit_are_refused_before_loading() -> None:
    check_weights_fit(4 * GIB, 5 * GIB)
    with pytest.raises(ConfigError, match=r"weights take 13\.0 GiB, but only 8\.0 GiB .* smaller model"):
        check_weights_fit(13 * GIB, 8 * GIB)
    with pytest.raises(ConfigError, match="in each of 2 replicas"):
        check_weights_fit(4 * GIB, 8 * GIB, replicas=2)


def test_checkpoint_is_measured_by_its_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 10, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file(
        {"b": torch.zeros(5), "c": torch.zeros(3, dtype=torch.int64)}, tmp_path / "two.safetensors", metadata={"x": "y"}
    )
    assert checkpoint_bytes(tmp_path) == 200 + 20 + 24
    assert checkpoint_bytes(tmp_path, dtype="float32") == 400 + 20 + 24
    assert checkpoint_bytes(tmp_path, dtype="bfloat16") == 200 + 10 + 24
    with pytest.raises(ConfigError, match="dtype 'int3'"):
        checkpoint_bytes(tmp_path, dtype="int3")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"not json not json"])
def test_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        checkpoint_bytes(tmp_path)


def test_memory_of_the_cpu_is_what_sizes_says() -> None:
    assert memory().limit == memory("cpu").limit == cpu_memory().limit


def test_threads_are_applied() -> None:
    before = torch.get_num_threads()
    try:
        apply_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        apply_threads(before)
