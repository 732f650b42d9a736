"""Argument structures of the attention kernels, as in attention.h, and the planner's plan of a step."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE = 16  # token slots of a page
MAX_DIMS = 512  # largest head size
_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class StepTables(ctypes.Structure):
    """A step, as input of the planner."""

    _fields_ = (
        *((name, _pointer) for name in ("qo_indptr", "starts", "kv_indptr", "kv_indices")),
        *((name, _int32) for name in ("num_rows", "block_size", "window", "group", "num_kv_heads", "threads")),
        *((name, _int32) for name in ("sharing", "split_blocks")),
    )


class AttentionCall(ctypes.Structure):
    """The arguments for one layer of one step. `num_tokens`: of the keys and values, which the kernels do not read."""

    num_tokens = 0

    _fields_ = (
        *((name, _pointer) for name in ("queries", "keys", "values", "out", "lse", "key_pages", "value_pages")),
        *((name, _pointer) for name in ("plan", "tables", "parts", "part_sums", "arrived")),
        *((name, _pointer) for name in ("page_writes", "token_writes")),
        *((name, _int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, _int64) for name in ("value_token", "value_head", "head_words")),
        *((name, _int32) for name in ("num_page_writes", "num_token_writes", "head_dim", "num_kv_heads", "group")),
        *((name, _int32) for name in ("block_size", "is_bf16", "window", "threads")),
        *((name, _float) for name in ("scale", "softcap")),
        ("sinks", _pointer),
    )


class PlanHeader(ctypes.Structure):
    """The sizes of a plan. `cost` is that of one kv head, in rows times pages."""

    _fields_ = (
        *((name, _int32) for name in ("num_items", "num_entries", "num_merges", "num_slots")),
        *((name, _int32) for name in ("num_groups", "grouped_blocks")),
        ("cost", _int64),
    )


class PackedPlan(NamedTuple):
    """The bytes of a plan, and its header, which is in them."""

    data: NDArray[np.int64]
    head: PlanHeader

    def items(self) -> NDArray[np.int32]:
        """Return the items [items, 6]: first entry, row begin and end, table offset, block begin and end."""
        words = self.data.view(np.int32)
        begin = ctypes.sizeof(PlanHeader) // 4
        return words[begin : begin + 6 * self.head.num_items].reshape(-1, 6)


NO_PLAN = PackedPlan(np.zeros(ctypes.sizeof(PlanHeader) // 8, np.int64), PlanHeader())


def plan_step_attention(library: Any, tables: StepTables) -> PackedPlan:
    """Plan a step with the kernels' planner. The arrays that `tables` points to must be alive and consistent."""
    data = np.empty(64 + 16 * tables.num_rows, np.int64)
    needed = library.headstart_attention_plan(ctypes.byref(tables), data.ctypes.data, data.nbytes)
    if needed > data.nbytes:
        data = np.empty(-(-needed // 8), np.int64)
        library.headstart_attention_plan(ctypes.byref(tables), data.ctypes.data, data.nbytes)
    return PackedPlan(data, PlanHeader.from_address(data.ctypes.data))
