"""StepInputs: a Batch as tensors, one packed row of tokens without padding.

Batch metadata are FlashInfer's arrays (qo_indptr, kv_indptr, kv_indices, last_page_len), so that each attention backend
is a thin adapter. Built with numpy per chunk, never per token. A chunk that is out of bounds is left out and reported;
the others are as if it had not been there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.core.batch import Batch, Chunk
from headstart.model.writes import Int32s, Ranges, Writes, plan_writes


class StepBounds(NamedTuple):
    """What ids may be: blocks in (0, num_blocks), tokens in [0, vocab_size), positions below max_positions."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`num_rows` chunks with `num_tokens` tokens in all. Tensors lie on the device, arrays on the host."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    writes: Writes  # where their KV goes
    qo_indptr: Int32s  # [R + 1]: chunk r has the tokens qo_indptr[r] : qo_indptr[r + 1]
    starts: Int32s  # [R]: position of each chunk's first token
    kv_indptr: Int32s  # [R + 1]: chunk r reads the blocks kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
    kv_indices: Int32s
    last_page_len: Int32s  # [R]: tokens of the last of them

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])


def build_step(
    batch: Batch, bounds: StepBounds, device: torch.device
) -> tuple[StepInputs | None, list[int], dict[int, str]]:
    """Tensors of the chunks in bounds, the batch indices of those chunks, and an error for each of the others.

    None if no chunk is in bounds.
    """
    errors: dict[int, str] = {}
    kept: list[int] = []
    tokens: list[Int32s] = []
    tables: list[Int32s] = []
    for index, chunk in enumerate(batch.chunks):
        ids = _int32s(chunk.token_ids)
        used = -(-(chunk.start + len(ids)) // bounds.block_size)
        table = _int32s(chunk.block_ids)[: max(used, 0)]
        problem = _problem(chunk, ids, table, used, bounds)
        if problem is not None:
            errors[index] = problem
            continue
        kept.append(index)
        tokens.append(ids)
        tables.append(table)
    if not kept:
        return None, kept, errors
    return _pack([batch.chunks[index] for index in kept], tokens, tables, bounds.block_size, device), kept, errors


def _pack(
    chunks: list[Chunk], tokens: list[Int32s], tables: list[Int32s], block_size: int, device: torch.device
) -> StepInputs:
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    qo_indptr = _offsets(lengths)
    kv_indptr = _offsets(np.array([len(table) for table in tables], dtype=np.int32))
    kv_indices = np.concatenate(tables)
    positions = np.arange(qo_indptr[-1]) - np.repeat(qo_indptr[:-1] - starts, lengths)
    write_from = np.array([chunk.write_from for chunk in chunks], dtype=np.int64)
    ranges = Ranges(qo_indptr, starts, write_from, kv_indptr, kv_indices)
    return StepInputs(
        token_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        writes=plan_writes(ranges, positions, block_size, device),
        qo_indptr=qo_indptr,
        starts=starts,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=(starts + lengths - 1) % block_size + 1,
    )


def _problem(chunk: Chunk, ids: Int32s, table: Int32s, used: int, bounds: StepBounds) -> str | None:
    """Why a chunk cannot be computed, or None."""
    end = chunk.start + len(ids)
    if len(ids) == 0 or chunk.start < 0:
        return f"chunk of {len(ids)} tokens from position {chunk.start}; both must be positive"
    if ids.min() < 0 or ids.max() >= bounds.vocab_size:
        outside = ids[(ids < 0) | (ids >= bounds.vocab_size)][0]
        return f"token id {outside} lies outside the vocabulary of {bounds.vocab_size}"
    if end > bounds.max_positions:
        return f"position {end - 1} lies beyond the {bounds.max_positions} the model knows"
    if len(table) < used:
        return f"{len(table)} blocks of {bounds.block_size} tokens do not cover {end} positions"
    if table.min() < 1 or table.max() >= bounds.num_blocks:
        return f"block id outside [1, {bounds.num_blocks}) in the block table"
    if chunk.num_logits not in (0, 1):
        return f"num_logits is {chunk.num_logits}; this executor samples the last position only"
    if chunk.adapter is not None:
        return f"adapter {chunk.adapter!r}: this executor has no adapters"
    return None


def _int32s(values: "Sequence[int] | array[int]") -> Int32s:
    """`values` as an int32 array, without a copy where they are packed already."""
    if isinstance(values, array) and values.typecode == "i":
        return np.frombuffer(values, dtype=np.int32) if len(values) else np.zeros(0, np.int32)
    return np.asarray(values, dtype=np.int32)


def _offsets(lengths: Int32s) -> Int32s:
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
