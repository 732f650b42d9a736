"""StepInputs: a Batch as tensors, one packed row of tokens without padding.

The batch metadata are FlashInfer's arrays (qo_indptr, kv_indptr, kv_indices), so that each attention backend is a thin
adapter; what the last block holds follows from starts. They are built with numpy for all chunks at once. Chunks
are checked one by one only if one of them is out of bounds: that chunk is left out and reported, and has no effect on
the other chunks.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.core.batch import Batch, Chunk
from headstart.model.kernels.library import KernelLibrary
from headstart.model.kv_writes import Int32s, Int64s, KVWrites, StepChunkArrays, plan_kv_writes

_UNKNOWN = array("i", [0])  # packed in place of a token that is not known yet


class StepInputBounds(NamedTuple):
    """Valid ranges: blocks in (0, num_blocks), tokens in [0, vocab_size), positions in [0, max_positions)."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_positions: int


class RecurrentState(NamedTuple):
    """The recurrent state of the request of one chunk, which a step updates in place; see layers/recurrent.py.

    `saves` are the states to keep: after how many tokens of the chunk, and the vector to write the state to.
    """

    begin: int  # the chunk has the tokens begin : end of the step
    end: int
    state: Tensor  # [state_size] fp32
    saves: tuple[tuple[int, Tensor], ...] = ()


