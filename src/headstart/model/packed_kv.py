"""PackedKV: the keys and values of all blocks, in the page layout of the kernels in `model/kernels/attention.cpp`.

It is the counterpart of PagedKV for these kernels: the same blocks and the same canonical form, but another memory
layout (see kernels/attention.h), which is the same for every kernel variant. Head size and block size are padded to a
multiple of 16. All memory is zero at the start. The system gives it when it is written, and that of the next blocks
while a step with prompt tokens runs: a load that writes them then takes no longer than to copy them.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core.cache.block_store import Data
from headstart.core.errors import ConfigError
from headstart.model.kernels.attention import MAX_DIMS, NO_PLAN, PAGE, AttentionCall
from headstart.model.kernels.library import KernelLibrary, num_kernel_threads
from headstart.model.kernels.memory import PagePrefaulter, num_staggered_items, reserve_memory
from headstart.model.kv_writes import KVWrites
from headstart.model.paged_kv import TokenKVShape

_NO_IDS, _NO_PAGES, _NO_PAGE_WRITES = np.zeros(0, np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int32)
DTYPES = (torch.float32, torch.bfloat16)


class PageWrites(NamedTuple):
    """The checked KV writes of a step, for the kernels: pages of which all slots are filled, and single tokens."""

    pages: NDArray[np.int32]  # [P, 2]: first of PAGE consecutive tokens, page
    tokens: NDArray[np.int32]  # [L, 2]: token, page * PAGE + offset in the page
    num_tokens: int  # number of tokens in the keys and values of the step


class PackedKV:
    """KV of `num_blocks` blocks of `block_size` tokens on the host; block 0 is never written and stays zero."""

    def __init__(
        self, kernels: KernelLibrary, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        if shape.head_dim > MAX_DIMS:
            raise ConfigError(f"head size {shape.head_dim} is more than the {MAX_DIMS} the CPU kernels support")
        if dtype not in DTYPES:
            raise ConfigError(f"the CPU kernels do not compute in {dtype}; choose float32 or bfloat16")
        self.kernels, self.shape, self.num_blocks, self.block_size, self.dtype = (
            kernels,
            shape,
            num_blocks,
            block_size,
            dtype,
        )
        self.device = torch.device("cpu")
        self.block_bytes = block_size * shape.token_bytes(dtype)  # of one block in canonical form
        self.pages_per_block = -(-block_size // PAGE)
        block_words = self.pages_per_block * PAGE * -(-shape.head_dim // 16) * 16 * dtype.itemsize // 4
        num_parts = 2 * shape.num_layers * shape.num_kv_heads
        reserved = num_staggered_items(num_blocks, 4 * block_words, num_parts=num_parts)
        size = (shape.num_layers, 2, shape.num_kv_heads, reserved, block_words)
        self.pool = reserve_memory(size, torch.int32, num_parts=num_parts).numpy().view(np.uint32)[..., :num_blocks, :]
        self._ahead = PagePrefaulter(self.pool)
        self._head_words = reserved * block_words
        calls = [self._layer_call(layer) for layer in range(shape.num_layers)]
        for call in calls:
            call.plan = NO_PLAN.data.ctypes.data
        self._calls = (AttentionCall * shape.num_layers)(*calls)

    def write_layer(self, layer: int, keys: Tensor, values: Tensor, writes: KVWrites) -> None:
        """Store the `keys` and `values` [T, Hkv, D] of a step in one layer, at the slots given by `writes`."""
        self.write_layer_planned(layer, keys, values, self.plan_writes(writes, len(keys)))

    def write_layer_planned(self, layer: int, keys: Tensor, values: Tensor, writes: PageWrites) -> None:
        """Do the same as `write`, with the result of `plan_writes`, which one step computes once for all layers."""
        keys, values = contiguous_heads(keys), contiguous_heads(values)
        call = attention_call_with_writes(self.build_write_call(layer, keys, values), writes)
        call.plan = NO_PLAN.data.ctypes.data
        self.kernels.library.headstart_attention(ctypes.byref(call))

    def plan_writes(self, writes: KVWrites, num_tokens: int, *, are_checked: bool = False) -> PageWrites:
        """Convert `writes` for the kernels. Raises ValueError for slots outside the pool or tokens outside the step."""
        if are_checked and writes.pairs is not None and self.block_size % PAGE == 0:
            return PageWrites(_NO_PAGE_WRITES, writes.pairs, num_tokens)
        if not writes.spans and writes.loose is None and self.block_size % PAGE == 0:  # a decode-only step
            slots = writes.loose_slots
            self._check_writes(_NO_IDS, slots, _NO_PAGES, num_tokens)
            if len(slots) > num_tokens:
                raise ValueError(f"{len(slots)} writes of {num_tokens} tokens")
            loose = np.empty((len(slots), 2), np.int32)
            loose[:, 0], loose[:, 1] = np.arange(len(slots)), slots
            return PageWrites(_NO_PAGE_WRITES, loose, num_tokens)
        loose = np.arange(len(writes.loose_slots)) if writes.loose is None else writes.loose
        tokens, slots = [loose], [writes.loose_slots]
        pages: list[NDArray[np.int64]] = []
        for begin, end, slot in writes.spans:
            if self.block_size % PAGE:
                tokens.append(np.arange(begin, end))
                slots.append(np.arange(slot, slot + end - begin))
            else:
                pages.append(np.stack((np.arange(begin, end, PAGE), np.arange(slot, slot + end - begin, PAGE)), 1))
        token, slot = np.concatenate(tokens), np.concatenate(slots)
        page = np.concatenate(pages) if pages else np.zeros((0, 2), np.int64)
        self._check_writes(token, slot, page, num_tokens)
        if self.block_size % PAGE:
            block, place = np.divmod(slot, self.block_size)
            slot = block * self.pages_per_block * PAGE + place
        page[:, 1] //= PAGE
        return PageWrites(
            np.ascontiguousarray(page, np.int32), np.stack((token, slot), 1).astype(np.int32, order="C"), num_tokens
        )

    def build_write_call(self, layer: int, keys: Tensor, values: Tensor) -> AttentionCall:
        """Return a call that writes one layer, for `planned`. It holds addresses of the tensors.

        Raises ValueError if keys and values are not [T, Hkv, D] in the dtype of the pool, with adjacent elements.
        """
        expected = (len(keys), self.shape.num_kv_heads, self.shape.head_dim)
        for rows in (keys, values):
            if tuple(rows.shape) != expected or rows.dtype != self.dtype or rows.device.type != "cpu":
                raise ValueError(f"keys and values must be {expected} in {self.dtype}, got {rows.shape} {rows.dtype}")
            if rows.stride(-1) != 1:
                raise ValueError("the elements of a head are not adjacent in memory")
        call = self._layer_call(layer)
        call.num_tokens = len(keys)
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.key_token, call.key_head = keys.stride(0), keys.stride(1)
        call.value_token, call.value_head = values.stride(0), values.stride(1)
        return call

    def read_block(self, block_id: int) -> Data:
        """Copy one block in canonical form: for each layer keys, then values, [block_size, kv heads, head_dim].

        Safe from any thread, also while a step runs; if the step writes to this block, the copy is inconsistent.
        """
        self._check_block(block_id)
        data = np.empty(self.block_bytes, dtype=np.uint8)
        self.kernels.library.headstart_read_block(self._calls, len(self._calls), block_id, data.ctypes.data)
        return data.data

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a block given in canonical form. Call it between two steps. Raises ValueError for a wrong length."""
        self._check_block(block_id)
        num_bytes = memoryview(data).nbytes
        if num_bytes != self.block_bytes:
            raise ValueError(f"a block of this model has {self.block_bytes} bytes, got {num_bytes}")
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        self.kernels.library.headstart_write_block(self._calls, len(self._calls), block_id, address)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero whose content may not be finite."""
        if block_ids:
            self.pool[:, :, :, list(block_ids)] = 0

    def _layer_call(self, layer: int) -> AttentionCall:
        """Return a call with the pool of one layer and no work."""
        if not 0 <= layer < self.shape.num_layers:
            raise ValueError(f"layer {layer} is not one of {self.shape.num_layers}")
        base, half = self.pool.ctypes.data, 4 * self.shape.num_kv_heads * self._head_words
        return AttentionCall(
            key_pages=base + 2 * layer * half,
            value_pages=base + (2 * layer + 1) * half,
            head_words=self._head_words,
            head_dim=self.shape.head_dim,
            num_kv_heads=self.shape.num_kv_heads,
            group=1,
            block_size=self.block_size,
            is_bf16=self.dtype == torch.bfloat16,
            threads=num_kernel_threads(),
        )

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not one of {self.num_blocks}")

    def _check_writes(
        self, token: NDArray[np.int64], slot: NDArray[np.int64], page: NDArray[np.int64], num_tokens: int
    ) -> None:
        """Raise ValueError unless all tokens and slots exist."""
        last, num_slots = PAGE - 1, self.num_blocks * self.block_size
        for first, end, bound, is_slot in (
            (token, token, num_tokens, False),
            (slot, slot, num_slots, True),
            (page[:, 0], page[:, 0] + last, num_tokens, False),
            (page[:, 1], page[:, 1] + last, num_slots, True),
        ):
            if len(first):
                most = int(end.max())
                if first.min() < 0 or most >= bound:
                    raise ValueError(f"writes of {first.min()} to {most} lie outside the {bound} there are")
                if is_slot:
                    self._ahead.note_writes_up_to(most // self.block_size)


def attention_call_with_writes(call: AttentionCall, writes: PageWrites) -> AttentionCall:
    """Return a copy of a call with the writes of a step. Raises ValueError if the step has another number of tokens."""
    if call.num_tokens != writes.num_tokens:
        raise ValueError(f"keys and values of {call.num_tokens} tokens for a step of {writes.num_tokens}")
    copy = AttentionCall.from_buffer_copy(call)
    copy.page_writes, copy.num_page_writes = writes.pages.ctypes.data, len(writes.pages)
    copy.token_writes, copy.num_token_writes = writes.tokens.ctypes.data, len(writes.tokens)
    return copy


def contiguous_heads(rows: Tensor) -> Tensor:
    """Return `rows` [T, H, D], copied if the elements of a head are not adjacent in memory."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
