"""Norm and rotary embedding of query and key heads in Triton, and the append of keys and values to the pool."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def load_normed_rotated_heads(
    head, position, cosines, sines, norm, eps, there,
    DIM: tl.constexpr, POWER: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return heads [H, D], normalised by `norm` [H or 1, D] and rotated; `head` [H, 1] points to each."""
    HALF: tl.constexpr = ROTATED // 2
    d = tl.arange(0, POWER)[None, :]
    partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTATED, d - HALF, d))
    mask = there & (d < DIM)
    stored = tl.load(head + d, mask=mask, other=0.0)
    x, y = stored.to(tl.float32), tl.load(head + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = (x * scale * tl.load(norm + d, mask=mask, other=0.0).to(tl.float32)).to(stored.dtype).to(tl.float32)
        y = (y * scale * tl.load(norm + partner, mask=mask, other=0.0).to(tl.float32)).to(stored.dtype).to(tl.float32)
    turned = there & (d < ROTATED)
    column = position * HALF + tl.where(d < HALF, d, d - HALF)
    cosine = tl.load(cosines + column, mask=turned, other=1.0)
    sine = tl.load(sines + column, mask=turned, other=0.0)
    return (x * cosine + y * tl.where(d < HALF, -sine, sine)).to(stored.dtype)


@triton.jit
def _rotate_and_append(
    qkv, queries, positions, slots, cosines, sines, norms, keys, values, eps, block_stride, count,
    QUERIES: tl.constexpr, KVS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, ROTATED: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write normalised and rotated queries to `queries`; keys, treated so, and values go to their slots.

    A program has TOKENS tokens and HEADS heads, head by head, so that the tokens of a page are written together.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = (tl.program_id(0) * TOKENS + row % TOKENS).to(tl.int64)
    head = tl.program_id(1) * HEADS + row // TOKENS
    d = tl.arange(0, POWER)[None, :]
    there = (head < QUERIES + 2 * KVS) & (token < count)
    position = tl.load(positions + token, mask=there, other=0)
    slot = tl.load(slots + token, mask=there, other=-1).to(tl.int64)
    is_query, is_value = head < QUERIES, head >= QUERIES + KVS
    source = qkv + token * ((QUERIES + 2 * KVS) * DIM) + head * DIM
    norm = norms + tl.where(is_query, 0, DIM)
    turned = load_normed_rotated_heads(
        source, position, cosines, sines, norm, eps, there & (is_value == 0), DIM, POWER, ROTATED, NORM
    )
    tl.store(queries + (token * QUERIES + head) * DIM + d, turned, mask=there & is_query & (d < DIM))
    kept = there & (slot >= 0) & (d < DIM)
    cell = (slot // PAGE) * block_stride + (slot % PAGE) * DIM + d
    is_key = (head >= QUERIES) & (head < QUERIES + KVS)
    tl.store(keys + cell + (head - QUERIES) * (PAGE * DIM), turned, mask=kept & is_key)
    value = tl.load(source + d, mask=kept & is_value, other=0.0)
    tl.store(values + cell + (head - QUERIES - KVS) * (PAGE * DIM), value, mask=kept & is_value)


def rotate_and_append_kv(
    qkv: Tensor,
    queries: Tensor,
    positions: Tensor,
    slots: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: Tensor | None,
    kv: tuple[Tensor, Tensor],
    eps: float,
    *,
    tokens: int = 1,
    pdl: bool = False,
) -> None:
    """Do so for rows [T, (Hq + 2 Hkv) * D]; `queries` is [T, Hq, D]. A slot below 0 is not written.

    `angles` are the cosines and sines of all positions, [positions, rotary_dim / 2] in float32; `norms` are the weights
    of query and key heads, [2, D]. `tokens`: of a program.
    """
    _, kvs, page, dim = kv[0].shape
    count, heads = queries.shape[1], min(8, triton.next_power_of_2(queries.shape[1] + 2 * kvs))
    _rotate_and_append[(triton.cdiv(len(qkv), tokens), triton.cdiv(count + 2 * kvs, heads))](
        qkv, queries, positions, slots, *angles, qkv if norms is None else norms, *kv, eps, kv[0].stride(0),
        len(qkv), count, kvs, dim, max(16, triton.next_power_of_2(dim)), 2 * angles[0].shape[1], page, heads, tokens,
        norms is not None, pdl, num_warps=2 if tokens == 1 else 4, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip


@triton.jit
def _append(
    keys, values, slots, key_pool, value_pool, key_token, key_head, value_token, value_head, block_stride,
    KVS: tl.constexpr, DIM: tl.constexpr, POWER: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store HEADS heads of the keys and values of one token at its slot; not of one whose slot is below 0."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        d = tl.arange(0, POWER)[None, :]
        there = (head < KVS) & (d < DIM)
        cell = (slot // PAGE) * block_stride + head * (PAGE * DIM) + (slot % PAGE) * DIM + d
        key = tl.load(keys + token * key_token + head * key_head + d, mask=there, other=0.0)
        value = tl.load(values + token * value_token + head * value_head + d, mask=there, other=0.0)
        tl.store(key_pool + cell, key, mask=there)
        tl.store(value_pool + cell, value, mask=there)


def append_kv(keys: Tensor, values: Tensor, slots: Tensor, kv: tuple[Tensor, Tensor], *, pdl: bool) -> None:
    """Store keys and values [T, Hkv, D], whose heads may be anywhere, in one layer of the pool."""
    _, kvs, page, dim = kv[0].shape
    heads = min(8, triton.next_power_of_2(kvs))
    _append[(len(keys), triton.cdiv(kvs, heads))](
        keys, values, slots, *kv, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), kv[0].stride(0),
        kvs, dim, max(16, triton.next_power_of_2(dim)), page, heads, pdl, num_warps=2, **pdl_launch_options(pdl=pdl),
    )  # fmt: skip


def pdl_launch_options(*, pdl: bool) -> dict[str, Any]:
    """Return the option of a programmatic dependent launch: a kernel may begin before the one before it has ended."""
    return {"launch_pdl": True} if pdl else {}
