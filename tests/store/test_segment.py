"""One segment file: the writer's order, the reader's second look, and names of files."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from stored_blocks import SHAPE, chain, content_of, key_of, name_of, names

from headstart.core.cache.block_store import BlockKey, Data
from headstart.store import segment as segments
from headstart.store.files import FileSystemCalls
from headstart.store.format import HEADER_BYTES, SegmentHeader, decode_segment_header
from headstart.store.segment import Segment, SegmentWriter, is_headerless_segment, leading_adjacent_slots, segment_id

HEADER = SegmentHeader(SHAPE, 8, bytes(range(8)))
FILES = FileSystemCalls()


class Noting(FileSystemCalls):
    """Notes where is written."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []

    def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
        self.writes.append((offset, sum(len(buffer) for buffer in buffers)))
        return super().pwritev(fd, buffers, offset)


def known(writer: SegmentWriter) -> Segment:
    """As another process knows it at first sight."""
    return Segment(1, writer.path, HEADER, 0)


def test_payloads_are_written_before_their_entries_and_in_one_call_each(tmp_path: Path) -> None:
    files = Noting()
    writer = SegmentWriter(files, tmp_path, HEADER)
    assert writer.path.read_bytes()[:HEADER_BYTES] and len(writer.path.read_bytes()) == HEADER.payload_start
    files.writes.clear()
    writer.append_blocks(chain(3))
    writer.append_blocks(chain(2, first=3))
    assert files.writes == [
        (HEADER.payload_offset(0), 3 * 64),
        (HEADER.entry_offset(0), 3 * SHAPE.table_entry_bytes),
        (HEADER.payload_offset(3), 2 * 64),
        (HEADER.entry_offset(3), 2 * SHAPE.table_entry_bytes),
    ]
    assert writer.num_free_slots == 3
    writer.close()


def test_a_file_has_its_name_only_with_a_header_in_it(tmp_path: Path) -> None:
    class Watching(FileSystemCalls):
        def rename(self, old: Path, new: Path) -> None:
            assert decode_segment_header(old.read_bytes()[:HEADER_BYTES], HEADER.segment_id) == HEADER
            assert is_headerless_segment(old.name) and segment_id(new.name) == HEADER.segment_id
            assert [path.name for path in tmp_path.iterdir()] == [old.name]
            super().rename(old, new)

    SegmentWriter(Watching(), tmp_path, HEADER).close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{HEADER.segment_id.hex()}.kv"]


def test_a_header_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    class Full(FileSystemCalls):
        def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        SegmentWriter(Full(), tmp_path, HEADER)
    assert list(tmp_path.iterdir()) == []


def test_after_an_entry_that_could_not_be_written_nothing_more_fits(tmp_path: Path) -> None:
    class Torn(FileSystemCalls):
        is_torn = False

        def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
            if self.is_torn and offset < HEADER.payload_start:
                super().pwritev(fd, [bytes(buffers[0])[:50]], offset)
                raise OSError(errno.EIO, "torn")
            return super().pwritev(fd, buffers, offset)

    files = Torn()
    writer = SegmentWriter(files, tmp_path, HEADER)
    writer.append_blocks(chain(2))
    files.is_torn = True
    with pytest.raises(OSError, match="torn"):
        writer.append_blocks(chain(2, first=2))
    assert writer.num_free_slots == 0
    writer.close()
    segment = known(writer)
    assert segments.load_hashes_into_segment(FILES, segment) == 1 and segment.block_hashes == [*names(chain(2)), b""]


def test_a_payload_that_could_not_be_written_is_written_again_in_its_place(tmp_path: Path) -> None:
    class Full(FileSystemCalls):
        is_full = False

        def pwritev(self, fd: int, buffers: Sequence[Data], offset: int) -> int:
            if self.is_full:
                return 0  # a disk that takes nothing more and does not say so
            return super().pwritev(fd, buffers, offset)

    files = Full()
    writer = SegmentWriter(files, tmp_path, HEADER)
    files.is_full = True
    with pytest.raises(OSError, match="nothing was written"):
        writer.append_blocks(chain(2))
    files.is_full = False
    writer.append_blocks(chain(8, seed=1))
    writer.close()
    assert segments.read_new_block_hashes(FILES, known(writer)) == (names(chain(8, seed=1)), 0)


def test_an_entry_that_is_being_written_is_looked_at_again(tmp_path: Path) -> None:
    """Half of it at the first look, all of it at the second: it is not counted as damaged."""
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(3))
    whole = writer.path.read_bytes()
    torn = bytearray(whole)
    half = slice(HEADER.entry_offset(1) + 60, HEADER.entry_offset(2))
    torn[half] = bytes(half.stop - half.start)
    writer.path.write_bytes(torn)
    segment = known(writer)
    found, num_bad = segments.read_new_block_hashes(FILES, segment)
    segment.add_block_hashes(found)
    assert (found, num_bad) == (names(chain(1)), 0)
    writer.path.write_bytes(whole)
    assert segments.read_new_block_hashes(FILES, segment) == (names(chain(2, first=1)), 0)
    writer.close()


