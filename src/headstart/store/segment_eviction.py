"""Eviction: makes space in the folder by deleting the segments that no process has used for longest.

One process at a time, under a file lock. Blocks of a victim that are valuable to this process are first written again
to its own segment: the pinned blocks, always, and the blocks used since they were written, as far as they fit into half
a segment. So at least half of every victim is gained; a segment of mostly pinned blocks is left alone.
"""

import contextlib
import errno
import time
from collections.abc import Callable, Container, Sequence

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store import segment as segments
from headstart.store.files import FileEntry, Files
from headstart.store.folder import STALE_SECONDS, Folder
from headstart.store.index import Index
from headstart.store.segment import Segment

RESERVE_BYTES = 1 << 30
"""Bytes left free on a disk, or a twentieth of it if that is less."""
MOVE_BYTES = 8 << 20
LOCK_TRIES, LOCK_SECONDS = 50, 0.01
MAX_PINNED_SHARE = 7 / 8
"""A segment with a larger share of pinned blocks is not worth evicting."""


class Eviction:
    """Keeps the files of one folder within a number of bytes. For one thread at a time."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        files: Files,
        size: int,
        write: Callable[[Sequence[tuple[BlockKey, Data]]], None],
    ) -> None:
        """`write` appends blocks to this process's own segment, even if they are stored already."""
        self._folder, self._index, self._files, self._size, self._write = folder, index, files, size, write
        self.max_bytes = size

    def room(self) -> int:
        """Return the bytes that may still be written, by the configured size and the disk's space. Raises OSError."""
        space = self._files.space(self._folder.path)
        reserve, num_bytes = min(RESERVE_BYTES, space.total // 20), self._folder.num_bytes
        self.max_bytes = max(0, min(self._size, num_bytes + space.free - reserve))
        return self.max_bytes - num_bytes

    def make_room(self, needed: int, own: str, kept: Container[BlockHash]) -> int:
        """Delete until `needed` bytes are free, except `own`, the file being written. Return how many blocks are lost.

        Raises OSError: ENOSPC if the rest is pinned or being written, EAGAIN if another process evicts for too long.
        """
        self._folder.list()
        for attempt in range(LOCK_TRIES):
            if self.room() >= needed:
                return 0
            lock = self._files.lock(self._folder.path / "lock")
            if lock is not None:
                try:
                    return self._evict(needed, own, kept)
                finally:
                    self._files.close(lock)
            time.sleep(LOCK_SECONDS if attempt else 0)
            self._folder.list()
        raise OSError(errno.EAGAIN, "another process has been evicting for too long")

    def _evict(self, needed: int, own: str, kept: Container[BlockHash]) -> int:
        given_up = 0
        victims = self._oldest_first(self._folder.list(), own)
        self._folder.sweep()
        for is_last_resort in (False, True):
            for name in victims:
                if self.room() >= needed:
                    return given_up
                if self._may_delete(name, kept, is_last_resort):
                    given_up += self._folder.unlink(name)
        if self.room() < needed and own and self._may_delete(own, kept, is_last_resort=True):
            given_up += self._folder.unlink(own)
        if self.room() < needed:
            raise OSError(errno.ENOSPC, f"the store has no space for {needed} bytes beside the pinned blocks")
        return given_up

    def _oldest_first(self, entries: dict[str, FileEntry], own: str) -> list[str]:
        now = self._files.now()
        mtimes = {name: entry.mtime for name, entry in entries.items() if name != own}
        for name, mtime in mtimes.items():
            if mtime > now + STALE_SECONDS:  # set by another clock: it would stay the most recent for that long
                mtimes[name] = now
                with contextlib.suppress(FileNotFoundError):
                    self._files.touch(self._folder.path / name)
        return sorted(mtimes, key=lambda name: (mtimes[name], name))

    def _may_delete(self, name: str, kept: Container[BlockHash], is_last_resort: bool) -> bool:
        """Return whether its deletion loses no pinned block; move valuable blocks first, except as a last resort."""
        segment = self._folder.known.get(name)
        if segment is None:
            return name in self._folder.others
        pinned, used = self._index.worth_moving(segment, kept)
        if is_last_resort:
            return not pinned
        num_slots = segment.header.num_slots
        if len(pinned) > MAX_PINNED_SHARE * num_slots:
            return False
        with contextlib.suppress(OSError):  # full or broken: unpinned blocks may be lost to make space
            self._move(segment, sorted(pinned + used[: max(0, num_slots // 2 - len(pinned))]))
        return not self._index.worth_moving(segment, kept)[0]

    def _move(self, segment: Segment, slots: list[int]) -> None:
        """Write these blocks again; unreadable ones are left. Raises OSError."""
        block_bytes = segment.header.shape.block_bytes
        at_once = max(1, MOVE_BYTES // block_bytes)
        buffer = memoryview(bytearray(min(at_once, len(slots)) * block_bytes))
        while slots:
            keys, found = segments.read_stored(self._files, segment, segments.first_run(slots, at_once), buffer)
            data = (buffer[at * block_bytes : (at + 1) * block_bytes] for at in range(found.num_blocks))
            self._write(list(zip(keys, data, strict=False)))
            del slots[: found.num_blocks + (found.miss is not None)]
