"""The catalog: what one process writes another reads, and nothing but what was asked for is ever handed out."""

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from stored_blocks import (
    SHAPE,
    SMALL,
    FakeClock,
    age,
    chain,
    content_of,
    fill,
    key_of,
    name_of,
    names,
    opened,
    read,
    segment_files,
)

from headstart.core.cache.block_store import Data
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import FileEntry, FileSystemCalls
from headstart.store.format import StoredBlockFormat

PER_SEGMENT = 66  # blocks of SHAPE in a folder of SMALL bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_was_appended_is_read_again(folder: Path) -> None:
    catalog, blocks = opened(folder), chain(10)
    assert catalog.write_new_blocks(blocks) == 10 == catalog.num_blocks
    assert all(catalog.contains(name) for name in names(blocks)) and not catalog.contains(name_of(10))
    assert read(catalog, blocks) == (10, None)
    assert read(catalog, chain(12)) == (10, "gone")
    assert read(catalog, []) == (0, None)


def test_it_is_there_after_a_restart_and_for_others(folder: Path) -> None:
    catalog, other = opened(folder), opened(folder)
    catalog.write_new_blocks(chain(100))
    assert read(other, chain(1)) == (0, "gone")
    other.refresh_from_other_writers()
    assert read(other, chain(100)) == read(opened(folder), chain(100)) == (100, None)
    assert catalog.num_segments == other.num_segments == 2  # of 66 each


def test_what_is_added_to_a_segment_that_is_known_is_found_too(folder: Path) -> None:
    catalog, other = opened(folder), opened(folder)
    for first in range(0, 200, 7):
        catalog.write_new_blocks(chain(7, first=first))
        other.refresh_from_other_writers()
        assert read(other, chain(first + 7)) == (first + 7, None)
    assert other.num_bytes > 200 * SHAPE.block_bytes


def test_files_are_for_us_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        fill(folder, chain(3))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in segment_files(folder)] == [0o600]


def test_a_block_is_stored_once(folder: Path) -> None:
    catalog = opened(folder)
    assert catalog.write_new_blocks(chain(3)) == 3
    assert catalog.write_new_blocks(chain(5)) == 2
    assert catalog.write_new_blocks([*chain(1, first=9), *chain(1, first=9)]) == 1
    assert catalog.num_blocks == 6


def test_neighbours_are_read_in_one_call(folder: Path) -> None:
    class Counting(FileSystemCalls):
        calls = 0

        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            self.calls += 1
            return super().preadv(fd, buffers, offset)

    fill(folder, chain(20))
    files = Counting()
    catalog = opened(folder, files=files)
    assert read(catalog, chain(20)) == (20, None) and files.calls == 1


def test_a_file_that_gives_a_few_bytes_at_a_time_is_read_and_written_whole(folder: Path) -> None:
    class Slow(FileSystemCalls):
        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            return super().preadv(fd, [memoryview(buffers[0])[:50]], offset)

        def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
            return super().pwritev(fd, [memoryview(buffers[0])[:50]], offset)

    catalog = opened(folder, files=Slow())
    catalog.write_new_blocks(chain(5))
    assert read(catalog, chain(5)) == read(opened(folder), chain(5)) == (5, None)


@pytest.mark.parametrize("field", ["parent", "tokens"])
def test_another_block_under_that_name_is_a_mismatch(folder: Path, field: str) -> None:
    """A block under the name of another is not served, and is given up."""
    catalog = opened(folder)
    catalog.write_new_blocks(chain(3))
    key, content = chain(3)[1]
    other = key._replace(parent=name_of(99)) if field == "parent" else key._replace(tokens=bytes(16))
    assert read(catalog, [chain(3)[0], (other, content)]) == (1, "mismatch")
    assert not catalog.contains(key.block_hash)


def test_names_cut_to_a_few_bits_never_give_a_wrong_block(folder: Path) -> None:
    """Names that collide all the time, as if the hash were broken: whatever is served is what was asked for."""
    catalog, served = opened(folder, max_bytes=1 << 20), 0
    short = [
        (key._replace(block_hash=BlockHash(key.block_hash[:1] * 32), parent=BlockHash(key.parent[:1] * 32)), content)
        for key, content in chain(2000)
    ]
    for block in short:
        catalog.write_new_blocks([block])
        served += read(catalog, [block])[0]
    assert served > 1  # the others met another block under their name


def test_a_second_copy_is_served_when_the_first_is_damaged(folder: Path) -> None:
    first, second = fill(folder, chain(5)), fill(folder / "elsewhere", chain(5))
    second.rename(folder / second.name)
    (folder / "elsewhere").rmdir()
    for path in (first, folder / second.name):
        catalog, content = opened(folder), path.read_bytes()
        assert catalog.num_blocks == 5 and catalog.num_segments == 2
        for index in (1, 4):
            path.write_bytes(path.read_bytes().replace(content_of(index), content_of(77)))
        assert read(catalog, chain(5)) == (5, None)
        assert read(catalog, chain(5)) == (5, None)
        path.write_bytes(content)


