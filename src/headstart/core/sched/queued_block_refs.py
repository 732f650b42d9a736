"""QueuedBlockRefs: for each block hash, the number of queued requests that reference it.

Most requests are admitted at once, and their references are removed before they are read. So references are counted
hash by hash only when they are read, which is when blocks have to be evicted.
"""

from collections import Counter
from collections.abc import Sequence

from headstart.core.cache.hashing import BlockHash

MAX_UNCOUNTED = 256


class QueuedBlockRefs:
    """A multiset of block hashes; membership is valid once `count` has been called since the last change."""

    def __init__(self) -> None:
        self._counts: Counter[BlockHash] = Counter()
        self._uncounted: dict[BlockHash, list[Sequence[BlockHash]]] = {}  # by the last hash, which determines the chain
        self._num_uncounted = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    def add(self, names: Sequence[BlockHash]) -> None:
        """Add one reference to every hash."""
        if names:
            self._uncounted.setdefault(names[-1], []).append(names[:])
            self._num_uncounted += 1
            if self._num_uncounted > MAX_UNCOUNTED:
                self.count()

    def discard(self, names: Sequence[BlockHash]) -> None:
        """Remove one reference from every hash, in any grouping."""
        alike = self._uncounted.get(names[-1]) if names else None
        if alike is not None and names in alike:
            alike.remove(names)
            if not alike:
                del self._uncounted[names[-1]]
            self._num_uncounted -= 1
            return
        self.count()
        counts = self._counts
        for name in names:
            assert name in counts, f"block {name.hex()} is dereferenced more often than referenced"
            if counts[name] == 1:
                counts.pop(name)  # `del` of a Counter runs in Python
            else:
                counts[name] -= 1

    def count(self) -> None:
        """Count the references added since the last call."""
        for alike in self._uncounted.values():
            for names in alike:
                self._counts.update(names)
        self._uncounted.clear()
        self._num_uncounted = 0
