"""Where the new KV of a step goes: whole blocks as spans, everything else token by token.

A span needs no index: it is one copy into adjacent blocks. That every chunk but the last ends on a block boundary (vLLM
#19878) is not required: a chunk that begins or ends inside a block has its ragged ends written by slot.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class Span(NamedTuple):
    """The tokens [begin, end) of a step fill the slots from `slot` on: whole blocks that are adjacent in memory."""

    begin: int
    end: int
    slot: int


class Writes(NamedTuple):
    """Said twice, for two ways to write the same: every token's slot, or spans and the slots of the loose tokens."""

    slots: Tensor  # [W] int64 on the device: block id * block_size + offset of the tokens that are written
    tokens: Tensor | None  # [W] int64 on the device: which tokens those are; None: all
    spans: tuple[Span, ...]
    loose: Int64s | None  # [L]: which tokens no span has; None: all
    loose_slots: Int64s  # [L]


class Ranges(NamedTuple):
    """The chunks of a step, [R] or [R + 1] each; see StepInputs. Positions before `write_from` are not written."""

    qo_indptr: Int32s
    starts: Int32s
    write_from: Int64s
    kv_indptr: Int32s
    kv_indices: Int32s


def plan_writes(ranges: Ranges, positions: Int64s, block_size: int, device: torch.device) -> Writes:
    """The writes of chunks with `positions` [T], packed. Changes nothing."""
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
    return Writes(
        slots=torch.from_numpy(slots if tokens is None else slots[tokens]).to(device),
        tokens=None if tokens is None else torch.from_numpy(tokens).to(device),
        spans=spans,
        loose=loose,
        loose_slots=slots if loose is None else slots[loose],
    )


def _spans(ranges: Ranges, block_size: int) -> tuple[Span, ...]:
    """Every whole block that is written, runs of adjacent ones together."""
    ends = ranges.starts + np.diff(ranges.qo_indptr)
    first = -(-np.maximum(ranges.starts, ranges.write_from) // block_size)
    last = ends // block_size
    spans: list[Span] = []
    for row in np.flatnonzero(first < last):
        table = ranges.kv_indices[ranges.kv_indptr[row] + first[row] : ranges.kv_indptr[row] + last[row]]
        cuts = np.flatnonzero(np.diff(table) != 1) + 1
        origin = int(ranges.qo_indptr[row] + first[row] * block_size - ranges.starts[row])  # token of table[0]
        edges = [0, *cuts.tolist(), len(table)]
        for low, high in pairwise(edges):
            begin, end = origin + low * block_size, origin + high * block_size
            spans.append(Span(begin, end, int(table[low]) * block_size))
    return tuple(spans)
