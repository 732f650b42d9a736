"""The CPU kernels' attention against the reference: all variants this machine runs, all shapes, poisoned memory."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from model.attending import ATOL, CPU, Pools, poison
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.attention import base
from headstart.model.attention.cpu import CPUAttention
from headstart.model.kernels import library as load
from headstart.model.paged_kv import TokenKVShape

RUNNABLE = load.runnable_variants()
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(load.kernel_library_in_use() is None, reason="no compiled kernels here")


@pytest.fixture(params=RUNNABLE, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant this processor runs, one after the other."""
    monkeypatch.setenv(load.VARIABLE, request.param)
    assert load.find_kernels().note == request.param


def naive(pools: Pools, starts: list[int], scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps in fp64, row by row."""
    extra = torch.full((pools.heads,), float("-inf")) if sinks is None else sinks
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for index, start in enumerate(starts):
        for position in range(start, pools.lengths[index]):
            group = pools.heads // pools.shape.num_kv_heads
            q = pools.queries[index][position].double()
            k, v = (x[index][: position + 1].double().repeat_interleave(group, 1) for x in (pools.keys, pools.values))
            scores = torch.cat((torch.einsum("hd,shd->hs", q, k) * scale, extra[:, None].double()), 1)
            outs.append(torch.einsum("hs,shd->hd", scores.softmax(-1)[:, :-1], v))
            lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("seed", range(24))
def test_random_ragged_steps_equal_the_reference(seed: int) -> None:
    rng = Random(seed)
    dim = rng.choice([1, 5, 8, 16, 20, 32, 64, 80, 96, 112, 128, 160, 256])
    kv_heads, group = rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 7, 8, 50])
    dtype, block_size = rng.choice(DTYPES), rng.choice([16, 16, 32, 4, 24])
    longest = rng.choice([60, 400, 1200])  # of 512 tokens on, in several pieces
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 6))]
    pools = Pools(
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        block_size=block_size,
        sharing="always",
        split_tokens=rng.choice([block_size, 256]),
        seed=seed,
    )
    starts = [rng.choice([0, length - 1, rng.randrange(length)]) for length in lengths]
    for follower in range(1, len(lengths)):
        pools.share(follower, 0, rng.randint(0, min(starts[0], starts[follower]) // block_size))
    pools.fill(starts)
    window, cap = rng.choice([None, None, 1, 5, 40]), rng.choice([None, None, 3.0])
    sinks = rng.choice([None, 2 * torch.randn(kv_heads * group)])
    due, found, _ = pools.compute(starts, scale=dim**-0.5, window=window, cap=cap, sinks=sinks)
    torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_changes_a_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    dim, kv_heads, group = rng.choice([20, 64, 128]), rng.choice([1, 2]), rng.choice([1, 3, 50])
    longest = rng.choice([300, 1500])
    lengths = [rng.randint(60, longest) for _ in range(5)]
    starts = [rng.choice([length - 1, length - rng.randint(1, 60)]) for length in lengths]
    window, dtype, block_size = (
        rng.choice([None, None, 200]),
        rng.choice(DTYPES),
        rng.choice([16, 16, 32, 24, 128, 272]),
    )
    outs: list[Tensor] = []
    for sharing, split_tokens, num_threads in [("never", 0, 1), ("always", 0, 1), ("never", 16, 4), ("always", 256, 8)]:
        monkeypatch.setattr("headstart.model.attention.cpu.num_kernel_threads", lambda count=num_threads: count)
        settings = {"dtype": dtype, "block_size": block_size, "sharing": sharing, "split_tokens": split_tokens}
        pools = Pools(lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, seed=seed, **settings)
        for follower in range(1, 5):
            pools.share(follower, 0, min(starts[0], starts[follower]) // block_size * 3 // 4)
        pools.fill(starts)
        due, found, _ = pools.compute(starts, scale=dim**-0.5, window=window, sinks=torch.ones(kv_heads * group))
        torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])
        outs.append(found)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("sharing", ["never", "always"])
@pytest.mark.parametrize("sink", [None, 0.5, 90.0, -90.0])  # none, one that counts, one above all scores, one below
def test_outputs_and_log_sum_exps_equal_fp64(sharing: str, sink: float | None) -> None:
    sinks = None if sink is None else sink + torch.arange(6) / 8
    pools = Pools([70, 33, 90, 16], heads=6, kv_heads=2, dim=24, sharing=sharing, split_tokens=16)
    pools.share(2, 0, 3)
    starts = [69, 0, 60, 7]
    pools.fill(starts)
    step, (q, k, v) = pools.step(starts, pools.lengths), pools.rows(starts, pools.lengths)
    lse = torch.empty(q.shape[:2])
    found = pools.own.begin_step(step)(1, q, k, v, scale=0.3, lse=lse, sinks=sinks)
    due, due_lse = naive(pools, starts, 0.3, sinks)
    torch.testing.assert_close(found.double(), due, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), due_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_vanish_leave_the_others(dtype: torch.dtype) -> None:
    """Most weights are below 2^-126, and so are the factors of most segments."""
    pools = Pools([700, 40], heads=6, kv_heads=2, dim=64, dtype=dtype)
    starts = [600, 0]
    pools.fill(starts)
    step, (q, k, v) = pools.step(starts, pools.lengths), pools.rows(starts, pools.lengths)
    lse = torch.empty(q.shape[:2])
    found = pools.own.begin_step(step)(1, q, k, v, scale=12.0, lse=lse)
    due, due_lse = naive(pools, starts, 12.0, None)
    torch.testing.assert_close(found.double(), due, atol=10 * ATOL[dtype], rtol=10 * ATOL[dtype])
    torch.testing.assert_close(lse.double(), due_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_row_split_between_threads_equals_the_whole_one(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.model.attention.cpu.num_kernel_threads", lambda: 4)
    monkeypatch.setattr("headstart.model.packed_kv.num_kernel_threads", lambda: threads)
    pools = Pools([3000], heads=4, kv_heads=2, dim=64, dtype=dtype)
    pools.fill([2990])
    due, found, step = pools.compute([2990], scale=0.2)
    assert step.plan(None, 2).head.num_slots >= 20  # ten tokens in two parts at least
    torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_several_levels_read_shared_blocks_once_and_exactly(dtype: torch.dtype) -> None:
    lengths = [200, 210, 205, 199, 100, 60, 80, 80]
    outs: list[Tensor] = []
    for sharing in ("never", "always"):
        pools = Pools(lengths, heads=6, kv_heads=2, dim=32, dtype=dtype, sharing=sharing, seed=4)
        for follower, num_blocks in ((1, 10), (2, 5), (3, 5), (4, 5), (7, 5)):
            pools.share(follower, 6 if follower == 7 else 0, num_blocks)
        starts = [199, 209, 204, 190, 99, 59, 79, 79]  # row 3 is a prefill; 6 and 7 are twins to the last token
        pools.fill(starts)
        due, found, step = pools.compute(starts, scale=0.2)
        torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])
        outs.append(found)
        plan = step.plan(None, 3)
        assert (plan.head.num_groups, plan.head.grouped_blocks) == ((0, 0) if sharing == "never" else (3, 12))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "grouped"), [(300, 8), (130, 4), (120, 0), (40, 0)])
def test_a_window_is_grouped_in_the_segments_that_all_see_whole(dtype: torch.dtype, window: int, grouped: int) -> None:
    lengths = [164, 175, 170, 189]
    outs: list[Tensor] = []
    for sharing in ("never", "always"):
        pools = Pools(lengths, heads=6, kv_heads=2, dim=32, dtype=dtype, sharing=sharing, seed=5)
        for follower in (1, 2, 3):
            pools.share(follower, 0, 10)
        starts = [163, 174, 160, 188]  # of a window of 130 the last sees 59 on: blocks 4 to 7, and 5 slots of 3
        pools.fill(starts)
        due, found, step = pools.compute(starts, scale=0.2, window=window, sinks=torch.ones(6))
        torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])
        outs.append(found)
        assert step.plan(window, 3).head.grouped_blocks == (0 if sharing == "never" else grouped)
    assert torch.equal(outs[0], outs[1])


def test_a_grouped_window_forgets_poison_that_left_it() -> None:
    pools = Pools([150, 190], heads=4, kv_heads=2, dim=16, sharing="always")
    pools.share(1, 0, 9)
    pools.fill([149, 189])
    poison(pools.own, pools.tables[0][3], slice(0, 6))  # positions 48 to 53; the second sees 54 on
    _, found, step = pools.compute([149, 189], scale=1.0, window=136)
    assert step.plan(136, 2).head.grouped_blocks == 4  # 4 to 7
    assert found.isfinite().flatten(1).all(1).tolist() == [False, True]


def test_a_group_is_made_where_it_saves_more_than_it_costs() -> None:
    def groups(rows: int, blocks: int, heads: int) -> int:
        lengths = [blocks * 16 + 5] * rows
        pools = Pools(lengths, heads=heads, kv_heads=2, dim=16)
        for follower in range(1, rows):
            pools.share(follower, 0, blocks)
        step = pools.own.begin_step(pools.step([length - 1 for length in lengths], lengths))
        return step.plan(None, heads // 2).head.num_groups

    assert groups(32, 64, 2) == 1  # one row per kv head: a tile is hardly filled
    assert groups(2, 1, 2) == 0
    assert groups(2, 64, 12) == 0  # six rows of one sequence fill a tile already


def test_prefixes_of_prefills_are_grouped_only_with_rows_to_fill() -> None:
    pools = Pools([300] * 4, heads=4, kv_heads=2, dim=16)
    for follower in (1, 2, 3):
        pools.share(follower, 0, 10)
    step = pools.own.begin_step(pools.step([160] * 4, [300] * 4))
    assert step.plan(None, 2).head.num_groups == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [16, 8])
def test_what_no_row_sees_never_matters(dtype: torch.dtype, window: int | None, block_size: int) -> None:
    lengths, starts = [40, 57, 130, 16], [39, 30, 129, 0]
    pools = Pools(lengths, heads=6, kv_heads=2, dim=48, dtype=dtype, block_size=block_size)
    for block in range(pools.num_blocks):
        poison(pools.own, block)
    pools.fill(starts)  # poison stays in unused blocks, in block 0 and behind each sequence's last token
    due, found, _ = pools.compute(starts, scale=0.2, window=window)
    torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=ATOL[dtype])


@pytest.mark.parametrize("sharing", ["never", "always"])
def test_a_poisoned_block_reaches_only_the_rows_that_read_it(sharing: str) -> None:
    pools = Pools([40, 50, 80, 90], heads=4, kv_heads=2, dim=16, sharing=sharing)
    pools.share(3, 2, 3)
    starts = [39, 49, 79, 89]
    pools.fill(starts)
    poison(pools.own, pools.tables[1][1], slice(3, 4))
    _, found, _ = pools.compute(starts, scale=1.0)
    assert found.isfinite().flatten(1).all(1).tolist() == [True, False, True, True]


def test_a_window_forgets_poison_that_left_it() -> None:
    pools = Pools([100], heads=2, kv_heads=1, dim=16)
    pools.fill([99])
    poison(pools.own, pools.tables[0][4])  # positions 64 to 79
    assert pools.compute([99], scale=1.0, window=20)[1].isfinite().all()
    assert not pools.compute([99], scale=1.0, window=21)[1].isfinite().all()


def test_queries_keys_and_values_may_be_slices_of_wider_rows() -> None:
    pools = Pools([50], heads=4, kv_heads=2, dim=32)
    step, (q, k, v) = pools.step([0], [50]), pools.rows([0], [50])
    wide = torch.cat((q, k, v), dim=1)
    slices = wide.split((4, 2, 2), dim=1)
    due = pools.reference.begin_step(step)(1, q, k, v, scale=0.2)
    torch.testing.assert_close(pools.own.begin_step(step)(1, *slices, scale=0.2), due, atol=1e-5, rtol=1e-5)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(pools.own.begin_step(step)(1, *turned, scale=0.2), due, atol=1e-5, rtol=1e-5)


def test_what_is_out_of_bounds_is_refused_before_the_kernels() -> None:
    pools = Pools([40, 20], heads=4, kv_heads=2, dim=16)
    good, (q, k, v) = pools.step([39, 0], [40, 20]), pools.rows([39, 0], [40, 20])
    attend = pools.own.begin_step(good)
    with pytest.raises(ValueError, match="do not go with"):
        attend(1, q[:5], k, v, scale=1.0)
    with pytest.raises(ValueError, match="keys and values must be"):
        attend(1, q, k[:, :, :8], v, scale=1.0)
    with pytest.raises(ValueError, match="queries are torch"):
        attend(1, q.double(), k, v, scale=1.0)
    with pytest.raises(ValueError, match="layer 2 is not one of 2"):
        attend(2, q, k, v, scale=1.0)
    with pytest.raises(ValueError, match="window 0"):
        attend(1, q, k, v, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"sinks must be contiguous fp32 \[4\], got torch.float32 \[2\]"):
        attend(1, q, k, v, scale=1.0, sinks=torch.zeros(2))
    for tables, message in (([[1], [2, 3]], "too short"), ([[1, 2, 99], [3, 4]], "outside")):
        wrong = replace(  # its writes stay good
            good,
            kv_indptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            kv_indices=np.array([block for table in tables for block in table], np.int32),
        )
        with pytest.raises(ValueError, match=message):
            pools.own.begin_step(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_outside_and_nothing_read_that_lies_beside(dtype: torch.dtype) -> None:
    pools = Pools([70, 33, 16, 200], heads=6, kv_heads=2, dim=40, dtype=dtype, sharing="always", split_tokens=16)
    pools.share(3, 0, 2)
    starts = [69, 0, 3, 40]
    pools.fill(starts)
    step = pools.step(starts, pools.lengths)
    due = pools.reference.begin_step(step)(1, *pools.rows(starts, pools.lengths), scale=0.2, sinks=torch.ones(6))
    kv, guard = pools.own.kv, 1 << 12
    words = np.full(kv.pool.size + 2 * guard, 0x7FC07FC0, np.uint32)  # NaN in bf16; in fp32, too
    words[guard:-guard] = kv.pool.ravel()
    kv.pool = words[guard:-guard].reshape(kv.pool.shape)
    rows = [_guarded(x) for x in pools.rows(starts, pools.lengths)]
    lse = _guarded(torch.zeros(len(rows[0]), 6))
    sinks = _guarded(torch.ones(6))
    found = pools.own.begin_step(step)(1, *rows, scale=0.2, lse=lse, sinks=sinks)
    torch.testing.assert_close(found, due, atol=ATOL[dtype], rtol=0.01)
    assert (words[:guard] == 0x7FC07FC0).all() and (words[-guard:] == 0x7FC07FC0).all()
    for inner in (*rows, lse, sinks):
        assert inner.isfinite().all()
        assert inner._base is not None and int(inner._base.isnan().sum()) == 2 * 4096


def _guarded(rows: Tensor) -> Tensor:
    """A copy of `rows` with NaN before and behind it in memory."""
    around = torch.full((rows.numel() + 2 * 4096,), float("nan"), dtype=rows.dtype)
    inner = around[4096:-4096].view(rows.shape)
    inner.copy_(rows)
    return inner


def test_shapes_that_the_kernels_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(dim: int, dtype: torch.dtype) -> CPUAttention:
        return CPUAttention(TokenKVShape(1, 1, dim), num_blocks=2, block_size=16, dtype=dtype, device=CPU)

    with pytest.raises(ConfigError, match="head size 513 is more than the 512"):
        make(513, torch.float32)
    with pytest.raises(ConfigError, match="do not compute in"):
        make(64, torch.float16)
    assert base.resolve_backend("auto", "cpu", 512) == "cpu"
    assert base.resolve_backend("auto", "cpu", 513) == "reference"
    monkeypatch.setattr(
        "headstart.model.attention.cpu.find_kernels", lambda: load.KernelSearchResult(None, "none: tried")
    )
    monkeypatch.setattr(base, "find_kernels", lambda: load.KernelSearchResult(None, "none: tried"))
    assert base.resolve_backend("auto") == "reference"
    with pytest.raises(ConfigError, match="needs compiled kernels"):
        make(64, torch.float32)
