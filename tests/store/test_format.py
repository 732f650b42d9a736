"""The format: what is written is read again, and every single wrong bit is told."""

import re
import struct

import pytest
from stored_blocks import SHAPE, content_of, key_of
from xxhash import xxh3_128_digest

from headstart.store.format import (
    HEADER_BYTES,
    MAGIC,
    MAX_SEGMENT_BYTES,
    BlockEntry,
    FormatError,
    SegmentHeader,
    StoredBlockFormat,
    decode_block_hashes,
    decode_entry,
    decode_segment_header,
    encode_header,
    encode_slot_entry,
    payload_checksum,
)

OWN_ID = b"\x01\x23\x45\x67\x89\xab\xcd\xef"
HEADER = SegmentHeader(SHAPE, 10, OWN_ID)
ENTRY = BlockEntry(key_of(3), payload_checksum(content_of(3)))


def raises(reason: str) -> "pytest.RaisesExc[FormatError]":
    return pytest.raises(FormatError, match=f"^{re.escape(reason)}$")


def test_a_header_comes_back_as_it_was() -> None:
    raw = encode_header(HEADER)
    assert len(raw) == HEADER_BYTES and decode_segment_header(raw, OWN_ID) == HEADER


def test_the_bytes_of_a_header_are_fixed() -> None:
    """Files outlive the program: who changes this changes the version."""
    raw = encode_header(SegmentHeader(StoredBlockFormat(b"f" * 32, 16, 196_608), 40, OWN_ID))
    assert raw[:48].hex() == (
        "686561646b760d0a" + "01000000" + "00010000" + "a8000000" + "10000000"
        "0000030000000000" + "2800000000000000" + "0020000000000000"
    )
    assert raw[48:88] == b"f" * 32 + OWN_ID and not any(raw[88:240])


def test_positions_follow_from_the_shape() -> None:
    assert SHAPE.table_entry_bytes == 72 + 16 + 32
    assert HEADER.payload_start == 4096
    assert HEADER.entry_offset(1) - HEADER.entry_offset(0) == SHAPE.table_entry_bytes
    assert HEADER.file_bytes == HEADER.payload_offset(10) == 4096 + 640
    assert [HEADER.num_slots_within(size) for size in (0, 4095, 4096 + 63, 4096 + 64, 4096 + 640, 1 << 50)] == [
        0, 0, 0, 1, 10, 10,
    ]  # fmt: skip


@pytest.mark.parametrize("num_slots", [0, 1 << 21])
def test_sizes_that_we_would_not_write_are_no_header(num_slots: int) -> None:
    assert not HEADER._replace(num_slots=num_slots).is_plausible()


@pytest.mark.parametrize(
    "header",
    [
        HEADER._replace(num_slots=0),
        HEADER._replace(num_slots=1 << 50),
        HEADER._replace(shape=SHAPE._replace(block_size=0)),
        HEADER._replace(shape=SHAPE._replace(block_size=1 << 20)),
        HEADER._replace(shape=SHAPE._replace(block_bytes=0)),
        HEADER._replace(shape=SHAPE._replace(block_bytes=1 << 31)),
        HEADER._replace(shape=SHAPE._replace(block_bytes=100 << 20)),
    ],
)
def test_lengths_that_agree_with_each_other_but_are_beyond_reason_are_refused(header: SegmentHeader) -> None:
    """Under a checksum that is right: a header with sizes of no model, which no writer writes."""
    shape = header.shape
    sizes = (1, HEADER_BYTES, shape.table_entry_bytes, shape.block_size, shape.block_bytes, header.num_slots)
    raw = struct.pack("<8sIIIIQQQ32s8s", MAGIC, *sizes, header.payload_start, shape.fingerprint, OWN_ID)
    raw = raw.ljust(HEADER_BYTES - 16, b"\0")
    with raises("lengths"):
        decode_segment_header(raw + xxh3_128_digest(raw), OWN_ID)


