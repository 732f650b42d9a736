"""Catalog: one folder of segments as one index of blocks, shared with other processes through the file system alone.

Every process writes segments of its own and reads everybody's. What is odd about a file or an entry is counted by
reason and skipped; the rest of its file is served. Only the threads named at each method may call it.

Who gives way is decided by files: the least recently used segment, by its mtime, which every process that uses one of
its blocks renews. What this process holds dear in a victim is written again to its own segment first.
"""

import contextlib
import errno
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.core.hashing import BlockHash
from headstart.core.store import BlockKey, Data
from headstart.store import segment as segments
from headstart.store.files import FileEntry, Files, prepare_folder
from headstart.store.format import MAX_SEGMENT_BYTES, MAX_SLOTS, FormatError, Header, Shape
from headstart.store.index import Index
from headstart.store.segment import ReadResult, Segment, SegmentWriter, segment_id

MIN_SEGMENT_BYTES = 8 << 20
RESERVE_BYTES = 1 << 30
"""A disk is left this much, or a twentieth of it if that is less."""
TOUCH_SECONDS = 1.0
"""A segment's mtime is renewed at most this often."""
LIST_SECONDS = 2.0
"""So long after the folder changed it is listed every time: its own mtime may be too coarse to show a second change."""
MOVE_BYTES = 8 << 20
LOCK_TRIES, LOCK_SECONDS = 50, 0.01
CORRUPT = ("short", "magic", "checksum", "lengths", "swapped", "cut", "entry")
"""Of the reasons in `Catalog.skipped`; the others are version, other shape, unsafe (no file of ours) and unreadable."""
STARVED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # says nothing about a file
STALE_SECONDS = (
    60.0  # an unfinished file this old has no writer any more; a mtime so far ahead comes from another clock
)


