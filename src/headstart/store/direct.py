"""Direct: payloads on their way to the disk past the page cache, where the disk and the sizes allow it.

Filling the page cache costs the processor thirty times what the transfer itself does (docs/experiments.md), and that is
taken from whoever computes. What is read later comes through the page cache all the same: the kernel keeps both views
of a file the same. The disk wants addresses, offsets and lengths in whole pages, so payloads are gathered in a buffer
that begins on one.
"""

import errno
from array import array
from collections.abc import Sequence
from pathlib import Path

from headstart.core.store import Data
from headstart.store.files import Files

PAGE_BYTES = 4096
GATHER_BYTES = 4 << 20
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)  # a file system that knows no direct writes


class DirectWrites:
    """Direct writes to one file of our own; it may turn out that there are none, and then `write` says so."""

    def __init__(self, files: Files, path: Path, block_bytes: int) -> None:
        """Raises OSError, but not for a file system that refuses."""
        self._files, self._block_bytes = files, block_bytes
        self._fd: int | None = None
        self._gathered = memoryview(b"")
        if block_bytes % PAGE_BYTES == 0:
            try:
                self._fd = files.open_direct(path)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
        if self._fd is not None:
            self._gathered = _aligned(max(GATHER_BYTES // block_bytes, 1) * block_bytes)

    def write(self, payloads: Sequence[Data], offset: int) -> bool:
        """Writes them one behind the other; False, and perhaps a part of them, if that has to go another way.

        Raises OSError.
        """
        if self._fd is None or offset % PAGE_BYTES:
            return False
        size, at_once = self._block_bytes, len(self._gathered) // self._block_bytes
        for first in range(0, len(payloads), at_once):
            part = payloads[first : first + at_once]
            for place, payload in enumerate(part):
                self._gathered[place * size : (place + 1) * size] = payload
            whole = self._gathered[: len(part) * size]
            try:
                written = self._files.pwritev(self._fd, [whole], offset + first * size)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self.close()
                return False
            if written != len(whole):  # the rest would not begin on a page
                return False
        return True

    def close(self) -> None:
        """Twice does no harm."""
        fd, self._fd = self._fd, None
        self._gathered = memoryview(b"")
        if fd is not None:
            self._files.close(fd)


def _aligned(num_bytes: int) -> memoryview:
    """Writable memory that begins on a page."""
    memory = array("B", bytes(num_bytes + PAGE_BYTES))
    skip = -memory.buffer_info()[0] % PAGE_BYTES
    return memoryview(memory)[skip : skip + num_bytes]
