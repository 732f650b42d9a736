"""Attention over work items in Triton: prefill tiles, split decodes and shared prefixes in one kernel.

Keys of a partial result are cut at fixed multiples counted from position 0 (step_plan.py), so a partial result is a
function of its own row. Partial results are normalised and carry their log-sum-exp (base 2); they are merged in the
order of their keys by a launch of its own: a row's last program would have to wait for the stores of the others, which
takes longer (measured) except in a step of one token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.model.cuda.step_plan import ITEM
from headstart.model.cuda.triton_rotary import load_normed_rotated_heads, pdl_launch_options

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [blocks, Hkv, page, D] each, of any block stride
LOG2_E = tl.constexpr(1.4426950408889634)
PARTS_BYTES = 1 << 28  # of partial results
_SHARED_MEMORY = 0.75  # share for keys and values; the rest is the compiler's
_MERGE_LOADS = 4096  # elements of partial results that are read together when they are merged
_MERGE_COLUMNS = 2048  # the most elements of a row that a program merges
_MERGERS = 8192  # programs of a merge from which on each takes more heads, and waits for more loads


class LayerScoring(NamedTuple):
    """Parameters of the attention scores of a layer; see Attend."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq], float32


class TileShape(NamedTuple):
    """The tiles of a launch. `tile_rows`: query rows of a program; `tile_keys`: keys of an iteration."""

    tile_rows: int
    tile_keys: int = 64
    warps: int = 4
    stages: int = 2


