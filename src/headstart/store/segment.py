"""One segment file: its state in memory, the reading of its table and blocks, and the writer of a new one.

A file has one writer, which writes a block's payload before its entry. Readers open the file for each run of blocks:
nothing is held open, so nothing can be closed under a reader, and an evicted file is gone at once.
"""

import contextlib
import errno
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from headstart.core.cache.block_store import BlockKey, Data
from headstart.store import format
from headstart.store.direct import DirectFileWriter
from headstart.store.files import FileSystemCalls
from headstart.store.format import HEADER_BYTES, BlockEntry, FormatError, SegmentHeader

SUFFIX = ".kv"
DRAFT_SUFFIX = ".tmp"
_TABLE_BYTES = 1 << 20
_MAX_BUFFERS = 512  # below IOV_MAX everywhere

Miss = Literal["gone", "corrupt", "mismatch", "io"]
_MISSES: dict[str, Miss] = {"discarded": "gone", "short": "io"}


@dataclass(slots=True, eq=False)
class Segment:
    """The state of one segment file of this process's shape."""

    number: int  # for locations; never reused
    path: Path
    header: SegmentHeader
    num_bytes: int
    block_hashes: list[bytes] = field(
        default_factory=list[bytes]
    )  # hashes by slot, as far as read; b"": nothing to load
    uses: "array[int]" = field(default_factory=lambda: array("Q"))  # by slot: number of its last use; 0: not used
    suspect_until: int = 0  # entries before this slot have been checked twice
    touched_at: float = float("-inf")
    is_sealed: bool = False  # it has no writer any more

    def is_full(self) -> bool:
        return len(self.block_hashes) == self.header.num_slots

    def add_block_hashes(self, block_hashes: list[bytes]) -> None:
        """Add the block hashes of the next slots."""
        self.block_hashes += block_hashes
        self.uses.frombytes(bytes(len(block_hashes) * self.uses.itemsize))
        self.is_sealed |= self.is_full()


class ReadResult(NamedTuple):
    """The number of leading blocks read and verified, and why the next one was not. `error` is for "io"."""

    num_blocks: int
    miss: Miss | None = None
    error: OSError | None = None


def segment_id(name: str) -> bytes | None:
    """Return the id of the segment with this file name; None for any other file."""
    stem = name.removesuffix(SUFFIX)
    if stem == name or len(stem) != 16 or set(stem) - set("0123456789abcdef"):
        return None
    return bytes.fromhex(stem)


def is_headerless_segment(name: str) -> bool:
    """Return whether a file is a segment that has no header yet."""
    return (
        name.startswith(".")
        and name.endswith(DRAFT_SUFFIX)
        and segment_id(name[1 : -len(DRAFT_SUFFIX)] + SUFFIX) is not None
    )


def read_header(files: FileSystemCalls, path: Path, own_id: bytes) -> SegmentHeader:
    """Read the header of a file. Raises OSError and FormatError."""
    fd = files.open_owned_regular_file(path)
    try:
        return format.decode_segment_header(files.pread(fd, HEADER_BYTES, 0), own_id)
    finally:
        files.close(fd)


