"""PagedKV: the keys and values of all blocks, and the canonical form of a block outside the process.

The memory layout is head-major, [keys | values, kv heads, blocks, block_size, head_dim] per layer. The gathered pages
of a head are therefore contiguous, and attention is a plain batched matmul. All memory is zero at the start, because
attention multiplies the content of a masked slot by 0, which needs a finite content. A host takes it from the system
when it is written.

On the host, numpy writes KV and copies blocks: its elements may be as wide as a whole head, while ATen copies 16 bytes
at a time. Another thread may read blocks while a step runs: numpy releases the GIL while it copies, and a thread that
calls torch would start its own team of OpenMP threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core.cache.block_store import Data
from headstart.model.kernels.memory import reserve_memory
from headstart.model.kv_writes import KVWrites

WIDE_BYTES = 16  # an indexed write has a cost per element, so it moves elements of this size if the head size allows


class TokenKVShape(NamedTuple):
    """The KV of one token: keys and values of `num_layers` x `num_kv_heads` x `head_dim`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class PagedKV:
    """KV of `num_blocks` blocks of `block_size` tokens; block 0 is never written and stays zero."""

    def __init__(
        self, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.num_blocks, self.block_size, self.dtype = shape, num_blocks, block_size, dtype
        self.device = device
        self.block_bytes = block_size * shape.token_bytes(dtype)  # of one block in canonical form
        size = (shape.num_layers, 2, shape.num_kv_heads, num_blocks, block_size, shape.head_dim)
        if device.type == "cpu":
            pool = reserve_memory(size, dtype, num_parts=2 * shape.num_layers * shape.num_kv_heads)
        else:
            pool = torch.zeros(size, dtype=dtype, device=device)
        self.layers = list(pool.unbind(0))
        row_bytes = shape.head_dim * dtype.itemsize
        wide = torch.complex128 if row_bytes % WIDE_BYTES == 0 else dtype
        self._wide = wide
        flat = (shape.num_kv_heads, num_blocks * block_size, shape.head_dim)
        self._slots = [(layer[0].view(flat).view(wide), layer[1].view(flat).view(wide)) for layer in self.layers]
        heads = _heads(pool) if device.type == "cpu" else None  # [layers, 2, kv heads, blocks, block_size]
        self._heads = None if heads is None else heads.reshape(*heads.shape[:3], -1).swapaxes(2, 3)
        self._blocks = None if heads is None else heads.transpose(3, 0, 1, 4, 2)  # [blocks], each in canonical order

    @property
    def layer_token_bytes(self) -> int:
        """The bytes of one token in one layer."""
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    def write_layer(self, layer: int, keys: Tensor, values: Tensor, writes: KVWrites) -> None:
        """Store the `keys` and `values` [T, Hkv, D] of a step in one layer, at the slots given by `writes`."""
        if self._heads is None:
            return self.write_layer_by_token(layer, keys, values, writes)
        for stored, source in zip(self._heads[layer], (_heads(keys), _heads(values)), strict=True):
            for begin, end, slot in writes.spans:
                stored[slot : slot + end - begin] = source[begin:end]
            if writes.loose is None:
                stored[writes.loose_slots] = source
            elif len(writes.loose):
                stored[writes.loose_slots] = source[writes.loose]

    def write_layer_by_token(self, layer: int, keys: Tensor, values: Tensor, writes: KVWrites) -> None:
        """Do the same as `write` token by token, on any device: the reference implementation for tests."""
        if writes.tokens is not None:
            keys, values = keys[writes.tokens], values[writes.tokens]
        for stored, source in zip(self._slots[layer], (keys, values), strict=True):
            stored.index_copy_(1, writes.slots, self._widened(source))

    def read_block(self, block_id: int) -> Data:
        """Copy one block in canonical form: for each layer keys, then values, [block_size, kv heads, head_dim].

        Safe from any thread, also while a step runs; if the step writes to this block, the copy is inconsistent.
        """
        if self._blocks is None:
            return self.read_block_in_torch(block_id)
        data = np.empty(self.block_bytes, dtype=np.uint8)
        block = self._blocks[block_id]
        data.view(block.dtype).reshape(block.shape)[...] = block
        return data.data

    def read_block_in_torch(self, block_id: int) -> bytes:
        """Do the same as `read_block` with torch, on any device: the reference implementation."""
        block = torch.stack([layer[:, :, block_id] for layer in self.layers]).transpose(2, 3)
        return block.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a block given in canonical form. Call it between two steps. Raises ValueError for a wrong length."""
        num_bytes = memoryview(data).nbytes
        if num_bytes != self.block_bytes:
            raise ValueError(f"a block of this model has {self.block_bytes} bytes, got {num_bytes}")
        if self._blocks is None:
            return self.write_block_in_torch(block_id, data)
        block = self._blocks[block_id]
        block[...] = np.frombuffer(data, dtype=block.dtype).reshape(block.shape)

    def write_block_in_torch(self, block_id: int, data: Data) -> None:
        """Do the same as `write_block` with torch, on any device, for data of the right length: the reference."""
        flat = torch.frombuffer(bytearray(data), dtype=self.dtype)
        heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        block = flat.view(len(self.layers), 2, self.block_size, heads, head_dim).transpose(2, 3)
        for layer, content in zip(self.layers, block, strict=True):
            layer[:, :, block_id] = content

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero whose content may not be finite."""
        if block_ids:
            chosen = torch.tensor(list(block_ids), dtype=torch.int64, device=self.layers[0].device)
            for layer in self.layers:
                layer.index_fill_(2, chosen, 0)

    def _widened(self, heads: Tensor) -> Tensor:
        """View `heads` [W, Hkv, D] in wide elements, head-major; through one dimension, whose stride is always 1."""
        width = heads.shape[2] * heads.itemsize // self._wide.itemsize
        return heads.reshape(-1).view(self._wide).view(*heads.shape[:2], width).transpose(0, 1)


def _heads(rows: Tensor) -> NDArray[np.void]:
    """Return `rows` [..., D] on the host as an array [...] of whole heads; shares memory if a head is contiguous."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    head = np.dtype((np.void, rows.shape[-1] * rows.itemsize))
    return rows.view(torch.uint8).numpy().view(head)[..., 0]
