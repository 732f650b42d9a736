"""Catalog: one folder of segments as one index of blocks, shared with other processes through the file system alone.

Every process writes its own segments and reads those of all. A fault in a file or an entry is counted by reason and
skipped; the rest of its file is served. Only the threads named at each method may call it.

The victim of an eviction is chosen from file times: the least recently used segment by its mtime, which every process
that uses one of its blocks renews. Blocks of a victim that are valuable to this process are first written again to its
own segment.
"""

import contextlib
import errno
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.store import segment as segments
from headstart.store.files import FileEntry, FileSystemCalls, create_store_folder
from headstart.store.folder import CORRUPT, STALE_SECONDS, SegmentFolder, SlotIndex
from headstart.store.format import MAX_SEGMENT_BYTES, MAX_SLOTS, SegmentHeader, StoredBlockFormat
from headstart.store.segment import ReadResult, Segment, SegmentWriter

MIN_SEGMENT_BYTES = 8 << 20
RESERVE_BYTES = 1 << 30
"""Bytes left free on a disk, or a twentieth of it if that is less."""
MOVE_BYTES = 8 << 20
LOCK_TRIES, LOCK_SECONDS = 50, 0.01
MAX_PINNED_SHARE = 7 / 8
"""A segment with a larger share of pinned blocks is not worth evicting."""


