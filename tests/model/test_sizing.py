from pathlib import Path
from typing import Any

import pytest
import torch
from cgroup_tree import GIB
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headstart.core.errors import ConfigError
from headstart.model.setup.sizes import MemoryInfo, cpu_memory
from headstart.model.setup.sizing import (
    GPU_CONTEXT_BYTES,
    KVPoolPlan,
    apply_threads,
    check_weights_fit,
    device_memory,
    gpu_budget,
    loaded_weight_bytes,
    measure_gpu_peak_increase,
    measure_torch_gpu_bytes,
    oom_as_config_error,
    plan_kv_pool,
)


def plan(**changes: Any) -> KVPoolPlan:
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


def test_a_full_pool_beside_a_small_model_leaves_half_of_the_memory_to_others() -> None:
    """Pages are taken as they are used, so a neighbour may come when the pool is still empty."""
    for total in (2 * GIB, 8 * GIB, 64 * GIB):
        got = plan(weight_bytes=GIB // 8, available_bytes=total)
        assert got.kv_bytes + GIB // 8 + total // 2 < total


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


def gpu(total: float, free: float) -> MemoryInfo:
    """A GPU with `total` and `free` GiB."""
    return MemoryInfo(int(total * GIB), int(free * GIB), "GPU")


def test_pool_of_a_gpu_is_all_that_weights_and_buffers_leave_of_nine_tenths() -> None:
    budget = gpu_budget(gpu(80, 79.5))  # half a GiB is this process's own context
    assert budget == int(0.9 * 80 * GIB) - GIB // 2
    got = plan(available_bytes=budget, gpu_profile_bytes=3 * GIB, weight_bytes=13 * GIB)
    assert got.kv_bytes <= budget - 16 * GIB < got.kv_bytes + 16 * 12 * 1024
    assert plan(available_bytes=budget, gpu_profile_bytes=0, max_model_len=100).num_blocks == 256 * 7 + 1  # tiny needs


def test_budget_counts_the_own_context_and_takes_a_limit() -> None:
    assert gpu_budget(gpu(4, 3.6)) == int(0.9 * 4 * GIB) - (4 * GIB - int(3.6 * GIB))  # a small card, all ours
    assert gpu_budget(gpu(80, 79.5), 0.5) == 40 * GIB - GPU_CONTEXT_BYTES
    assert gpu_budget(gpu(80, 79.5), limit=8 * GIB) == 8 * GIB
    assert gpu_budget(gpu(80, 79.5), 0.05, limit=8 * GIB) == 4 * GIB - GPU_CONTEXT_BYTES


def test_memory_that_other_processes_hold_is_refused_with_the_share_that_is_left() -> None:
    with pytest.raises(ConfigError, match=r"0\.9 is 72\.0 GiB .* 80\.0 GiB, .* 29\.5 GiB is in use") as caught:
        gpu_budget(gpu(80, 50))
    assert "nvidia-smi" in str(caught.value) and "\n" not in str(caught.value)
    share = float(str(caught.value).split("--gpu-memory-utilization to ")[1].split()[0])
    assert share == 0.63 and gpu_budget(gpu(80, 50), share) <= 50 * GIB
    with pytest.raises(ConfigError):
        gpu_budget(gpu(80, 50), share + 0.01)
    with pytest.raises(ConfigError, match=r"nvidia-smi lists them\)$"):
        gpu_budget(gpu(80, 0))


def test_where_a_size_is_given_what_is_free_counts_and_not_the_default_share() -> None:
    assert gpu_budget(gpu(80, 50), limit=60 * GIB) == 50 * GIB
    assert gpu_budget(gpu(80, 50), is_sized=True) == 50 * GIB
    with pytest.raises(ConfigError):  # but a share that is given counts
        gpu_budget(gpu(80, 50), 0.9, is_sized=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_memory": "9GiB"}, "KV pool of 9.0 GiB .* 7.0 GiB .* 1.0 GiB of buffers; lower --kv-cache-memory"),
        ({"max_model_len": 10**6}, "than the pool of 7.0 GiB .*: raise --gpu-memory-utilization, or set"),
        ({"num_blocks_override": 10**6}, "lower --num-blocks or raise --gpu-memory-utilization"),
        ({"gpu_profile_bytes": 9 * GIB}, "more than the pool of 0 B .* raise --gpu-memory-utilization"),
    ],
)
def test_what_cannot_fit_on_a_gpu_is_refused_with_numbers_and_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**{"gpu_profile_bytes": GIB, **changes})


BYTES = st.integers(0, 200 * GIB)


