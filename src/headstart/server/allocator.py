"""Settings of the C allocator for processes that hold large bodies for a moment, as fronts do.

glibc raises its threshold for mmap with every large block that is freed and keeps an arena per thread, so after a few
bodies of some megabytes, read on several threads, a process keeps all that they needed for good.
"""

import ctypes

MMAP_BYTES = 1 << 20  # blocks from here on go back to the system when they are freed
MAX_ARENAS = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def give_memory_back() -> bool:
    """Set fixed thresholds and few arenas; return whether this process has an allocator that can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, MMAP_BYTES), (_M_ARENA_MAX, MAX_ARENAS))
    return all([mallopt(name, value) == 1 for name, value in settings])
