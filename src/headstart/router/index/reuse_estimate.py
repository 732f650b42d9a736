"""ReuseEstimate: the probability that a block is used again, from how often blocks were used.

A block with a mean interval `gap` between uses that has been idle for `away` is used again with probability
gap / (gap + away): after a burst of uses its value decays quickly. A block used once has the probability with which
blocks have had a second use so far. Time is a count of uses, as in approximate_index.py.
"""


class ReuseEstimate:
    """The uses of each block of a pool of `num_blocks`, which may grow to `size`."""

    __slots__ = ("_first", "_num_new", "_num_reused", "_remembered", "_uses")

    def __init__(self, num_blocks: int, size: int) -> None:
        self._uses = [0] * num_blocks
        self._first = [0] * num_blocks  # first use
        self._remembered = 2 * size
        self._num_new = 0
        self._num_reused = 0

    @property
    def share(self) -> float:
        """The share of added blocks that were used a second time; older ones count less."""
        return self._num_reused / max(self._num_new, 1)

    def emptied(self, num_blocks: int, size: int) -> "ReuseEstimate":
        """Return an estimate for an empty pool, with the same statistics."""
        fresh = ReuseEstimate(num_blocks, size)
        fresh._num_new, fresh._num_reused = self._num_new, self._num_reused
        return fresh

    @property
    def tables(self) -> tuple[list[int], list[int]]:
        """All tables of blocks."""
        return self._uses, self._first

    def grow(self, num: int) -> None:
        """Add state for `num` more blocks."""
        self._uses += [0] * num
        self._first += [0] * num

    def added(self, blocks: list[int], now: int) -> None:
        """Record new blocks, and their first use."""
        uses, first = self._uses, self._first
        for block in blocks:
            uses[block] = 1
            first[block] = now
        self._num_new += len(blocks)
        if self._num_new > self._remembered:
            self._num_new //= 2
            self._num_reused //= 2

    def used(self, blocks: list[int]) -> None:
        """Record a further use of blocks."""
        uses = self._uses
        for block in blocks:
            self._num_reused += uses[block] == 1
            uses[block] += 1

    def chance(self, block: int, last: int, now: int) -> float:
        """Return the probability that a block last used at `last` is used again."""
        uses = self._uses[block]
        if uses < 2:
            return self.share
        gap = (last - self._first[block]) / (uses - 1)
        return gap / max(gap + now - last, 1.0)