@settings(max_examples=300)
@given(
    total=st.integers(1, 200 * GIB),
    held=st.one_of(st.integers(0, GIB), BYTES),
    utilization=st.one_of(st.none(), st.floats(0.01, 1)),
    limit=st.one_of(st.none(), st.integers(1, 200 * GIB)),
    weights=BYTES,
    profile=st.one_of(st.integers(0, GIB), BYTES),
    pool=st.one_of(
        st.fixed_dictionaries({}),
        st.fixed_dictionaries({"kv_cache_memory": st.integers(1, 200 * GIB).map(str)}),
        st.fixed_dictionaries({"num_blocks_override": st.integers(2, 10**7)}),
    ),
    length=st.integers(2, 10**5),
    per_token=st.integers(1, 10**6),
)
def test_weights_buffers_and_pool_never_exceed_the_share_nor_what_is_free(
    total: int,
    held: int,
    utilization: float | None,
    limit: int | None,
    weights: int,
    profile: int,
    pool: dict[str, Any],
    length: int,
    per_token: int,
) -> None:
    found = MemoryInfo(total, max(total - held, 0), "GPU")
    try:
        budget = gpu_budget(found, utilization, limit=limit, is_sized=bool(pool))
        got = plan(
            available_bytes=budget,
            weight_bytes=weights,
            gpu_profile_bytes=profile,
            max_model_len=length,
            kv_bytes_per_token=per_token,
            **pool,
        )
    except ConfigError:
        return
    used = weights + profile + got.kv_bytes
    assert used <= (0.9 if utilization is None else utilization) * total
    assert used <= found.available and (limit is None or used <= limit)
    assert "num_blocks_override" in pool or (got.num_blocks - 1) * 16 >= length


@given(st.integers(1, 200 * GIB), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 100 * GIB))
def test_a_larger_share_or_a_smaller_profile_never_makes_the_pool_smaller(
    total: int, one: float, other: float, profile: int
) -> None:
    def blocks(utilization: float, profile_bytes: int) -> int:
        budget = gpu_budget(MemoryInfo(total, total, "GPU"), utilization)
        try:
            return plan(available_bytes=budget, gpu_profile_bytes=profile_bytes, max_model_len=2).num_blocks
        except ConfigError:
            return 0

    low, high = sorted((one, other))
    assert blocks(low, profile) <= blocks(high, profile) <= blocks(high, profile // 2)


ONE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB\n")


@pytest.mark.parametrize("error", [ONE, RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")])
def test_a_gpu_out_of_memory_is_one_line_with_numbers_and_remedy(error: RuntimeError) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"^out of GPU memory while loading: .*3\.0 GiB of 8\.0 GiB.*; pray$"
        ) as caught,
        oom_as_config_error("loading", "pray", gpu(8, 3)),
    ):
        raise error
    assert "\n" not in str(caught.value) and ("2.00 GiB" in str(caught.value)) is (error is ONE)


def test_other_errors_of_torch_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), oom_as_config_error("loading", "pray", gpu(8, 3)):
        raise RuntimeError("shapes do not match")


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
    assert loaded_weight_bytes(tmp_path) == 200 + 20 + 24
    assert loaded_weight_bytes(tmp_path, dtype="float32") == 400 + 20 + 24
    assert loaded_weight_bytes(tmp_path, dtype="bfloat16") == 200 + 10 + 24
    with pytest.raises(ConfigError, match="dtype 'int3'"):
        loaded_weight_bytes(tmp_path, dtype="int3")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"not json not json"])
def test_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        loaded_weight_bytes(tmp_path)


def test_memory_of_the_cpu_is_what_sizes_says() -> None:
    assert device_memory().limit == device_memory("cpu").limit == cpu_memory().limit


def test_threads_are_applied() -> None:
    before = torch.get_num_threads()
    try:
        apply_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        apply_threads(before)


@pytest.mark.gpu
def test_numbers_of_a_real_gpu_are_those_that_sizing_expects() -> None:
    found = device_memory("cuda")
    assert 0 < found.available <= found.limit and gpu_budget(found, 0.01, is_sized=True) <= found.available
    held = measure_torch_gpu_bytes("cuda")
    assert measure_gpu_peak_increase(lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda"), "cuda") >= 2**28
    assert measure_torch_gpu_bytes("cuda") == held
    with (
        pytest.raises(ConfigError, match=r"GPU memory while trying: .* was free at the start and .* more was needed"),
        oom_as_config_error("trying", "pray", found),
    ):
        torch.empty(found.limit + 2**30, dtype=torch.uint8, device="cuda")
