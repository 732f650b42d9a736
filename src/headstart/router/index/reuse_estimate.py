"""Reuse: how often the blocks of a cache were used, and from that how likely one is to be used again.

A block that came back every so often and has been away for a while comes back with the chance gap / (gap + away): what
was used in one burst and then left is soon worth nothing. One that was used once has the chance that blocks had so far
to be used a second time. Time is a count of uses, as in approximate_index.py.
"""


class ReuseEstimate:
    """Uses of each block of a pool of `num_blocks`, which may grow to `size`."""

    __slots__ = ("_first", "_num_new", "_num_reused", "_remembered", "_uses")

    def __init__(self, num_blocks: int, size: int) -> None:
        self._uses = [0] * num_blocks
        self._first = [0] * num_blocks  # when it was taken in
        self._remembered = 2 * size
        self._num_new = 0
        self._num_reused = 0

    @property
    def share(self) -> float:
        """Of the blocks that were taken in, those that were used a second time; older ones count less."""
        return self._num_reused / max(self._num_new, 1)

    def emptied(self, num_blocks: int, size: int) -> "ReuseEstimate":
        """The same experience with blocks, and none of them there."""
        fresh = ReuseEstimate(num_blocks, size)
        fresh._num_new, fresh._num_reused = self._num_new, self._num_reused
        return fresh

    @property
    def tables(self) -> tuple[list[int], list[int]]:
        """All that it knows of blocks."""
        return self._uses, self._first

    def grow(self, num: int) -> None:
        """The pool has so many more blocks."""
        self._uses += [0] * num
        self._first += [0] * num

    def added(self, blocks: list[int], now: int) -> None:
        """They are new, and used for the first time."""
        uses, first = self._uses, self._first
        for block in blocks:
            uses[block] = 1
            first[block] = now
        self._num_new += len(blocks)
        if self._num_new > self._remembered:
            self._num_new //= 2
            self._num_reused //= 2

    def used(self, blocks: list[int]) -> None:
        """Another request uses them."""
        uses = self._uses
        for block in blocks:
            self._num_reused += uses[block] == 1
            uses[block] += 1

    def chance(self, block: int, last: int, now: int) -> float:
        """That it is used again, if it was used at `last` for the last time."""
        uses = self._uses[block]
        if uses < 2:
            return self.share
        gap = (last - self._first[block]) / (uses - 1)
        return gap / max(gap + now - last, 1.0)
