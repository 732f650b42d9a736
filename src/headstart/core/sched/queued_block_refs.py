"""QueuedBlockRefCounts: for each block hash, the number of queued requests that reference it.

Most requests are admitted at once, and their references are removed before they are read. So references are counted
hash by hash only when they are read, which is when blocks have to be evicted.
"""

from collections import Counter
from collections.abc import Sequence

from headstart.core.cache.hashing import BlockHash

MAX_UNCOUNTED = 256


class QueuedBlockRefCounts:
    """A multiset of block hashes; membership is valid after `add_pending_to_counts`, until the next change."""

    def __init__(self) -> None:
        self._counts: Counter[BlockHash] = Counter()
        self._uncounted: dict[BlockHash, list[Sequence[BlockHash]]] = {}  # by the last hash, which determines the chain
        self._num_uncounted = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._counts

    def add(self, block_hashes: Sequence[BlockHash]) -> None:
        """Add one reference to every hash."""
        if block_hashes:
            self._uncounted.setdefault(block_hashes[-1], []).append(block_hashes[:])
            self._num_uncounted += 1
            if self._num_uncounted > MAX_UNCOUNTED:
                self.add_pending_to_counts()

    def discard(self, block_hashes: Sequence[BlockHash]) -> None:
        """Remove one reference from every hash, in any grouping."""
        alike = self._uncounted.get(block_hashes[-1]) if block_hashes else None
        if alike is not None and block_hashes in alike:
            alike.remove(block_hashes)
            if not alike:
                del self._uncounted[block_hashes[-1]]
            self._num_uncounted -= 1
            return
        self.add_pending_to_counts()
        counts = self._counts
        for block_hash in block_hashes:
            assert block_hash in counts, f"block {block_hash.hex()} is dereferenced more often than referenced"
            if counts[block_hash] == 1:
                counts.pop(block_hash)  # `del` of a Counter runs in Python
            else:
                counts[block_hash] -= 1

    def add_pending_to_counts(self) -> None:
        """Count the references added since the last call."""
        for alike in self._uncounted.values():
            for block_hashes in alike:
                self._counts.update(block_hashes)
        self._uncounted.clear()
        self._num_uncounted = 0
