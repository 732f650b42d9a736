"""Arena: memory for packed weights, in huge pages where the system grants them.

Every step reads all weights. With pages of 4 KiB the processor needs a page table lookup for every 64 cache lines, and
prefetching waits for it: one thread then reads 20 % slower. Weights are stored side by side, since most are smaller
than a few huge pages.
"""

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 16 * HUGE
ALIGNED = 64  # bytes; the kernels require it


class Arena:
    """An allocator; the memory of a chunk is freed when all tensors in it are. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # the unused rest of the chunk

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeroed dense memory of this shape, aligned for the kernels."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNED) * ALIGNED
        with self._lock:
            if len(self._chunk) < room:
                self._chunk = _chunk(max(CHUNK, -(-room // HUGE) * HUGE))
            taken, self._chunk = self._chunk[:size], self._chunk[room:]
        assert size == 0 or taken.data_ptr() % ALIGNED == 0, taken.data_ptr()
        return taken.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    """Allocate bytes aligned to a huge page; only pages that are written become resident."""
    pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    with suppress(AttributeError, OSError):  # not Linux, or no huge pages: the same memory in small pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    begin = -memory.data_ptr() % HUGE
    return memory[begin : begin + size]
