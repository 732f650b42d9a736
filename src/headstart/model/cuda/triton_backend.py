"""TritonAttention: the attention backend of GPUs, for models that run on Transformers' code.

A step is planned once for all layers and windows, by the planner of CudaRunner, and travels as one copy through pinned
memory. Torch's cache of pinned memory reuses a piece only after its copy, so the next step may be planned while this
one is on its way; nothing waits for the device. A layer is two launches, up to four where prompts are computed or
prefixes are shared.
"""

from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.model.attention.cpu import check_block_tables
from headstart.model.cuda.cuda_kv import CudaKV
from headstart.model.cuda.step_plan import Ints, PackedStepChunks, StepArrayLayout, StepPlanner, pad_int32s_to_16_bytes
from headstart.model.cuda.triton_attention import (
    KV,
    LayerScoring,
    PartialResults,
    allocate_partial_results,
    launch_attention,
    max_partial_results,
    merge_partial_results,
    tile_shapes,
)
from headstart.model.cuda.triton_rotary import append_kv
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs


class TritonAttention:
    """The attention backend for GPUs, which owns the KV of one model; see `AttentionBackend`."""

    def __init__(
        self, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        split_tokens: int = 0,
    ) -> None:  # fmt: skip
        """`split_tokens`: keys of a partial result, a power of two from 16 on; 0: the planner's choice."""
        self.kv = CudaKV(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self.on_gpu = device.type == "cuda"
        self.pdl = self.on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
        properties = torch.cuda.get_device_properties(device) if self.on_gpu else None
        shared = properties.shared_memory_per_block_optin if properties is not None else 0
        self.processors = properties.multi_processor_count if properties is not None else 8
        self.single, self.tile = tile_shapes(shape.head_dim, dtype, shared, split_tokens)
        self._split = split_tokens
        self._parts: dict[int, PartialResults] = {}  # by the number of query heads

    def begin_step(self, step: StepInputs) -> "TritonAttentionStep":
        """See AttentionBackend. Raises ValueError for a step that reads outside the pool."""
        return TritonAttentionStep(self, step)

    def planner(self, heads: int) -> StepPlanner:
        """Return the planner for layers with `heads` query heads."""
        shape = self.kv.shape
        return StepPlanner(
            page=self.kv.block_size, group=heads // shape.num_kv_heads, kv_heads=shape.num_kv_heads,
            processors=self.processors, max_parts=max_partial_results(heads, shape.head_dim), split=self._split,
            exact=False,
        )  # fmt: skip

    def reserve_partial_results(self, count: int, heads: int) -> PartialResults:
        """Return room for the partial results of a launch; the launches share it."""
        _, kvs, dim = self.kv.shape
        held = self._parts.get(heads)
        if held is None or len(held.out) < count:
            held = self._parts[heads] = allocate_partial_results(
                max(count, max_partial_results(heads, dim)), heads, kvs, dim, self.kv.device
            )
        return held


class _Plan(NamedTuple):
    """The plan of some chunks of a step: their tokens, and the planner's array on the device."""

    tokens: slice
    layout: StepArrayLayout
    meta: Tensor


class TritonAttentionStep:
    """The attention of one step. It is planned at its first layer, which knows the number of query heads."""

    def __init__(self, backend: TritonAttention, step: StepInputs) -> None:
        self._backend, self._step = backend, step
        kv, known = backend.kv, step.bounds
        if known is None or known.block_size != kv.block_size or known.num_blocks > kv.num_blocks:
            tables = (step.qo_indptr, step.starts, step.kv_indptr, step.kv_indices)
            check_block_tables(*tables, num_blocks=kv.num_blocks, block_size=kv.block_size)
        self._plans: dict[int, list[_Plan]] = {}

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See Attend. Raises ValueError for arguments that do not fit: the kernels do not check them."""
        backend, count, heads = self._backend, self._step.num_tokens, queries.shape[1]
        shape, dtype, kvs = backend.kv.shape, backend.kv.dtype, backend.kv.shape.num_kv_heads
        new, given = (count, kvs, shape.head_dim), {queries.dtype, keys.dtype, values.dtype}
        if keys.shape != new or values.shape != new or queries.shape != (count, heads, shape.head_dim) or heads % kvs:
            raise ValueError(f"queries {list(queries.shape)} and keys {list(keys.shape)} do not go with KV {list(new)}")
        if given != {dtype} or (window is not None and window < 1) or (softcap is not None and softcap <= 0):
            raise ValueError(f"{given} for KV of {dtype}, or window {window} or softcap {softcap} that is not positive")
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"sinks {list(sinks.shape)} are not [{heads}]")
        plans = self._plans.get(heads)
        if plans is None:
            plans = self._plans[heads] = self._plan(heads)
        kv = backend.kv.layers[layer]
        packed = queries.stride()[1:] == (shape.head_dim, 1)
        queries, keys, values = queries if packed else queries.contiguous(), _adjacent(keys), _adjacent(values)
        out = torch.empty(queries.shape, dtype=dtype, device=backend.kv.device)
        scoring = LayerScoring(scale, window, softcap, None if sinks is None else sinks.float().contiguous())
        # Triton launches on the current device.
        with torch.cuda.device(backend.kv.device) if backend.on_gpu else nullcontext():
            for plan in plans:  # all of them first: a chunk may read what another one of this step has
                slots = plan.meta[plan.layout.slots_offset :]
                append_kv(keys[plan.tokens], values[plan.tokens], slots, kv, pdl=backend.pdl)
            for plan in plans:
                self._attend(plan, queries[plan.tokens], kv, out[plan.tokens], scoring)
        return out

    def _attend(self, plan: _Plan, queries: Tensor, kv: KV, out: Tensor, scoring: LayerScoring) -> None:
        layout, meta, backend, kvs = plan.layout, plan.meta, self._backend, kv[0].shape[1]
        parts = backend.reserve_partial_results(layout.num_parts, out.shape[1])
        common = (
            queries,
            kv,
            out,
            parts,
            meta,
            meta[layout.positions_offset :],
            meta[layout.singles_offset :],
            scoring,
        )
        pdl = backend.pdl
        if count := layout.num_singles * kvs:
            launch_attention(*common, backend.single, single=True, programs=count, pdl=pdl)
        if count := layout.num_tiles * kvs:
            launch_attention(*common, backend.tile, single=False, programs=count, pdl=pdl)
        if layout.merged:
            tokens, firsts = (
                meta[layout.merged_tokens_offset :][: layout.merged],
                meta[layout.first_part_indices_offset :],
            )
            merge_partial_results(parts, out, tokens, firsts, scoring.sinks, pdl=pdl)

    def _plan(self, heads: int) -> list[_Plan]:
        backend, planner, none = self._backend, self._backend.planner(heads), np.zeros(0, np.int32)
        layouts: list[StepArrayLayout] = []
        arrays: list[Ints] = []
        for rows in _fitting(planner, _step_rows(self._step)):
            memory, tile = np.empty(planner.max_parts_and_ints(rows)[1], np.int32), backend.tile.tile_rows
            layouts.append(planner.fill(memory, rows, padded=None, tile_rows=tile, selected=none, outputs=0))
            arrays.append(memory[: pad_int32s_to_16_bytes(layouts[-1].total)])
        array = torch.from_numpy(np.concatenate(arrays))
        meta = (array.pin_memory() if backend.on_gpu else array).to(backend.kv.device, non_blocking=True)
        metas = meta.split([len(one) for one in arrays])
        own = [slice(*pair) for pair in pairwise(accumulate((layout.rows for layout in layouts), initial=0))]
        return [_Plan(*found) for found in zip(own, layouts, metas, strict=True)]


def _step_rows(step: StepInputs) -> PackedStepChunks:
    """Return the step as the planner reads it, from its arrays on the host."""
    lengths, count, writes = np.diff(step.qo_indptr), step.num_tokens, step.writes
    positions = np.arange(count, dtype=np.int32) - np.repeat(step.qo_indptr[:-1] - step.starts, lengths)
    slots = np.full(count, -1, np.int32)
    slots[slice(None) if writes.loose is None else writes.loose] = writes.loose_slots
    for span in writes.spans:
        slots[span.begin : span.end] = np.arange(span.slot, span.slot + span.end - span.begin)
    none = np.zeros(count, np.int32)  # tokens are for the kernels of a whole decoder
    return PackedStepChunks(
        tokens=none,
        positions=positions.astype(np.int32),
        slots=slots,
        previous=none,
        indptr=step.qo_indptr.astype(np.int32),
        table_ptr=step.kv_indptr.astype(np.int32),
        blocks=step.kv_indices.astype(np.int32),
    )


def _fitting(planner: StepPlanner, rows: PackedStepChunks) -> list[PackedStepChunks]:
    """Return the step in halves of halves whose partial results fit; one chunk fits always."""
    chunks = len(rows.indptr) - 1
    if chunks == 1 or planner.step_fits(rows, 1 << 31):
        return [rows]
    halves = (_cut(rows, 0, chunks // 2), _cut(rows, chunks // 2, chunks))
    return [part for half in halves for part in _fitting(planner, half)]


def _cut(rows: PackedStepChunks, first: int, end: int) -> PackedStepChunks:
    """Return the chunks [first, end)."""
    indptr, table_ptr = rows.indptr[first : end + 1], rows.table_ptr[first : end + 1]
    own = slice(indptr[0], indptr[-1])
    return PackedStepChunks(
        tokens=rows.tokens[own],
        positions=rows.positions[own],
        slots=rows.slots[own],
        previous=rows.previous[own],
        indptr=indptr - indptr[0],
        table_ptr=table_ptr - table_ptr[0],
        blocks=rows.blocks[table_ptr[0] : table_ptr[-1]],
    )


def _adjacent(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
