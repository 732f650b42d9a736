"""Index: the location of each stored block, block hash -> segment and slot, in memory. No disk.

A location is one int, so a block costs a dict entry, its hash, and that int. `contains` reads one dict and needs no
lock; everything else holds one lock for the duration of a lookup.
"""

import threading
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store.format import MAX_SLOTS
from headstart.store.segment import Segment


class Run(NamedTuple):
    """Requested blocks in adjacent slots of one segment."""

    segment: Segment
    slot: int
    length: int


class Index:
    """The block hashes of all known segments of one shape."""

    def __init__(self) -> None:
        self._where: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further locations of blocks that are stored more than once
        self._segments: dict[int, Segment] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._where)

    def contains(self, block_hash: bytes) -> bool:
        return block_hash in self._where

    def add(self, segment: Segment, block_hashes: list[bytes]) -> None:
        """Add block hashes in the next slots of a segment. b"" is a slot without a block."""
        with self._lock:
            self._segments[segment.number] = segment
            location = segment.number * MAX_SLOTS + len(segment.block_hashes)
            segment.note(block_hashes)
            for block_hash in block_hashes:
                if block_hash and self._where.setdefault(block_hash, location) != location:
                    self._copies.setdefault(block_hash, []).append(location)
                location += 1

    def run(self, keys: Sequence[BlockKey], first: int) -> Run | None:
        """Return the location of `keys[first]` and the number of consecutive blocks there; None if it is not stored."""
        with self._lock:
            location = self._where.get(keys[first].block_hash)
            if location is None:
                return None
            number, slot = divmod(location, MAX_SLOTS)
            segment, length = self._segments[number], 1
            block_hashes = segment.block_hashes
            while (
                first + length < len(keys)
                and slot + length < len(block_hashes)
                and block_hashes[slot + length] == keys[first + length].block_hash
            ):
                length += 1
            return Run(segment, slot, length)

    def mark_used(self, segment: Segment, slot: int, length: int) -> None:
        """Mark slots as used by a request since they were written."""
        with self._lock:
            segment.used[slot : slot + length] = b"\1" * len(segment.used[slot : slot + length])

    def places(self, block_hash: bytes) -> list[tuple[Segment, int]]:
        """Return all locations of a block."""
        with self._lock:
            locations = (
                [self._where[block_hash], *self._copies.get(block_hash, ())] if block_hash in self._where else []
            )
            return [(self._segments[number], slot) for number, slot in (divmod(at, MAX_SLOTS) for at in locations)]

    def forget(self, block_hash: bytes, segment: Segment, slot: int) -> None:
        """Remove one location of a block. Others may remain."""
        with self._lock:
            self._forget(block_hash, segment, slot)

    def drop(self, segment: Segment) -> int:
        """Remove a segment. Return the number of blocks that are no longer stored anywhere."""
        with self._lock:
            before = len(self._where)
            for slot, block_hash in enumerate(segment.block_hashes):
                if block_hash:
                    self._forget(block_hash, segment, slot)
            self._segments.pop(segment.number, None)
            return before - len(self._where)

    def worth_moving(self, segment: Segment, kept: Container[BlockHash]) -> tuple[list[int], list[int]]:
        """Return the slots whose block has no other copy: those in `kept`, and those used since they were written."""
        pinned: list[int] = []
        used: list[int] = []
        with self._lock:
            for slot, block_hash in enumerate(segment.block_hashes):
                if block_hash and block_hash not in self._copies:
                    if BlockHash(block_hash) in kept:
                        pinned.append(slot)
                    elif segment.used[slot]:
                        used.append(slot)
        return pinned, used

    def segments(self) -> Iterable[Segment]:
        with self._lock:
            return list(self._segments.values())

    def _forget(self, block_hash: bytes, segment: Segment, slot: int) -> None:
        location = segment.number * MAX_SLOTS + slot
        if slot < len(segment.block_hashes) and segment.block_hashes[slot] == block_hash:
            segment.block_hashes[slot] = b""
        copies = self._copies.get(block_hash, [])
        if self._where.get(block_hash) == location:
            if copies:
                self._where[block_hash] = copies.pop(0)
            else:
                del self._where[block_hash]
        elif location in copies:
            copies.remove(location)
        if not copies:
            self._copies.pop(block_hash, None)
