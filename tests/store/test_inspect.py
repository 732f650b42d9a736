"""Reports about a folder: its content, by model, and what of it is damaged."""

import errno
import os
from pathlib import Path

import pytest
from stored_blocks import SHAPE, age, chain, content_of, fill, name_of, opened, read, segment_files

from headstart.store import inspect
from headstart.store.files import FileSystemCalls
from headstart.store.format import StoredBlockFormat

OTHER = StoredBlockFormat(b"o" * 32, SHAPE.block_size, SHAPE.block_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """20 blocks of one model in two files, 5 of another, of which 4 are the same."""
    folder = tmp_path / "store"
    age(fill(folder, chain(15)), 500)
    age(fill(folder, chain(5, first=15)), 100)
    age(fill(folder, chain(5), shape=OTHER), 300)
    return folder


def test_a_folder_is_counted_by_model(folder: Path) -> None:
    found, now = inspect.stat_folder(folder), FileSystemCalls().mtime_clock_now()
    assert [(stats.shape, stats.num_segments, stats.num_blocks) for stats in found.shapes] == [
        (SHAPE, 2, 20),
        (OTHER, 1, 5),
    ]
    assert [round(now - stats.oldest_use, -1) for stats in found.shapes] == [500, 300]
    assert [round(now - stats.newest_use, -1) for stats in found.shapes] == [100, 300]
    assert found.num_files == 3 and found.num_bytes == sum(stats.num_bytes for stats in found.shapes) > 25 * 64
    assert found.odd == {}


def test_what_is_odd_is_counted_by_reason_and_changes_nothing_else(folder: Path) -> None:
    (folder / f"{'1' * 16}.kv").write_bytes(b"x" * 300)
    (folder / f"{'2' * 16}.kv").write_bytes(b"")
    (folder / f"{'3' * 16}.kv").symlink_to("elsewhere")
    (folder / "notes.txt").write_text("mine")
    path = next(path for path in segment_files(folder) if path.is_file() and name_of(16) in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(name_of(16), name_of(17), 1))
    found = inspect.stat_folder(folder)
    assert found.odd == {"magic": 1, "short": 1, "unsafe": 1, "entry": 1}
    assert found.num_files == 5 and found.shapes[0].num_blocks == 19


def test_a_sound_folder_is_found_sound_with_progress_to_the_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = inspect.verify_folder(folder, lambda done, total: seen.append((done, total)))
    assert (report.num_good, report.num_bytes, report.num_bad, report.bad) == (25, 25 * 64, 0, {})
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0 and len(seen) >= 3


def test_damage_is_told_by_file_and_reason(folder: Path) -> None:
    path = next(path for path in segment_files(folder) if content_of(3) in path.read_bytes())
    content = path.read_bytes()
    path.write_bytes(content.replace(content_of(3), content_of(4), 1).replace(name_of(2), name_of(9), 1))
    bad_header = folder / f"{'f' * 16}.kv"
    bad_header.write_bytes(content)
    report = inspect.verify_folder(folder)
    # name_of(2) is the name in entry 2 and, there first, nowhere else: entry 2 is damaged, block 3 has wrong content
    assert report.bad[path.name] == {"entry": 1, "corrupt": 1} and report.bad[bad_header.name] == {"swapped": 1}
    assert report.num_bad == 3 and report.num_good == 23


def test_a_cut_file_is_told(folder: Path) -> None:
    path = max(segment_files(folder), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size - 70)
    report = inspect.verify_folder(folder)
    assert report.bad == {path.name: {"cut": 1}} and report.num_good == 23


def test_an_unreadable_file_is_told(folder: Path) -> None:
    class Broken(FileSystemCalls):
        def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
            raise OSError(errno.EIO, "bad sector")

    report = inspect.verify_folder(folder, files=Broken())
    assert (
        report.num_good == 0 and sorted(counts.popitem() for counts in report.bad.values()) == [("unreadable", 1)] * 3
    )
    assert inspect.stat_folder(folder, Broken()).odd == {"unreadable": 3}


def test_discarded_blocks_are_neither_good_nor_bad(folder: Path) -> None:
    opened(folder).discard_blocks([name_of(0), name_of(19)])
    assert inspect.stat_folder(folder).shapes[0].num_blocks == 18
    report = inspect.verify_folder(folder)
    assert report.num_good == 23 and report.num_bad == 0


def test_clearing_deletes_our_files_and_no_others(folder: Path) -> None:
    user = opened(folder)
    (folder / "secret").write_bytes(b"s" * 32)
    (folder / "notes.txt").write_text("mine")
    (folder / f".{'a' * 16}.tmp").write_bytes(b"unfinished")
    (folder / f"{'3' * 16}.kv").mkdir()
    num_files, num_bytes = inspect.clear_folder(folder)
    assert num_files == 4 and num_bytes > 25 * 64
    assert sorted(path.name for path in folder.iterdir()) == [f"{'3' * 16}.kv", "notes.txt", "secret"]
    user.refresh_from_other_writers()
    assert read(user, chain(1)) == (0, "gone")
    user.write_new_blocks(chain(1))
    assert read(user, chain(1)) == (1, None)


def test_a_folder_that_is_not_there_raises(tmp_path: Path) -> None:
    for look in (inspect.stat_folder, inspect.verify_folder, inspect.clear_folder):
        with pytest.raises(FileNotFoundError):
            look(tmp_path / "nothing")
