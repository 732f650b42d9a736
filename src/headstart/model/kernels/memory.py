"""Memory of weights and of the KV pool, in huge pages where the system grants them.

Every step reads all weights. With pages of 4 KiB the processor needs a page table lookup for every 64 cache lines, and
prefetching waits for it: one thread then reads 20 % slower. Weights are stored side by side, since most are smaller
than a few huge pages.

A KV pool is only reserved: the system gives it a page when the page is first written. Attention to blocks in random
places reads huge pages 10 % faster, but one of them per layer and head is hundreds of MiB for the first block, so each
begins with small ones. Taking a page costs as much time as writing it, so a thread takes those of the next blocks.
"""

import ctypes
import math
import mmap
import os
import sys
import time
from contextlib import suppress
from threading import Lock, Thread, get_native_id

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core.errors import ConfigError

HUGE = 2 << 20
CHUNK = 16 * HUGE
ALIGNED = 64  # bytes; the kernels require it
AHEAD = 64 << 20  # bytes behind the last block written that have pages
TAKEN = 128 << 10  # bytes of one part that are taken at once, about 50 µs
AHEAD_PAUSE, AHEAD_NICE = 4, 10  # the pause after each, in times its duration; below the compute threads
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: takes pages, and changes no content


class Arena:
    """An allocator; the memory of a chunk is freed when all tensors in it are. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # the unused rest of the chunk

    def take_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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


class PagePrefaulter:
    """Takes the pages of the items behind the last one that a step writes, at most AHEAD bytes, in a thread.

    Each item has its bytes in each of several parts side by side; items are first written in their order. The thread
    pauses, so that it slows a step that runs meanwhile little. Without it (not Linux, or before 5.14) each page is
    taken when it is written.
    """

    def __init__(self, parts: NDArray[np.uint32]) -> None:
        """`parts` [..., items, words]: reserved memory."""
        *outer, self._num_items, words = parts.shape
        self._item_bytes, self._parts = words * parts.itemsize, parts
        self._begins = [parts[index].ctypes.data for index in np.ndindex(*outer)]
        self._ahead = max(1, AHEAD // (len(self._begins) * self._item_bytes))  # items
        self._step = max(1, min(TAKEN // self._item_bytes, self._ahead // 4))
        self._end = self._due = 0  # of the items that have pages; the item at which more are taken
        self._thread: Thread | None = None

    def note_writes_up_to(self, item: int) -> None:
        """Tell that a step writes items up to this one. Never waits."""
        if item < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = item + self._step
        begin, self._end = max(self._end, item), min(item + 1 + self._ahead, self._num_items)
        if begin < self._end and sys.platform == "linux":
            self._thread = Thread(target=self._take, args=(begin, self._end), name="kv-pool-pages", daemon=True)
            self._thread.start()

    def _take(self, begin: int, end: int) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + AHEAD_NICE)
        madvise, page = ctypes.CDLL(None).madvise, mmap.PAGESIZE
        for first in range(begin, end, self._step):
            num_bytes = (min(first + self._step, end) - first) * self._item_bytes
            for part in self._begins:
                start = (part + first * self._item_bytes) // page * page
                length = part + first * self._item_bytes + num_bytes - start
                began = time.perf_counter()
                if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), POPULATE_WRITE):
                    return
                time.sleep(AHEAD_PAUSE * (time.perf_counter() - began))


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
