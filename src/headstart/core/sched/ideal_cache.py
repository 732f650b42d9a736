"""IdealCache: counts what a perfect, infinite, shared cache would have computed; the lower bound of prefill work.

It remembers block hashes only, in two generations: those used since the current generation began, and those used in the
generation before. A generation ends when it holds half of `max_hashes`; then the older one is dropped as a whole. So a
hash is remembered at least until `max_hashes / 2` other hashes were used after it, and memory is bounded by
`max_hashes` and the two longest chains.

Use of a block implies use of all blocks before it, so each generation holds, with a hash, every hash before it in its
chain. Dropping a whole generation keeps that true; dropping single hashes, oldest first, would not: heads would go
before tails. So the number of leading known hashes is found by bisection, with the same result as a linear search.
"""

from headstart.core.cache.hashing import BlockHash

POOLS = 8
MIN_HASHES = 65_536


def max_remembered_hashes(num_blocks: int) -> int:
    """Return how many block hashes to remember for a pool of `num_blocks`."""
    return max(POOLS * num_blocks, MIN_HASHES)


class IdealCache:
    """The block hashes used lately: a perfect cache holds a block from its first use on."""

    def __init__(self, max_hashes: int) -> None:
        self._generation = max(max_hashes // 2, 1)
        self._young: set[BlockHash] = set()
        self._old: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash]) -> int:
        """Return the number of leading `block_hashes`, one chain, that are remembered. Changes nothing."""
        known = _num_leading(block_hashes, self._young, 0)
        if known < len(block_hashes) and block_hashes[known] in self._old:
            known = _num_leading(block_hashes, self._old, known + 1)
        return known

    def record_use(self, block_hashes: list[BlockHash]) -> None:
        """Record the use of `block_hashes`, the block hashes of one chain from its first on."""
        if not block_hashes or block_hashes[-1] in self._young:
            return
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, set()
        self._young.update(block_hashes[_num_leading(block_hashes, self._young, 0) :])


def _num_leading(block_hashes: list[BlockHash], held: set[BlockHash], low: int) -> int:
    """Return the number of leading `block_hashes` in `held`, by bisection; at least `low` of them are."""
    high = len(block_hashes)
    while low < high:
        middle = (low + high) // 2
        if block_hashes[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low
