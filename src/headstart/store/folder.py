"""Folder: the segment files that exist, the content of those of one shape, and the bytes of all of them.

A fault in a file or an entry is counted by reason and skipped; the rest of its file counts. Files that are not named
like segments are left alone.
"""

import contextlib
import errno
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store import segment as segments
from headstart.store.files import FileEntry, FileSystemCalls
from headstart.store.format import MAX_SLOTS, FormatError, SegmentHeader, StoredBlockFormat
from headstart.store.segment import Segment, segment_id

TOUCH_SECONDS = 1.0
"""Minimum interval between two renewals of a segment's mtime."""
LIST_SECONDS = 2.0
"""After a change the folder is listed every time for this long: its mtime may be too coarse to show a second change."""
CORRUPT = ("short", "magic", "checksum", "lengths", "swapped", "cut", "entry")
"""Among the reasons in `SegmentFolder.skipped`; others: version, other shape, unsafe (no file of this user) and
unreadable."""
STALE_SECONDS = 60.0
"""An unfinished file this old no longer has a writer."""
STALE_SHARE = 0.2
"""Of the used blocks: those whose last use is the oldest are not written again when their segment goes."""
MAX_SAMPLE = 4096
STARVED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # unrelated to the file


class SlotRun(NamedTuple):
    """Requested blocks in adjacent slots of one segment."""

    segment: Segment
    slot: int
    length: int


