"""Settings of the C allocator for processes that hold large bodies for a moment, as fronts do.

glibc raises its threshold for mmap with every large block that is freed and keeps an arena per thread, so after a few
bodies of some megabytes, read on several threads, a process keeps all that they needed for good. With fixed thresholds
it still keeps what is free between blocks in use, until it is trimmed.
"""

import asyncio
import ctypes
import resource

MMAP_BYTES = 1 << 20  # blocks from here on go back to the system when they are freed
MAX_ARENAS = 2
TRIM_SECONDS = 1.0  # between two looks at the process
TRIM_BYTES = 8 << 20  # of pages touched anew, from which on it is trimmed
_PAGE_BYTES = resource.getpagesize()
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def give_memory_back() -> bool:
    """Set fixed thresholds and few arenas; return whether this process has an allocator that can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, MMAP_BYTES), (_M_ARENA_MAX, MAX_ARENAS))
    return all([mallopt(name, value) == 1 for name, value in settings])


async def trim_regularly() -> None:
    """Give back what is free inside the heap once a second while much memory comes and goes, and once behind that.

    Ends with its task. A look takes about 2 us; trimming takes some milliseconds, on a thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    trimmed_at, was_busy = _num_faults(), False
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        is_busy = (_num_faults() - trimmed_at) * _PAGE_BYTES > TRIM_BYTES
        if is_busy or was_busy:
            await asyncio.to_thread(trim, 0)
            trimmed_at = _num_faults()
        was_busy = is_busy


def _num_faults() -> int:
    """Return how many pages this process has touched anew in its life."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