def test_what_was_discarded_comes_back_nowhere(folder: Path) -> None:
    catalog, other = opened(folder), opened(folder)
    catalog.write_new_blocks(chain(5))
    other.refresh_from_other_writers()
    other.discard_blocks([name_of(2), name_of(77)])  # in a segment that another process writes
    assert not other.contains(name_of(2))
    assert read(catalog, chain(5)) == (2, "gone") and not catalog.contains(name_of(2))
    late = opened(folder)
    assert read(late, chain(5)) == (2, "gone") and late.num_blocks == 4 and late.num_corrupt == 0
    catalog.write_new_blocks([(key_of(2), content_of(2))])
    late.refresh_from_other_writers()
    assert read(late, chain(5)) == (5, None)


def test_every_copy_of_what_was_discarded_is_marked(folder: Path) -> None:
    first, second = opened(folder), opened(folder)
    first.write_new_blocks(chain(2))
    second.write_new_blocks(chain(2))
    first.refresh_from_other_writers()
    first.discard_blocks([name_of(0)])
    assert read(second, chain(1)) == read(opened(folder), chain(1)) == (0, "gone")


def test_a_discard_that_fails_is_told_but_holds_here(folder: Path) -> None:
    class ReadOnly(FileSystemCalls):
        def open_owned_regular_file(self, path: Path, *, to_write: bool = False) -> int:
            if to_write:
                raise OSError(errno.EROFS, "read-only")
            return super().open_owned_regular_file(path)

    fill(folder, chain(3))
    catalog = opened(folder, files=ReadOnly())
    with pytest.raises(OSError, match="read-only"):
        catalog.discard_blocks([name_of(0), name_of(1)])
    catalog.refresh_from_other_writers()
    assert not catalog.contains(name_of(0)) and not catalog.contains(name_of(1)) and catalog.contains(name_of(2))


def test_clearing_deletes_the_segments_of_all(folder: Path) -> None:
    catalog, other = opened(folder), opened(folder)
    catalog.write_new_blocks(chain(5))
    fill(folder, chain(5, seed=1), shape=StoredBlockFormat(b"o" * 32, 4, 64))
    other.refresh_from_other_writers()
    other.clear()
    assert segment_files(folder) == [] and (other.num_blocks, other.num_bytes, other.num_segments) == (0, 0, 0)
    catalog.write_new_blocks(chain(1, first=50))  # its file is gone: it begins another
    assert read(catalog, chain(1, first=50)) == (1, None)
    assert read(catalog, chain(1)) == (0, "gone")
    other.refresh_from_other_writers()
    assert read(other, chain(1, first=50)) == (1, None) and other.num_blocks == 1


def test_a_writer_whose_file_was_deleted_begins_another(folder: Path) -> None:
    catalog = opened(folder)
    catalog.write_new_blocks(chain(5))
    segment_files(folder)[0].unlink()
    assert catalog.write_new_blocks(chain(5, seed=1)) == 5
    assert len(segment_files(folder)) == 1
    assert read(opened(folder), chain(5, seed=1)) == (5, None)
    assert catalog.num_blocks == 5 and read(catalog, chain(5)) == (0, "gone")


@pytest.mark.parametrize("damage", ["renamed", "a folder now"])
def test_a_writer_whose_file_is_called_otherwise_now_begins_another(folder: Path, damage: str) -> None:
    catalog = opened(folder)
    catalog.write_new_blocks(chain(5))
    (path,) = segment_files(folder)
    path.rename(folder / "kept")
    if damage == "a folder now":
        path.mkdir()
    catalog.refresh_from_other_writers()
    catalog.write_new_blocks(chain(5, seed=1))
    assert read(catalog, chain(5, seed=1)) == (5, None) == read(opened(folder), chain(5, seed=1))


def test_a_folder_that_vanished_is_made_again(folder: Path) -> None:
    catalog = opened(folder)
    catalog.write_new_blocks(chain(5))
    shutil.rmtree(folder)
    assert read(catalog, chain(5)) == (0, "gone")
    with pytest.raises(FileNotFoundError):
        catalog.write_new_blocks(chain(1, first=9))
    catalog.refresh_from_other_writers()
    assert catalog.num_blocks == catalog.num_bytes == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    catalog.write_new_blocks(chain(5))
    assert read(opened(folder), chain(5)) == (5, None)


def test_a_folder_whose_parent_vanished_raises(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "a" / "store")
    catalog.write_new_blocks(chain(5))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        catalog.refresh_from_other_writers()
    assert catalog.num_blocks == 0
    (tmp_path / "a").mkdir()
    catalog.refresh_from_other_writers()
    catalog.write_new_blocks(chain(5))
    assert read(catalog, chain(5)) == (5, None)