class SegmentEvictor:
    """Keeps the files of one folder within a number of bytes. One thread of one process at a time, under a file lock.

    Of a victim's blocks the pinned ones are moved, always, and those used since they were written, the most recently
    used first, as far as they fit into half a segment; not those whose last use is among the oldest fifth of all. So at
    least half of every victim is gained; a segment of mostly pinned blocks is left alone.
    """

    def __init__(
        self,
        folder: SegmentFolder,
        index: SlotIndex,
        files: FileSystemCalls,
        size: int,
        write: Callable[[Sequence[tuple[BlockKey, Data]]], None],
    ) -> None:
        """`write` appends blocks to this process's own segment, even if they are stored already."""
        self._folder, self._index, self._files, self._size, self._write = folder, index, files, size, write
        self.max_bytes = size

    def update_writable_bytes(self) -> int:
        """Return the bytes that may still be written, by the configured size and the disk's space. Raises OSError."""
        space = self._files.space(self._folder.path)
        reserve, num_bytes = min(RESERVE_BYTES, space.total // 20), self._folder.num_bytes
        self.max_bytes = max(0, min(self._size, num_bytes + space.free - reserve))
        return self.max_bytes - num_bytes

    def make_room(self, needed: int, own: str, kept: Container[BlockHash]) -> int:
        """Delete until `needed` bytes are free, except `own`, the file being written. Return how many blocks are lost.

        Raises OSError: ENOSPC if the rest is pinned or being written, EAGAIN if another process evicts for too long.
        """
        self._folder.scan()
        for attempt in range(LOCK_TRIES):
            if self.update_writable_bytes() >= needed:
                return 0
            lock = self._files.try_open_locked(self._folder.path / "lock")
            if lock is not None:
                try:
                    return self._evict(needed, own, kept)
                finally:
                    self._files.close(lock)
            time.sleep(LOCK_SECONDS if attempt else 0)
            self._folder.scan()
        raise OSError(errno.EAGAIN, "another process has been evicting for too long")

    def _evict(self, needed: int, own: str, kept: Container[BlockHash]) -> int:
        given_up = 0
        victims = self._oldest_first(self._folder.scan(), own)
        self._folder.delete_abandoned_files()
        for is_last_resort in (False, True):
            for name in victims:
                if self.update_writable_bytes() >= needed:
                    return given_up
                if self._may_delete(name, kept, is_last_resort):
                    given_up += self._folder.unlink(name)
        if self.update_writable_bytes() < needed and own and self._may_delete(own, kept, is_last_resort=True):
            given_up += self._folder.unlink(own)
        if self.update_writable_bytes() < needed:
            raise OSError(errno.ENOSPC, f"the store has no space for {needed} bytes beside the pinned blocks")
        return given_up

    def _oldest_first(self, entries: dict[str, FileEntry], own: str) -> list[str]:
        now = self._files.mtime_clock_now()
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
        pinned, used = self._index.slots_to_move(segment, kept)
        if is_last_resort:
            return not pinned
        num_slots = segment.header.num_slots
        if len(pinned) > MAX_PINNED_SHARE * num_slots:
            return False
        with contextlib.suppress(OSError):  # full or broken: unpinned blocks may be lost to make space
            self._move(segment, sorted(pinned + used[: max(0, num_slots // 2 - len(pinned))]))
        return not self._index.slots_to_move(segment, kept)[0]

    def _move(self, segment: Segment, slots: list[int]) -> None:
        """Write these blocks again; unreadable ones are left. Raises OSError."""
        block_bytes = segment.header.shape.block_bytes
        at_once = max(1, MOVE_BYTES // block_bytes)
        buffer = memoryview(bytearray(min(at_once, len(slots)) * block_bytes))
        while slots:
            keys, found = segments.read_stored_blocks(
                self._files, segment, segments.leading_adjacent_slots(slots, at_once), buffer
            )
            data = (buffer[at * block_bytes : (at + 1) * block_bytes] for at in range(found.num_blocks))
            self._write(list(zip(keys, data, strict=False)))
            del slots[: found.num_blocks + (found.miss is not None)]


class SegmentCatalog:
    """The blocks of one shape in a folder, and the space for more.

    `contains`, `read` and `used` may be called from any thread; all else from one thread at a time. `num_blocks`,
    `num_bytes`, `num_segments`, `max_bytes` and `skipped` may be read from any thread.
    """

    def __init__(
        self,
        folder: Path,
        shape: StoredBlockFormat,
        max_bytes: int,
        files: FileSystemCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the folder if needed, but read nothing: see `refresh`.

        Raises ConfigError for an unusable folder, and for a size below a single block.
        """
        smallest = SegmentHeader(shape, 1, bytes(8)).file_bytes
        if smallest > max_bytes:
            raise ConfigError(f"--kv-store-size {max_bytes} holds not even one block; give at least {smallest} bytes")
        create_store_folder(folder)
        self._shape, self._files = shape, files or FileSystemCalls()
        self._index = SlotIndex()
        self._folder = SegmentFolder(folder.resolve(), shape, self._files, self._index, clock)
        self._eviction = SegmentEvictor(self._folder, self._index, self._files, max_bytes, self._write)
        self._writer: SegmentWriter | None = None
        self._unmarked: list[tuple[Segment, int]] = []  # discarded here, but not yet marked for other processes

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """The bytes of all segments in the folder, of any shape."""
        return self._folder.num_bytes

    @property
    def num_segments(self) -> int:
        """The number of segment files, of any shape."""
        return len(self._folder.known) + len(self._folder.others)

    @property
    def max_bytes(self) -> int:
        """The bound of `num_bytes`: the configured size, or what the disk allowed at the last call of `make_room`."""
        return self._eviction.max_bytes

    @property
    def skipped_by_reason(self) -> Mapping[str, int]:
        """Files and entries that are not served, by reason, each counted once."""
        return self._folder.skipped

    @property
    def num_corrupt(self) -> int:
        """The number of damaged ones among them."""
        return sum(self.skipped_by_reason.get(reason, 0) for reason in CORRUPT)

    def contains(self, block_hash: BlockHash) -> bool:
        return self._index.contains(block_hash)

    def refresh_from_other_writers(self) -> None:
        """Index what other processes wrote, and drop what they evicted. Creates the folder if it vanished.

        Raises OSError if that fails as a whole; a single faulty file is counted in `skipped`.
        """
        self._folder.refresh()

    def read_blocks_until_miss(
        self, keys: Sequence[BlockKey], buffer: memoryview, ahead: Sequence[BlockKey] = ()
    ) -> ReadResult:
        """Read blocks from the first on, each verified against its key, until one is unavailable.

        `buffer` has space for all; after the blocks that count its content is undefined. A block that does not match
        its key is dropped. Raises nothing.
        """
        block_bytes = self._shape.block_bytes
        assert len(buffer) >= len(keys) * block_bytes, (len(buffer), len(keys), block_bytes)
        done, miss = 0, "gone"
        while done < len(keys):
            run = self._index.run(keys, done)
            if run is None:
                return ReadResult(done, miss)
            segment, slot, length = run
            part = buffer[done * block_bytes : (done + length) * block_bytes]
            found = segments.read_and_verify_blocks(self._files, segment, slot, keys[done : done + length], part)
            if found.num_blocks:
                self._index.mark_slots_used(segment, slot, found.num_blocks)
                self._folder.touch(segment)
            done += found.num_blocks
            if found.error is not None:
                return ReadResult(done, found.miss, found.error)
            if found.miss is not None:  # another copy may exist
                self._index.remove_location(keys[done].block_hash, segment, slot + found.num_blocks)
            miss = found.miss or "gone"
        return ReadResult(done)

    def write_new_blocks(self, blocks: Sequence[tuple[BlockKey, Data]]) -> int:
        """Write those that are not stored yet; return their number. Does not check `max_bytes`.

        Raises OSError; then some of them may have been written, and `contains` reports which.
        """
        new = {key.block_hash: (key, data) for key, data in blocks if not self._index.contains(key.block_hash)}
        self._write(list(new.values()))
        return len(new)

    def make_room(self, num_bytes: int, *, kept: Container[BlockHash]) -> int:
        """Evict until so many bytes of blocks can be appended; return the number of blocks dropped.

        Blocks in `kept` are not dropped, unless another process evicts them. Raises OSError: ENOSPC if there is still
        no space, EAGAIN if another process has been evicting for too long.
        """
        self._drop_evicted_writer()
        room = self._eviction.update_writable_bytes()  # first, since the size of new segments depends on it
        needed = num_bytes + self._overhead(num_bytes)
        if room >= needed + 2 * self._header(bytes(8)).file_bytes:
            return 0  # otherwise it depends on what others wrote meanwhile
        own = self._writer.path.name if self._writer is not None else ""
        return self._eviction.make_room(needed, own, kept)

    def mark_used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Mark blocks of chains, and their files, as used now: a request uses them. The head of one counts as last."""
        for block_hash in reversed(list(block_hashes)):
            for segment, slot in self._index.locations_of_block(block_hash):
                self._index.mark_slots_used(segment, slot, 1)
                self._folder.touch(segment)

    def discard_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Drop these and mark them in their files, so that other processes do not load them either.

        Raises OSError; then unmarked ones are dropped here all the same, and marked by the next call.
        """
        for block_hash in block_hashes:
            for segment, slot in self._index.locations_of_block(block_hash):
                self._index.remove_location(block_hash, segment, slot)
                self._unmarked.append((segment, slot))
        while self._unmarked:
            with contextlib.suppress(FileNotFoundError):
                segments.mark_entry_discarded(self._files, *self._unmarked[0])
            del self._unmarked[0]

    def clear(self) -> None:
        """Delete all segments, of every model and process. Raises OSError."""
        self._close_writer()
        for name in self._folder.scan():
            self._folder.unlink(name)

    def close(self) -> None:
        """End writing; what was written stays. Calling it twice is harmless."""
        self._close_writer()

    def _write(self, blocks: Sequence[tuple[BlockKey, Data]]) -> None:
        done = 0
        while done < len(blocks):
            writer = self._writer_with_room()
            part = blocks[done : done + writer.num_free_slots]
            writer.append_blocks(part)
            segment = self._folder.known[writer.path.name]
            self._index.append_block_hashes(segment, [key.block_hash for key, _ in part])
            segment.num_bytes = writer.header.payload_offset(writer.num_blocks)
            done += len(part)
        self._folder.recount_bytes()

    def _writer_with_room(self) -> SegmentWriter:
        self._drop_evicted_writer()
        if self._writer is not None and not self._writer.num_free_slots:
            self._close_writer()
        if self._writer is None:
            header = self._header(secrets.token_bytes(8))
            self._writer = SegmentWriter(self._files, self._folder.path, header)
            self._folder.add_own_segment(self._writer.path, header)
        return self._writer

    def _drop_evicted_writer(self) -> None:
        """Close this process's segment if another process evicted it; only then is its space free."""
        if self._writer is not None:
            name = self._writer.path.name
            if name not in self._folder.known or not self._writer.is_linked():
                self._folder.drop_missing_file(name)
                self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _overhead(self, num_bytes: int) -> int:
        """Return the bytes of the tables of the new segments that so many bytes of blocks need."""
        left = num_bytes // self._shape.block_bytes - (self._writer.num_free_slots if self._writer is not None else 0)
        header = self._header(bytes(8))
        return max(0, -(-left // header.num_slots)) * header.payload_start

    def _header(self, own_id: bytes) -> SegmentHeader:
        """Return a new segment's header: small enough that evictions lose little, large enough that files are few."""
        max_bytes, smallest = self.max_bytes, SegmentHeader(self._shape, 1, own_id).file_bytes
        wanted = min(max(max_bytes // 256, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES, max_bytes // 4)
        num_slots = (wanted - smallest) // (self._shape.table_entry_bytes + self._shape.block_bytes)
        return SegmentHeader(self._shape, max(1, min(MAX_SLOTS, num_slots)), own_id)
