"""IdealCache: what a perfect, infinite, shared cache would have had to compute; the floor of prefill redundancy.

It remembers names only, in two generations: those used since the current generation began, and those used in the
generation before. A generation ends when it holds half of `max_names`; then the older one is forgotten as a whole. So a
name is remembered at least until `max_names / 2` other names were used after it, and memory is bounded by `max_names`
and the two longest chains.

Using a block uses all blocks in front of it, so each generation holds, with a name, every name in front of it in its
chain. Forgetting a generation keeps that true; forgetting single names, oldest first, would not: heads would go before
tails. So the leading names that are known are found by bisection, with the same result as one by one.
"""

from headstart.core.cache.hashing import BlockHash

POOLS = 8
MIN_NAMES = 65_536


def max_names(num_blocks: int) -> int:
    """Return how many names to remember for a pool of `num_blocks`: several pools of them."""
    return max(POOLS * num_blocks, MIN_NAMES)


class IdealCache:
    """The names used lately, by chain: from its first use on, a perfect cache holds a block."""

    def __init__(self, max_names: int) -> None:
        self._generation = max(max_names // 2, 1)
        self._young: set[BlockHash] = set()
        self._old: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def num_known(self, names: list[BlockHash]) -> int:
        """Return how many leading `names` of one chain are remembered. Changes nothing."""
        known = _num_leading(names, self._young, 0)
        if known < len(names) and names[known] in self._old:
            known = _num_leading(names, self._old, known + 1)
        return known

    def learn(self, names: list[BlockHash]) -> None:
        """Remember `names`, the blocks of one chain from its first on, as used now."""
        if not names or names[-1] in self._young:
            return
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, set()
        self._young.update(names[_num_leading(names, self._young, 0) :])


def _num_leading(names: list[BlockHash], held: set[BlockHash], low: int) -> int:
    """Return how many leading `names` are in `held`, by bisection; at least `low` of them are."""
    high = len(names)
    while low < high:
        middle = (low + high) // 2
        if names[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low
