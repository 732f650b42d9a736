"""Small blocks for tests of the store on disk: their content follows from seed and index, so any wrong byte shows."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import FileSystemCalls
from headstart.store.format import StoredBlockFormat

SHAPE = StoredBlockFormat(hashlib.sha256(b"a model").digest(), block_size=4, block_bytes=64)
SMALL = 64 << 10
"""Bytes: a folder of this size has segments of 66 blocks of SHAPE, so that four fit."""
Block = tuple[BlockKey, bytes]


class Watched(FileSystemCalls):
    """Notes the most that was read at once, which is what was allocated for it. Bytes."""

    largest_read = 0

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self.largest_read = max(self.largest_read, num_bytes)
        return super().pread(fd, num_bytes, offset)


class FakeClock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def name_of(index: int, seed: int = 0) -> BlockHash:
    return BlockHash(hashlib.sha256(f"{seed}/{index}".encode()).digest())


def key_of(index: int, seed: int = 0) -> BlockKey:
    return BlockKey(name_of(index, seed), name_of(index - 1, seed), index.to_bytes(4, "little") * SHAPE.block_size)


def content_of(index: int, seed: int = 0, num_bytes: int = SHAPE.block_bytes) -> bytes:
    return hashlib.shake_128(f"{seed}/{index}".encode()).digest(num_bytes)


def chain(num: int, seed: int = 0, first: int = 0) -> list[Block]:
    return [(key_of(index, seed), content_of(index, seed)) for index in range(first, first + num)]


def names(blocks: Iterable[Block]) -> list[BlockHash]:
    return [key.block_hash for key, _ in blocks]


def read(catalog: SegmentCatalog, blocks: Sequence[Block]) -> tuple[int, str | None]:
    """Return how many of these come back, and why the next does not. Raises AssertionError for a wrong byte."""
    buffer = bytearray(b"?" * (len(blocks) * SHAPE.block_bytes))
    num_blocks, miss, _ = catalog.read_blocks_until_miss([key for key, _ in blocks], memoryview(buffer))
    expected = b"".join(content for _, content in blocks[:num_blocks])
    assert buffer[: len(expected)] == expected, f"wrong bytes served for one of {num_blocks} blocks"
    assert (miss is None) == (num_blocks == len(blocks)), (num_blocks, miss)
    return num_blocks, miss


def fill(folder: Path, blocks: Sequence[Block], max_bytes: int = SMALL, shape: StoredBlockFormat = SHAPE) -> Path:
    """Writes these as a process of its own would; returns the new segment file. They must fit into one."""
    before = set(segment_files(folder))
    writer = SegmentCatalog(folder, shape, max_bytes)
    writer.write_new_blocks(blocks)
    writer.close()
    (path,) = set(segment_files(folder)) - before
    return path


def opened(
    folder: Path, max_bytes: int = SMALL, files: FileSystemCalls | None = None, clock: FakeClock | None = None
) -> SegmentCatalog:
    """A catalog as another process has it after its start. What is damaged is believed at the second look."""
    catalog = SegmentCatalog(folder, SHAPE, max_bytes, files, clock or FakeClock())
    catalog.refresh_from_other_writers()
    catalog.refresh_from_other_writers()
    return catalog


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def age(path: Path, seconds: float) -> None:
    """Sets its mtime to so long ago."""
    mtime = FileSystemCalls().mtime_clock_now() - seconds
    os.utime(path, (mtime, mtime))