class Catalog:
    """The blocks of one shape in a folder, and the room for more.

    `contains`, `read` and `used` may be called from any thread; all else from one thread at a time. `num_blocks`,
    `num_bytes`, `num_segments`, `max_bytes` and `skipped` may be looked at from anywhere.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        max_bytes: int,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the folder where needed, but reads nothing: see `refresh`.

        Raises ConfigError for a folder that cannot be used, and for a size that does not hold a single block.
        """
        prepare_folder(folder)
        self._folder, self._shape, self._size, self._clock = folder, shape, max_bytes, clock
        self._files = files or Files()
        self._num_slots = _slots_per_segment(shape, max_bytes)
        self._index = Index()
        self._known: dict[str, Segment] = {}  # segments of our shape, by file name
        self._others: dict[str, FileEntry] = {}  # all other segment files: not to be read, but they take room
        self._unsafe: set[str] = set()  # called like segments, but no files of ours
        self._writer: SegmentWriter | None = None
        self._next_number = 0
        self._folder_mtime, self._folder_changed = -1.0, float("-inf")
        self.skipped: Counter[str] = Counter()
        self.num_bytes = 0
        self.max_bytes = max_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_segments(self) -> int:
        """Files, of whatever shape."""
        return len(self._known) + len(self._others)

    @property
    def num_corrupt(self) -> int:
        """Files and entries that were damaged when they were scanned."""
        return sum(self.skipped[reason] for reason in CORRUPT)

    def contains(self, name: BlockHash) -> bool:
        return self._index.contains(name)

    def refresh(self) -> None:
        """Takes in what other processes wrote, and forgets what they evicted. Creates the folder if it vanished.

        Raises OSError if that fails as a whole; a single odd file is counted in `skipped`.
        """
        try:
            changed_at = self._files.stat(self._folder).mtime
        except FileNotFoundError:
            self._files.make_folder(self._folder)
            changed_at = self._files.stat(self._folder).mtime
        if changed_at != self._folder_mtime or self._clock() - self._folder_changed < LIST_SECONDS:
            self._list()
            if changed_at != self._folder_mtime:
                self._folder_mtime, self._folder_changed = changed_at, self._clock()
        for segment in list(self._known.values()):
            if not segment.is_sealed:
                self._take_in_more(segment)
        self._measure()

    def read(self, keys: Sequence[BlockKey], buffer: memoryview) -> ReadResult:
        """Reads blocks from the first on, each verified to be what its key says, until one cannot be had.

        `buffer` has room for all; behind the blocks that count it may hold anything. A block that is not what it should
        be is forgotten. Raises nothing.
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
            found = segments.read_blocks(self._files, segment, slot, keys[done : done + length], part)
            if found.num_blocks:
                self._index.mark_used(segment, slot, found.num_blocks)
                self._touch(segment)
            done += found.num_blocks
            if found.error is not None:
                return ReadResult(done, found.miss, found.error)
            if found.miss is not None:  # perhaps it is stored once more
                self._index.forget(keys[done].name, segment, slot + found.num_blocks)
            miss = found.miss or "gone"
        return ReadResult(done)

    def append(self, blocks: Sequence[tuple[BlockKey, Data]]) -> int:
        """Writes those that are not stored yet; returns how many that were. Does not look at `max_bytes`.

        Raises OSError; then some of them may have been written, and `contains` knows which.
        """
        new = {key.name: (key, data) for key, data in blocks if not self._index.contains(key.name)}
        self._write(list(new.values()))
        return len(new)

    def make_room(self, num_bytes: int, *, kept: Container[BlockHash]) -> int:
        """Evicts until so many bytes of blocks can be appended; returns how many blocks were given up for that.

        Raises OSError: ENOSPC if there is no room even so, EAGAIN if another process has been at it for long.
        """
        needed = num_bytes + self._overhead(num_bytes)
        segment_bytes = self._new_header(bytes(8)).file_bytes
        if self._room() >= needed + 2 * segment_bytes:  # else it depends on what others wrote meanwhile
            return 0
        self._list()
        if self._room() >= needed:
            return 0
        for _ in range(LOCK_TRIES):
            lock = self._files.lock(self._folder / "lock")
            if lock is not None:
                try:
                    return self._evict(needed, kept)
                finally:
                    self._files.close(lock)
            time.sleep(LOCK_SECONDS)
            self._list()
            if self._room() >= needed:
                return 0
        raise OSError(errno.EAGAIN, "another process has been making room for long")

    def used(self, names: Iterable[BlockHash]) -> None:
        """A request takes these over: they, and their files, are recent now."""
        for name in names:
            for segment, slot in self._index.places(name):
                self._index.mark_used(segment, slot, 1)
                self._touch(segment)

    def discard(self, names: Iterable[BlockHash]) -> None:
        """Forgets these and marks them in their files, so that no other process loads them either. Raises OSError."""
        failed: OSError | None = None
        for name in names:
            for segment, slot in self._index.places(name):
                self._index.forget(name, segment, slot)
                try:
                    segments.discard_entry(self._files, segment, slot)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed

    def clear(self) -> None:
        """Deletes all segments, of every model and process. Raises OSError."""
        self._close_writer()
        for name in self._list():
            self._unlink(name)
        self._measure()

    def close(self) -> None:
        """Ends writing; what was written stays. Twice does no harm."""
        self._close_writer()

    def _list(self) -> dict[str, FileEntry]:
        """Looks for files that came and went. Returns all that count as segments, of whatever shape. Raises OSError."""
        found = {entry.name: entry for entry in self._files.list(self._folder) if segment_id(entry.name)}
        unsafe = {name for name, entry in found.items() if not entry.is_safe}
        self.skipped["unsafe"] += len(unsafe - self._unsafe)
        self._unsafe = unsafe
        for name in self._known.keys() - (found.keys() - unsafe):
            self._drop(name)
        for name in self._others.keys() - (found.keys() - unsafe):
            del self._others[name]
        entries = {name: entry for name, entry in found.items() if entry.is_safe}
        for name, entry in entries.items():
            if name in self._others:
                self._others[name] = entry
            elif name not in self._known:
                self._take_in(entry)
        self._measure()
        return entries

    def _take_in(self, entry: FileEntry) -> None:
        path = self._folder / entry.name
        own_id = segment_id(entry.name)
        assert own_id is not None, entry.name
        try:
            header = segments.read_header(self._files, path, own_id)
            if header.shape != self._shape:
                self._reject(entry, "other shape")
                return
            segment = self._new_segment(path, header, entry.num_bytes)
            names, num_bad = segments.read_names(self._files, segment)
            self.skipped["cut"] += segments.is_cut(self._files, segment)
        except FileNotFoundError:
            return
        except FormatError as error:
            self._reject(entry, error.reason)
        except OSError as error:
            if error.errno in STARVED:
                raise
            self._reject(entry, "unreadable")
        else:
            self._known[entry.name] = segment
            self._index.add(segment, names)
            self.skipped["entry"] += num_bad

    def _take_in_more(self, segment: Segment) -> None:
        try:
            names, num_bad = segments.read_names(self._files, segment)
        except FileNotFoundError:
            self._drop(segment.path.name)
        except OSError as error:
            if error.errno in STARVED:
                raise
            self.skipped["unreadable"] += 1
            segment.is_sealed = True
        else:
            self._index.add(segment, names)
            self.skipped["entry"] += num_bad

    def _reject(self, entry: FileEntry, reason: str) -> None:
        self._others[entry.name] = entry
        self.skipped[reason] += 1

    def _drop(self, name: str) -> int:
        """Forgets a file. Returns how many blocks were lost with it."""
        self._others.pop(name, None)
        segment = self._known.pop(name, None)
        return 0 if segment is None else self._index.drop(segment)

    def _unlink(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(self._folder / name)
        return self._drop(name)

    def _touch(self, segment: Segment) -> None:
        now = self._clock()
        if now - segment.touched_at >= TOUCH_SECONDS:
            segment.touched_at = now
            with contextlib.suppress(OSError):  # it is about recency only; what ails the disk shows elsewhere
                self._files.touch(segment.path)

    def _write(self, blocks: Sequence[tuple[BlockKey, Data]]) -> None:
        done = 0
        while done < len(blocks):
            writer = self._writer_with_room()
            part = blocks[done : done + writer.room]
            writer.append(part)
            segment = self._known[writer.path.name]
            self._index.add(segment, [key.name for key, _ in part])
            segment.num_bytes = writer.header.payload_offset(writer.num_blocks)
            done += len(part)
        self._measure()

    def _writer_with_room(self) -> SegmentWriter:
        if self._writer is not None and not self._writer.is_linked():  # evicted by another process
            self._drop(self._writer.path.name)
            self._close_writer()
        if self._writer is not None and not self._writer.room:
            self._close_writer()
        if self._writer is None:
            header = self._new_header(secrets.token_bytes(8))
            self._writer = SegmentWriter(self._files, self._folder, header)
            segment = self._new_segment(self._writer.path, header, header.payload_start)
            segment.is_sealed = True  # what is in it we know from writing it
            self._known[segment.path.name] = segment
        return self._writer

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _evict(self, needed: int, kept: Container[BlockHash]) -> int:
        """Under the lock. First with what is dear moved away; if that does not do, without."""
        given_up = 0
        victims = self._oldest_first(self._list())
        self._sweep()
        for is_last_resort in (False, True):
            for name in victims:
                self._measure()
                if self._room() >= needed:
                    return given_up
                segment = self._known.get(name)
                if segment is None and name not in self._others:
                    continue
                if segment is None or is_last_resort or self._moved(segment, kept):
                    given_up += self._unlink(name)
        self._measure()
        if self._room() < needed and self._writer is not None:
            given_up += self._unlink(self._writer.path.name)
            self._close_writer()
            self._measure()
        if self._room() < needed:
            raise OSError(errno.ENOSPC, f"no room for {needed} bytes even in an empty store")
        return given_up

    def _oldest_first(self, entries: dict[str, FileEntry]) -> list[str]:
        now = self._files.now()
        own = self._writer.path.name if self._writer is not None else ""
        for name, entry in entries.items():
            if entry.mtime > now + STALE_SECONDS:  # set by another clock: it would stay the youngest for as long
                entries[name] = entry._replace(mtime=now)
                with contextlib.suppress(FileNotFoundError):
                    self._files.touch(self._folder / name)
        return sorted(entries.keys() - {own}, key=lambda name: (entries[name].mtime, name))

    def _moved(self, segment: Segment, kept: Container[BlockHash]) -> bool:
        """Writes what is dear in a victim to our own segment. False: that is nearly all of it, so take another."""
        pinned, used = self._index.worth_moving(segment, kept)
        half = segment.header.num_slots // 2
        if len(pinned) > half:
            return False
        slots = sorted(pinned + used[: half - len(pinned)])
        keys_at_once = max(1, MOVE_BYTES // self._shape.block_bytes)
        buffer = memoryview(bytearray(min(keys_at_once, len(slots)) * self._shape.block_bytes))
        with contextlib.suppress(OSError):  # a disk that is full or broken: room matters more
            while slots:
                length = 1
                while length < min(len(slots), keys_at_once) and slots[length] == slots[0] + length:
                    length += 1
                self._move(segment, slots[0], length, buffer)
                del slots[:length]
        return True

    def _move(self, segment: Segment, slot: int, length: int, buffer: memoryview) -> None:
        keys = segments.read_keys(self._files, segment, slot, length)
        found = segments.read_blocks(self._files, segment, slot, keys, buffer)
        size = self._shape.block_bytes
        self._write([(key, buffer[i * size : (i + 1) * size]) for i, key in enumerate(keys[: found.num_blocks])])

    def _sweep(self) -> None:
        """Deletes files whose writers were killed before they had a name."""
        now = self._files.now()
        for entry in self._files.list(self._folder):
            if segments.is_draft(entry.name) and entry.is_safe and now - entry.mtime > STALE_SECONDS:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self._folder / entry.name)

    def _measure(self) -> None:
        self.num_bytes = sum(segment.num_bytes for segment in self._known.values()) + sum(
            entry.num_bytes for entry in self._others.values()
        )

    def _room(self) -> int:
        """Bytes that may still be written, by the size asked for and by what the disk has left. Raises OSError."""
        space = self._files.space(self._folder)
        reserve = min(RESERVE_BYTES, space.total // 20)
        self.max_bytes = max(0, min(self._size, self.num_bytes + space.free - reserve))
        return self.max_bytes - self.num_bytes

    def _overhead(self, num_bytes: int) -> int:
        """Bytes for the tables of the segments that have to be begun for so many bytes of blocks."""
        left = num_bytes // self._shape.block_bytes - (self._writer.room if self._writer is not None else 0)
        return max(0, -(-left // self._num_slots)) * self._new_header(bytes(8)).payload_start

    def _new_header(self, own_id: bytes) -> Header:
        return Header(self._shape, self._num_slots, own_id)

    def _new_segment(self, path: Path, header: Header, num_bytes: int) -> Segment:
        self._next_number += 1
        return Segment(self._next_number, path, header, num_bytes)


def _slots_per_segment(shape: Shape, max_bytes: int) -> int:
    """Segments are small enough that evicting one loses little, and large enough that there are not many."""
    smallest = Header(shape, 1, bytes(8)).file_bytes
    if smallest > max_bytes:
        raise ConfigError(f"--kv-store-size {max_bytes} is less than one block takes; give at least {smallest} bytes")
    wanted = min(max(max_bytes // 256, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES, max_bytes // 4)
    per_slot = shape.entry_bytes + shape.block_bytes
    return max(1, min(MAX_SLOTS, (wanted - smallest) // per_slot))