@triton.jit
def _load_keys(
    start, end, table, keys, values, head_at, block_stride,
    DIM: tl.constexpr, POWER: tl.constexpr, PAGE: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the keys and values [start, start + TILE_N), [N, D]; with MASKED zeros from `end` on."""
    n = start + tl.arange(0, TILE_N)
    d = tl.arange(0, POWER)
    inside = n < end
    if MASKED:
        page = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(table + n // PAGE).to(tl.int64)
    at = (page * block_stride + head_at + (n % PAGE) * DIM)[:, None] + d[None, :]
    if MASKED or POWER != DIM:
        there = (d < DIM)[None, :] & (n >= 0)[:, None]
        if MASKED:
            there = there & inside[:, None]
        key = tl.load(keys + at, mask=there, other=0.0)
        value = tl.load(values + at, mask=there, other=0.0)
    else:
        key = tl.load(keys + at)
        value = tl.load(values + at)
    return key, value


@triton.jit
def _fold(
    query, key, value, top, total, sums, start, end, position, scale, softcap, window,
    TILE_N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add keys from `start` on to a running softmax; with MASKED those before `end` that a row sees."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:  # c * tanh(score / c)
        score = softcap - 2 * softcap / (tl.exp2(score * (2 * LOG2_E / softcap)) + 1)
    score = score * LOG2_E
    if MASKED:
        n = start + tl.arange(0, TILE_N)
        seen = (n < end)[None, :] & (n[None, :] <= position[:, None])
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
    query, top, total, sums, begin, end, lowest, position, table, keys, values, head_at, block_stride, scale, softcap,
    window, DIM: tl.constexpr, POWER: tl.constexpr, PAGE: tl.constexpr, TILE_N: tl.constexpr, EXACT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return (result [M, D], log-sum-exp [M]) of a running softmax and the keys [begin, end).

    `lowest` is the first position of the rows. Keys that all rows see need no mask: only the last tiles of a causal
    range have one. EXACT: all have, since without it a compiler may join operations that it does not join with it.
    """
    whole = tl.maximum(begin, tl.minimum(end, lowest + 1) // TILE_N * TILE_N)
    if WINDOW:
        begin = tl.maximum(begin, (lowest - window + 1) // TILE_N * TILE_N)
    if WINDOW or EXACT:
        whole = begin
    for start in range(begin, whole, TILE_N):
        key, value = _load_keys(
            start, end, table, keys, values, head_at, block_stride, DIM, POWER, PAGE, TILE_N, False
        )  # fmt: skip
        top, total, sums = _fold(
            query, key, value, top, total, sums, start, end, position, scale, softcap, window,
            TILE_N, False, WINDOW, SOFTCAP,
        )  # fmt: skip
    for start in range(whole, end, TILE_N):
        key, value = _load_keys(start, end, table, keys, values, head_at, block_stride, DIM, POWER, PAGE, TILE_N, True)
        top, total, sums = _fold(
            query, key, value, top, total, sums, start, end, position, scale, softcap, window,
            TILE_N, True, WINDOW, SOFTCAP,
        )  # fmt: skip
    some = total > 0
    result = sums / tl.where(some, total, 1.0)[:, None]
    return result, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def _join(top, total, sums, lse, result):
    """Add one partial result to a running sum, element by element, so that its bits are those of any other layout."""
    highest = tl.maximum(top, lse)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight, fade = tl.exp2(lse - base), tl.exp2(top - base)
    return highest, tl.fma(total, fade, weight), tl.fma(sums, fade, result * weight)


@triton.jit
def _merged(
    part_out, part_lse, sinks, first, end, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return the results [GROUP * POWER] of GROUP heads of one row from its parts [first, end), in their order.

    AT_ONCE parts are loaded before the first of them is used, so that their latencies are one: ptxas moved single loads
    to their use (Triton 3.6). It still does where a program merges several heads and has few registers.
    """
    column = tl.arange(0, GROUP * POWER)
    own, d = head + column // POWER, column % POWER
    inside = (d < DIM) & (own < HEADS)
    top = tl.full([GROUP * POWER], float("-inf"), tl.float32)
    total = tl.zeros([GROUP * POWER], tl.float32)
    sums = tl.zeros([GROUP * POWER], tl.float32)
    for start in range(first, end, AT_ONCE):
        lses, results = (), ()
        for index in tl.static_range(AT_ONCE):
            part = start + index + column * 0
            mask = inside & (part < end)
            at = part.to(tl.int64) * HEADS + own
            lses = lses + (tl.load(part_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg"),)  # noqa: RUF005
            results = results + (tl.load(part_out + at * DIM + d, mask=mask, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for index in tl.static_range(AT_ONCE):
            top, total, sums = _join(top, total, sums, lses[index], results[index])
    if SINKS:
        sink = tl.load(sinks + own, mask=inside, other=0.0)
        total += tl.exp2(tl.fma(sink, tl.full([GROUP * POWER], LOG2_E, tl.float32), -top))
    return sums / total


@triton.jit
def _store_merged(
    part_out, part_lse, sinks, out, token, first, end, head, GROUP: tl.constexpr, POWER_OF_GROUP: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge GROUP heads of one row from `head` on."""
    result = _merged(
        part_out, part_lse, sinks, first, end, head, POWER_OF_GROUP, HEADS, DIM, POWER, SINKS, AT_ONCE
    )  # fmt: skip
    column = tl.arange(0, POWER_OF_GROUP * POWER)
    own, d = column // POWER, column % POWER
    at = (token.to(tl.int64) * HEADS + head + own) * DIM + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(own < GROUP) & (d < DIM))


@triton.jit
def _attend(
    queries, keys, values, out, part_out, part_lse, sinks, meta, positions, singles, scale, softcap, window,
    q_stride, block_stride, KVS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr,
    PAGE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute work items; each program takes every n-th pair of an item and a kv head.

    A single is one token, whose result is part `part`. A tile has entries (token, part); a part below 0 means that the
    result is whole, and goes to `out`. SPLIT: exact; whole results are sums of partial ones of SPLIT keys, as a decode
    of the same row would be.
    """
    HEADS: tl.constexpr = KVS * GROUP
    EXACT: tl.constexpr = SPLIT > 0
    if PDL:
        gdc_launch_dependents()
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
        if PDL:
            gdc_wait()  # the step's array is older than the kernel before this one
        query_head = head * GROUP + m % GROUP
        q_at = token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * DIM + d[None, :]
        query = tl.load(queries + q_at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
        head_at = head * (PAGE * DIM)
        no_top = tl.full([TILE_M], float("-inf"), tl.float32)
        no_total = tl.zeros([TILE_M], tl.float32)
        no_sums = tl.zeros([TILE_M, POWER], tl.float32)
        if SPLIT == 0 or SINGLE:
            result, lse = _walk(
                query, no_top, no_total, no_sums, begin, end, lowest, position, table, keys, values, head_at,
                block_stride, scale, softcap, window, DIM, POWER, PAGE, TILE_N, EXACT, WINDOW, SOFTCAP,
            )  # fmt: skip
        else:
            top = no_top[:, None] + no_sums
            total, sums = no_sums, no_sums
            for split in range(begin, end, SPLIT):
                one, one_lse = _walk(
                    query, no_top, no_total, no_sums, split, tl.minimum(split + SPLIT, end), lowest, position, table,
                    keys, values, head_at, block_stride, scale, softcap, window, DIM, POWER, PAGE, TILE_N, EXACT,
                    WINDOW, SOFTCAP,
                )  # fmt: skip
                top, total, sums = _join(top, total, sums, one_lse[:, None] + no_sums, one)
            result = sums / tl.where(total > 0, total, 1.0)
            lse = tl.max(tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")), 1)
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


@triton.jit
def _attend_one(
    qkv, keys, values, out, part_out, part_lse, arrived, meta, positions, slots, singles, cosines, sines, norms, eps,
    scale, window, block_stride, KVS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    POWER: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    NORM: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr, POWER_OF_GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do for a step of one token what `rotate_and_append_kv`, `_attend` and merging do: one launch instead of three.

    Each program rotates the queries of its kv head; that of the row's last part stores the new key and value first.
    The step's array and the older keys are on their way before the kernel before this one has ended.
    """
    HEADS: tl.constexpr = KVS * GROUP
    if PDL:
        gdc_launch_dependents()
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
        begin_at = begin
        if WINDOW:
            begin_at = tl.maximum(begin, (position - window + 1) // TILE_N * TILE_N)
        old_key, old_value = _load_keys(
            begin_at, end, table, keys, values, head_at, block_stride, DIM, POWER, PAGE, TILE_N, True
        )  # fmt: skip
        if PDL:
            gdc_wait()
        is_last = part == first + count - 1
        if is_last & (slot >= 0):
            one = tl.arange(0, 1)
            key = load_normed_rotated_heads(
                qkv + (HEADS + head + one)[:, None] * DIM, position + one[:, None], cosines, sines, norms + DIM, eps,
                one[:, None] >= 0, DIM, POWER, ROTATED, NORM,
            )  # fmt: skip
            value = tl.load(qkv + (HEADS + KVS + head + one)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
            cell = (slot // PAGE) * block_stride + head_at + (slot % PAGE) * DIM + d[None, :]
            tl.store(keys + cell, key, mask=inside)
            tl.store(values + cell, value, mask=inside)
            tl.debug_barrier()  # this program reads them again
            old_key, old_value = _load_keys(
                begin_at, end, table, keys, values, head_at, block_stride, DIM, POWER, PAGE, TILE_N, True
            )  # fmt: skip
        query_head = head * GROUP + m
        query = load_normed_rotated_heads(
            qkv + query_head[:, None] * DIM, position + m[:, None] * 0, cosines, sines, norms, eps,
            real[:, None], DIM, POWER, ROTATED, NORM,
        )  # fmt: skip
        top = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        sums = tl.zeros([TILE_M, POWER], tl.float32)
        top, total, sums = _fold(
            query, old_key, old_value, top, total, sums, begin_at, end, position + m * 0, scale, 1.0, window,
            TILE_N, True, WINDOW, False,
        )  # fmt: skip
        result, lse = _walk(
            query, top, total, sums, begin_at + TILE_N, end, position, position + m * 0, table, keys, values, head_at,
            block_stride, scale, 1.0, window, DIM, POWER, PAGE, TILE_N, False, WINDOW, False,
        )  # fmt: skip
        row = part.to(tl.int64) * HEADS + query_head
        tl.store(part_out + row[:, None] * DIM + d[None, :], result, mask=real[:, None] & inside)
        tl.store(part_lse + row, lse, mask=real)
        tl.debug_barrier()  # all threads have stored their part
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == count - 1:  # the last part of a kv head merges its heads
            _store_merged(
                part_out, part_lse, part_lse, out, tl.load(item), first, first + count, head * GROUP,
                GROUP, POWER_OF_GROUP, HEADS, DIM, POWER, False, AT_ONCE,
            )  # fmt: skip
            tl.store(arrived + head, 0)


@triton.jit
def _merge(
    part_out, part_lse, sinks, out, tokens, firsts, GROUP: tl.constexpr, POWER_OF_GROUP: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts [firsts[i], firsts[i + 1]) of GROUP heads of row tokens[i]; one without parts is left alone."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1) * GROUP
    token = tl.load(tokens + row).to(tl.int64)
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    if end > first:
        _store_merged(
            part_out, part_lse, sinks, out, token, first, end, head, GROUP, POWER_OF_GROUP, HEADS, DIM, POWER, SINKS,
            AT_ONCE,
        )  # fmt: skip


class PartialResults(NamedTuple):
    """Partial results on the device, and how many parts of each kv head have arrived in a step of one token."""

    out: Tensor  # [parts, Hq, D], float32
    lse: Tensor  # [parts, Hq], float32
    arrived: Tensor  # [Hkv], int32; zero between launches


def launch_attention(
    queries: Tensor,
    kv: KV,
    out: Tensor,
    parts: PartialResults,
    meta: Tensor,
    positions: Tensor,
    singles: Tensor,
    scoring: LayerScoring,
    shape: TileShape,
    *,
    single: bool,
    programs: int,
    split: int = 0,
    pdl: bool = False,
) -> None:
    """Run the singles or the tiles of the step in `meta`; `queries` are rows of Hq * D or more, `out` is [T, Hq, D].

    `split`: see `_attend`.
    """
    _, kvs, page, dim = kv[0].shape
    group = out.shape[1] // kvs
    sinks = parts.lse if scoring.sinks is None else scoring.sinks
    _attend[(programs,)](
        queries, *kv, out, parts.out, parts.lse, sinks, meta, positions, singles, scoring.scale,
        scoring.softcap or 1.0, scoring.window or 0, queries.stride(0), kv[0].stride(0), kvs, group, dim,
        max(16, triton.next_power_of_2(dim)), page, max(shape.tile_rows, triton.next_power_of_2(group)),
        shape.tile_keys, single, split, scoring.window is not None, scoring.softcap is not None,
        scoring.sinks is not None, ITEM, pdl,
        num_warps=shape.warps, num_stages=shape.stages, **pdl_launch_options(pdl=pdl),
        # The variants of an exact kernel must not differ in which products and sums a compiler fuses.
        enable_fp_fusion=split == 0,
    )  # fmt: skip


def launch_single_token_step(
    qkv: Tensor,
    kv: KV,
    out: Tensor,
    parts: PartialResults,
    meta: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    norms: Tensor | None,
    eps: float,
    scoring: LayerScoring,
    shape: TileShape,
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
        norms is not None, scoring.window is not None, ITEM, *_merging(group, dim), pdl,
        num_warps=shape.warps, num_stages=shape.stages, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip


def merge_partial_results(
    parts: PartialResults,
    out: Tensor,
    tokens: Tensor,
    firsts: Tensor,
    sinks: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Write the rows `tokens` of `out` [T, Hq, D] from their parts."""
    _, heads, dim = out.shape
    # Many rows are a graph's, and few of them have parts: fewer programs find out sooner.
    group = 1
    while 2 * group * dim <= _MERGE_COLUMNS and heads % (2 * group) == 0 and len(tokens) * heads > group * _MERGERS:
        group *= 2
    columns, at_once = _merging(group, dim)
    _merge[(len(tokens), heads // group)](
        parts.out, parts.lse, parts.lse if sinks is None else sinks, out, tokens, firsts, group, columns, heads, dim,
        max(16, triton.next_power_of_2(dim)), at_once, sinks is not None, pdl,
        num_warps=2 if group < 4 else 4, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip


def tile_shapes(dim: int, dtype: torch.dtype, shared: int, split_tokens: int = 0) -> tuple[TileShape, TileShape]:
    """Return the shapes of singles and of tiles on a GPU with `shared` bytes of memory for a program.

    Measured on an H100 for heads of 128 in bfloat16; larger heads and float32 have fewer rows and keys.
    """
    row_bytes = max(16, triton.next_power_of_2(dim)) * dtype.itemsize
    most_rows, most_keys, most = (64, 32, 1) if dtype == torch.float32 else (128, 64, 3)
    keys = max(16, min(most_keys, split_tokens or 64, (1 << 14) // row_bytes))  # a part is whole tiles of keys
    stages = max(1, min(most, int(_SHARED_MEMORY * shared) // (2 * keys * row_bytes)))
    rows = max(16, min(most_rows, (1 << 15) // row_bytes))
    return TileShape(16, keys, 4, min(2, stages)), TileShape(rows, keys, 4, stages)


def _merging(group: int, dim: int) -> tuple[int, int]:
    """Return the columns of merged heads, as a power of two, and how many parts are read together."""
    columns = triton.next_power_of_2(group)
    return columns, max(2, min(16, _MERGE_LOADS // (columns * triton.next_power_of_2(dim))))


def max_partial_results(heads: int, dim: int) -> int:
    """Return the number of partial results that there is room for."""
    return max(2048, min(32768, PARTS_BYTES // (4 * heads * dim)))


def allocate_partial_results(count: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> PartialResults:
    """Return room for `count` partial results."""
    out = torch.zeros(count, heads, dim, device=device)
    arrived = torch.zeros(kv_heads, dtype=torch.int32, device=device)
    return PartialResults(out, torch.zeros(count, heads, device=device), arrived)
