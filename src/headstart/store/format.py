"""The format of a segment file: [header | table of fixed-size entries | payloads]. Pure: bytes in, values out.

    0          256                     payload_start (a multiple of 4096)
    | header   | entry 0 | entry 1 | ..| payload 0 | payload 1 | ...

Every position follows from the header, and every length in the header is computed and compared, never trusted: nothing
is allocated by a file's claim. Header and entries carry their own checksum, and an entry's checksum is bound to its
file and slot: an entry that was moved is invalid. Checksums are XXH3-128: they detect accidents, while the folder's
mode protects against other users. Numbers are little-endian.
"""

import struct
from typing import Literal, NamedTuple

from xxhash import xxh3_128_digest

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash

MAGIC = b"headkv\r\n"
VERSION = 1
HEADER_BYTES = 256
MAX_BLOCK_SIZE = 1 << 16
MAX_BLOCK_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 256 << 20
"""No segment is longer than this, unless it holds a single longer block."""
MAX_SLOTS = 1 << 20
_HEADER = struct.Struct("<8sIIIIQQQ32s8s")
_ENTRY_MAGIC = b"blok"
_ENTRY_HEAD = struct.Struct("<4sB3s32s32s")
_CHECKSUM_BYTES = 16
_PAGE = 4096
_STORED, _DISCARDED = 0, 1
_BLOCK_HASH = slice(8, 40)

Reason = Literal["short", "magic", "version", "checksum", "lengths", "swapped", "flags", "discarded", "empty"]