class Failing(FileSystemCalls):
    """Raises `error` at the calls whose numbers are in `at`, counted over all kinds of writing."""

    def __init__(self, error: int, at: range) -> None:
        self.error, self.at, self.calls = error, at, 0

    def _fail(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise OSError(self.error, os.strerror(self.error))

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        self._fail()
        return super().pwritev(fd, buffers, offset)

    def create(self, path: Path) -> int:
        self._fail()
        return super().create(path)

    def rename(self, old: Path, new: Path) -> None:
        self._fail()
        super().rename(old, new)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_write_that_fails_anywhere_leaves_nothing_wrong_behind(folder: Path, error: int) -> None:
    for at in range(14):
        shutil.rmtree(folder, ignore_errors=True)
        catalog = opened(folder, files=Failing(error, range(at, at + 1)))
        failed = 0
        for first in range(0, 80, 20):
            try:
                catalog.write_new_blocks(chain(20, first=first))
            except OSError as found:
                assert found.errno == error
                failed += 1
        assert failed == 1 or at > 10
        assert catalog.num_blocks >= 60
        other = opened(folder)
        assert other.num_blocks == catalog.num_blocks and other.num_corrupt == 0
        for block in chain(80):
            assert read(catalog, [block])[0] == catalog.contains(block[0].block_hash) == read(other, [block])[0]
        assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_an_error_while_reading_is_told_and_forgets_nothing(folder: Path) -> None:
    class Broken(FileSystemCalls):
        error = 0

        def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            return super().preadv(fd, buffers, offset)

    fill(folder, chain(3))
    files = Broken()
    catalog, buffer = opened(folder, files=files), memoryview(bytearray(3 * 64))
    files.error = errno.EIO
    found = catalog.read_blocks_until_miss([key for key, _ in chain(3)], buffer)
    assert found.num_blocks == 0 and found.miss == "io" and found.error is not None and found.error.errno == errno.EIO
    files.error = 0
    assert read(catalog, chain(3)) == (3, None)


def test_too_many_open_files_loses_no_segment(folder: Path) -> None:
    class Starved(FileSystemCalls):
        is_starved = True

        def open_owned_regular_file(self, path: Path, *, to_write: bool = False) -> int:
            if self.is_starved:
                raise OSError(errno.EMFILE, "too many open files")
            return super().open_owned_regular_file(path, to_write=to_write)

    fill(folder, chain(3))
    files = Starved()
    catalog = SegmentCatalog(folder, SHAPE, SMALL, files, FakeClock())
    for _ in range(2):
        with pytest.raises(OSError, match="too many"):
            catalog.refresh_from_other_writers()
    files.is_starved = False
    catalog.refresh_from_other_writers()
    assert read(catalog, chain(3)) == (3, None)


def test_a_folder_that_does_not_change_is_not_listed_again(folder: Path) -> None:
    class Counting(FileSystemCalls):
        num_lists = 0

        def list_entries(self, folder: Path) -> list[FileEntry]:
            self.num_lists += 1
            return super().list_entries(folder)

    fill(folder, chain(3))
    os.utime(folder, (1, 1))  # so that the next change shows, however soon it comes
    files, clock = Counting(), FakeClock()
    catalog = opened(folder, files=files, clock=clock)
    clock.now = 10.0
    before = files.num_lists
    catalog.refresh_from_other_writers()
    assert files.num_lists == before
    fill(folder, chain(3, seed=1))
    catalog.refresh_from_other_writers()
    assert files.num_lists == before + 1 and read(catalog, chain(3, seed=1)) == (3, None)
    catalog.refresh_from_other_writers()
    assert files.num_lists == before + 2  # a second change might have had the same mtime


def test_use_renews_the_age_of_a_file_once_a_second(folder: Path) -> None:
    path, clock = fill(folder, chain(3)), FakeClock()
    catalog = opened(folder, clock=clock)
    for use in (lambda: read(catalog, chain(1)), lambda: catalog.mark_used([name_of(2)])):
        clock.now += 2
        age(path, 1000)
        use()
        renewed = path.stat().st_mtime
        assert renewed > FileSystemCalls().mtime_clock_now() - 500
        age(path, 1000)
        use()
        assert path.stat().st_mtime < renewed - 500


def test_a_size_that_holds_no_block_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv-store-size 4000 .*at least 4160 bytes"):
        SegmentCatalog(folder, SHAPE, 4000)
    catalog = opened(folder, max_bytes=4160)
    catalog.make_room(64, kept=())
    catalog.write_new_blocks(chain(1))
    catalog.make_room(64, kept=())
    catalog.write_new_blocks(chain(1, seed=1))
    assert read(catalog, chain(1, seed=1)) == (1, None) and catalog.num_blocks == 1


def test_a_closed_catalog_can_be_closed_again(folder: Path) -> None:
    catalog = opened(folder)
    catalog.write_new_blocks(chain(PER_SEGMENT + 1))
    catalog.close()
    catalog.close()
    assert read(catalog, chain(3)) == (3, None)
