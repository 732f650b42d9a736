"""Attention with the kernels in `model/kernels/attention.cpp`: one call per layer writes KV and computes attention.

All arguments are checked here, once per step or by shape; the kernels do not check them. The planner of the kernels
plans the reads of a step once per window: groups of sequences that share blocks, and splits of long rows.
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.kernels.attention import AttentionCall, PackedPlan, StepTables, plan_step_attention
from headstart.model.kernels.library import find_kernels, num_kernel_threads
from headstart.model.packed_kv import PackedKV, attention_call_with_writes, contiguous_heads
from headstart.model.paged_kv import TokenKVShape
from headstart.model.step_inputs import StepInputs

SPLIT_TOKENS = 256  # minimum tokens per part of a row that is split between threads
SHARING = {"never": 0, "where it pays": 1, "always": 2}


class CPUAttention:
    """The attention backend for CPUs, which owns the KV of one model; see `AttentionBackend`."""

    def __init__(
        self,
        shape: TokenKVShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sharing: str = "where it pays",
        split_tokens: int = SPLIT_TOKENS,
    ) -> None:
        found = find_kernels()
        if found.kernels is None:
            raise ConfigError(f"attention_backend cpu needs compiled kernels ({found.note}): choose reference")
        if device.type != "cpu":
            raise ConfigError(f"attention_backend cpu runs on the CPU, not on {device}: choose reference")
        self.kv = PackedKV(found.kernels, shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.sharing = SHARING[sharing]
        self.split_blocks = -(-split_tokens // block_size)

    def prepare_call(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> AttentionCall:
        """Return the checked kernel argument for one layer and any step of T tokens, completed by `bind_call_to_step`.

        It holds addresses of the tensors. The elements of a head must be adjacent; `out` [T, Hq, D] must be dense, and
        so must `sinks`, in fp32. Raises ValueError for arguments that do not fit.
        """
        kv, num_heads = self.kv, queries.shape[1]
        if queries.shape != (len(keys), num_heads, kv.shape.head_dim) or num_heads % kv.shape.num_kv_heads:
            raise ValueError(f"queries {list(queries.shape)} do not go with keys {list(keys.shape)}")
        if queries.dtype != kv.dtype or queries.device.type != "cpu":
            raise ValueError(f"queries are {queries.dtype} on {queries.device}, the KV is {kv.dtype} on the CPU")
        if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
            raise ValueError(f"window {window} and softcap {softcap} must be positive")
        if lse is not None and (lse.shape != queries.shape[:2] or lse.dtype != torch.float32 or not _on_host(lse)):
            raise ValueError(f"lse must be contiguous fp32 {list(queries.shape[:2])}, got {lse.dtype} {lse.shape}")
        if out.shape != queries.shape or out.dtype != kv.dtype or not _on_host(out) or queries.stride(-1) != 1:
            raise ValueError(f"out must be contiguous {kv.dtype} {list(queries.shape)}, got {out.dtype} {out.shape}")
        if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or not _on_host(sinks)):
            raise ValueError(f"sinks must be contiguous fp32 [{num_heads}], got {sinks.dtype} {list(sinks.shape)}")
        call = kv.build_write_call(layer, keys, values)
        call.queries, call.out, call.lse = queries.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
        call.query_token, call.query_head = queries.stride(0), queries.stride(1)
        call.group, call.window = num_heads // kv.shape.num_kv_heads, window or 0
        call.scale, call.softcap = scale, softcap or 0.0
        call.sinks = None if sinks is None else sinks.data_ptr()
        return call

    def begin_step(self, step: StepInputs) -> "CPUAttentionStep":
        """See AttentionBackend. Raises ValueError for a step that reads or writes outside the pool."""
        return CPUAttentionStep(self, step)


class CPUAttentionStep:
    """The attention of one step. The plan for a window is made when a layer first uses that window."""

    def __init__(self, backend: CPUAttention, step: StepInputs) -> None:
        self.backend, self._step = backend, step
        kv, known = backend.kv, step.bounds
        are_checked = known is not None and known.block_size == kv.block_size and known.num_blocks <= kv.num_blocks
        self._writes = kv.plan_writes(step.writes, step.num_tokens, are_checked=are_checked)
        self._arrays = tuple(
            np.ascontiguousarray(array, np.int32)
            for array in (step.qo_indptr, step.starts, step.kv_indptr, step.kv_indices)
        )
        if not are_checked:
            check_block_tables(*self._arrays, num_blocks=kv.num_blocks, block_size=kv.block_size)
        self._plans: dict[tuple[int, int], _Prepared] = {}

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """See Attend. `lse` [T, Hq] in fp32, if given, receives the log-sum-exp of each row's scores and its sink."""
        queries, keys, values = contiguous_heads(queries), contiguous_heads(keys), contiguous_heads(values)
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        out = torch.empty(queries.shape, dtype=self.backend.kv.dtype)
        prepared = self.backend.prepare_call(
            layer, queries, keys, values, out, scale=scale, window=window, softcap=softcap, sinks=sinks, lse=lse
        )
        self.backend.kv.kernels.library.headstart_attention(ctypes.byref(self.bind_call_to_step(prepared)))
        return out

    @property
    def layer_stride_bytes(self) -> int:
        """The distance in bytes from the pages of one layer to those of the next."""
        return self.backend.kv.pool.strides[0]

    def bind_call_to_step(self, prepared: AttentionCall) -> AttentionCall:
        """Return a call of this backend's `prepare` for this step, which must live as long as the call.

        Raises ValueError if the step has another number of tokens.
        """
        call = attention_call_with_writes(prepared, self._writes)
        found = self._prepared(call.window, call.group)
        call.plan, call.tables = found.plan.data.ctypes.data, self._arrays[3].ctypes.data
        call.parts, call.part_sums = found.parts.ctypes.data, found.part_sums.ctypes.data
        call.arrived = found.arrived.ctypes.data
        return call

    def plan(self, window: int | None, group: int) -> PackedPlan:
        """Return the plan of the reads for layers with `window` and `group` query heads per kv head."""
        return self._prepared(window or 0, group).plan

    def _prepared(self, window: int, group: int) -> "_Prepared":
        found = self._plans.get((window, group))
        if found is None:
            kv = self.backend.kv
            tables = StepTables(
                *(array.ctypes.data for array in self._arrays),
                self._step.num_chunks,
                kv.block_size,
                window,
                group,
                kv.shape.num_kv_heads,
                num_kernel_threads(),
                self.backend.sharing,
                self.backend.split_blocks,
            )
            found = _Prepared(plan_step_attention(kv.kernels.library, tables), group, kv.shape)
            self._plans[window, group] = found
        return found


