"""Where a step's KV goes: spans and loose tokens together are exactly the tokens due, each in its slot, bit by bit."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.paged import chunk
from torch import Tensor

from headstart.core.batch import Batch, Chunk
from headstart.model.kv_writes import KVWrites, SlotSpan
from headstart.model.paged_kv import PagedKV, TokenKVShape
from headstart.model.step_inputs import StepInputBounds, build_step_inputs

BLOCK, NUM_BLOCKS = 4, 40
BOUNDS = StepInputBounds(NUM_BLOCKS, BLOCK, vocab_size=100, max_positions=64)
CPU = torch.device("cpu")


class Piece(NamedTuple):
    """A chunk [start, end) whose positions below `write_from` are shared."""

    start: int
    end: int
    write_from: int


def plan(*chunks: Chunk) -> KVWrites:
    step, kept, errors = build_step_inputs(Batch(chunks), BOUNDS, CPU)
    assert step is not None and len(kept) == len(chunks), errors
    return step.writes


def test_a_prompt_of_adjacent_blocks_is_one_span_and_a_ragged_end() -> None:
    writes = plan(chunk(list(range(14)), 0, 14, [5, 6, 7, 9]))
    assert writes.spans == (SlotSpan(0, 12, 20),)
    assert writes.loose is not None and writes.loose.tolist() == [12, 13]
    assert writes.loose_slots.tolist() == [36, 37]


def test_spans_break_where_blocks_are_not_adjacent() -> None:
    writes = plan(chunk(list(range(16)), 0, 16, [5, 6, 8, 7]))
    assert writes.spans == (SlotSpan(0, 8, 20), SlotSpan(8, 12, 32), SlotSpan(12, 16, 28))
    assert writes.loose is not None and len(writes.loose) == 0


def test_a_chunk_that_begins_and_ends_inside_a_block_has_spans_too() -> None:
    decode = chunk(list(range(8)), 7, 8, [1, 2])
    ragged = chunk(list(range(20)), 2, 15, [10, 11, 12, 13, 20])
    writes = plan(decode, ragged)
    assert writes.spans == (SlotSpan(3, 11, 44),)  # positions 4 to 11
    assert writes.loose is not None and writes.loose.tolist() == [0, 1, 2, 11, 12, 13]
    assert writes.loose_slots.tolist() == [11, 42, 43, 52, 53, 54]


def test_shared_blocks_are_in_no_span() -> None:
    writes = plan(
        chunk(list(range(16)), 0, 16, [5, 6, 7, 8], write_from=8), chunk(list(range(8)), 7, 8, [1, 2], write_from=8)
    )
    assert writes.spans == (SlotSpan(8, 16, 28),)
    assert writes.tokens is not None and writes.tokens.tolist() == list(range(8, 16))
    assert writes.loose is not None and len(writes.loose) == 0


def test_decodes_alone_need_no_choice_of_tokens() -> None:
    writes = plan(chunk(list(range(8)), 7, 8, [1, 2]), chunk(list(range(3)), 2, 3, [9]))
    assert writes.spans == () and writes.loose is None
    assert writes.loose_slots.tolist() == writes.slots.tolist() == [11, 38]


@st.composite
def batches(draw: st.DrawFn) -> list[Chunk]:
    """Chunks of sequences with tables of their own: aligned or not, shared in front or not, blocks adjacent or not."""
    free = draw(st.permutations(range(1, NUM_BLOCKS))) if draw(st.booleans()) else list(range(1, NUM_BLOCKS))
    chunks: list[Chunk] = []
    for index in range(draw(st.integers(1, 5))):
        end = draw(st.integers(1, 26))
        start = draw(st.sampled_from([0, end - 1, draw(st.integers(0, end - 1))]))
        shared = draw(st.integers(0, end // BLOCK)) * BLOCK
        table, free = free[: -(-end // BLOCK)], free[-(-end // BLOCK) :]
        chunks.append(chunk([1] * end, start, end, table, request_id=str(index), write_from=max(start, shared)))
    return chunks


def strided(num_tokens: int, shape: TokenKVShape, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
    """Random keys and values [T, Hkv, D]: a slice of a wider row as in the decoder, or transposed heads or dims."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    if form == "sliced":
        rows = torch.randn(num_tokens, 5 * heads, dim).to(dtype)
        return rows[:, 3 * heads : 4 * heads], rows[:, 4 * heads :]
    if form == "heads first":
        both = torch.randn(2, heads, num_tokens, dim).to(dtype).transpose(1, 2)
    else:
        both = torch.randn(2, num_tokens, dim, heads).to(dtype).transpose(2, 3)
    return both[0], both[1]


@settings(max_examples=150, deadline=None)
@given(
    chunks=batches(),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 3, 8, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    form=st.sampled_from(["sliced", "heads first", "dims first"]),
)
def test_both_ways_to_write_store_every_token_due_bit_by_bit_and_nothing_else(
    chunks: list[Chunk], heads: int, dim: int, dtype: torch.dtype, form: str
) -> None:
    shape = TokenKVShape(2, heads, dim)
    num_tokens = sum(len(c.token_ids) for c in chunks)
    keys, values = strided(num_tokens, shape, dtype, form)
    due = torch.zeros(2, heads, NUM_BLOCKS * BLOCK, dim, dtype=dtype)
    token = 0
    for made in chunks:
        for position in range(made.start, made.start + len(made.token_ids)):
            if position >= made.write_from:
                slot = made.block_ids[position // BLOCK] * BLOCK + position % BLOCK
                due[0, :, slot], due[1, :, slot] = keys[token], values[token]
            token += 1
    writes = plan(*chunks)
    for by_head in (True, False):
        kv = PagedKV(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype=dtype, device=CPU)
        with torch.inference_mode():
            (kv.write_layer if by_head else kv.write_layer_by_token)(1, keys, values, writes)
        assert torch.equal(bits(kv.layers[1]), bits(due.view_as(kv.layers[1])))
        assert not kv.layers[0].any()


def bits(values: Tensor) -> Tensor:
    """So that also NaN and -0 are compared as what they are."""
    return values.contiguous().view(torch.uint8)


def test_nan_and_minus_zero_are_stored_as_they_are() -> None:
    kv = PagedKV(TokenKVShape(1, 1, 4), num_blocks=3, block_size=BLOCK, dtype=torch.float32, device=CPU)
    keys = torch.tensor([[[float("nan"), -0.0, float("inf"), 1.0]]]).expand(4, 1, 4)
    kv.write_layer(0, keys, keys, plan(chunk([1] * 4, 0, 4, [2])))
    assert torch.equal(bits(kv.layers[0][0, 0, 2]), bits(keys[:, 0]))


@pytest.mark.parametrize("ends", [[16, 32, 40], [5, 21, 40], [40]])
def test_chunks_of_any_cut_leave_the_same_kv(ends: list[int]) -> None:
    keys, values = torch.randn(2, 40, 2, 8).unbind(0)
    kv, whole = (
        PagedKV(TokenKVShape(1, 2, 8), num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype=torch.float32, device=CPU)
        for _ in range(2)
    )
    table = [3, 4, 5, 9, 8, 7, 20, 21, 22, 23]
    start = 0
    for end in ends:
        kv.write_layer(0, keys[start:end], values[start:end], plan(chunk([1] * 40, start, end, table)))
        start = end
    slots = np.array([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(40)])
    whole.layers[0].view(2, 2, -1, 8)[:, :, slots] = torch.stack((keys, values)).transpose(1, 2)
    assert torch.equal(kv.layers[0], whole.layers[0])
