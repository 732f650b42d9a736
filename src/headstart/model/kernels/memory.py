"""Memory of weights and of the KV pool, in huge pages where the system grants them.

Every step reads all weights. With pages of 4 KiB the processor needs a page table lookup for every 64 cache lines, and
prefetching waits for it: one thread then reads 20 % slower. Weights are stored side by side, since most are smaller
than a few huge pages.

A KV pool is only reserved: the system gives it a page when the page is first written. Attention to blocks in random
places reads huge pages 10 % faster, but one of them per layer and head is hundreds of MiB for the first block, so each
begins with small ones.
"""

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from headstart.core.errors import ConfigError

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


def reserve_memory(shape: tuple[int, ...], dtype: torch.dtype, *, num_parts: int) -> Tensor:
    """Return zeroed dense memory of which no page is resident yet; it begins where a huge page can.

    Of each of `num_parts` equal parts the first HUGE bytes are in small pages, so that what is used of it is what it
    takes. Raises ConfigError if the system does not grant the address space.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        pages, memory, begin = _mapped(size)
    except OSError as error:
        raise ConfigError(
            f"the system does not grant the {size / 2**30:.1f} GiB of the KV pool ({error.strerror}): lower "
            "--kv-cache-memory, or raise the limit of address space (ulimit -v)"
        ) from error
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        for part in range(num_parts):
            first = -(-(part * size // num_parts + HUGE) // HUGE) * HUGE
            end = (part + 1) * size // num_parts // HUGE * HUGE
            if first < end:
                pages.madvise(mmap.MADV_HUGEPAGE, begin + first, end - first)
    return memory[begin : begin + size].view(dtype).view(shape)


def num_staggered_items(num: int, item_bytes: int, *, num_parts: int) -> int:
    """Return how many items, at least `num`, to reserve for each of `num_parts` parts side by side.

    Parts that all begin at the same place of a huge page come to their next one at the same item: the first write of a
    KV block then waited 0.5 s for 96 pages. So each begins at another place; what is added is never resident.
    """
    step = max(HUGE // num_parts, item_bytes)
    found = range(num, num + HUGE // item_bytes) if num * item_bytes > HUGE else ()
    return next((more for more in found if step <= more * item_bytes % HUGE < 2 * step), num)


def _chunk(size: int) -> Tensor:
    """Allocate bytes aligned to a huge page; only pages that are written become resident."""
    pages, memory, begin = _mapped(size)
    with suppress(AttributeError, OSError):  # not Linux, or no huge pages: the same memory in small pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memory[begin : begin + size]


def _mapped(size: int) -> tuple[mmap.mmap, Tensor, int]:
    """Return a mapping, all of its bytes, and the first of `size` that begin where a huge page can."""
    pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    return pages, memory, -memory.data_ptr() % HUGE