def read_new_block_hashes(files: FileSystemCalls, segment: Segment) -> tuple[list[bytes], int]:
    """Return the block hashes written since the last call, and the number of damaged entries.

    Stops before the first damaged entry unless it was damaged at an earlier call: its writer may be writing it.
    Changes only `suspect_until` and `num_bytes`. Raises OSError.
    """
    found = files.lstat(segment.path)
    first, header = len(segment.block_hashes), segment.header
    stop, size = header.num_slots_within(found.size), header.shape.table_entry_bytes
    segment.num_bytes = found.num_bytes
    block_hashes: list[bytes] = []
    num_bad = 0
    if stop <= first:
        return block_hashes, num_bad
    fd = files.open_owned_regular_file(segment.path)
    try:
        while first < stop:
            asked = min(stop - first, max(1, _TABLE_BYTES // size))
            piece = format.decode_block_hashes(header, first, files.pread(fd, asked * size, header.entry_offset(first)))
            new = next((place for place in piece.bad if first + place >= segment.suspect_until), len(piece.by_slot))
            block_hashes += piece.by_slot[:new]
            num_bad += sum(place < new for place in piece.bad)
            if new < len(piece.by_slot):
                segment.suspect_until = first + len(piece.by_slot)
            if new < asked:
                break
            first += new
    finally:
        files.close(fd)
    return block_hashes, num_bad


def load_hashes_into_segment(files: FileSystemCalls, segment: Segment) -> int:
    """Add all block hashes in the file now; return the number of damaged entries. Raises OSError."""
    num_bad = num_idle = 0
    while num_idle < 2:
        block_hashes, more_bad = read_new_block_hashes(files, segment)
        segment.add_block_hashes(block_hashes)
        num_bad += more_bad
        num_idle = 0 if block_hashes else num_idle + 1
    return num_bad


def is_truncated(files: FileSystemCalls, segment: Segment) -> bool:
    """Return whether the file is truncated: in header or table, or before an entry's payload. Raises OSError."""
    header = segment.header
    first = header.num_slots_within(files.lstat(segment.path).size)
    fd = files.open_owned_regular_file(segment.path)
    try:
        entry = files.pread(
            fd, header.shape.table_entry_bytes if first < header.num_slots else 0, header.entry_offset(first)
        )
    finally:
        files.close(fd)
    size = files.lstat(segment.path).size  # read last: a payload is written before its entry
    return size < header.payload_start or (any(entry) and header.num_slots_within(size) <= first)


def read_and_verify_blocks(
    files: FileSystemCalls, segment: Segment, slot: int, keys: Sequence[BlockKey], buffer: memoryview
) -> ReadResult:
    """Read and verify blocks in adjacent slots into `buffer`, and stop at the first that is not as requested.

    The content of `buffer` after the blocks that count is undefined. Raises nothing.
    """
    try:
        fd = files.open_owned_regular_file(segment.path)
        try:
            return _read_blocks(files, fd, segment.header, slot, keys, buffer)
        finally:
            files.close(fd)
    except FileNotFoundError:
        return ReadResult(0, "gone")
    except OSError as error:
        return ReadResult(0, "io", error)


def leading_adjacent_slots(slots: Sequence[int], at_most: int) -> range:
    """Return the leading slots that are adjacent, at most `at_most`. `slots` are ascending."""
    length = 1
    while length < min(len(slots), at_most) and slots[length] == slots[0] + length:
        length += 1
    return range(slots[0], slots[0] + length)


def read_stored_blocks(
    files: FileSystemCalls, segment: Segment, slots: range, buffer: memoryview
) -> tuple[list[BlockKey], ReadResult]:
    """Read adjacent blocks, whatever they are, as `read_blocks` does; return their keys as well. Raises nothing."""
    header, keys = segment.header, list[BlockKey]()
    size = header.shape.table_entry_bytes
    try:
        fd = files.open_owned_regular_file(segment.path)
        try:
            table = files.pread(fd, len(slots) * size, header.entry_offset(slots.start))
        finally:
            files.close(fd)
        for place, slot in enumerate(slots):
            keys.append(format.decode_entry(header, slot, table[place * size : (place + 1) * size]).key)
    except FileNotFoundError:
        return [], ReadResult(0, "gone")
    except OSError as error:
        return [], ReadResult(0, "io", error)
    except FormatError as error:
        miss: Miss | None = _MISSES.get(error.reason, "corrupt")
    else:
        miss = None
    found = read_and_verify_blocks(files, segment, slots.start, keys, buffer)
    return keys, found if found.miss is not None else found._replace(miss=miss)


def mark_entry_discarded(files: FileSystemCalls, segment: Segment, slot: int) -> None:
    """Mark a stored block as unusable for all processes, even if another one wrote it. Raises OSError."""
    header = segment.header
    fd = files.open_owned_regular_file(segment.path, to_write=True)
    try:
        raw = files.pread(fd, header.shape.table_entry_bytes, header.entry_offset(slot))
        try:
            entry = format.decode_entry(header, slot, raw)
        except FormatError:
            return  # no reader accepts it anyway
        raw = format.encode_slot_entry(header, slot, entry, discarded=True)
        write_all_buffers(files, fd, [raw], header.entry_offset(slot))
    finally:
        files.close(fd)


class SegmentWriter:
    """A new segment file and its writer. The file appears in the folder under its final name with a complete header."""

    def __init__(self, files: FileSystemCalls, folder: Path, header: SegmentHeader) -> None:
        self._files, self.header = files, header
        self.path = folder / f"{header.segment_id.hex()}{SUFFIX}"
        self.num_blocks = 0
        draft = folder / f".{header.segment_id.hex()}{DRAFT_SUFFIX}"
        self._fd = files.create(draft)
        try:
            write_all_buffers(files, self._fd, [format.encode_header(header)], 0)
            write_all_buffers(files, self._fd, [b"\0"], header.payload_start - 1)  # its length, to detect truncation
            files.rename(draft, self.path)
            self._direct = DirectFileWriter(files, self.path, header.shape.block_bytes)
        except BaseException:
            self._abandon(draft)
            raise

    @property
    def num_free_slots(self) -> int:
        """Blocks that still fit."""
        return self.header.num_slots - self.num_blocks

    def is_linked(self) -> bool:
        """Return whether the file is still in the folder. Raises OSError."""
        return self._files.is_linked(self._fd)

    def append_blocks(self, blocks: Sequence[tuple[BlockKey, Data]]) -> None:
        """Write the payloads, then their entries. Raises OSError: then none of them counts.

        If an entry could not be written, nothing more fits: no slot that a reader may have seen is written twice.
        """
        assert len(blocks) <= self.num_free_slots, (len(blocks), self.num_free_slots)
        header, slot = self.header, self.num_blocks
        data = [payload for _, payload in blocks]
        assert all(len(payload) == header.shape.block_bytes for payload in data), [len(payload) for payload in data]
        entries = [BlockEntry(key, format.payload_checksum(payload)) for key, payload in blocks]
        table = b"".join(format.encode_slot_entry(header, slot + place, entry) for place, entry in enumerate(entries))
        offset = header.payload_offset(slot)
        if not self._direct.try_write(data, offset):
            write_all_buffers(self._files, self._fd, data, offset)
        self.num_blocks = header.num_slots
        write_all_buffers(self._files, self._fd, [table], header.entry_offset(slot))
        self.num_blocks = slot + len(blocks)

    def close(self) -> None:
        self._direct.close()
        self._files.close(self._fd)

    def _abandon(self, draft: Path) -> None:
        with contextlib.suppress(OSError):  # the first error is the one to report
            self._files.close(self._fd)
        for path in (draft, self.path):
            with contextlib.suppress(OSError):
                self._files.unlink(path)


def write_all_buffers(files: FileSystemCalls, fd: int, buffers: Sequence[Data], offset: int) -> None:
    """Write all buffers. Raises OSError, also for a disk that accepts only a part."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        written = files.pwritev(fd, left[:_MAX_BUFFERS], offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _read_blocks(
    files: FileSystemCalls, fd: int, header: SegmentHeader, slot: int, keys: Sequence[BlockKey], buffer: memoryview
) -> ReadResult:
    size, block_bytes = header.shape.table_entry_bytes, header.shape.block_bytes
    table = files.pread(fd, len(keys) * size, header.entry_offset(slot))
    checksums: list[bytes] = []
    miss: Miss | None = None
    for place, key in enumerate(keys):
        try:
            entry = format.decode_entry(header, slot + place, table[place * size : (place + 1) * size])
        except FormatError as error:
            miss = _MISSES.get(error.reason, "corrupt")
            break
        if entry.key != key:
            miss = "mismatch"
            break
        checksums.append(entry.payload_checksum)
    whole = _read_fully(files, fd, buffer[: len(checksums) * block_bytes], header.payload_offset(slot)) // block_bytes
    for place, expected in enumerate(checksums[:whole]):
        if format.payload_checksum(buffer[place * block_bytes : (place + 1) * block_bytes]) != expected:
            return ReadResult(place, "corrupt")
    return ReadResult(whole, miss if whole == len(checksums) else "io")


def _read_fully(files: FileSystemCalls, fd: int, buffer: memoryview, offset: int) -> int:
    """Return the bytes read: fewer than requested only at the end of the file. Raises OSError."""
    done = 0
    while done < len(buffer):
        got = files.preadv(fd, [buffer[done:]], offset + done)
        if got <= 0:
            break
        done += got
    return done
