"""Eviction of files from the page cache, to measure reads as on a machine that has just started.

Asks the kernel to drop the pages of these files and of no others, which needs no privileges, and checks the result.
Linux only; elsewhere nothing is dropped, and the result is None.
"""

import os
from pathlib import Path

PROBES = 16
"""Pages checked in each file."""


def drop(folder: Path) -> float | None:
    """Drop the files in `folder` from the page cache. Return the share of checked pages that is absent, if known."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path in files:
        _advise(path)
    probed = [absent for path in files for absent in _probe(path)]
    for path in files:
        _advise(path)  # a probe makes the kernel read ahead
    return sum(probed) / len(probed) if probed else None


def _advise(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not on disk yet is not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _probe(path: Path) -> list[bool]:
    """Return for some pages that are not holes whether they are absent from memory; empty where this is unknown."""
    if not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "SEEK_DATA"):
        return []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        offsets = [os.lseek(descriptor, size * i // PROBES, os.SEEK_DATA) for i in range(PROBES)] if size else []
        return [_is_absent(descriptor, offset) for offset in offsets]
    except OSError:  # a file system without this information
        return []
    finally:
        os.close(descriptor)


def _is_absent(descriptor: int, offset: int) -> bool:
    """Return whether the page at `offset` is not in memory. Raises OSError where the file system cannot tell."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    return False
