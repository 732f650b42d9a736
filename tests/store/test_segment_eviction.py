"""Eviction: files stay within a number of bytes, the least recently used go first, and what is dear stays."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from stored_blocks import SHAPE, SMALL, Block, FakeClock, age, chain, fill, name_of, names, opened, read, segment_files

from headstart.core.cache.block_store import Data
from headstart.core.cache.hashing import BlockHash
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import DiskSpace, FileSystemCalls
from headstart.store.format import StoredBlockFormat

PER_SEGMENT = 66
SEGMENT_BYTES = 8192 + PER_SEGMENT * 64
NOTHING: frozenset[BlockHash] = frozenset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def write(
    catalog: SegmentCatalog, blocks: Sequence[Block], kept: frozenset[BlockHash] = NOTHING, at_once: int = 10
) -> int:
    """As the writer does: makes room, then appends. Returns how many blocks were given up."""
    given_up = 0
    for first in range(0, len(blocks), at_once):
        part = blocks[first : first + at_once]
        given_up += catalog.make_room(len(part) * SHAPE.block_bytes, kept=kept)
        catalog.write_new_blocks(part)
    return given_up


def filled(folder: Path) -> list[Path]:
    """Five full segments, the oldest first: there is no room for a sixth."""
    paths = [fill(folder, chain(PER_SEGMENT, seed=seed)) for seed in range(5)]
    for seconds, path in zip(range(500, 0, -100), paths, strict=True):
        age(path, seconds)
    return paths


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in segment_files(folder))


def test_the_files_never_grow_beyond_the_size_and_all_is_accounted_for(folder: Path) -> None:
    catalog, given_up = opened(folder), 0
    for first in range(0, 1000, 10):
        given_up += write(catalog, chain(10, first=first))
        assert bytes_of(folder) <= SMALL
        assert catalog.num_blocks == first + 10 - given_up
    assert given_up > 700
    assert catalog.num_bytes <= catalog.max_bytes == SMALL
    late = opened(folder)
    assert late.num_blocks == catalog.num_blocks
    assert read(late, chain(50, first=950)) == (50, None)  # the newest


def test_room_that_there_is_costs_nothing(folder: Path) -> None:
    catalog = opened(folder)
    assert catalog.make_room(640, kept=()) == 0 and not (folder / "lock").exists()


def test_the_segment_unused_for_longest_goes_first(folder: Path) -> None:
    paths = filled(folder)
    age(paths[2], 1000)
    write(opened(folder), chain(10, seed=9))
    assert [path.exists() for path in paths] == [True, True, False, True, True]


def test_what_is_read_stays_and_so_does_what_a_request_uses(folder: Path) -> None:
    paths = filled(folder)
    reader = opened(folder)  # another process than the one that evicts
    read(reader, chain(1, seed=0))
    reader.mark_used([name_of(5, seed=1)])
    write(opened(folder), chain(10, seed=9))
    assert [path.exists() for path in paths] == [True, True, False, True, True]


def test_blocks_used_since_they_were_written_outlive_their_segment(folder: Path) -> None:
    catalog = opened(folder)
    write(catalog, chain(30))
    for flood in range(1, 20):
        write(catalog, chain(60, seed=flood))
        assert read(catalog, chain(5)) == (5, None), flood
    assert read(catalog, chain(30)) == (5, "gone")
    assert bytes_of(folder) <= SMALL + SEGMENT_BYTES
    assert read(opened(folder), chain(5)) == (5, None)


def test_blocks_used_once_are_moved_once(folder: Path) -> None:
    catalog = opened(folder)
    write(catalog, chain(30))
    catalog.mark_used(names(chain(5)))
    given_up = [write(catalog, chain(60, seed=flood)) for flood in range(1, 20)]
    assert not any(catalog.contains(name) for name in names(chain(5)))
    assert sum(given_up) + catalog.num_blocks == 30 + 19 * 60


def test_at_most_half_a_segment_is_moved_for_having_been_used(folder: Path) -> None:
    catalog = opened(folder)
    write(catalog, chain(PER_SEGMENT))
    catalog.mark_used(names(chain(PER_SEGMENT)))
    write(catalog, chain(280, seed=1))
    left = sum(catalog.contains(name) for name in names(chain(PER_SEGMENT)))
    assert left == PER_SEGMENT // 2


def test_the_most_recently_used_half_of_a_segment_is_moved(folder: Path) -> None:
    catalog = opened(folder)
    write(catalog, chain(PER_SEGMENT))
    half = names(chain(PER_SEGMENT))[PER_SEGMENT // 2 :]
    catalog.mark_used(names(chain(PER_SEGMENT)))
    catalog.mark_used(half)
    write(catalog, chain(280, seed=1))
    assert [name for name in names(chain(PER_SEGMENT)) if catalog.contains(name)] == half


class RecordedTouches(FileSystemCalls):
    def __init__(self) -> None:
        self.touched: list[str] = []

    def touch(self, path: Path) -> None:
        self.touched.append(path.name)


def test_of_a_chain_the_segment_of_its_tail_looks_the_oldest(folder: Path) -> None:
    paths, files = filled(folder), RecordedTouches()
    catalog = opened(folder, files=files)
    catalog.mark_used([name_of(0, seed=seed) for seed in (3, 1, 0)])
    assert files.touched == [paths[seed].name for seed in (0, 1, 3)]


def test_what_is_kept_outlives_any_flood(folder: Path) -> None:
    catalog, kept = opened(folder), frozenset(names(chain(40)))
    write(catalog, chain(40), kept)
    for flood in range(1, 20):
        write(catalog, chain(60, seed=flood), kept)
        assert bytes_of(folder) <= SMALL + SEGMENT_BYTES
    assert read(opened(folder), chain(40)) == (40, None)


def test_where_all_is_kept_there_is_no_room_and_nothing_is_lost(folder: Path) -> None:
    catalog, blocks = opened(folder), chain(5 * PER_SEGMENT)
    kept = frozenset(names(blocks))
    write(catalog, blocks, kept)
    before = segment_files(folder)
    with pytest.raises(OSError, match="pinned") as raised:
        write(catalog, chain(10, seed=1), kept)
    assert segment_files(folder) == before  # nor was anything moved in vain
    assert raised.value.errno == errno.ENOSPC
    assert all(catalog.contains(name) for name in kept)
    assert write(catalog, chain(10, seed=2)) > 0  # not kept any more: it goes on


def test_other_models_segments_are_evicted_as_well(folder: Path) -> None:
    other = StoredBlockFormat(b"o" * 32, SHAPE.block_size, SHAPE.block_bytes)
    theirs = [fill(folder, chain(66, seed=seed), shape=other) for seed in range(5)]
    for seconds, path in enumerate(theirs):
        age(path, 1000 - seconds)
    catalog = opened(folder)
    assert catalog.num_blocks == 0 and catalog.num_bytes > SMALL - 5000
    assert write(catalog, chain(66)) == 0  # none that we could have used
    assert [path.exists() for path in theirs] == [False, True, True, True, True]
    assert catalog.num_bytes <= SMALL


def test_damaged_files_take_room_until_their_turn_comes(folder: Path) -> None:
    bad = folder / f"{'0' * 16}.kv"
    fill(folder, chain(10))
    bad.write_bytes(b"x" * 40_000)
    age(bad, 1000)
    catalog = opened(folder)
    assert catalog.num_bytes > 40_000
    write(catalog, chain(PER_SEGMENT + 50, seed=1))
    assert not bad.exists() and read(catalog, chain(10)) == (10, None)


def test_the_segment_being_written_goes_last(folder: Path) -> None:
    catalog = opened(folder)
    write(catalog, chain(10))
    (own,) = segment_files(folder)
    age(own, 1000)
    others = filled(folder)
    catalog.refresh_from_other_writers()
    write(catalog, chain(10, seed=9))
    assert own.exists() and not all(path.exists() for path in others)


def test_a_file_from_the_future_is_neither_first_nor_for_ever(folder: Path) -> None:
    """The clock was a day ahead when it was used, and has been put right."""
    paths = filled(folder)
    age(paths[0], -86_400)
    catalog = opened(folder)
    write(catalog, chain(10, seed=9))
    assert paths[0].exists() and paths[0].stat().st_mtime < FileSystemCalls().mtime_clock_now() + 10


class Disk(FileSystemCalls):
    """A disk of its own, of which the folder's files take what they take. Bytes."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total

    def space(self, folder: Path) -> DiskSpace:
        return DiskSpace(max(0, self.total - bytes_of(self.folder)), self.total)

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        if self.space(self.folder).free < sum(len(buffer) for buffer in buffers):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


