"""EvictionHistory: hashes of evicted blocks, with the cause and the request that needed the space. Bounded.

It serves as ghost list of the eviction order (as in ARC and 2Q), and explains misses.
"""

from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash


class EvictionRecord(NamedTuple):
    """The cause of a block's eviction."""

    cause: (
        str  # "capacity": the space was needed; "failed": it may not be finite; "reset": it was cleared, or "replaced"
    )
    by: str  # id of the request that needed the space; empty for other causes
    at: float  # seconds, the scheduler's clock
    memo: int = -1  # of the eviction policy `lhd`; -1: none
    tenant: str = ""  # of that request


class EvictionHistory:
    """A map of at least the last `capacity // 2` evicted hashes and at most `capacity`; each operation is O(1).

    Two generations: when the younger is full, the older one is dropped as a whole. That takes half the memory of an
    ordered dictionary, and exact age of the oldest hashes is not needed.
    """

    def __init__(self, capacity: int) -> None:
        self.grow_capacity(capacity)
        self._young: dict[BlockHash, EvictionRecord] = {}
        self._old: dict[BlockHash, EvictionRecord] = {}

    def grow_capacity(self, capacity: int) -> None:
        """Change the capacity, which must not shrink."""
        self._generation = max(capacity // 2, 1)

    @property
    def teardown_tables(self) -> tuple[dict[BlockHash, EvictionRecord], dict[BlockHash, EvictionRecord]]:
        """Both generations."""
        return self._young, self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, block_hash: BlockHash, evicted: EvictionRecord) -> None:
        """Add the hash of an evicted block."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[block_hash] = evicted

    def get(self, block_hash: BlockHash) -> EvictionRecord | None:
        """Return the eviction of a block hash; None if it is not remembered."""
        return self._young.get(block_hash) or self._old.get(block_hash)

    def pop(self, block_hash: BlockHash) -> EvictionRecord | None:
        """Remove and return the eviction of a block hash that is published again; None if it is not remembered."""
        return self._young.pop(block_hash, None) or self._old.pop(block_hash, None)