class _Prepared:
    """A plan, and the memory for the partial results that are merged at the end."""

    def __init__(self, plan: PackedPlan, group: int, shape: TokenKVShape) -> None:
        self.plan, self.group = plan, group
        num_heads, dims = group * shape.num_kv_heads, -(-shape.head_dim // 16) * 16
        self.parts = np.empty((plan.head.num_slots, num_heads, dims), np.float32)
        self.part_sums = np.empty((plan.head.num_slots, num_heads, 2), np.float32)
        self.arrived = np.zeros((plan.head.num_merges, shape.num_kv_heads), np.int32)


def _on_host(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def check_block_tables(
    qo_indptr: NDArray[np.int32],
    starts: NDArray[np.int32],
    kv_indptr: NDArray[np.int32],
    kv_indices: NDArray[np.int32],
    *,
    num_blocks: int,
    block_size: int,
) -> None:
    """Raise ValueError unless every row has tokens, and a table of existing blocks for all its positions."""
    lengths, pages = np.diff(qo_indptr), np.diff(kv_indptr)
    rows = len(starts)
    shaped = rows and len(lengths) == rows and len(pages) == rows and qo_indptr[0] == 0 and kv_indptr[0] >= 0
    if not shaped or lengths.min() < 1 or starts.min() < 0 or kv_indptr[-1] > len(kv_indices):
        raise ValueError("the arrays of the step do not belong together")
    ends = starts.astype(np.int64) + lengths
    if (pages < -(-ends // block_size)).any():
        raise ValueError(f"a block table is too short for its {int(ends.max())} positions")
    if kv_indices.min() < 0 or kv_indices.max() >= num_blocks:
        raise ValueError(f"a block table names blocks outside [0, {num_blocks})")
