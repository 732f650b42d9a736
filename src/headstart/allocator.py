"""Settings of the C allocator for processes that briefly hold large request bodies, as API servers do.

glibc raises its mmap threshold with every large block that is freed and keeps an arena per thread. After a few bodies
of some megabytes, read on several threads, a process would keep that memory forever. With fixed thresholds it still
keeps free memory between blocks in use, until the heap is trimmed.
"""

import asyncio
import ctypes
import resource

MMAP_BYTES = 1 << 20  # larger blocks are returned to the system when they are freed
MAX_ARENAS = 2
TRIM_SECONDS = 0.25  # between two checks of the process
TRIM_BYTES = 8 << 20  # of newly touched pages; above this the heap is trimmed
_PAGE_BYTES = resource.getpagesize()
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def configure_malloc() -> bool:
    """Set fixed thresholds and few arenas; return whether this process's allocator supports it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, MMAP_BYTES), (_M_ARENA_MAX, MAX_ARENAS))
    return all([mallopt(name, value) == 1 for name, value in settings])


def trim_heap() -> None:
    """Return the heap's free pages to the system, where the allocator can. Takes some milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


async def trim_heap_regularly() -> None:
    """Trim the heap every TRIM_SECONDS while much memory is allocated and freed, and once more afterwards.

    Runs until its task is cancelled. A check takes about 2 us; trimming takes some milliseconds, on a thread.
    """
    trimmed_at, was_busy = _num_faults(), False
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        is_busy = (_num_faults() - trimmed_at) * _PAGE_BYTES > TRIM_BYTES
        if is_busy or was_busy:
            await asyncio.to_thread(trim_heap)
            trimmed_at = _num_faults()
        was_busy = is_busy


def _num_faults() -> int:
    """Return the number of minor page faults of this process: pages touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
