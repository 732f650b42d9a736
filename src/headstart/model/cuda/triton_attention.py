"""Attention over work items in Triton: prefill tiles, split decodes and shared prefixes in one kernel.

Keys of a partial result are cut at fixed multiples counted from position 0 (step_plan.py), so a partial result is a
function of its own row. Partial results are normalised and carry their log-sum-exp (base 2); they are merged in the
order of their keys, by the last program of a row or by a launch of its own, with the same code.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.model.cuda.step_plan import ITEM
from headstart.model.cuda.triton_rotary import launch_options, rotated

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [blocks, Hkv, page, D] each, of any block stride
LOG2_E = tl.constexpr(1.4426950408889634)
_PARTS_AT_ONCE = 8  # partial results of a row that are merged together


class Scoring(NamedTuple):
    """Parameters of the attention scores of a layer; see Attend."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq], float32


class Shape(NamedTuple):
    """How a launch is cut. `tile_rows`: query rows of a program; `tile_keys`: keys of an iteration."""

    tile_rows: int
    tile_keys: int = 64
    warps: int = 4
    stages: int = 2


@triton.jit
def _fold(
    query, top, total, sums, start, end, position, table, keys, values, head_at, block_stride, scale, softcap, window,
    DIM: tl.constexpr, POWER: tl.constexpr, PAGE: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, start + TILE_N) to a running softmax; with MASKED those before `end` that a row sees."""
    n = start + tl.arange(0, TILE_N)
    d = tl.arange(0, POWER)
    inside = n < end
    if MASKED:
        page = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(table + n // PAGE).to(tl.int64)
    cell = page * block_stride + head_at + (n % PAGE) * DIM
    if MASKED or POWER != DIM:
        there = (d < DIM)[None, :] & (n >= 0)[:, None]
        if MASKED:
            there = there & inside[:, None]
        key = tl.load(keys + cell[:, None] + d[None, :], mask=there, other=0.0)
        value = tl.load(values + cell[:, None] + d[None, :], mask=there, other=0.0)
    else:
        key = tl.load(keys + cell[:, None] + d[None, :])
        value = tl.load(values + cell[:, None] + d[None, :])
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:  # c * tanh(score / c)
        score = softcap - 2 * softcap / (tl.exp2(score * (2 * LOG2_E / softcap)) + 1)
    score = score * LOG2_E
    if MASKED:
        seen = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight, 1)
    sums = tl.dot(weight.to(value.dtype), value, sums * fade[:, None], input_precision="ieee")
    return highest, total, sums


@triton.jit
def _walk(
    query, begin, end, lowest, position, table, keys, values, head_at, block_stride, scale, softcap, window,
    TILE_M: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, PAGE: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return (result [M, D], log-sum-exp [M]) over the keys [begin, end); `lowest` is the first position of the rows.

    Keys that all rows see need no mask: only the last tiles of a causal range have one.
    """
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    sums = tl.zeros([TILE_M, POWER], tl.float32)
    whole = tl.maximum(begin, tl.minimum(end, lowest + 1) // TILE_N * TILE_N)
    if WINDOW:
        begin = tl.maximum(begin, (lowest - window + 1) // TILE_N * TILE_N)
        whole = begin
    for start in range(begin, whole, TILE_N):
        top, total, sums = _fold(
            query, top, total, sums, start, end, position, table, keys, values, head_at, block_stride, scale, softcap,
            window, DIM, POWER, PAGE, TILE_N, False, WINDOW, SOFTCAP,
        )  # fmt: skip
    for start in range(whole, end, TILE_N):
        top, total, sums = _fold(
            query, top, total, sums, start, end, position, table, keys, values, head_at, block_stride, scale, softcap,
            window, DIM, POWER, PAGE, TILE_N, True, WINDOW, SOFTCAP,
        )  # fmt: skip
    some = total > 0
    result = sums / tl.where(some, total, 1.0)[:, None]
    return result, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def _join(top, total, sums, lse, result):
    """Add one partial result of each row to a running sum of them, as in `_merged_row`."""
    highest = tl.maximum(top, lse)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight, fade = tl.exp2(lse - base), tl.exp2(top - base)
    return highest, total * fade + weight, sums * fade[:, None] + result * weight[:, None]


@triton.jit
def _merged_row(
    part_out, part_lse, sinks, first, end, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Return the result [D] of one row and head from its parts [first, end)."""
    d = tl.arange(0, POWER)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([POWER], tl.float32)
    for start in range(first, end, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        there = part < end
        at = part.to(tl.int64) * HEADS + head
        lse = tl.load(part_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        mask = there[:, None] & (d < DIM)[None, :]
        found = tl.load(part_out + at[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(found * weight[:, None], 0)
        top = highest
    if SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - top)
    return sums / total


@triton.jit
def _merge_last(
    arrived, part_out, part_lse, sinks, out, token, first, count, unit, head, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, POWER: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Count a finished part of (row, kv head) `unit`; the last one merges the row's heads, and resets the count."""
    tl.debug_barrier()  # all threads have stored their part
    if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == count - 1:
        d = tl.arange(0, POWER)
        for index in range(GROUP):
            query_head = head * GROUP + index
            result = _merged_row(
                part_out, part_lse, sinks, first, first + count, query_head, HEADS, DIM, POWER, AT_ONCE, SINKS
            )
            at = out + (token.to(tl.int64) * HEADS + query_head) * DIM + d
            tl.store(at, result.to(out.dtype.element_ty), mask=d < DIM)
        tl.store(arrived + unit, 0)


@triton.jit
def _attend(
    queries, keys, values, out, part_out, part_lse, arrived, sinks, meta, positions, singles, scale, softcap, window,
    q_stride, block_stride, KVS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr,
    PAGE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, SINGLE: tl.constexpr, LAST: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute work items; each program takes every n-th pair of an item and a kv head.

    A single is one token, whose result is part `part`. A tile has entries (token, part); a part below 0 means that the
    result is whole, and goes to `out`. LAST: the last part of a single merges its row. SPLIT: whole results are sums of
    partial ones of SPLIT keys, as a decode of the same row would be.
    """
    HEADS: tl.constexpr = KVS * GROUP
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    units = tl.load(meta + (0 if SINGLE else 1)) * KVS
    if SINGLE:
        items = singles
        entries = singles
    else:
        items = meta + tl.load(meta + 2)
        entries = meta + tl.load(meta + 3)
    m = tl.arange(0, TILE_M)
    d = tl.arange(0, POWER)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = items + (unit // KVS) * FIELDS
        head = unit % KVS
        table, begin, end = meta + tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        if SINGLE:
            real = m < GROUP
            own = tl.load(item)
            token = own + tl.zeros([TILE_M], tl.int32)
            part = tl.load(item + 1) + tl.zeros([TILE_M], tl.int32)
            lowest = tl.load(positions + own)
            position = lowest + tl.zeros([TILE_M], tl.int32)
        else:
            real = m // GROUP < tl.load(item + 1)
            entry = entries + 2 * (tl.load(item) + m // GROUP)
            token = tl.load(entry, mask=real, other=0)
            part = tl.load(entry + 1, mask=real, other=0)
            position = tl.load(positions + token, mask=real, other=2147483647)
            lowest = tl.min(position, 0)
            position = tl.where(real, position, end)
        query_head = head * GROUP + m % GROUP
        q_at = token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * DIM + d[None, :]
        query = tl.load(queries + q_at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
        head_at = head * (PAGE * DIM)
        if SPLIT == 0 or SINGLE:
            result, lse = _walk(
                query, begin, end, lowest, position, table, keys, values, head_at, block_stride, scale, softcap, window,
                TILE_M, DIM, POWER, PAGE, TILE_N, WINDOW, SOFTCAP,
            )  # fmt: skip
        else:
            lse = tl.full([TILE_M], float("-inf"), tl.float32)
            total = tl.zeros([TILE_M], tl.float32)
            result = tl.zeros([TILE_M, POWER], tl.float32)
            for split in range(begin, end, SPLIT):
                one, one_lse = _walk(
                    query, split, tl.minimum(split + SPLIT, end), lowest, position, table, keys, values, head_at,
                    block_stride, scale, softcap, window, TILE_M, DIM, POWER, PAGE, TILE_N, WINDOW, SOFTCAP,
                )  # fmt: skip
                lse, total, result = _join(lse, total, result, one_lse, one)
            some = total > 0
            result = result / tl.where(some, total, 1.0)[:, None]
            lse = tl.where(some, lse + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        row = part.to(tl.int64) * HEADS + query_head
        is_part = real & (part >= 0)
        inside = (d < DIM)[None, :]
        tl.store(part_out + row[:, None] * DIM + d[None, :], result, mask=is_part[:, None] & inside)
        tl.store(part_lse + row, lse, mask=is_part)
        if not SINGLE:
            if SINKS:
                sink = tl.load(sinks + query_head, mask=real, other=0.0) * LOG2_E
                result = result / (1 + tl.exp2(sink - lse))[:, None]
            whole = (real & (part < 0))[:, None] & inside
            o_at = (token.to(tl.int64)[:, None] * HEADS + query_head[:, None]) * DIM + d[None, :]
            tl.store(out + o_at, result.to(out.dtype.element_ty), mask=whole)
        elif LAST:
            first, count = tl.load(item + 5), tl.load(item + 6)
            _merge_last(
                arrived, part_out, part_lse, sinks, out, own, first, count, own * KVS + head, head,
                GROUP, HEADS, DIM, POWER, AT_ONCE, SINKS,
            )  # fmt: skip


@triton.jit
def _attend_one(
    qkv, keys, values, out, part_out, part_lse, arrived, meta, positions, slots, singles, cosines, sines, norms, eps,
    scale, window, block_stride, KVS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    POWER: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    NORM: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do for a step of one token what `rotate_and_append`, `_attend` and merging do: one launch instead of three.

    Each program rotates the queries of its kv head; that of the row's last part stores the new key and value first.
    """
    HEADS: tl.constexpr = KVS * GROUP
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    units = tl.load(meta) * KVS
    position, slot = tl.load(positions), tl.load(slots).to(tl.int64)
    m = tl.arange(0, TILE_M)
    d = tl.arange(0, POWER)
    inside = (d < DIM)[None, :]
    real = m < GROUP
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = singles + (unit // KVS) * FIELDS
        head = unit % KVS
        part, table = tl.load(item + 1), meta + tl.load(item + 2)
        begin, end = tl.load(item + 3), tl.load(item + 4)
        first, count = tl.load(item + 5), tl.load(item + 6)
        head_at = head * (PAGE * DIM)
        if (part == first + count - 1) & (slot >= 0):
            one = tl.arange(0, 1)
            key = rotated(
                qkv + (HEADS + head + one)[:, None] * DIM, position + one[:, None], cosines, sines, norms + DIM, eps,
                one[:, None] >= 0, DIM, POWER, ROTATED, NORM,
            )  # fmt: skip
            value = tl.load(qkv + (HEADS + KVS + head + one)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
            cell = (slot // PAGE) * block_stride + head_at + (slot % PAGE) * DIM + d[None, :]
            tl.store(keys + cell, key, mask=inside)
            tl.store(values + cell, value, mask=inside)
            tl.debug_barrier()  # this program reads them again below
        query_head = head * GROUP + m
        query = rotated(
            qkv + query_head[:, None] * DIM, position + m[:, None] * 0, cosines, sines, norms, eps,
            real[:, None], DIM, POWER, ROTATED, NORM,
        )  # fmt: skip
        result, lse = _walk(
            query, begin, end, position, position + m * 0, table, keys, values, head_at, block_stride, scale, 1.0,
            window, TILE_M, DIM, POWER, PAGE, TILE_N, WINDOW, False,
        )  # fmt: skip
        row = part.to(tl.int64) * HEADS + query_head
        tl.store(part_out + row[:, None] * DIM + d[None, :], result, mask=real[:, None] & inside)
        tl.store(part_lse + row, lse, mask=real)
        _merge_last(
            arrived, part_out, part_lse, part_lse, out, tl.load(item), first, count, head, head,
            GROUP, HEADS, DIM, POWER, AT_ONCE, False,
        )  # fmt: skip


@triton.jit
def _merge(
    part_out, part_lse, sinks, out, tokens, firsts, HEADS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr,
    AT_ONCE: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts [firsts[i], firsts[i + 1]) of row tokens[i]; a row without parts is left alone."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + row).to(tl.int64)
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    if end > first:
        d = tl.arange(0, POWER)
        result = _merged_row(part_out, part_lse, sinks, first, end, head, HEADS, DIM, POWER, AT_ONCE, SINKS)
        tl.store(out + (token * HEADS + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


class Parts(NamedTuple):
    """Partial results on the device, and how many parts of each (row, kv head) have arrived."""

    out: Tensor  # [parts, Hq, D], float32
    lse: Tensor  # [parts, Hq], float32
    arrived: Tensor  # [rows * Hkv], int32; zero between launches


def attend(
    queries: Tensor,
    kv: KV,
    out: Tensor,
    parts: Parts,
    meta: Tensor,
    positions: Tensor,
    singles: Tensor,
    scoring: Scoring,
    shape: Shape,
    *,
    single: bool,
    programs: int,
    last: bool = False,
    split: int = 0,
    pdl: bool = False,
) -> None:
    """Run the singles or the tiles of the step in `meta`; `queries` are rows of Hq * D or more, `out` is [T, Hq, D].

    `last`: the last part of each single merges its row, so that no `merge` follows. `split`: see `_attend`.
    """
    _, kvs, page, dim = kv[0].shape
    group = out.shape[1] // kvs
    sinks = parts.lse if scoring.sinks is None else scoring.sinks
    _attend[(programs,)](
        queries, *kv, out, parts.out, parts.lse, parts.arrived, sinks, meta, positions, singles, scoring.scale,
        scoring.softcap or 1.0, scoring.window or 0, queries.stride(0), kv[0].stride(0), kvs, group, dim,
        max(16, triton.next_power_of_2(dim)), page, max(shape.tile_rows, triton.next_power_of_2(group)),
        shape.tile_keys, single, last, split, scoring.window is not None, scoring.softcap is not None,
        scoring.sinks is not None, ITEM, _PARTS_AT_ONCE, pdl,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(pdl=pdl),
    )  # fmt: skip


def attend_one(
    qkv: Tensor,
    kv: KV,
    out: Tensor,
    parts: Parts,
    meta: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    norms: Tensor | None,
    eps: float,
    scoring: Scoring,
    shape: Shape,
    *,
    programs: int,
    pdl: bool = False,
) -> None:
    """Compute the attention `out` [1, Hq, D] of a step of one token from its `qkv` row; `step` is its position, slot
    and singles.
    """
    _, kvs, page, dim = kv[0].shape
    group = out.shape[1] // kvs
    assert scoring.softcap is None and scoring.sinks is None, scoring
    _attend_one[(programs,)](
        qkv, *kv, out, *parts, meta, *step, *angles, qkv if norms is None else norms, eps, scoring.scale,
        scoring.window or 0, kv[0].stride(0), kvs, group, dim, max(16, triton.next_power_of_2(dim)),
        2 * angles[0].shape[1], page, max(shape.tile_rows, triton.next_power_of_2(group)), shape.tile_keys,
        norms is not None, scoring.window is not None, ITEM, _PARTS_AT_ONCE, pdl,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(pdl=pdl),
    )  # fmt: skip


def merge(
    parts: Parts, out: Tensor, tokens: Tensor, firsts: Tensor, sinks: Tensor | None = None, *, pdl: bool = False
) -> None:
    """Write the rows `tokens` of `out` [T, Hq, D] from their parts."""
    _, heads, dim = out.shape
    _merge[(len(tokens), heads)](
        parts.out, parts.lse, parts.lse if sinks is None else sinks, out, tokens, firsts, heads, dim,
        max(16, triton.next_power_of_2(dim)), _PARTS_AT_ONCE, sinks is not None, pdl,
        num_warps=2, **launch_options(pdl=pdl),
    )  # fmt: skip


def make_parts(count: int, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> Parts:
    """Return room for `count` partial results of steps of at most `rows` singles."""
    out = torch.zeros(count, heads, dim, device=device)
    arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
    return Parts(out, torch.zeros(count, heads, device=device), arrived)