class FormatError(Exception):
    """Bytes that are no header or entry; `reason` is one word, by which it is counted."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class StoredBlockFormat(NamedTuple):
    """The common properties of all blocks in one segment: the model, tokens per block, and bytes per block."""

    fingerprint: bytes  # 32 bytes
    block_size: int
    block_bytes: int

    @property
    def table_entry_bytes(self) -> int:
        return _ENTRY_HEAD.size + 4 * self.block_size + 2 * _CHECKSUM_BYTES


class SegmentHeader(NamedTuple):
    """One segment: the shape of its blocks, how many it can hold, and its id, 8 random bytes."""

    shape: StoredBlockFormat
    num_slots: int
    segment_id: bytes

    @property
    def payload_start(self) -> int:
        table_end = HEADER_BYTES + self.num_slots * self.shape.table_entry_bytes
        return -(-table_end // _PAGE) * _PAGE

    @property
    def file_bytes(self) -> int:
        """The bytes of the full file."""
        return self.payload_offset(self.num_slots)

    def entry_offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self.shape.table_entry_bytes

    def payload_offset(self, slot: int) -> int:
        return self.payload_start + slot * self.shape.block_bytes

    def num_slots_within(self, file_bytes: int) -> int:
        """Return the number of slots whose whole payload lies in a file of this length."""
        return min(max(0, file_bytes - self.payload_start) // self.shape.block_bytes, self.num_slots)

    def is_plausible(self) -> bool:
        """Return whether the sizes are ones that a writer would choose."""
        fingerprint, block_size, block_bytes = self.shape
        return (
            len(fingerprint) == 32
            and len(self.segment_id) == 8
            and 1 <= block_size <= MAX_BLOCK_SIZE
            and 1 <= block_bytes <= MAX_BLOCK_BYTES
            and 1 <= self.num_slots <= MAX_SLOTS
            and (self.num_slots == 1 or self.file_bytes <= MAX_SEGMENT_BYTES)
        )


class BlockEntry(NamedTuple):
    """One stored block: its identity, and the checksum of its content."""

    key: BlockKey
    payload_checksum: bytes


class SegmentBlockHashes(NamedTuple):
    """The block hashes in part of a table. Torn, damaged, discarded and empty entries have none."""

    by_slot: list[bytes]  # up to the last non-empty slot; b"": nothing to load
    bad: list[int]  # indexes in `by_slot` of entries that fail their check, or are empty before a later entry


def encode_header(header: SegmentHeader) -> bytes:
    shape = header.shape
    assert header.is_plausible(), header
    sizes = (VERSION, HEADER_BYTES, shape.table_entry_bytes, shape.block_size, shape.block_bytes, header.num_slots)
    raw = _HEADER.pack(MAGIC, *sizes, header.payload_start, shape.fingerprint, header.segment_id)
    raw = raw.ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
    return raw + xxh3_128_digest(raw)


def decode_segment_header(raw: bytes, segment_id: bytes) -> SegmentHeader:
    """Decode the header of the file named `segment_id`.

    Raises FormatError: short, magic, version, checksum, lengths, or swapped (another file's).
    """
    if len(raw) != HEADER_BYTES:
        raise FormatError("short")
    fields = _HEADER.unpack_from(raw)
    magic, version, header_bytes, entry_bytes, block_size, block_bytes, num_slots, payload_start, fingerprint, own = (
        fields
    )
    if magic != MAGIC:
        raise FormatError("magic")
    if version != VERSION:
        raise FormatError("version")
    if xxh3_128_digest(raw[:-_CHECKSUM_BYTES]) != raw[-_CHECKSUM_BYTES:]:
        raise FormatError("checksum")
    header = SegmentHeader(StoredBlockFormat(fingerprint, block_size, block_bytes), num_slots, own)
    said = (header_bytes, entry_bytes, payload_start)
    if not header.is_plausible() or said != (HEADER_BYTES, header.shape.table_entry_bytes, header.payload_start):
        raise FormatError("lengths")
    if own != segment_id:
        raise FormatError("swapped")
    return header


def payload_checksum(payload: Data) -> bytes:
    return xxh3_128_digest(payload)


def encode_slot_entry(header: SegmentHeader, slot: int, entry: BlockEntry, *, discarded: bool = False) -> bytes:
    """Return the entry of one slot; a discarded one marks its block as not to be used any more."""
    block_hash, parent, tokens = entry.key
    sizes = (len(block_hash), len(parent), len(tokens), len(entry.payload_checksum))
    assert sizes == (32, 32, 4 * header.shape.block_size, _CHECKSUM_BYTES), sizes
    head = _ENTRY_HEAD.pack(_ENTRY_MAGIC, _DISCARDED if discarded else _STORED, bytes(3), block_hash, parent)
    raw = head + tokens + entry.payload_checksum
    return raw + xxh3_128_digest(raw, _seed(header, slot))


def decode_entry(header: SegmentHeader, slot: int, raw: bytes) -> BlockEntry:
    """Decode an entry. Raises FormatError: short, empty, checksum, magic, flags, or discarded."""
    if len(raw) != header.shape.table_entry_bytes:
        raise FormatError("short")
    if not any(raw):
        raise FormatError("empty")
    if xxh3_128_digest(raw[:-_CHECKSUM_BYTES], _seed(header, slot)) != raw[-_CHECKSUM_BYTES:]:
        raise FormatError("checksum")
    magic, flags, reserved, block_hash, parent = _ENTRY_HEAD.unpack_from(raw)
    if magic != _ENTRY_MAGIC:
        raise FormatError("magic")
    if flags == _DISCARDED:
        raise FormatError("discarded")
    if flags != _STORED or any(reserved):
        raise FormatError("flags")
    tokens_end = len(raw) - 2 * _CHECKSUM_BYTES
    key = BlockKey(BlockHash(block_hash), BlockHash(parent), raw[_ENTRY_HEAD.size : tokens_end])
    return BlockEntry(key, raw[tokens_end:-_CHECKSUM_BYTES])


def decode_block_hashes(header: SegmentHeader, first: int, table: bytes) -> SegmentBlockHashes:
    """Return the block hashes in a piece of the table that begins at slot `first`. A partial last entry is skipped."""
    size, empty = header.shape.table_entry_bytes, bytes(header.shape.table_entry_bytes)
    usable = _ENTRY_MAGIC + bytes([_STORED, 0, 0, 0])
    block_hashes: list[bytes] = []
    bad: list[int] = []
    holes: list[int] = []
    end = 0
    for place, offset in enumerate(range(0, len(table) - size + 1, size)):
        raw = table[offset : offset + size]
        block_hash = b""
        if raw == empty:
            holes.append(place)
        else:
            end = place + 1
            if xxh3_128_digest(raw[:-_CHECKSUM_BYTES], _seed(header, first + place)) != raw[-_CHECKSUM_BYTES:]:
                bad.append(place)
            elif raw.startswith(usable):
                block_hash = raw[_BLOCK_HASH]
            elif raw[: len(_ENTRY_MAGIC)] != _ENTRY_MAGIC or raw[len(_ENTRY_MAGIC)] != _DISCARDED:
                bad.append(place)
        block_hashes.append(block_hash)
    return SegmentBlockHashes(block_hashes[:end], sorted(bad + [hole for hole in holes if hole < end]))


def _seed(header: SegmentHeader, slot: int) -> int:
    """Return the seed of an entry's checksum: valid in this slot of this file only."""
    return (int.from_bytes(header.segment_id, "little") + slot) % (1 << 64)
