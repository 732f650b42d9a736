"""Arena: memory for packed weights, in huge pages where the system grants them.

Weights are read from end to end in every step. With pages of 4 KiB the processor looks up a page for every 64 lines,
and what is fetched ahead waits for it: one thread then reads a fifth slower. Weights lie side by side, since most are
smaller than a few huge pages.
"""

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 16 * HUGE
ALIGNED = 64  # bytes; the kernels' sources count on it


class Arena:
    """Hands out memory that is freed when all that shares a chunk of it is. Fit for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Dense memory of this shape, aligned for the kernels; zeros."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNED) * ALIGNED
        with self._lock:
            if len(self._chunk) < room:
                self._chunk = _chunk(max(CHUNK, -(-room // HUGE) * HUGE))
            taken, self._chunk = self._chunk[:size], self._chunk[room:]
        assert size == 0 or taken.data_ptr() % ALIGNED == 0, taken.data_ptr()
        return taken.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    """Fresh bytes that begin where a huge page can; only what is written to becomes resident."""
    pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    with suppress(AttributeError, OSError):  # not Linux, or without huge pages: the same memory in small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    begin = -memory.data_ptr() % HUGE
    return memory[begin : begin + size]