def test_a_disk_is_never_filled(folder: Path) -> None:
    disk = Disk(folder, 100_000)
    catalog = opened(folder, max_bytes=1 << 20, files=disk)  # more than there is
    for seed in range(40):
        write(catalog, chain(60, seed=seed))
        assert disk.space(folder).free >= 5_000
    assert catalog.max_bytes == pytest.approx(95_000, abs=4_500)  # files have holes


def test_on_a_disk_that_others_filled_the_store_gives_room_back(folder: Path) -> None:
    disk = Disk(folder, 1 << 20)
    catalog = opened(folder, files=disk)
    write(catalog, chain(250))
    disk.total = bytes_of(folder)  # all of it is ours, nothing is free
    before = catalog.num_bytes
    try:
        write(catalog, chain(10, seed=1))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    assert catalog.num_bytes < before


def test_a_process_that_makes_room_for_ever_is_not_waited_for(folder: Path) -> None:
    catalog = opened(folder)
    filled(folder)
    catalog.refresh_from_other_writers()
    lock = FileSystemCalls().try_open_locked(folder / "lock")
    assert lock is not None
    with pytest.raises(OSError, match="another process") as raised:
        catalog.make_room(640, kept=())
    assert raised.value.errno == errno.EAGAIN
    os.close(lock)
    assert catalog.make_room(640, kept=()) == PER_SEGMENT