def test_an_entry_that_is_damaged_twice_is_damaged_and_does_not_hide_the_next(tmp_path: Path) -> None:
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(5))
    content = bytearray(writer.path.read_bytes())
    content[HEADER.entry_offset(1) + 60] ^= 1
    content[HEADER.entry_offset(3) : HEADER.entry_offset(4)] = bytes(SHAPE.table_entry_bytes)  # never reached the disk
    writer.path.write_bytes(content)
    segment = known(writer)
    assert segments.load_hashes_into_segment(FILES, segment) == 2
    assert segment.block_hashes == [name_of(0), b"", name_of(2), b"", name_of(4)]
    writer.close()


def test_a_payload_without_an_entry_is_no_block_and_no_damage(tmp_path: Path) -> None:
    """The file of a writer that is killed between the two."""
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(2))
    with writer.path.open("r+b") as file:
        file.seek(HEADER.payload_offset(2))
        file.write(content_of(2))
    segment = known(writer)
    assert segments.load_hashes_into_segment(FILES, segment) == 0 and segment.block_hashes == names(chain(2))
    assert not segments.is_truncated(FILES, segment)
    writer.close()


@pytest.mark.parametrize(("length", "is_cut"), [(256, True), (4095, True), (4096 + 127, True), (4096 + 128, False)])
def test_a_file_is_cut_if_a_payload_is_missing_that_has_an_entry(tmp_path: Path, length: int, is_cut: bool) -> None:
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(2))
    with writer.path.open("r+b") as file:
        file.truncate(length)
    assert segments.is_truncated(FILES, known(writer)) is is_cut
    writer.close()


def test_blocks_are_read_until_one_is_not_what_it_should_be(tmp_path: Path) -> None:
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(5))
    writer.close()
    segment, buffer = known(writer), bytearray(5 * 64)
    keys = [key for key, _ in chain(5)]

    def read(keys: Sequence[BlockKey], slot: int = 0) -> tuple[int, str | None]:
        return segments.read_and_verify_blocks(FILES, segment, slot, keys, memoryview(buffer))[:2]

    assert read(keys) == (5, None) and bytes(buffer) == b"".join(content for _, content in chain(5))
    assert read([keys[0], keys[2]]) == (1, "mismatch")
    assert read(keys[1:], 1) == (4, None)
    assert read([*keys, key_of(5)][4:], 4) == (1, "corrupt")  # there is no entry, though the index said so
    segments.mark_entry_discarded(FILES, segment, 3)
    assert read(keys) == (3, "gone")
    content = bytearray(writer.path.read_bytes())
    content[HEADER.payload_offset(1)] ^= 1
    writer.path.write_bytes(content)
    assert read(keys) == (1, "corrupt")
    writer.path.write_bytes(content[: HEADER.payload_offset(0) + 70])
    assert read(keys) == (1, "io")
    writer.path.unlink()
    assert read(keys) == (0, "gone")


def test_stored_blocks_are_read_without_knowing_what_they_are(tmp_path: Path) -> None:
    writer = SegmentWriter(FILES, tmp_path, HEADER)
    writer.append_blocks(chain(5))
    writer.close()
    segment, buffer = known(writer), memoryview(bytearray(5 * 64))
    keys, found = segments.read_stored_blocks(FILES, segment, range(1, 4), buffer)
    assert (keys, found.num_blocks, found.miss) == ([key for key, _ in chain(3, first=1)], 3, None)
    segments.mark_entry_discarded(FILES, segment, 2)
    segments.mark_entry_discarded(FILES, segment, 2)
    keys, found = segments.read_stored_blocks(FILES, segment, range(1, 4), buffer)
    assert (keys, found.num_blocks, found.miss) == ([key_of(1)], 1, "gone")


def test_runs_of_slots() -> None:
    assert leading_adjacent_slots([4, 5, 6, 8], 10) == range(4, 7)
    assert leading_adjacent_slots([4, 5, 6, 8], 2) == range(4, 6)
    assert leading_adjacent_slots([8], 1) == range(8, 9)


@pytest.mark.parametrize("name", ["0123456789abcdef", "0123456789ABCDEF.kv", "0123456789abcde.kv", "x.kv", "", ".kv"])
def test_other_files_are_no_segments(name: str) -> None:
    assert segment_id(name) is None and segment_id("0123456789abcdef.kv") == bytes.fromhex("0123456789abcdef")
    assert (
        not is_headerless_segment(name)
        and is_headerless_segment(".0123456789abcdef.tmp")
        and not is_headerless_segment(f".{name}.tmp.tmp")
    )
