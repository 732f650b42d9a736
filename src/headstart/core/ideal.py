"""IdealCache: what a perfect, infinite, shared cache would have had to compute; the floor of prefill redundancy.

It remembers names only, and "infinite" is several pools of them: beyond that it forgets the oldest and calls a repeat
of those new.
"""

from headstart.core.hashing import BlockHash

POOLS = 8
MIN_NAMES = 65_536


class IdealCache:
    """All block names that ever were, by arrival: from then on a perfect cache computes them once."""

    def __init__(self, num_blocks: int) -> None:
        self._max_names = max(POOLS * num_blocks, MIN_NAMES)
        self._names: dict[BlockHash, None] = {}

    def num_known(self, names: list[BlockHash]) -> int:
        """How many leading `names` it has seen; by bisection, since names are chained."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._names:
                low = middle + 1
            else:
                high = middle
        return low

    def learn(self, names: list[BlockHash], start: int) -> None:
        """Remembers `names[start:]`."""
        if start < len(names):
            self._names.update(dict.fromkeys(names[start:]))
            while len(self._names) > self._max_names:
                del self._names[next(iter(self._names))]