class SlotIndex:
    """The location of each block in all known segments of one shape, in memory: block hash -> segment and slot.

    A location is one int. `contains` reads one dict and needs no lock; everything else holds one during a lookup.
    """

    def __init__(self) -> None:
        self._where: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further locations of blocks that are stored more than once
        self._segments: dict[int, Segment] = {}
        self._num_uses = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._where)

    def contains(self, block_hash: bytes) -> bool:
        return block_hash in self._where

    def append_block_hashes(self, segment: Segment, block_hashes: list[bytes]) -> None:
        """Add block hashes in the next slots of a segment. b"" is a slot without a block."""
        with self._lock:
            self._segments[segment.number] = segment
            location = segment.number * MAX_SLOTS + len(segment.block_hashes)
            segment.add_block_hashes(block_hashes)
            for block_hash in block_hashes:
                if block_hash and self._where.setdefault(block_hash, location) != location:
                    self._copies.setdefault(block_hash, []).append(location)
                location += 1

    def run(self, keys: Sequence[BlockKey], first: int) -> SlotRun | None:
        """Return the location of `keys[first]` and the number of consecutive blocks there; None if it is not stored."""
        with self._lock:
            location = self._where.get(keys[first].block_hash)
            if location is None:
                return None
            number, slot = divmod(location, MAX_SLOTS)
            segment, length = self._segments[number], 1
            block_hashes = segment.block_hashes
            while (
                first + length < len(keys)
                and slot + length < len(block_hashes)
                and block_hashes[slot + length] == keys[first + length].block_hash
            ):
                length += 1
            return SlotRun(segment, slot, length)

    def mark_slots_used(self, segment: Segment, slot: int, length: int) -> None:
        """Mark slots as used by a request since they were written."""
        with self._lock:
            self._num_uses += 1
            length = len(segment.uses[slot : slot + length])
            segment.uses[slot : slot + length] = array("Q", (self._num_uses,)) * length

    def locations_of_block(self, block_hash: bytes) -> list[tuple[Segment, int]]:
        """Return all locations of a block."""
        with self._lock:
            locations = (
                [self._where[block_hash], *self._copies.get(block_hash, ())] if block_hash in self._where else []
            )
            return [(self._segments[number], slot) for number, slot in (divmod(at, MAX_SLOTS) for at in locations)]

    def remove_location(self, block_hash: bytes, segment: Segment, slot: int) -> None:
        """Remove one location of a block. Others may remain."""
        with self._lock:
            self._forget(block_hash, segment, slot)

    def drop_segment(self, segment: Segment) -> int:
        """Remove a segment. Return the number of blocks that are no longer stored anywhere."""
        with self._lock:
            before = len(self._where)
            for slot, block_hash in enumerate(segment.block_hashes):
                if block_hash:
                    self._forget(block_hash, segment, slot)
            self._segments.pop(segment.number, None)
            return before - len(self._where)

    def slots_to_move(self, segment: Segment, kept: Container[BlockHash]) -> tuple[list[int], list[int]]:
        """Return the slots whose block has no other copy: those in `kept`, and those used since they were written.

        The last are ordered by their last use, the most recent first; those of the oldest uses of all are left out.
        """
        pinned: list[int] = []
        used: list[int] = []
        oldest = self._oldest_valued_use()
        with self._lock:
            for slot, block_hash in enumerate(segment.block_hashes):
                if block_hash and block_hash not in self._copies:
                    if BlockHash(block_hash) in kept:
                        pinned.append(slot)
                    elif segment.uses[slot] >= oldest:
                        used.append(slot)
            used.sort(key=segment.uses.__getitem__, reverse=True)
        return pinned, used

    def _oldest_valued_use(self) -> int:
        """Return the number of the use before which a fifth of all used blocks was used last, of a sample of slots."""
        known = list(self.segments())
        step = max(1, sum(len(segment.uses) for segment in known) // MAX_SAMPLE)
        uses = sorted(filter(None, chain.from_iterable(segment.uses[::step] for segment in known)))
        return uses[int(STALE_SHARE * len(uses))] if uses else 1

    def segments(self) -> Iterable[Segment]:
        with self._lock:
            return list(self._segments.values())

    def _forget(self, block_hash: bytes, segment: Segment, slot: int) -> None:
        location = segment.number * MAX_SLOTS + slot
        if slot < len(segment.block_hashes) and segment.block_hashes[slot] == block_hash:
            segment.block_hashes[slot] = b""
        copies = self._copies.get(block_hash, [])
        if self._where.get(block_hash) == location:
            if copies:
                self._where[block_hash] = copies.pop(0)
            else:
                del self._where[block_hash]
        elif location in copies:
            copies.remove(location)
        if not copies:
            self._copies.pop(block_hash, None)


class SegmentFolder:
    """The segment files of a folder. All methods except `touch` are for one thread at a time."""

    def __init__(
        self, path: Path, shape: StoredBlockFormat, files: FileSystemCalls, index: SlotIndex, clock: Callable[[], float]
    ) -> None:
        self.path, self._shape, self._files, self._index, self._clock = path, shape, files, index, clock
        self.known: dict[str, Segment] = {}  # segments of this shape, by file name
        self.others: dict[str, FileEntry] = {}  # all other segment files: not readable, but they take space
        self.skipped: Counter[str] = Counter()
        self.num_bytes = 0
        self._unsafe: set[str] = set()  # named like segments, but not files of this user
        self._next_number = 0
        self._mtime, self._changed_at = -1.0, float("-inf")

    def refresh(self) -> None:
        """Index what other processes wrote, and drop what they evicted. Creates the folder if it vanished.

        Raises OSError if that fails as a whole; a single faulty file is counted in `skipped`.
        """
        try:
            mtime = self._files.lstat(self.path).mtime
        except FileNotFoundError:
            for name in [*self.known, *self.others]:
                self.drop_missing_file(name)
            self._files.mkdir(self.path)
            mtime = self._files.lstat(self.path).mtime
        now = self._clock()
        if mtime != self._mtime or now - self._changed_at < LIST_SECONDS:
            self.scan()
            if mtime != self._mtime:
                self._mtime, self._changed_at = mtime, now
        for segment in list(self.known.values()):
            if not segment.is_sealed:
                self._read_more(segment)
        self.recount_bytes()

    def scan(self) -> dict[str, FileEntry]:
        """Find new and vanished files. Return all that count as segments, of any shape. Raises OSError."""
        found = {
            entry.name: entry for entry in self._files.list_entries(self.path) if segment_id(entry.name) is not None
        }
        entries = {name: entry for name, entry in found.items() if entry.is_safe}
        unsafe = found.keys() - entries.keys()
        self.skipped["unsafe"] += len(unsafe - self._unsafe)
        self._unsafe = set(unsafe)
        for name in (self.known.keys() | self.others.keys()) - entries.keys():
            self.drop_missing_file(name)
        for name, entry in entries.items():
            if name in self.others:
                self.others[name] = entry
            elif name not in self.known:
                self._add_file(entry)
            else:  # another process may have appended to it
                segment = self.known[name]
                segment.num_bytes = entry.num_bytes if segment.is_full() else max(segment.num_bytes, entry.num_bytes)
        self.recount_bytes()
        return entries

    def add_own_segment(self, path: Path, header: SegmentHeader) -> Segment:
        """Add a segment that this process has begun to write. Its content is known from writing it."""
        segment = self._new_segment(path, header, header.payload_start)
        segment.is_sealed = True
        self.known[path.name] = segment
        return segment

    def unlink(self, name: str) -> int:
        """Delete a file. Return the number of blocks that are no longer stored anywhere. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self.path / name)
        lost = self.drop_missing_file(name)
        self.recount_bytes()
        return lost

    def drop_missing_file(self, name: str) -> int:
        """Drop a file that is gone. Return the number of blocks that are no longer stored anywhere."""
        self.others.pop(name, None)
        segment = self.known.pop(name, None)
        return 0 if segment is None else self._index.drop_segment(segment)

    def touch(self, segment: Segment) -> None:
        """Renew its mtime, by which all processes see that it is in use. From any thread."""
        now = self._clock()
        if now - segment.touched_at >= TOUCH_SECONDS:
            segment.touched_at = now
            with contextlib.suppress(OSError):  # it only affects recency; disk errors show elsewhere
                self._files.touch(segment.path)

    def delete_abandoned_files(self) -> None:
        """Delete files whose writers were killed before naming them. Raises OSError."""
        now = self._files.mtime_clock_now()
        for entry in self._files.list_entries(self.path):
            if segments.is_headerless_segment(entry.name) and entry.is_safe and now - entry.mtime > STALE_SECONDS:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self.path / entry.name)

    def recount_bytes(self) -> None:
        """Recompute `num_bytes`."""
        of_ours = sum(segment.num_bytes for segment in self.known.values())
        self.num_bytes = of_ours + sum(entry.num_bytes for entry in self.others.values())

    def _add_file(self, entry: FileEntry) -> None:
        path, own_id = self.path / entry.name, segment_id(entry.name)
        assert own_id is not None, entry.name
        try:
            header = segments.read_header(self._files, path, own_id)
            if header.shape != self._shape:
                self._reject(entry, "other shape")
                return
            segment = self._new_segment(path, header, entry.num_bytes)
            block_hashes, num_bad = segments.read_new_block_hashes(self._files, segment)
            is_cut = segments.is_truncated(self._files, segment)
        except FileNotFoundError:
            return
        except FormatError as error:
            self._reject(entry, error.reason)
        except OSError as error:
            if error.errno in STARVED:
                raise
            self._reject(entry, "unreadable")
        else:
            self.known[entry.name] = segment
            self._index.append_block_hashes(segment, block_hashes)
            self.skipped["entry"] += num_bad
            self.skipped["cut"] += is_cut

    def _read_more(self, segment: Segment) -> None:
        try:
            block_hashes, num_bad = segments.read_new_block_hashes(self._files, segment)
        except FileNotFoundError:
            self.drop_missing_file(segment.path.name)
        except OSError as error:
            if error.errno in STARVED:
                raise
            self.skipped["unreadable"] += 1
            segment.is_sealed = True
        else:
            self._index.append_block_hashes(segment, block_hashes)
            self.skipped["entry"] += num_bad

    def _reject(self, entry: FileEntry, reason: str) -> None:
        self.others[entry.name] = entry
        self.skipped[reason] += 1

    def _new_segment(self, path: Path, header: SegmentHeader, num_bytes: int) -> Segment:
        self._next_number += 1
        return Segment(self._next_number, path, header, num_bytes)