def test_room_that_another_process_makes_meanwhile_will_do(folder: Path) -> None:
    class Busy(FileSystemCalls):
        """Another has the lock, and has deleted a segment by the time that we ask again."""

        def try_open_locked(self, path: Path) -> int | None:
            segment_files(folder)[0].unlink(missing_ok=True)
            return None

    filled(folder)
    catalog = opened(folder, files=Busy())
    assert catalog.make_room(640, kept=()) == 0
    assert catalog.num_segments == 4


def test_files_of_writers_that_were_killed_at_birth_are_swept(folder: Path) -> None:
    filled(folder)
    old, new, strange = (folder / name for name in (f".{'a' * 16}.tmp", f".{'b' * 16}.tmp", "x.tmp"))
    for path in (old, new, strange):
        path.write_bytes(b"x")
    age(old, 1000)
    age(strange, 1000)
    write(opened(folder), chain(10, seed=9))
    assert [path.exists() for path in (old, new, strange)] == [False, True, True]


def test_a_victim_that_cannot_be_read_is_deleted_without_its_blocks(folder: Path) -> None:
    class Unreadable(FileSystemCalls):
        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            raise OSError(errno.EIO, "bad sector")

    filled(folder)
    catalog = opened(folder, files=Unreadable(), clock=FakeClock())
    catalog.mark_used(names(chain(66)))
    assert write(catalog, chain(10, seed=9)) == 66
    assert bytes_of(folder) <= SMALL


def test_a_victim_that_cannot_be_deleted_raises(folder: Path) -> None:
    class ReadOnly(FileSystemCalls):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    filled(folder)
    catalog = opened(folder, files=ReadOnly())
    with pytest.raises(OSError, match="Read-only"):
        catalog.make_room(640, kept=())
    assert catalog.num_blocks == 5 * PER_SEGMENT


def test_what_another_process_appended_since_the_last_look_counts(folder: Path) -> None:
    """Its segment was known when it was small."""
    for path in filled(folder)[:2]:
        path.unlink()
    one, other = opened(folder), opened(folder)
    write(other, chain(2, seed=9))
    write(one, chain(2, seed=8))
    other.write_new_blocks(chain(20, seed=9, first=2))
    assert one.make_room(SHAPE.block_bytes, kept=NOTHING) == 0
    assert one.num_bytes == bytes_of(folder)
