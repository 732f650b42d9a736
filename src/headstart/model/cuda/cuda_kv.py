"""CudaKV: the keys and values of all blocks on the device, and their copies to and from the host.

The pool is block-major over layers, so that a block is one contiguous copy; attention is as fast as with a pool per
layer. Reads run on a stream of their own beside the steps, through pinned memory: the caller only asks for blocks whose
step has been collected. Writes are queued on the stream of the steps, so the next step sees them without a wait.
"""

import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from headstart.core.cache.block_store import Data
from headstart.model.paged_kv import TokenKVShape

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
RING = 8  # pinned buffers of blocks on their way to the device


class CudaKV:
    """KV of `num_blocks` blocks of `block_size` tokens; block 0 is never written. Also works on a CPU, for tests."""

    def __init__(
        self, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.num_blocks, self.block_size = num_blocks, block_size
        size = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.pool = torch.zeros(size, dtype=dtype, device=device)
        self.layers = [(self.pool[:, layer, 0], self.pool[:, layer, 1]) for layer in range(shape.num_layers)]
        self.block_bytes = self.pool[0].nbytes  # in canonical form, too
        self.lock = threading.Lock()  # a graph is not captured while another thread copies
        self._canonical = (shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._read_here = torch.empty(self._canonical, dtype=dtype, device=device)
        self._ring: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (torch.empty(self._canonical, dtype=dtype, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None)
            for _ in range(RING)
        ]
        self._next = 0

    def read_block(self, block_id: int) -> Data:
        """Copy one block in canonical form. Safe from any thread, also while a step runs that does not write it."""
        with self.lock, torch.inference_mode():
            # Pinned memory from torch's cache, which takes it back when the caller drops the data: no copy, no faults.
            data = torch.empty(self._canonical, dtype=self.dtype, pin_memory=self._side is not None)
            with nullcontext() if self._side is None else torch.cuda.stream(self._side):
                self._read_here.copy_(self.pool[block_id].transpose(2, 3))
                data.copy_(self._read_here, non_blocking=True)
            if self._side is not None:
                self._side.synchronize()
            return data.view(-1).view(torch.uint8).numpy().data

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a block given in canonical form, before the next step. Raises ValueError for a wrong length."""
        num_bytes = memoryview(data).nbytes
        if num_bytes != self.block_bytes:
            raise ValueError(f"a block of this model has {self.block_bytes} bytes, got {num_bytes}")
        with self.lock, torch.inference_mode():
            pinned, copied = self._ring[self._next]
            self._next = (self._next + 1) % RING
            if copied is not None:
                copied.synchronize()  # its last copy, RING blocks ago
            pinned.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))  # by several threads
            self.pool[block_id].transpose(2, 3).copy_(pinned.to(self.device, non_blocking=True))
            if copied is not None:
                copied.record(torch.cuda.current_stream(self.device))

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero whose content may not be finite."""
        if block_ids:
            with torch.inference_mode():
                chosen = torch.tensor(list(block_ids), dtype=torch.int64)
                self.pool.index_fill_(0, chosen.to(self.device, non_blocking=True), 0)
