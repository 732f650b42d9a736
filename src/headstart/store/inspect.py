"""Inspection of a folder: blocks of every model, without a server, while servers use it. Never changes a block.

Errors of single files are counted by reason; OSError is raised if the folder itself cannot be read.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headstart.store import segment as segments
from headstart.store.files import FileEntry, FileSystemCalls
from headstart.store.format import FormatError, StoredBlockFormat
from headstart.store.segment import Segment

READ_BYTES = 8 << 20
Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass(slots=True)
class ShapeStats:
    """All segments of one model and block size. Times are seconds since the epoch."""

    shape: StoredBlockFormat
    num_segments: int = 0
    num_blocks: int = 0  # a block that is stored twice counts twice
    num_bytes: int = 0
    oldest_use: float = float("inf")
    newest_use: float = float("-inf")


@dataclass(slots=True)
class FolderStats:
    """The content of a folder. `odd` counts files and entries that are not served, by reason."""

    shapes: list[ShapeStats] = field(default_factory=list[ShapeStats])  # the largest first
    num_bytes: int = 0  # of all segment files, faulty ones included
    num_files: int = 0
    odd: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class VerifyReport:
    """The result of reading every block of a folder. Good blocks are those that a load would accept."""

    num_good: int = 0
    num_bytes: int = 0  # of their contents
    bad: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])  # file name -> reason -> count

    @property
    def num_bad(self) -> int:
        return sum(counts.total() for counts in self.bad.values())


def stat_folder(folder: Path, files: FileSystemCalls | None = None) -> FolderStats:
    """Count the content of a folder, from headers and tables alone. Raises OSError for an unreadable folder."""
    files = files or FileSystemCalls()
    found, by_shape = FolderStats(), dict[StoredBlockFormat, ShapeStats]()
    for entry in _segment_files(files, folder):
        segment, bad = _open(files, folder, entry)
        found.odd.update(bad)
        if entry.is_safe:
            found.num_files += 1
            found.num_bytes += entry.num_bytes
        if segment is not None:
            stats = by_shape.setdefault(segment.header.shape, ShapeStats(segment.header.shape))
            stats.num_segments += 1
            stats.num_blocks += sum(map(bool, segment.block_hashes))
            stats.num_bytes += entry.num_bytes
            stats.oldest_use = min(stats.oldest_use, entry.mtime)
            stats.newest_use = max(stats.newest_use, entry.mtime)
    found.shapes = sorted(by_shape.values(), key=lambda stats: -stats.num_bytes)
    return found


def verify_folder(folder: Path, progress: Progress | None = None, files: FileSystemCalls | None = None) -> VerifyReport:
    """Read every block and check it as a load would. Raises OSError for an unreadable folder."""
    files = files or FileSystemCalls()
    report = VerifyReport()
    entries = _segment_files(files, folder)
    before, total = 0, sum(entry.num_bytes for entry in entries)
    for entry in entries:
        segment, bad = _open(files, folder, entry)
        done = 0
        for good, miss in () if segment is None else _check(files, segment):
            report.num_good += good
            done += good * (segment.header.shape.block_bytes if segment else 0)
            bad.update([miss] if miss else [])
            if progress is not None:
                progress(min(before + done, total), total)
        before += entry.num_bytes
        report.num_bytes += done
        if bad:
            report.bad[entry.name] = bad
    if progress is not None:
        progress(total, total)
    return report


def clear_folder(folder: Path, files: FileSystemCalls | None = None) -> tuple[int, int]:
    """Delete all segments, of every model; servers that use the folder continue. Return the numbers of files and bytes.

    Raises OSError for a folder that cannot be read or changed.
    """
    files = files or FileSystemCalls()
    num_files = num_bytes = 0
    for entry in files.list_entries(folder):
        is_ours = segments.segment_id(entry.name) is not None or segments.is_headerless_segment(entry.name)
        if is_ours and entry.is_safe:
            with contextlib.suppress(FileNotFoundError):
                files.unlink(folder / entry.name)
                num_files += 1
                num_bytes += entry.num_bytes
    return num_files, num_bytes


def _segment_files(files: FileSystemCalls, folder: Path) -> list[FileEntry]:
    return sorted(entry for entry in files.list_entries(folder) if segments.segment_id(entry.name) is not None)


def _open(files: FileSystemCalls, folder: Path, entry: FileEntry) -> tuple[Segment | None, Counter[str]]:
    """Return a segment with all its block hashes, or None; and its faults."""
    path, own_id = folder / entry.name, segments.segment_id(entry.name)
    assert own_id is not None, entry.name
    if not entry.is_safe:
        return None, Counter(["unsafe"])
    try:
        segment = Segment(0, path, segments.read_header(files, path, own_id), entry.num_bytes)
        num_bad = segments.load_hashes_into_segment(files, segment)
        is_cut = segments.is_truncated(files, segment)
    except FileNotFoundError:
        return None, Counter()  # evicted just now
    except FormatError as error:
        return None, Counter([error.reason])
    except OSError:
        return None, Counter(["unreadable"])
    return segment, +Counter({"entry": num_bad, "cut": int(is_cut)})


def _check(files: FileSystemCalls, segment: Segment) -> Iterator[tuple[int, str]]:
    """Read all blocks, in runs. Yield the number of good ones, and the fault of the next one, if any."""
    block_bytes = segment.header.shape.block_bytes
    at_once = max(1, READ_BYTES // block_bytes)
    buffer = memoryview(bytearray(min(at_once, len(segment.block_hashes)) * block_bytes))
    slots = [slot for slot, block_hash in enumerate(segment.block_hashes) if block_hash]
    while slots:
        found = segments.read_stored_blocks(files, segment, segments.leading_adjacent_slots(slots, at_once), buffer)[1]
        yield found.num_blocks, found.miss if found.miss and found.miss != "gone" else ""
        del slots[: found.num_blocks + (found.miss is not None)]
