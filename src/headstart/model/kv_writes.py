"""Slots for the new KV of a step: whole blocks as spans, all other tokens one by one.

A span needs no index: it is one copy into adjacent blocks. vLLM #19878 ends every chunk but the last on a block
boundary; this is not required here: the tokens of a partly written block are written by slot.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class SlotSpan(NamedTuple):
    """Tokens [begin, end) of a step, which fill the slots from `slot` on: whole blocks that are adjacent in memory."""

    begin: int
    end: int
    slot: int


class KVWrites(NamedTuple):
    """The writes of a step in two equivalent forms: the slot of every token, or spans and the slots of loose tokens."""

    slots: Tensor  # [W] int64 on the device: block id * block_size + offset, for each written token
    tokens: Tensor | None  # [W] int64 on the device: indices of the written tokens; None: all
    spans: tuple[SlotSpan, ...]
    loose: Int64s | None  # [L]: indices of the written tokens outside all spans; None: all tokens
    loose_slots: Int64s  # [L]
    pairs: Int32s | None = None  # [L, 2]: token and slot of each loose one, if that is known


class StepChunkArrays(NamedTuple):
    """The chunks of a step as arrays [R] or [R + 1]; see StepInputs. Positions before `write_from` are not written."""

    qo_indptr: Int32s
    starts: Int32s
    write_from: Int64s
    kv_indptr: Int32s
    kv_indices: Int32s


def plan_kv_writes(ranges: StepChunkArrays, positions: Int64s, block_size: int, device: torch.device) -> KVWrites:
    """Return the writes of packed chunks with `positions` [T]. Changes nothing."""
    tables, write_from = ranges.kv_indptr[:-1], ranges.write_from
    single = len(positions) == len(ranges.starts)
    if not single:
        row_of = np.repeat(np.arange(len(ranges.starts)), np.diff(ranges.qo_indptr))
        tables, write_from = tables[row_of], write_from[row_of]
    blocks = ranges.kv_indices[tables + positions // block_size]
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    due = positions >= write_from
    tokens = None if due.all() else np.flatnonzero(due)
    spans = () if single and block_size > 1 else _spans(ranges, block_size)
    loose = tokens
    if spans:
        for span in spans:
            due[span.begin : span.end] = False
        loose = np.flatnonzero(due)
    return KVWrites(
        slots=torch.from_numpy(slots if tokens is None else slots[tokens]).to(device),
        tokens=None if tokens is None else torch.from_numpy(tokens).to(device),
        spans=spans,
        loose=loose,
        loose_slots=slots if loose is None else slots[loose],
    )


def _spans(ranges: StepChunkArrays, block_size: int) -> tuple[SlotSpan, ...]:
    """Return one span for each run of adjacent blocks that are written whole."""
    ends = ranges.starts + np.diff(ranges.qo_indptr)
    first = -(-np.maximum(ranges.starts, ranges.write_from) // block_size)
    last = ends // block_size
    spans: list[SlotSpan] = []
    for row in np.flatnonzero(first < last):
        table = ranges.kv_indices[ranges.kv_indptr[row] + first[row] : ranges.kv_indptr[row] + last[row]]
        cuts = np.flatnonzero(np.diff(table) != 1) + 1
        origin = int(ranges.qo_indptr[row] + first[row] * block_size - ranges.starts[row])  # token of table[0]
        edges = [0, *cuts.tolist(), len(table)]
        for low, high in pairwise(edges):
            begin, end = origin + low * block_size, origin + high * block_size
            spans.append(SlotSpan(begin, end, int(table[low]) * block_size))
    return tuple(spans)
