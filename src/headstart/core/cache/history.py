"""EvictionHistory: the names of blocks that were given up, why, and for whom. Names only, bounded.

The eviction order asks it whether a block that is published was here before (a ghost list, as in ARC and 2Q), the
explainer asks it why a prompt missed.
"""

from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash


class Evicted(NamedTuple):
    """Why a block is not there any more."""

    cause: str  # "capacity": its place was needed; "failed": it may not be finite; "reset": the cache was cleared
    by: str  # id of the request that needed its place; empty for other causes
    at: float  # seconds, the scheduler's clock


class EvictionHistory:
    """Remembers at least the last `capacity // 2` names and at most `capacity`, each O(1).

    Two generations: when the younger is full the older one is dropped as a whole. That takes half the memory of an
    ordered dictionary, and being exact about the oldest names is worth nothing here.
    """

    def __init__(self, capacity: int) -> None:
        self.resize(capacity)
        self._young: dict[BlockHash, Evicted] = {}
        self._old: dict[BlockHash, Evicted] = {}

    def resize(self, capacity: int) -> None:
        """Remembers another number of names from now on; not less than before."""
        self._generation = max(capacity // 2, 1)

    @property
    def tables(self) -> tuple[dict[BlockHash, Evicted], dict[BlockHash, Evicted]]:
        """All that it remembers."""
        return self._young, self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, name: BlockHash, evicted: Evicted) -> None:
        """Remembers a name that is not there any more."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[name] = evicted

    def get(self, name: BlockHash) -> Evicted | None:
        """What became of a name; None if it is not remembered."""
        return self._young.get(name) or self._old.get(name)

    def forget(self, name: BlockHash) -> Evicted | None:
        """Drops a name that is there again; what had become of it."""
        return self._young.pop(name, None) or self._old.pop(name, None)
