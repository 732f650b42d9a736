from pathlib import Path
from typing import Any

import pytest
import torch
from cgroup_tree import GIB, group_files, machine, v2_group
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headstart.core.errors import ConfigError
from headstart.model.sizing import (
    KVPlan,
    apply_threads,
    check_weights_fit,
    checkpoint_bytes,
    format_bytes,
    memory,
    parse_bytes,
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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        ("512MB", 512_000_000),
        ("1.5G", 1_500_000_000),
        ("2Ki", 2048),
        ("123", 123),
        (4096, 4096),
        ("10B", 10),
        ("1T", 10**12),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "six GiB", "-1GiB", "6 GiB 3", "1e9", "0", "0.1", "6PiB", "6ib", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2**42, "4096.0 GiB")]
)
def test_sizes_are_written_in_1024s(size: int, text: str) -> None:
    assert format_bytes(size) == text


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


def test_replicas_share_the_machine() -> None:
    assert plan(replicas=2, max_model_len=1024).kv_bytes <= 0.4 * 3 * GIB
    assert plan(replicas=2, max_model_len=1024).kv_bytes > 0.39 * 3 * GIB


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
        ({"replicas": 8}, "more than the pool of 0 B"),
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
    replicas=st.integers(1, 4),
)
def test_pool_never_takes_more_than_its_share_and_always_holds_one_sequence(
    per_token: int, block_size: int, weights: int, length: int, replicas: int
) -> None:
    try:
        got = plan(
            kv_bytes_per_token=per_token,
            block_size=block_size,
            weight_bytes=weights,
            max_model_len=length,
            replicas=replicas,
        )
    except ConfigError:
        return
    assert replicas * (got.kv_bytes / 0.4 + weights) <= 10 * GIB + 10
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


def test_memory_is_the_machines_without_a_group(tmp_path: Path) -> None:
    assert memory("cpu", machine(tmp_path)) == (64 * GIB, 60 * GIB, "machine")


def test_tightest_group_binds(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), "/a/b", memory_max=str(8 * GIB), memory_current=str(GIB))
    group_files(tmp_path, "/a", memory_max=str(32 * GIB), memory_current=str(30 * GIB))
    assert memory("cpu", tmp_path) == (8 * GIB, 2 * GIB, "cgroup")


def test_generous_group_does_not_hide_a_full_machine(tmp_path: Path) -> None:
    v2_group(machine(tmp_path, available=GIB), memory_max=str(32 * GIB), memory_current="0")
    assert memory("cpu", tmp_path).available == GIB


def test_overdrawn_group_has_nothing_left(tmp_path: Path) -> None:
    v2_group(machine(tmp_path), memory_max=str(GIB), memory_current=str(2 * GIB))
    assert memory("cpu", tmp_path).available == 0


def test_memory_of_this_machine_is_plausible(tmp_path: Path) -> None:
    here = memory()
    assert 0 < here.available <= here.limit
    elsewhere = memory("cpu", tmp_path)  # no /proc/meminfo: what psutil says
    assert 0 < elsewhere.available <= elsewhere.limit


def test_threads_are_applied() -> None:
    before = torch.get_num_threads()
    try:
        apply_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        apply_threads(before)
