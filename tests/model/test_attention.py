"""The reference attention against a naive one that loops over rows, heads and keys in fp64."""

from random import Random

import numpy as np
import pytest
import torch
from model.paged import token_writes
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.attention import attention_plan as plan_module
from headstart.model.attention import reference as reference_module
from headstart.model.attention.base import backend_factory, resolve_backend
from headstart.model.attention.reference import ReferenceAttention
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs

CPU = torch.device("cpu")


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [n, Hq, D] at positions from `start` over all keys [S, Hkv, D], row by row."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(q.shape[0]):
        last = start + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            keys, values = (x[first : last + 1, head // group].double() for x in (k, v))
            scores = keys @ q[row, head].double() * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = torch.softmax(scores, 0)[: len(values)] @ values
    return out


class Pool:
    """Sequences with random KV in random blocks of one backend, layer 1 of 2."""

    def __init__(self, seed: int, lengths: list[int], *, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
        torch.manual_seed(seed)
        rng = Random(seed)
        self.heads, self.lengths = heads, lengths
        num_blocks = sum(-(-length // 16) for length in lengths) + 3
        self.backend = ReferenceAttention(
            TokenKVShape(2, kv_heads, dim), num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU
        )
        free = rng.sample(range(1, num_blocks), num_blocks - 1)
        self.tables = [[free.pop() for _ in range(-(-length // 16))] for length in lengths]
        self.k = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
        self.v = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
        self.q = [torch.randn(length, heads, dim).to(dtype) for length in lengths]

    def share(self, follower: int, leader: int, num_blocks: int) -> None:
        """The follower's first blocks become the leader's."""
        self.tables[follower][:num_blocks] = self.tables[leader][:num_blocks]
        self.k[follower][: num_blocks * 16] = self.k[leader][: num_blocks * 16]
        self.v[follower][: num_blocks * 16] = self.v[leader][: num_blocks * 16]

    def slots(self, index: int, start: int, end: int) -> list[int]:
        return [self.tables[index][p // 16] * 16 + p % 16 for p in range(start, end)]

    def compute(
        self,
        starts: list[int],
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Tensor | None = None,
    ) -> list[Tensor]:
        """Fills the KV before `starts`, then computes the rest of every sequence in one step."""
        for index, start in enumerate(starts):
            writes = token_writes(self.slots(index, 0, start))
            self.backend.kv.write_layer(1, self.k[index][:start], self.v[index][:start], writes)
        spans = list(zip(range(len(starts)), starts, self.lengths, strict=True))
        lengths = [end - start for _, start, end in spans]
        step = StepInputs(
            token_ids=torch.zeros(sum(lengths), dtype=torch.int64),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            writes=token_writes([slot for span in spans for slot in self.slots(*span)]),
            qo_indptr=np.cumsum([0, *lengths], dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            kv_indptr=np.cumsum([0, *map(len, self.tables)], dtype=np.int32),
            kv_indices=np.array([block for table in self.tables for block in table], dtype=np.int32),
        )
        q, k, v = (torch.cat([x[i][start:end] for i, start, end in spans]) for x in (self.q, self.k, self.v))
        out = self.backend.begin_step(step)(1, q, k, v, scale=scale, window=window, softcap=cap, sinks=sinks)
        return list(out.split(lengths))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 4, 20), (6, 1, 8)])
@pytest.mark.parametrize("window", [None, 5, 16, 40])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_ragged_batches_equal_the_naive_loop(
    heads: int, kv_heads: int, dim: int, window: int | None, cap: float | None
) -> None:
    lengths, starts = [1, 17, 64, 90, 33, 200, 48], [0, 16, 0, 41, 32, 199, 46]
    pool = Pool(0, lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.float32)
    for index, found in enumerate(pool.compute(starts, 0.3, window, cap)):
        rows = pool.q[index][starts[index] :]
        expected = naive(rows, pool.k[index], pool.v[index], starts[index], 0.3, window, cap)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_their_share_once_also_of_rows_that_share_blocks(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "MIN_SHARED_BYTES", 1)
    pool = Pool(7, [65, 70, 30], heads=4, kv_heads=2, dim=16, dtype=dtype)
    pool.share(1, 0, 3)
    sinks, starts = torch.tensor([-3.0, 0.0, 2.0, 60.0]), [64, 69, 4]
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    for index, found in enumerate(pool.compute(starts, 0.5, window, None, sinks.to(dtype))):
        rows = pool.q[index][starts[index] :]
        expected = naive(rows, pool.k[index], pool.v[index], starts[index], 0.5, window, None, sinks)
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=atol)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("name", "size"), [("TILE_SCORES", 1), ("MAX_TILE", 30), ("MAX_TILE", 128)])
def test_prefill_in_many_tiles_equals_the_naive_loop(
    name: str, size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_module, name, size)
    pool = Pool(1, [190, 40], heads=4, kv_heads=2, dim=8, dtype=torch.float32)
    for index, found in enumerate(pool.compute([37, 0], 0.5, window, None)):
        start = [37, 0][index]
        expected = naive(pool.q[index][start:], pool.k[index], pool.v[index], start, 0.5, window, None)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_decode_rows_in_many_buckets_equal_the_naive_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "BUCKET_BYTES", 1)
    lengths = [20, 300, 21, 5, 150]
    pool = Pool(2, lengths, heads=4, kv_heads=2, dim=8, dtype=torch.float32)
    for index, found in enumerate(pool.compute([length - 1 for length in lengths], 0.5, None, None)):
        rows = pool.q[index][-1:]
        expected = naive(rows, pool.k[index], pool.v[index], lengths[index] - 1, 0.5, None, None)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_rows_that_share_blocks_read_them_once_and_exactly(
    cap: float | None, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "MIN_SHARED_BYTES", 1)
    lengths = [65, 70, 66, 64, 40, 17, 48, 48]  # 5 shares one block with 4; 6 and 7 are twins to the last token
    pool = Pool(3, lengths, heads=6, kv_heads=2, dim=16, dtype=dtype)
    for follower in (1, 2, 3):
        pool.share(follower, 0, 3)
    pool.share(5, 4, 1)
    pool.share(7, 6, 3)
    starts = [length - 1 for length in lengths]
    starts[2] = 60  # a prefill among them
    outs = pool.compute(starts, 0.25, None, cap)
    for index, found in enumerate(outs):
        expected = naive(pool.q[index][starts[index] :], pool.k[index], pool.v[index], starts[index], 0.25, None, cap)
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=atol)


def test_shared_blocks_form_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MIN_SHARED_BYTES", 1)
    seen: list[tuple[int, int]] = []
    original = plan_module.plan_attention_reads

    def spy(*arguments: object) -> plan_module.AttentionPlan:
        plan = original(*arguments)
        seen.extend((len(group.rows), group.num_pages) for group in plan.groups)
        return plan

    monkeypatch.setattr(reference_module, "plan_attention_reads", spy)
    pool = Pool(4, [65, 70, 40], heads=2, kv_heads=2, dim=8, dtype=torch.float32)
    pool.share(1, 0, 3)
    pool.compute([64, 69, 39], 1.0, None, None)
    assert seen == [(2, 3)]


def test_a_poisoned_block_reaches_only_the_rows_that_read_it() -> None:
    pool = Pool(5, [40, 50, 80], heads=2, kv_heads=1, dim=8, dtype=torch.float32)
    pool.k[1][3] = float("nan")
    outs = pool.compute([39, 49, 50], 1.0, None, None)
    assert [bool(out.isfinite().all()) for out in outs] == [True, False, True]


def test_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="'flash9' is not known; choose auto, cpu, reference, triton"):
        resolve_backend("flash9")
    assert backend_factory(resolve_backend("reference")) is ReferenceAttention
