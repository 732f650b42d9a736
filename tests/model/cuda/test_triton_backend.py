"""The Triton attention backend against the reference in Triton's interpreter; and models on it, also on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attending import Pools, poison
from paged import Shared, change_block, chunk, load_tiny
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.core.batch import Batch, RowErrorKind
from headstart.core.errors import ConfigError
from headstart.model.attention import base
from headstart.model.cuda import triton_backend
from headstart.model.cuda.triton_backend import TritonAttention, TritonAttentionStep
from headstart.model.model_runner import ModelRunner
from headstart.model.paged_kv import TokenKVShape
from headstart.model.weights.model_loader import LoadedModel, load_model

TINY: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 16, "backend": TritonAttention}
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"cap": 2.0},
    "sinks": {"sinks": torch.tensor([-3.0, 0.0, 2.0, 60.0])},
}
ATOL = 2e-5


def shared_pools(**options: Any) -> tuple[Pools, list[int]]:
    """Decodes and prompts, three of them behind the same blocks; every slot that is not written holds NaN."""
    pools = Pools([70, 75, 9, 40, 90], **TINY, **options)
    pools.share(1, 0, 4)
    pools.share(4, 0, 3)
    starts = [69, 74, 8, 30, 88]
    for block in range(pools.num_blocks):
        poison(pools.own, block)
    pools.fill(starts)
    return pools, starts


def assert_equal(pools: Pools, starts: list[int], **scoring: Any) -> None:
    due, found, _ = pools.compute(starts, scale=0.3, **scoring)
    torch.testing.assert_close(found, due, atol=ATOL, rtol=ATOL)
    for index, start in enumerate(starts):  # the new keys and values are where the reference has them
        for number in range(start // 16, -(-pools.lengths[index] // 16)):
            block, end = pools.tables[index][number], min(16, pools.lengths[index] - number * 16)
            a, b = (
                torch.frombuffer(bytearray(kv.read_block(block)), dtype=torch.float32)
                for kv in (pools.reference.kv, pools.own.kv)
            )
            a, b = (one.view(2, 2, 16, -1)[1, :, start % 16 if number == start // 16 else 0 : end] for one in (a, b))
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name",
    [
        "sinks",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("plain", "window", "softcap")),
    ],
)
def test_a_mixed_step_is_that_of_the_reference(name: str) -> None:
    pools, starts = shared_pools(split_tokens=32)
    assert_equal(pools, starts, **SCORINGS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", SCORINGS)
def test_decodes_alone(name: str) -> None:
    pools = Pools([70, 5, 33], **TINY, split_tokens=32)
    pools.fill([69, 4, 32])
    assert_equal(pools, [69, 4, 32], **SCORINGS[name])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_random_ragged_steps_equal_the_reference(seed: int) -> None:
    rng = Random(seed)
    dim, kv_heads, group = rng.choice([8, 20, 64, 80, 128]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7])
    lengths = [rng.randint(1, rng.choice([30, 200])) for _ in range(rng.randint(1, 5))]
    pools = Pools(
        lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, seed=seed, backend=TritonAttention,
        split_tokens=rng.choice([0, 64]), block_size=rng.choice([16, 32]),
    )  # fmt: skip
    starts = [rng.choice([0, length - 1, max(0, length - 20)]) for length in lengths]
    for follower in range(1, len(lengths)):
        pools.share(follower, 0, rng.randint(0, min(starts[0], starts[follower]) // pools.block_size))
    for block in range(pools.num_blocks):
        poison(pools.own, block)
    pools.fill(starts)
    due, found, _ = pools.compute(
        starts, scale=dim**-0.5, window=rng.choice([None, None, 1, 5, 40]), cap=rng.choice([None, 3.0]),
        sinks=rng.choice([None, 2 * torch.randn(kv_heads * group)]),
    )  # fmt: skip
    torch.testing.assert_close(found, due, atol=ATOL, rtol=ATOL)


def assert_cut(monkeypatch: pytest.MonkeyPatch, most: int, plans: int) -> None:
    monkeypatch.setattr(triton_backend, "max_partial_results", lambda *_: most)
    pools, starts = shared_pools(split_tokens=32)
    _, _, step = pools.compute(starts, scale=0.3)
    assert [len(found) for found in step._plans.values()] == [plans]
    assert_equal(pools, starts)


@pytest.mark.long
def test_a_step_with_too_many_partial_results_is_cut_into_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_cut(monkeypatch, 6, 2)


@pytest.mark.long
def test_one_row_has_room_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_cut(monkeypatch, 1, 3)  # the last three have one part among them


@pytest.mark.long
def test_a_chunk_may_read_what_another_one_of_the_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "max_partial_results", lambda *_: 1)
    pools = Pools([70, 64], **TINY, split_tokens=32)
    pools.share(1, 0, 3)
    pools.fill([69, 32])
    poison(pools.own, pools.tables[0][2])  # the second writes it
    assert_equal(pools, [69, 32])


def test_room_for_partial_results_grows() -> None:
    cpu = torch.device("cpu")
    backend = TritonAttention(TokenKVShape(1, 2, 16), num_blocks=2, block_size=16, dtype=torch.float32, device=cpu)
    first = backend.reserve_partial_results(1, 4)
    assert (
        backend.reserve_partial_results(len(first.out), 4) is first
        and backend.reserve_partial_results(1, 2) is not first
    )
    assert len(backend.reserve_partial_results(len(first.out) + 1, 4).out) > len(first.out)


@pytest.mark.long
def test_queries_keys_and_values_may_lie_anywhere() -> None:
    pools = Pools([20], **TINY)
    step, (q, k, v) = pools.step([0], [20]), pools.rows([0], [20])
    due = pools.reference.begin_step(step)(1, q, k, v, scale=0.2)
    sliced = torch.cat((q, k, v), dim=1).split((4, 2, 2), dim=1)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    head_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for rows in (sliced, turned, head_first):
        torch.testing.assert_close(pools.own.begin_step(step)(1, *rows, scale=0.2), due, atol=ATOL, rtol=ATOL)


@pytest.mark.long
def test_a_poisoned_block_reaches_only_the_rows_that_read_it() -> None:
    pools = Pools([40, 50, 80, 90], **TINY, split_tokens=32)
    pools.share(3, 2, 3)
    starts = [39, 49, 79, 89]
    pools.fill(starts)
    poison(pools.own, pools.tables[1][1], slice(3, 4))
    _, found, _ = pools.compute(starts, scale=1.0)
    assert found.isfinite().flatten(1).all(1).tolist() == [True, False, True, True]


def test_what_does_not_fit_is_refused_before_the_kernels() -> None:
    pools = Pools([40, 20], **TINY)
    step, (q, k, v) = pools.step([39, 0], [40, 20]), pools.rows([39, 0], [40, 20])
    attend = pools.own.begin_step(step)
    for rows in ((q[:5], k, v), (q, k[:, :, :8], v), (q[:, :3], k, v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match="do not go with"):
            attend(1, *rows, scale=1.0)
    for rows, options in (((q.double(), k, v), {}), ((q, k, v), {"window": 0}), ((q, k, v), {"softcap": 0.0})):
        with pytest.raises(ValueError, match="float32, or window"):
            attend(1, *rows, scale=1.0, **options)
    with pytest.raises(ValueError, match=r"sinks \[2\] are not \[4\]"):
        attend(1, q, k, v, scale=1.0, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="outside"):
        pools.own.begin_step(replace(step, kv_indices=step.kv_indices + 99))


class _Copies(TorchDispatchMode):
    """Records the operators that move or read values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("_local_scalar_dense", "nonzero", "_to_copy", "copy_", "_pin_memory"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_is_planned_once_for_all_layers_and_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("append_kv", "launch_attention", "merge_partial_results"):
        monkeypatch.setattr(triton_backend, name, lambda *_, name=name, **__: launched.append(name))
    backend = TritonAttention(
        TokenKVShape(2, 2, 16), num_blocks=99, block_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    monkeypatch.setattr(backend.kv, "device", torch.device("meta"))  # a copy to it is seen, and holds no values
    pools, starts = shared_pools(split_tokens=32)
    step, rows = pools.step(starts, pools.lengths), [x.to("meta") for x in pools.rows(starts, pools.lengths)]
    with _Copies() as copies:
        attend = backend.begin_step(step)
        attend(0, *rows, scale=1.0)
        attend(1, *rows, scale=1.0, window=20)
    assert copies.seen == ["_to_copy.default"]
    assert launched == ["append_kv", "launch_attention", "launch_attention", "merge_partial_results"] * 2


def logits_of(loaded: LoadedModel, name: str) -> torch.Tensor:
    """All logits of prompts in random chunks, two of which share their beginning, with the backend `name`."""
    common = [Random(1).randrange(3, 128) for _ in range(34)]
    prompts = [common, [*common[:33], 5, 6, 7], [9, 8, 7, 6, 5, 4, 3] * 3]
    runner = ModelRunner(replace(loaded, attention_backend=name), num_blocks=32, block_size=16)
    return torch.cat(Shared(runner, prompts, Random(2)).run(20))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_of_transformers_have_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    loaded = load_tiny(family, tmp_path)
    due, found = logits_of(loaded, "reference"), logits_of(loaded, "triton")
    torch.testing.assert_close(found, due, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_on_a_gpu_have_the_logits_of_the_reference_and_attention_waits_for_nothing(
    family: str, dtype: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the logits are as close to those of float32, of the same weights, as the reference's are."""
    folder = make_checkpoint(family, tmp_path, head_dim=head_dim)
    weights = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(weights).items()}
    save_file(rounded, weights, {"format": "pt"})
    loaded = load_model(folder, dtype=dtype, device="cuda")
    assert loaded.attention_backend == "triton"
    due, allowed = logits_of(load_model(folder, dtype="float32", device="cuda"), "reference"), 1e-4
    if dtype == "bfloat16":
        allowed = 1.1 * float((logits_of(loaded, "reference").float() - due).norm() / due.norm())
        assert allowed < 0.1
    original = TritonAttentionStep.__call__

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TritonAttentionStep, "__call__", watched)
    error = float((logits_of(loaded, "triton").float() - due).norm() / due.norm())
    assert error < allowed


@pytest.mark.long
def test_a_corrupt_block_fails_its_own_row_and_blocks_travel(tmp_path: Path) -> None:
    loaded = replace(load_tiny("gemma2", tmp_path), attention_backend="triton")
    tokens, tables = [Random(3).randrange(3, 128) for _ in range(20)], ([1, 2], [3, 4])
    firsts = [chunk(tokens, 0, 16, table, request_id=str(table)) for table in tables]
    lasts = [chunk(tokens, 16, 20, table, request_id=str(table), num_logits=1) for table in tables]
    runner, other = (ModelRunner(loaded, num_blocks=9, block_size=16) for _ in range(2))
    runner.execute(Batch(tuple(firsts)))
    clean = runner.execute(Batch(tuple(lasts))).rows
    assert clean[0].token_ids == clean[1].token_ids and clean[0].error is None
    other.write_block(3, runner.read_block(1))
    assert other.execute(Batch((lasts[1],))).rows[0].token_ids == clean[1].token_ids
    change_block(runner, 3, lambda kv: kv.fill_(float("nan")))
    rows = runner.execute(Batch(tuple(lasts))).rows
    assert rows[0] == clean[0] and rows[1].error is not None and rows[1].error.kind is RowErrorKind.NON_FINITE
    runner.zero_blocks((3,))
    assert not any(runner.read_block(3))


@pytest.mark.long
def test_kernels_compile_for_gpus_and_fit_their_shared_memory() -> None:
    script = Path(__file__).with_name("compile_for_gpus.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.PIPE)
    found = json.loads(ran.stdout)
    assert len(found) == 12 and all(len(one["shared"]) == 4 for one in found)
    assert [one for one in found if max(one["shared"]) > one["limit"]] == []


def test_auto_takes_it_where_it_runs_and_it_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attention_backend triton runs on GPUs, not on cpu: choose auto or ref"):
        base.resolve_backend("triton", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert base.resolve_backend("auto", "cuda:1") == base.resolve_backend("triton", "cuda") == "triton"
    assert base.backend_factory("triton") is TritonAttention
    assert base.resolve_backend("auto", "cpu", 1000) == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert base.resolve_backend("auto", "cuda") == "reference"
    with pytest.raises(ConfigError, match=r"triton needs compute capability 8\.0, and cuda:1 has 7\.5"):
        base.resolve_backend("triton", "cuda:1")
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    assert base.resolve_backend("auto", "cuda") == "reference"
    with pytest.raises(ConfigError, match="needs Triton, which is not installed"):
        base.resolve_backend("triton", "cuda")
