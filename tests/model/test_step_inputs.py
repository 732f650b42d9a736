"""Packing a batch: hand-computed arrays, and errors that stay with their chunk."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model.paged import chunk

from headstart.core.batch import Batch, Chunk
from headstart.model import step_inputs
from headstart.model.kernels.library import KernelLibrary, find_kernels, kernel_library_in_use
from headstart.model.step_inputs import StepInputBounds, build_step_inputs

BOUNDS = StepInputBounds(num_blocks=20, block_size=4, vocab_size=100, max_positions=32)
CPU = torch.device("cpu")


def require_kernels() -> KernelLibrary:
    found = find_kernels()
    if found.kernels is None:
        pytest.skip(found.note)
    return found.kernels


def test_two_chunks_are_packed_without_padding() -> None:
    prefill = chunk(list(range(10, 20)), 2, 7, [5, 6, 7])
    decode = chunk(list(range(30, 38)), 7, 8, [9, 3])
    step, kept, errors = build_step_inputs(Batch((prefill, decode)), BOUNDS, CPU)
    assert step is not None and kept == [0, 1] and errors == {}
    assert step.token_ids.tolist() == [12, 13, 14, 15, 16, 37]
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 7]
    assert step.writes.slots.tolist() == [22, 23, 24, 25, 26, 15] and step.writes.tokens is None
    assert step.qo_indptr.tolist() == [0, 5, 6] and step.starts.tolist() == [2, 7]
    assert step.kv_indptr.tolist() == [0, 2, 4] and step.kv_indices.tolist() == [5, 6, 9, 3]
    assert (step.num_chunks, step.num_tokens) == (2, 6)
    assert step.token_ids.dtype == step.positions.dtype == step.writes.slots.dtype == torch.int64
    assert step.kv_indices.dtype == step.qo_indptr.dtype == np.int32


def test_positions_before_write_from_are_not_written() -> None:
    shared = chunk(list(range(8)), 2, 8, [1, 2], write_from=4)
    cached = chunk(list(range(4)), 3, 4, [1], write_from=4)
    step, _, _ = build_step_inputs(Batch((shared, cached)), BOUNDS, CPU)
    assert step is not None and step.writes.tokens is not None
    assert step.writes.tokens.tolist() == [2, 3, 4, 5] and step.writes.slots.tolist() == [8, 9, 10, 11]


GOOD = chunk([1, 2, 3], 0, 3, [1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chunk([1, 100], 0, 2, [1]), "token id 100 lies outside the vocabulary of 100"),
        (chunk([-1], 0, 1, [1]), "token id -1 lies outside"),
        (chunk([1] * 5, 0, 5, [1]), "1 blocks of 4 tokens do not cover 5 positions"),
        (chunk([1], 0, 1, [0]), r"block id outside \[1, 20\)"),
        (chunk([1], 0, 1, [20]), r"block id outside \[1, 20\)"),
        (chunk([1] * 40, 30, 33, list(range(1, 11))), "position 32 lies beyond the 32 positions of the model"),
        (chunk([1], 1, 1, [1]), "chunk of 0 tokens"),
        (chunk([1, 2], 0, 2, [1], num_logits=3), "num_logits is 3"),
        (chunk([1], 0, 1, [1])._replace(start=-1), "from position -1"),
        (chunk([1], 0, 1, [1])._replace(adapter="a"), "adapter 'a'"),
    ],
)
def test_a_chunk_out_of_bounds_fails_alone(bad: Chunk, message: str) -> None:
    step, kept, errors = build_step_inputs(Batch((GOOD, bad, GOOD)), BOUNDS, CPU)
    assert step is not None and kept == [0, 2]
    assert step.token_ids.tolist() == [1, 2, 3, 1, 2, 3]
    assert list(errors) == [1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(errors[1])


def test_only_bad_chunks_make_no_step() -> None:
    step, kept, errors = build_step_inputs(Batch((chunk([500], 0, 1, [1]),)), BOUNDS, CPU)
    assert step is None and kept == [] and list(errors) == [0]
    assert build_step_inputs(Batch(()), BOUNDS, CPU) == (None, [], {})


def test_unused_blocks_behind_the_chunk_are_not_read() -> None:
    step, _, _ = build_step_inputs(Batch((GOOD._replace(block_ids=(1, 99), token_ids=array("i", [1])),)), BOUNDS, CPU)
    assert step is not None and step.kv_indices.tolist() == [1]


@st.composite
def batches(draw: st.DrawFn) -> list[Chunk]:
    """Chunks in bounds; tables are tuples, lists or packed, some longer than needed."""
    chunks: list[Chunk] = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 20))
        end = start + draw(st.just(1) | st.integers(1, 32 - start))
        tokens = draw(st.lists(st.integers(0, 99), min_size=end, max_size=end))
        needed = -(-end // 4) + draw(st.sampled_from([0, 0, 2]))
        table = draw(st.lists(st.integers(1, 19), min_size=needed, max_size=needed))
        made = chunk(tokens, start, end, table, write_from=draw(st.integers(0, end)))
        packed = draw(st.sampled_from([tuple(table), table, array("i", table)]))
        chunks.append(made._replace(block_ids=packed))
    return chunks


@given(batches(), st.booleans())
def test_a_step_is_its_chunks_one_after_the_other(chunks: list[Chunk], by_kernels: bool) -> None:
    step, kept, errors = build_step_inputs(
        Batch(tuple(chunks)), BOUNDS, CPU, kernel_library_in_use() if by_kernels else None
    )
    assert step is not None and kept == list(range(len(chunks))) and errors == {}
    written: list[tuple[int, int]] = []
    for index, one in enumerate(chunks):
        end, first = one.start + len(one.token_ids), int(step.qo_indptr[index])
        rows = slice(first, int(step.qo_indptr[index + 1]))
        assert step.token_ids[rows].tolist() == one.token_ids.tolist()
        assert step.positions[rows].tolist() == list(range(one.start, end))
        table = step.kv_indices[step.kv_indptr[index] : step.kv_indptr[index + 1]].tolist()
        assert table == list(one.block_ids)[: -(-end // 4)]
        assert step.starts[index] == one.start
        due = range(max(one.start, one.write_from), end)
        written += [(first + position - one.start, table[position // 4] * 4 + position % 4) for position in due]
    tokens = list(range(step.num_tokens)) if step.writes.tokens is None else step.writes.tokens.tolist()
    assert list(zip(tokens, step.writes.slots.tolist(), strict=True)) == written


def test_a_packed_table_may_grow_while_its_step_is_alive() -> None:
    table = array("i", [1, 2])
    step, _, _ = build_step_inputs(Batch((GOOD._replace(block_ids=table), chunk([500], 0, 1, [1]))), BOUNDS, CPU)
    table.append(3)
    assert step is not None and step.kv_indices.tolist() == [1]


def decode(position: int, table: list[int], *, token: int = 7, write_from: int = 0) -> Chunk:
    made = chunk([token] * (position + 1), position, position + 1, table, write_from=write_from)
    return made._replace(block_ids=array("i", table))


@pytest.mark.parametrize("size", [4, 16])
def test_decodes_are_packed_in_one_call_as_with_numpy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = BOUNDS._replace(block_size=size)
    chunks = Batch((decode(5, [3, 9]), decode(0, [4], token=99), decode(31, list(range(8, 16)), write_from=31)))
    expected, _, _ = build_step_inputs(chunks, bounds, CPU)
    monkeypatch.setattr(step_inputs, "_pack", lambda *_: pytest.fail("packed with numpy"))
    step, kept, errors = build_step_inputs(chunks, bounds, CPU, require_kernels())
    assert step is not None and expected is not None and kept == [0, 1, 2] and not errors
    for name in ("token_ids", "positions", "qo_indptr", "starts", "kv_indptr", "kv_indices"):
        found, known = getattr(step, name), getattr(expected, name)
        assert found.tolist() == known.tolist() and found.dtype == known.dtype, name
    assert step.writes.slots.tolist() == expected.writes.slots.tolist() == step.writes.loose_slots.tolist()
    assert step.writes[1:4] == expected.writes[1:4] and step.max_end_position == expected.max_end_position == 32


@pytest.mark.parametrize(
    "bad",
    [
        decode(0, [1], token=100),
        decode(0, [1], token=-1),
        decode(4, [1]),
        decode(0, [0]),
        decode(4, [20, 1]),
        decode(32, list(range(1, 10))),
        decode(0, [1])._replace(start=-1),
        decode(0, [1])._replace(num_logits=2),
        decode(0, [1])._replace(adapter="a"),
    ],
)
def test_a_decode_out_of_bounds_fails_alone(bad: Chunk) -> None:
    good = decode(3, [2])
    found = [build_step_inputs(Batch((good, bad, good)), BOUNDS, CPU, chosen) for chosen in (None, require_kernels())]
    assert found[0][1:] == found[1][1:] and list(found[1][2]) == [1]
