"""DirectFileWriter: writes payloads past the page cache (O_DIRECT), if the disk and the sizes allow it.

Filling the page cache costs thirty times the CPU time of the transfer itself (benchmarks/experiments.md), which the
compute threads lose. Later reads go through the page cache all the same: the kernel keeps both views of a file
coherent. The disk requires offsets, lengths and perhaps addresses in whole pages: unaligned data is gathered in an
aligned buffer.
"""

import errno
from array import array
from collections.abc import Sequence
from pathlib import Path

from headstart.core.cache.block_store import Data
from headstart.store.files import FileSystemCalls

PAGE_BYTES = 4096
GATHER_BYTES = 4 << 20
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # a file system without direct writes


class DirectFileWriter:
    """Direct writes to one file of this process; `write` returns False if they are not possible."""

    def __init__(self, files: FileSystemCalls, path: Path, block_bytes: int) -> None:
        """Raises OSError, but not for a file system without direct writes."""
        self._files, self._block_bytes = files, block_bytes
        self._fd: int | None = None
        self._gathered = memoryview(b"")
        if block_bytes % PAGE_BYTES == 0:
            try:
                self._fd = files.open_for_direct_write(path)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise

    def try_write(self, payloads: Sequence[Data], offset: int) -> bool:
        """Write the payloads one after the other; return False, perhaps after a part, if buffered writes are needed.

        Raises OSError.
        """
        if self._fd is None or offset % PAGE_BYTES:
            return False
        size, at_once = self._block_bytes, max(GATHER_BYTES // self._block_bytes, 1)
        for first in range(0, len(payloads), at_once):
            part = payloads[first : first + at_once]
            written = self._write(self._fd, part, offset + first * size)
            if written is None:
                written = self._write(self._fd, [self._gather(part)], offset + first * size)
            if written is None:
                self.close()
            if written != len(part) * size:  # otherwise the rest would not begin on a page
                return False
        return True

    def _write(self, fd: int, buffers: Sequence[Data], offset: int) -> int | None:
        """Return the bytes written; None if the file system refuses direct writes."""
        try:
            return self._files.pwritev(fd, buffers, offset)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return None

    def _gather(self, payloads: Sequence[Data]) -> memoryview:
        size = self._block_bytes
        if not self._gathered:
            self._gathered = allocate_page_aligned(max(GATHER_BYTES // size, 1) * size)
        for place, payload in enumerate(payloads):
            self._gathered[place * size : (place + 1) * size] = payload
        return self._gathered[: len(payloads) * size]

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        fd, self._fd = self._fd, None
        self._gathered = memoryview(b"")
        if fd is not None:
            self._files.close(fd)


def allocate_page_aligned(num_bytes: int) -> memoryview:
    """Return writable memory that begins on a page."""
    memory = array("B", bytes(num_bytes + PAGE_BYTES))
    skip = -memory.buffer_info()[0] % PAGE_BYTES
    return memoryview(memory)[skip : skip + num_bytes]
