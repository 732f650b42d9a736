"""Segments damaged in every way there is: nothing wrong is served, nothing raises, all is counted, the rest is served.

Each case damages one of two segment files, half of them before the folder is opened and half of them after.
"""

import errno
import os
import shutil
import socket
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from stored_blocks import SHAPE, Block, Watched, chain, fill, opened, read, segment_files
from xxhash import xxh3_128_digest

from headstart.store.format import HEADER_BYTES, SegmentHeader, StoredBlockFormat, decode_segment_header
from headstart.store.segment import segment_id

NUM = 6  # blocks in each segment
FIELDS = {  # of the header: offset, format
    "version": (8, "<I"),
    "header_bytes": (12, "<I"),
    "entry_bytes": (16, "<I"),
    "block_size": (20, "<I"),
    "block_bytes": (24, "<Q"),
    "num_slots": (32, "<Q"),
    "payload_start": (40, "<Q"),
}
HEADER_USED = 88  # bytes that mean something; the rest up to the checksum is zero
EVIL = [0, 1, 2, 3, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EVIL_LONG = [*EVIL, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 64, (1 << 64) - 1]


class Case(NamedTuple):
    """Damage done to the first file; `lost` are the blocks of it that may be gone."""

    label: str
    damage: Callable[[Path], None]
    lost: frozenset[int]
    is_noticed: bool = True  # False: it may hit bytes that mean nothing


ALL = frozenset(range(NUM))


class Folder:
    """Two segments, pristine, and how to have them again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks = [chain(NUM), chain(NUM, seed=1)]
        fill(path, self.blocks[0])
        fill(path, self.blocks[1])
        self.first, self.second = segment_files(path)
        self.contents = {file: file.read_bytes() for file in (self.first, self.second)}
        name = self.blocks[0][0][0].block_hash
        if name not in self.contents[self.first]:
            self.blocks.reverse()  # blocks[0] are those of the first file
        self.header = decode_segment_header(
            self.contents[self.first][:HEADER_BYTES], segment_id(self.first.name) or b""
        )

    def restore(self) -> None:
        for file in self.path.iterdir():
            if file not in self.contents:
                file.unlink() if not file.is_dir() or file.is_symlink() else shutil.rmtree(file)
        for file, content in self.contents.items():
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            elif file.is_symlink() or not file.is_file():
                file.unlink(missing_ok=True)
            file.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


def run(folder: Folder, cases: Iterable[Case]) -> Counter[str]:
    """Does the damage and reads every block, twice over. Returns how often each reason was counted; "cases" too."""
    reasons: Counter[str] = Counter()
    for number, case in enumerate(cases):
        folder.restore()
        files = Watched()
        if number % 2:
            catalog = opened(folder.path, files=files)
            case.damage(folder.first)
            catalog.refresh_from_other_writers()
        else:
            case.damage(folder.first)
            catalog = opened(folder.path, files=files)
        found = Counter(catalog.skipped_by_reason)
        served: set[Block] = set()
        for blocks in folder.blocks:
            for block in blocks:
                found_here, miss = read(catalog, [block])
                served.update([block][:found_here])
                if miss is not None and miss != "gone":
                    found[miss] += 1
            read(catalog, blocks)
        intact = {block for index, block in enumerate(folder.blocks[0]) if index not in case.lost} | {*folder.blocks[1]}
        assert intact <= served, (case.label, number % 2, found)
        is_noticed = found.total() > 0 or len(served) == 2 * NUM
        assert is_noticed or not case.is_noticed, (case.label, number % 2)
        assert files.largest_read <= folder.header.payload_start, (case.label, files.largest_read)
        reasons.update(found)
        reasons["cases"] += 1
        catalog.close()
    return reasons


def flip(offset: int, bit: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1 << bit
        path.write_bytes(content)

    return damage


def put(offset: int, new: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(new)

    return damage


def resealed(path: Path, offset: int, new: bytes) -> None:
    """Changes the header and makes its checksum right again: what a bug, or malice, would write."""
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    content[HEADER_BYTES - 16 : HEADER_BYTES] = xxh3_128_digest(bytes(content[: HEADER_BYTES - 16]))
    path.write_bytes(content)


def header_flips() -> Iterator[Case]:
    """Every bit of every field and of the checksum, and some of the zeros between them."""
    for offset in (*range(HEADER_USED), *range(HEADER_BYTES - 16, HEADER_BYTES), 100, 239):
        for bit in range(8):
            yield Case(f"header byte {offset} bit {bit}", flip(offset, bit), ALL)


def entry_flips(header: SegmentHeader) -> Iterator[Case]:
    """A bit of every byte of two entries: magic, flags, zeros, name, parent, tokens and both checksums."""
    rng = Random(1)
    for slot in (0, NUM - 1):
        for offset in range(header.entry_offset(slot), header.entry_offset(slot + 1)):
            bit = rng.randrange(8)
            yield Case(f"entry {slot} at {offset} bit {bit}", flip(offset, bit), frozenset({slot}))


def payload_flips(header: SegmentHeader) -> Iterator[Case]:
    rng = Random(2)
    for _ in range(300):
        slot, offset, bit = rng.randrange(NUM), rng.randrange(SHAPE.block_bytes), rng.randrange(8)
        yield Case(f"payload {slot}+{offset}", flip(header.payload_offset(slot) + offset, bit), frozenset({slot}))


def truncations(header: SegmentHeader) -> Iterator[Case]:
    end = header.payload_offset(NUM)
    for length in [*range(0, end, 64), *range(1, end, 64), *range(header.payload_start - 7, end, 17)]:
        lost = frozenset(slot for slot in range(NUM) if header.payload_offset(slot + 1) > length)
        yield Case(f"cut to {length}", lambda path, length=length: os.truncate(path, length), lost)


def evil_lengths() -> Iterator[Case]:
    """Lengths that we would not write, under a checksum that is right. Even ours under the wrong name say nothing."""
    for field, (offset, form) in FIELDS.items():
        for value in EVIL if form == "<I" else EVIL_LONG:
            new = struct.pack(form, value)
            yield Case(f"{field} = {value}", lambda path, at=offset, new=new: resealed(path, at, new), ALL, False)


def overwritten(header: SegmentHeader) -> Iterator[Case]:
    """Stretches of noise and of zeros, anywhere."""
    rng, end = Random(3), header.payload_offset(NUM)
    for number in range(300):
        length = rng.choice([1, 16, 64, 120, 512])
        start = rng.randrange(end - length)
        new = rng.randbytes(length) if number % 3 else bytes(length)
        hit = range(start, start + length)
        lost = frozenset(
            slot
            for slot in range(NUM)
            if start < HEADER_BYTES
            or _overlap(hit, header.entry_offset(slot), SHAPE.table_entry_bytes)
            or _overlap(hit, header.payload_offset(slot), SHAPE.block_bytes)
        )
        yield Case(f"{length} bytes at {start}", put(start, new), lost, is_noticed=False)


def _overlap(hit: range, start: int, length: int) -> bool:
    return hit.start < start + length and start < hit.stop


def test_flipped_bits_of_a_header_cost_its_file_and_nothing_else(folder: Folder) -> None:
    reasons = run(folder, header_flips())
    assert reasons["cases"] == 8 * (HEADER_USED + 16 + 2)
    assert reasons["magic"] and reasons["version"] and reasons["checksum"]


def test_flipped_bits_of_an_entry_cost_its_block_and_nothing_else(folder: Folder) -> None:
    reasons = run(folder, entry_flips(folder.header))
    assert reasons["cases"] == 2 * SHAPE.table_entry_bytes
    assert reasons["entry"] == reasons["corrupt"] == SHAPE.table_entry_bytes  # found by the scan, or by the read


def test_flipped_bits_of_a_payload_cost_its_block_and_nothing_else(folder: Folder) -> None:
    assert run(folder, payload_flips(folder.header)) == {
        "cases": 300,
        "corrupt": 300,
        "cut": 0,
        "entry": 0,
        "unsafe": 0,
    }


def test_a_cut_file_serves_what_is_left_of_it(folder: Folder) -> None:
    reasons = run(folder, truncations(folder.header))
    assert reasons["cases"] > 2 * folder.header.payload_offset(NUM) // 64
    assert reasons["short"] and reasons["cut"] and reasons["io"]


def test_implausible_lengths_are_refused_before_anything_is_allocated(folder: Folder) -> None:
    reasons = run(folder, evil_lengths())
    assert reasons["cases"] == 4 * len(EVIL) + 3 * len(EVIL_LONG)
    assert reasons["lengths"] > 30 and reasons["version"] >= 4


def test_stretches_of_noise_and_zeros_cost_what_they_hit(folder: Folder) -> None:
    assert run(folder, overwritten(folder.header))["cases"] == 300


def swapped_files(path: Path) -> None:
    other = next(file for file in segment_files(path.parent) if file != path)
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def test_two_files_under_each_others_name_serve_nothing(folder: Folder) -> None:
    for is_open in (False, True):
        folder.restore()
        early = opened(folder.path)
        swapped_files(folder.first)
        catalog = early if is_open else opened(folder.path)
        catalog.refresh_from_other_writers()
        assert [read(catalog, blocks)[0] for blocks in folder.blocks] == [0, 0]
        assert is_open or catalog.skipped_by_reason["swapped"] == 2


@pytest.mark.parametrize("part", ["table", "payloads", "both", "one entry"])
def test_parts_swapped_between_two_good_files_are_noticed(folder: Folder, part: str) -> None:
    header, (one, other) = folder.header, folder.contents.values()
    table = slice(HEADER_BYTES, header.payload_start)
    payloads = slice(header.payload_start, None)
    spans = {
        "table": [table],
        "payloads": [payloads],
        "both": [table, payloads],
        "one entry": [slice(header.entry_offset(2), header.entry_offset(3))],
    }
    mixed = bytearray(one)
    for span in spans[part]:
        mixed[span] = other[span]

    def damage(path: Path) -> None:
        path.write_bytes(mixed)

    lost = frozenset({2}) if part == "one entry" else ALL
    assert run(folder, [Case(part, damage, lost)] * 2).total() > 2


def test_an_entry_and_its_payload_moved_to_another_slot_are_noticed(folder: Folder) -> None:
    header, content = folder.header, folder.contents[folder.first]

    def damage(path: Path) -> None:
        moved = bytearray(content)
        for at in (header.entry_offset, header.payload_offset):
            moved[at(0) : at(1)], moved[at(3) : at(4)] = content[at(3) : at(4)], content[at(0) : at(1)]
        path.write_bytes(moved)

    reasons = run(folder, [Case("moved", damage, frozenset({0, 3}))] * 2)
    assert reasons["entry"] == reasons["corrupt"] == 2


@pytest.mark.parametrize("value", [2, 3, 1 << 31, (1 << 32) - 1])
def test_a_future_version_is_left_alone(folder: Folder, value: int) -> None:
    def damage(path: Path) -> None:
        resealed(path, FIELDS["version"][0], struct.pack("<I", value))

    assert run(folder, [Case("version", damage, ALL)])["version"] == 1
    assert folder.first.exists()


@pytest.mark.parametrize(
    "shape",
    [SHAPE._replace(fingerprint=b"o" * 32), SHAPE._replace(block_size=8), SHAPE._replace(block_bytes=128)],
)
def test_another_models_blocks_are_counted_but_not_read(folder: Folder, shape: StoredBlockFormat) -> None:
    folder.first.unlink()
    blocks = [
        (key._replace(tokens=b"\1\2\3\4" * shape.block_size), (content * 2)[: shape.block_bytes])
        for key, content in folder.blocks[0]
    ]
    path = fill(folder.path, blocks, shape=shape)
    catalog = opened(folder.path)
    assert read(catalog, folder.blocks[0]) == (0, "gone") and read(catalog, folder.blocks[1]) == (NUM, None)
    assert catalog.skipped_by_reason["other shape"] == 1 and catalog.num_corrupt == 0
    assert catalog.num_segments == 2 and catalog.num_bytes >= path.stat().st_size > 0


def to_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def to_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


@pytest.mark.parametrize("damage", [to_link, to_dangling_link, to_pipe, to_folder, to_socket])
def test_what_is_no_regular_file_is_never_opened_for_long_and_never_deleted(
    folder: Folder, damage: Callable[[Path], None]
) -> None:
    reasons = run(folder, [Case(damage.__name__, damage, ALL)] * 2)
    assert reasons["unsafe"] == 2
    opened(folder.path).clear()
    assert os.path.lexists(folder.first) and not folder.second.exists()


def test_a_link_that_appears_after_the_folder_was_listed_is_not_followed(folder: Folder) -> None:
    catalog = opened(folder.path)
    to_link(folder.first)
    assert read(catalog, folder.blocks[0]) == (0, "io")  # ELOOP


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_an_unreadable_file_is_counted_and_the_others_are_served(folder: Folder, error: int) -> None:
    first = folder.first

    class Unreadable(Watched):
        def open_owned_regular_file(self, path: Path, *, to_write: bool = False) -> int:
            if path == first:
                raise OSError(error, os.strerror(error))
            return super().open_owned_regular_file(path, to_write=to_write)

    catalog = opened(folder.path, files=Unreadable())
    assert catalog.skipped_by_reason["unreadable"] == 1
    assert read(catalog, folder.blocks[0]) == (0, "gone") and read(catalog, folder.blocks[1]) == (NUM, None)


def test_an_empty_file_is_short(folder: Folder) -> None:
    assert run(folder, [Case("empty", lambda path: os.truncate(path, 0), ALL)])["short"] == 1


def test_a_huge_sparse_file_costs_neither_memory_nor_room(folder: Folder) -> None:
    """It says that it holds as many blocks as the format allows, and is a terabyte long, of nothing."""
    own_id = bytes(range(8))
    slots = ((256 << 20) - 8192) // (SHAPE.table_entry_bytes + SHAPE.block_bytes)
    header = SegmentHeader(SHAPE, min(slots, 1 << 20), own_id)
    path = folder.path / f"{own_id.hex()}.kv"
    content = folder.contents[folder.first]
    path.write_bytes(content[:HEADER_BYTES])
    resealed(path, 32, struct.pack("<QQ", header.num_slots, header.payload_start))
    resealed(path, 80, own_id)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    catalog = opened(folder.path, files=Watched())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert catalog.skipped_by_reason["lengths"] == catalog.num_corrupt == 0
    assert peak < 8 << 20
    assert catalog.num_bytes < 1 << 20
    assert [read(catalog, blocks)[0] for blocks in folder.blocks] == [NUM, NUM]


def test_files_that_are_not_ours_are_neither_read_nor_counted_nor_deleted(folder: Folder) -> None:
    strange = ["notes.txt", "0123456789abcdef", "0123456789ABCDEF.kv", "0123456789abcde.kv", "x" * 200 + ".kv", ".kv"]
    for name in strange:
        (folder.path / name).write_bytes(folder.contents[folder.first])
    catalog = opened(folder.path)
    assert catalog.num_segments == 2 and sum(catalog.skipped_by_reason.values()) == 0
    catalog.clear()
    assert sorted(file.name for file in folder.path.iterdir()) == sorted(strange)


def test_a_whole_block_of_zeros_in_the_table_hides_only_what_it_covers(folder: Folder) -> None:
    """A page of the table that never reached the disk, though later ones did."""
    header = folder.header
    damage = put(header.entry_offset(1), bytes(3 * SHAPE.table_entry_bytes))
    run(folder, [Case("zeros", damage, frozenset({1, 2, 3}))] * 2)


def test_many_kinds_of_damage_at_once(folder: Folder) -> None:
    """Several bits anywhere, up to a hundred: whatever is served is right."""
    rng, end = Random(4), folder.header.payload_offset(NUM)

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice([2, 10, 100])):
            content[rng.randrange(end)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)

    assert run(folder, [Case("bits", damage, ALL, is_noticed=False)] * 200)["cases"] == 200


def test_there_are_two_thousand_cases(folder: Folder) -> None:
    header = folder.header
    families = (
        header_flips(),
        entry_flips(header),
        payload_flips(header),
        truncations(header),
        evil_lengths(),
        overwritten(header),
    )
    assert sum(1 for family in families for _ in family) + 200 >= 2000