@dataclass(slots=True)
class StepInputs:
    """`num_rows` chunks with `num_tokens` tokens in total. Tensors are on the device, arrays on the host."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    writes: KVWrites  # where the KV of the tokens is stored
    qo_indptr: Int32s  # [R + 1]: chunk r has the tokens qo_indptr[r] : qo_indptr[r + 1]
    starts: Int32s  # [R]: position of each chunk's first token
    kv_indptr: Int32s  # [R + 1]: chunk r reads the blocks kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
    kv_indices: Int32s
    bounds: StepInputBounds | None = None  # if given, all values above have been checked against these bounds
    states: tuple[RecurrentState, ...] | None = None  # [R], of a model with recurrent layers

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_end_position(self) -> int:
        """The position behind the last of all tokens."""
        return int((self.starts + np.diff(self.qo_indptr)).max())


def build_step_inputs(
    batch: Batch, bounds: StepInputBounds, device: torch.device, kernels: KernelLibrary | None = None
) -> tuple[StepInputs | None, list[int], dict[int, str]]:
    """Return the tensors of the chunks in bounds, the batch indices of these chunks, and an error for each other chunk.

    The tensors are None if no chunk is in bounds. `kernels` pack steps of decodes alone in less time, on the CPU.
    """
    chunks = batch.chunks
    if chunks and kernels is not None and (step := _pack_decodes(kernels, chunks, bounds)) is not None:
        return step, list(range(len(chunks))), {}
    if chunks and (step := _pack(chunks, bounds, device)) is not None:
        return step, list(range(len(chunks))), {}
    errors = chunk_problems(chunks, bounds)
    kept = [index for index in range(len(chunks)) if index not in errors]
    if not kept:
        return None, kept, errors
    step = _pack([chunks[index] for index in kept], bounds, device)
    assert step is not None, "chunks in bounds are out of bounds together"
    return step, kept, errors


class PackedChunks(NamedTuple):
    """Chunks one after the other, as arrays on the host; names as in StepInputs."""

    tokens: Int32s  # [T]
    positions: Int64s  # [T]
    starts: Int32s  # [R]
    write_from: Int64s  # [R]
    qo_indptr: Int32s  # [R + 1]
    kv_indptr: Int32s  # [R + 1]
    blocks: Int32s
    ends: Int64s  # [R]: position behind each chunk's last token


def pack_chunks(chunks: Sequence[Chunk], bounds: StepInputBounds) -> PackedChunks | None:
    """Return all `chunks` packed, or None if any is out of bounds. A token that is not known yet is packed as 0."""
    if any(not 0 <= chunk.num_logits <= len(chunk.token_ids) or chunk.adapter is not None for chunk in chunks):
        return None
    block_size = bounds.block_size
    sizes = np.array([(c.start, len(c.token_ids), len(c.block_ids), c.write_from) for c in chunks], np.int64)
    starts, lengths, pages, write_from = sizes.T
    tokens = _joined([chunk.token_ids if chunk.from_previous is None else _UNKNOWN for chunk in chunks])
    ends = starts + lengths
    used = -(-ends // block_size)
    if starts.min() < 0 or lengths.min() < 1 or ends.max() > bounds.max_positions or (pages < used).any():
        return None
    tables = [chunk.block_ids for chunk in chunks]
    if (pages > used).any():
        tables = [table[:count] for table, count in zip(tables, used.tolist(), strict=True)]
    blocks = _joined(tables)
    if not _within(tokens, 0, bounds.vocab_size) or not _within(blocks, 1, bounds.num_blocks):
        return None
    qo_indptr = _offsets(lengths)
    positions = starts  # correct if every chunk has one token
    if len(tokens) > len(chunks):
        positions = np.arange(len(tokens)) - np.repeat(qo_indptr[:-1] - starts, lengths)
    return PackedChunks(tokens, positions, starts.astype(np.int32), write_from, qo_indptr, _offsets(used), blocks, ends)


def _pack_decodes(kernels: KernelLibrary, chunks: Sequence[Chunk], bounds: StepInputBounds) -> StepInputs | None:
    """Do the same as `_pack` if each chunk has one token, which is written, and a packed table; else return None."""
    given, num_blocks = list[int](), 0
    for chunk in chunks:
        tokens, table, start = chunk.token_ids, chunk.block_ids, chunk.start
        if len(tokens) != 1 or type(table) is not array or table.typecode != "i" or chunk.num_logits not in (0, 1):
            return None
        if not 0 <= start < bounds.max_positions or chunk.from_previous is not None or chunk.adapter is not None:
            return None
        given += (tokens.buffer_info()[0], table.buffer_info()[0], start, chunk.write_from, len(table))
        num_blocks += start // bounds.block_size + 1
    count = len(chunks)
    wide, narrow = np.empty((3, count), np.int64), np.empty(5 * count + 2 + num_blocks, np.int32)
    decodes, limits = (ctypes.c_int64 * len(given))(*given), (ctypes.c_int64 * len(bounds))(*bounds)
    if not kernels.held.headstart_pack_decodes(decodes, count, limits, wide.ctypes.data, narrow.ctypes.data):
        return None
    token_ids, positions, slots = torch.from_numpy(wide).unbind()
    after = 3 * count + 2
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        writes=KVWrites(slots, None, (), None, wide[2], narrow[after : after + 2 * count].reshape(count, 2)),
        qo_indptr=narrow[count : 2 * count + 1],
        starts=narrow[:count],
        kv_indptr=narrow[2 * count + 1 : after],
        kv_indices=narrow[after + 2 * count :],
        bounds=bounds,
    )


def _pack(chunks: Sequence[Chunk], bounds: StepInputBounds, device: torch.device) -> StepInputs | None:
    """Return the step of all `chunks`, or None if any chunk is out of bounds."""
    packed = pack_chunks(chunks, bounds)
    if packed is None:
        return None
    ranges = StepChunkArrays(packed.qo_indptr, packed.starts, packed.write_from, packed.kv_indptr, packed.blocks)
    return StepInputs(
        token_ids=torch.from_numpy(packed.tokens.astype(np.int64)).to(device),
        positions=torch.from_numpy(np.ascontiguousarray(packed.positions)).to(device),
        writes=plan_kv_writes(ranges, packed.positions, bounds.block_size, device),
        qo_indptr=packed.qo_indptr,
        starts=packed.starts,
        kv_indptr=packed.kv_indptr,
        kv_indices=packed.blocks,
        bounds=bounds,
    )


def _within(ids: Int32s, low: int, end: int) -> bool:
    return bool(ids.min() >= low and ids.max() < end)


def chunk_problems(chunks: Sequence[Chunk], bounds: StepInputBounds) -> dict[int, str]:
    """Return, by index, the reason why a chunk cannot be computed; valid chunks are not included."""
    errors: dict[int, str] = {}
    for index, chunk in enumerate(chunks):
        ids = _joined([chunk.token_ids if chunk.from_previous is None else _UNKNOWN])
        table = _joined([chunk.block_ids])
        used = -(-(chunk.start + len(ids)) // bounds.block_size)
        problem = _problem(chunk, ids, table[: max(used, 0)], used, bounds)
        if problem is not None:
            errors[index] = problem
    return errors


def _problem(chunk: Chunk, ids: Int32s, table: Int32s, used: int, bounds: StepInputBounds) -> str | None:
    """Return the reason why a chunk cannot be computed, or None."""
    end = chunk.start + len(ids)
    if len(ids) == 0 or chunk.start < 0:
        return f"chunk of {len(ids)} tokens from position {chunk.start}; both must be positive"
    if ids.min() < 0 or ids.max() >= bounds.vocab_size:
        outside = ids[(ids < 0) | (ids >= bounds.vocab_size)][0]
        return f"token id {outside} lies outside the vocabulary of {bounds.vocab_size}"
    if end > bounds.max_positions:
        return f"position {end - 1} lies beyond the {bounds.max_positions} positions of the model"
    if len(table) < used:
        return f"{len(table)} blocks of {bounds.block_size} tokens do not cover {end} positions"
    if table.min() < 1 or table.max() >= bounds.num_blocks:
        return f"block id outside [1, {bounds.num_blocks}) in the block table"
    if not 0 <= chunk.num_logits <= len(ids):
        return f"num_logits is {chunk.num_logits}, of a chunk of {len(ids)} tokens"
    if chunk.adapter is not None:
        return f"adapter {chunk.adapter!r}: this executor has no adapters"
    return None


def _joined(parts: "Sequence[Sequence[int] | array[int]]") -> Int32s:
    """Concatenate all ids into one int32 array; a copy, so that the callers may append to their arrays meanwhile."""
    if all(isinstance(part, array) and part.typecode == "i" for part in parts):
        return np.frombuffer(b"".join(parts), dtype=np.int32)  # pyrefly: ignore[bad-argument-type]
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _offsets(lengths: Int64s) -> Int32s:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
