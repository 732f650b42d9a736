"""Triton kernels of a decoder layer besides attention: embedding, norms, gates, and products.

Two forms of products beside the library's. A product of one row begins to read weights before the kernel before it has
ended, and takes norm, gate and residual along. The exact product computes a row with the same sums in the same order
whatever the number of rows: K is walked in equal steps by one program per tile, and never split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.model.cuda.triton_rotary import pdl_launch_options

_EXACT_K = 64  # inputs of a step of an exact product


@triton.jit
def _embed(tokens, previous, sampled, table, out, vocab, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    from_row = tl.load(previous + row)
    token = tl.load(tokens + row)
    if from_row >= 0:  # a failed row may have left any number
        token = tl.minimum(tl.maximum(tl.load(sampled + from_row), 0), vocab - 1)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    value = tl.load(table + token.to(tl.int64) * WIDTH + column, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + column, value, mask=inside)


@triton.jit
def _add_rms_norm(
    delta, stream, weight, out, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(stream + at, mask=inside, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(stream + at, row, mask=inside)
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale).to(row.dtype), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    wide = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (wide * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _vector_product(
    x, weight, bias, norm, stream, out, eps, COUNT: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W @ x for one row: norm(x) before; bias, silu(gate) * up or addition to the stream after."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    row = weight + n.to(tl.int64)[:, None] * WIDTH
    there = (n < COUNT)[:, None]
    if PDL:
        gdc_launch_dependents()
    # Weights depend on no earlier kernel: their first tile is on its way while the kernel before this one ends.
    tile = tl.load(row + k[None, :], mask=there & (k < WIDTH)[None, :], other=0.0)
    up_tile = tile
    if GATED:
        up_tile = tl.load(row + COUNT * WIDTH + k[None, :], mask=there & (k < WIDTH)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    scale = 1.0
    if NORM:
        column = tl.arange(0, POWER)
        whole = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / WIDTH + eps)
    sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    ups = tl.zeros([TILE_N, TILE_K], tl.float32)
    for start in range(0, WIDTH, TILE_K):
        here, after = start + k, start + TILE_K + k
        both = there & (after < WIDTH)[None, :]
        next_tile = tl.load(row + after[None, :], mask=both, other=0.0)
        value = tl.load(x + here, mask=here < WIDTH, other=0.0).to(tl.float32)
        if NORM:
            value = value * scale * tl.load(norm + here, mask=here < WIDTH, other=0.0).to(tl.float32)
            value = value.to(x.dtype.element_ty).to(tl.float32)
        sums += tile.to(tl.float32) * value[None, :]
        tile = next_tile
        if GATED:
            next_up = tl.load(row + COUNT * WIDTH + after[None, :], mask=both, other=0.0)
            ups += up_tile.to(tl.float32) * value[None, :]
            up_tile = next_up
    result = tl.sum(sums, 1)
    kind = out.dtype.element_ty
    if BIAS:
        result += tl.load(bias + n, mask=n < COUNT, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if BIAS:
            up += tl.load(bias + COUNT + n, mask=n < COUNT, other=0.0).to(tl.float32)
        gate = result.to(kind).to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = gate * up.to(kind).to(tl.float32)
    if ADD:
        result = result.to(kind).to(tl.float32) + tl.load(stream + n, mask=n < COUNT, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(kind), mask=n < COUNT)


@triton.jit
def _exact_product(
    x, weight, bias, out, rows, COUNT: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    x_at = x + m.to(tl.int64)[:, None] * WIDTH + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, WIDTH, TILE_K):
        left_mask, right_mask = (m < rows)[:, None], (n < COUNT)[:, None]
        if not EVEN:
            left_mask, right_mask = left_mask & (k < WIDTH - start)[None, :], right_mask & (k < WIDTH - start)[None, :]
        left = tl.load(x_at + start, mask=left_mask, other=0.0)
        right = tl.load(w_at + start, mask=right_mask, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + n, mask=n < COUNT, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * COUNT + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < COUNT)[None, :])


def embed_tokens(tokens: Tensor, previous: Tensor, sampled: Tensor, table: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the embeddings [T, hidden] of `tokens` [T], or of `sampled[previous]` where `previous` [T] is not < 0."""
    out = table.new_empty(len(tokens), table.shape[1])
    tile = triton.next_power_of_2(table.shape[1])
    _embed[(len(tokens),)](
        tokens, previous, sampled, table, out, *table.shape, tile, pdl, **pdl_launch_options(pdl=pdl)
    )
    return out


def add_rms_norm(
    stream: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """Add `delta` to `stream` in place, if given; return the normalised rows."""
    out = torch.empty_like(stream)
    rows, width = stream.shape
    tile = triton.next_power_of_2(width)
    given = stream if delta is None else delta
    _add_rms_norm[(rows,)](
        given, stream, weight, out, eps, width, tile, delta is not None, pdl,
        num_warps=8 if tile >= 2048 else 4, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """Return silu(gate) * up of rows [gate | up]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, tile))](gate_up, out, width, tile, pdl, **pdl_launch_options(pdl=pdl))
    return out


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    onto: Tensor | None = None,
    gated: bool = False,
    tiles: tuple[int, int, int] = (4, 2048, 4),
    pdl: bool = False,
) -> Tensor:
    """Return the product of one row; `onto`: it is added to this row in place; `gated`: W holds gate, then up.

    `tiles`: outputs and inputs of an iteration of a program, and its warps.
    """
    count, width = weight.shape
    count = count // 2 if gated else count
    out = x.new_empty(1, count) if onto is None else onto
    tile_n, tile_k, warps = tiles
    _vector_product[(triton.cdiv(count, tile_n),)](
        x, weight, weight if bias is None else bias, x if norm is None else norm[0], out, out,
        0.0 if norm is None else norm[1], count, width, triton.next_power_of_2(width), tile_n,
        min(tile_k, triton.next_power_of_2(width)), norm is not None, gated, onto is not None, bias is not None, pdl,
        num_warps=warps, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip
    return out


def batch_invariant_matmul(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """Return rows @ W^T + b, in `out` if given; a row's bits do not depend on the other rows, nor on their number."""
    (count, width), num_rows = weight.shape, len(rows)
    out = rows.new_empty(num_rows, count) if out is None else out
    wide = rows.dtype == torch.float32
    tile_m, tile_n, warps = (64, 32, 4) if num_rows <= 64 or wide else (128, 128, 8)
    _exact_product[(triton.cdiv(count, tile_n), triton.cdiv(num_rows, tile_m))](
        rows, weight, weight if bias is None else bias, out, num_rows, count, width, tile_m, tile_n, _EXACT_K,
        bias is not None, width % _EXACT_K == 0, pdl, num_warps=warps, num_stages=2 if wide else 4,
        **pdl_launch_options(pdl=pdl),
    )  # fmt: skip
    return out
