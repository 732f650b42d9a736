"""The order in which idle blocks lose their content: `lru`, and `2q`, which survives a scan of one-off prompts.

An order holds the idle blocks of one class (one tenant, one retention priority), every operation O(1) per block. What
it knows about a block beyond that lies in `marks`, one byte per block of the pool, shared by all orders and the pool.

Blocks come in tails first, so a chain loses its tail before its head.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

HOT = 1  # used again after it had been idle or evicted: not a one-off
SEEN = 2  # somebody who gave no hint has stopped using it: hints of others cannot lower its priority

_REVIVED = HOT | SEEN

PROTECTED_SHARE = 0.5  # of the pool; decided in benchmarks/eviction


class EvictionOrder(Protocol):
    """Idle blocks, the next to be evicted first."""

    def add(self, blocks: Sequence[int], hot: int = 0) -> int:
        """Takes in blocks of one chain, tails first. `hot`: HOT if a block behind them is; HOT if the last one is."""
        ...

    def remove(self, block: int) -> None:
        """Takes out one block. Raises KeyError if it is not here."""
        ...

    def revive(self, blocks: Sequence[int]) -> None:
        """Takes out blocks that are used again. Raises KeyError if one is not here."""
        ...

    def pop(self) -> int:
        """Takes out the block whose turn it is. Raises KeyError if there is none."""
        ...

    @property
    def tables(self) -> "tuple[OrderedDict[int, None], ...]":
        """All that holds its blocks."""
        ...

    def __len__(self) -> int: ...
    def __contains__(self, block: object) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...


class Lru:
    """Least recently released first."""

    __slots__ = ("_marks", "_queue")

    def __init__(self, marks: bytearray, max_protected: int = 0) -> None:
        self._marks = marks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int], hot: int = 0) -> int:
        queue = self._queue
        for block in blocks:
            queue[block] = None
        return 0

    def remove(self, block: int) -> None:
        del self._queue[block]

    def revive(self, blocks: Sequence[int]) -> None:
        queue, marks = self._queue, self._marks
        for block in blocks:
            del queue[block]
            marks[block] = SEEN

    def pop(self) -> int:
        return self._queue.popitem(last=False)[0]

    @property
    def tables(self) -> tuple[OrderedDict[int, None], ...]:
        return (self._queue,)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: object) -> bool:
        return block in self._queue

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)


class TwoQueue:
    """Blocks used once go before blocks used again, each kind least recently released first.

    After 2Q (Johnson and Shasha, VLDB 1994) and segmented LRU: what is published for the first time is on probation.
    What is used again while idle, or published again while its name is remembered (the pool's history is the ghost
    list), is protected; the least recent of more than `max_protected` protected blocks go back on probation. So a scan,
    however long, only displaces what was used once, and what is in use at an interval longer than the pool lasts still
    comes to be protected.

    A head is never on probation while its tail is protected: heat spreads from the tail of a chain to its head.
    """

    __slots__ = ("_marks", "_max_protected", "_probation", "_protected")

    def __init__(self, marks: bytearray, max_protected: int) -> None:
        self._marks = marks
        self._max_protected = max_protected
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int], hot: int = 0) -> int:
        marks, probation, protected = self._marks, self._probation, self._protected
        for block in blocks:
            if hot or marks[block] & HOT:
                hot = HOT
                marks[block] |= HOT
                protected[block] = None
            else:
                probation[block] = None
        while len(protected) > self._max_protected:
            block, _ = protected.popitem(last=False)
            marks[block] &= ~HOT
            probation[block] = None
        return hot

    def remove(self, block: int) -> None:
        del (self._protected if self._marks[block] & HOT else self._probation)[block]

    def revive(self, blocks: Sequence[int]) -> None:
        marks, probation, protected = self._marks, self._probation, self._protected
        for block in blocks:
            if marks[block] & HOT:
                del protected[block]
            else:
                del probation[block]
            marks[block] = _REVIVED

    def pop(self) -> int:
        return (self._probation or self._protected).popitem(last=False)[0]

    @property
    def tables(self) -> tuple[OrderedDict[int, None], ...]:
        return self._probation, self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected


EVICTION_POLICIES: dict[str, Callable[[bytearray, int], EvictionOrder]] = {"2q": TwoQueue, "lru": Lru}