def test_only_a_single_block_may_be_longer_than_a_segment() -> None:
    large = StoredBlockFormat(b"f" * 32, 16, MAX_SEGMENT_BYTES)
    assert SegmentHeader(large, 1, OWN_ID).is_plausible() and not SegmentHeader(large, 2, OWN_ID).is_plausible()


def test_every_flipped_bit_of_a_header_is_told() -> None:
    raw = encode_header(HEADER)
    for at in range(8 * HEADER_BYTES):
        wrong = bytearray(raw)
        wrong[at // 8] ^= 1 << at % 8
        with pytest.raises(FormatError):
            decode_segment_header(bytes(wrong), OWN_ID)


def test_a_header_is_good_under_its_own_name_only() -> None:
    with raises("swapped"):
        decode_segment_header(encode_header(HEADER), bytes(8))
    with raises("short"):
        decode_segment_header(encode_header(HEADER)[:-1], OWN_ID)


def test_an_entry_comes_back_as_it_was() -> None:
    raw = encode_slot_entry(HEADER, 7, ENTRY)
    assert len(raw) == SHAPE.table_entry_bytes and decode_entry(HEADER, 7, raw) == ENTRY


def test_every_flipped_bit_of_an_entry_is_told() -> None:
    raw = encode_slot_entry(HEADER, 7, ENTRY)
    for at in range(8 * len(raw)):
        wrong = bytearray(raw)
        wrong[at // 8] ^= 1 << at % 8
        with raises("checksum"):
            decode_entry(HEADER, 7, bytes(wrong))


def test_an_entry_is_good_in_its_own_slot_and_file_only() -> None:
    raw = encode_slot_entry(HEADER, 7, ENTRY)
    with raises("checksum"):
        decode_entry(HEADER, 6, raw)
    with raises("checksum"):
        decode_entry(HEADER._replace(segment_id=b"another!"), 7, raw)


def test_empty_short_and_discarded_entries_are_told_apart() -> None:
    for raw, reason in [
        (bytes(SHAPE.table_entry_bytes), "empty"),
        (encode_slot_entry(HEADER, 0, ENTRY)[:-1], "short"),
        (encode_slot_entry(HEADER, 0, ENTRY, discarded=True), "discarded"),
    ]:
        with raises(reason):
            decode_entry(HEADER, 0, raw)


def test_names_are_read_up_to_the_last_entry_and_damaged_ones_have_none() -> None:
    entries = [
        encode_slot_entry(HEADER, 2 + place, BlockEntry(key_of(place), payload_checksum(b""))) for place in range(5)
    ]
    entries[1] = encode_slot_entry(HEADER, 3, ENTRY, discarded=True)
    entries[2] = b"x" * SHAPE.table_entry_bytes
    entries[3] = bytes(SHAPE.table_entry_bytes)
    table = b"".join(entries) + bytes(3 * SHAPE.table_entry_bytes) + b"incomplete"
    found = decode_block_hashes(HEADER, 2, table)
    assert found.by_slot == [key_of(0).block_hash, b"", b"", b"", key_of(4).block_hash]
    assert found.bad == [2, 3]
    assert decode_block_hashes(HEADER, 0, bytes(500)) == ([], [])


def test_the_scan_and_the_read_agree_on_every_flag() -> None:
    """A flag that this version does not know, under a checksum that is right, is no block to either."""
    for place in range(8):
        raw = bytearray(encode_slot_entry(HEADER, 0, ENTRY)[:-16])
        raw[place] ^= 0x40
        seed = int.from_bytes(OWN_ID, "little")
        whole = bytes(raw) + xxh3_128_digest(bytes(raw), seed)
        assert decode_block_hashes(HEADER, 0, whole) == ([b""], [0])
        with raises("magic" if place < 4 else "flags"):
            decode_entry(HEADER, 0, whole)
