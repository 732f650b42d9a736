"""Eviction orders of idle blocks: `lru`, and `2q`, which is resistant to scans of prompts used once; a third, `lhd`, is
in hit_density.py. KVBlockLoops: the loops over the blocks of a chain, which may be compiled.

An order holds the idle blocks of one class (one tenant, one retention priority); every operation is O(1) per block.
Further state of a block is in `marks`, one byte per block of the pool, shared by all orders and the pool.

Blocks are added tails first, so a chain loses its tail before its head.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

from headstart.core.cache.hashing import BlockHash

Entries = dict[BlockHash, tuple[int, BlockHash, bytes]]
"""Block hash -> block, parent hash, tokens."""

HOT = 1  # used again after it had been idle or evicted: not used only once
SEEN = 2  # released by a request without retention hints: hints of others cannot lower its priority

PROTECTED_SHARE = 0.5  # of the pool; decided in benchmarks/eviction


class EvictionOrder(Protocol):
    """The idle blocks of one class, next to be evicted first."""

    def add_chain(self, blocks: Sequence[int], hot: int = 0) -> int:
        """Add blocks of one chain, tails first; return HOT if the last is hot. `hot`: HOT if a later block is."""
        ...

    def remove(self, block: int) -> None:
        """Remove one block. Raises KeyError if it is not here."""
        ...

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        """Remove blocks that are used again. Raises KeyError if one is not here."""
        ...

    def pop_victim(self) -> int:
        """Remove and return the next block to evict. Raises KeyError if there is none."""
        ...

    @property
    def teardown_tables(self) -> "tuple[OrderedDict[int, None], ...]":
        """The tables that hold the blocks."""
        ...

    def __len__(self) -> int: ...
    def __contains__(self, block: object) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...


class LruOrder:
    """An order that evicts the least recently released block first."""

    __slots__ = ("_marks", "_queue")

    def __init__(self, marks: bytearray, max_protected: int = 0) -> None:
        self._marks = marks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def add_chain(self, blocks: Sequence[int], hot: int = 0) -> int:
        queue = self._queue
        for block in blocks:
            queue[block] = None
        return 0

    def remove(self, block: int) -> None:
        del self._queue[block]

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        queue, marks = self._queue, self._marks
        for block in blocks:
            del queue[block]
            marks[block] = SEEN

    def pop_victim(self) -> int:
        return self._queue.popitem(last=False)[0]

    @property
    def teardown_tables(self) -> tuple[OrderedDict[int, None], ...]:
        return (self._queue,)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: object) -> bool:
        return block in self._queue

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)


class TwoQueueOrder:
    """Order that evicts blocks used once before blocks used again; in each class, least recently released first.

    After 2Q (Johnson and Shasha, VLDB 1994) and segmented LRU. A block published for the first time is on probation. A
    block used again while idle, or published again while its hash is remembered (the pool's history is the ghost list),
    is protected; beyond `max_protected` protected blocks the least recent ones return to probation. So a scan of any
    length only evicts blocks used once, and blocks whose reuse interval is longer than the pool's lifetime still become
    protected.

    A head is never on probation while its tail is protected: HOT spreads from the tail of a chain to its head.
    """

    __slots__ = ("_marks", "_max_protected", "_probation", "_protected")

    def __init__(self, marks: bytearray, max_protected: int) -> None:
        self._marks = marks
        self._max_protected = max_protected
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def add_chain(self, blocks: Sequence[int], hot: int = 0) -> int:
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

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        marks, probation, protected = self._marks, self._probation, self._protected
        for block in blocks:
            if marks[block] & HOT:
                del protected[block]
            else:
                del probation[block]
            marks[block] = HOT | SEEN

    def pop_victim(self) -> int:
        return (self._probation or self._protected).popitem(last=False)[0]

    @property
    def teardown_tables(self) -> tuple[OrderedDict[int, None], ...]:
        return self._probation, self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected


class KVBlockLoops(Protocol):
    """The loops over the blocks of one chain, on a pool's own tables; compiled: model/kernels/compiled_blocks.py."""

    def find_prefix(
        self, entries: Entries, block_hashes: list[BlockHash], root: BlockHash, tokens: bytes, stride: int
    ) -> list[int]:
        """Return the blocks of the longest prefix of `block_hashes` that is in `entries`, with parents and tokens."""
        found = list(takewhile(bool, map(entries.get, block_hashes)))
        while found:
            blocks, parents, contents = zip(*found, strict=True)
            as_named = parents[0] == root and parents[1:] == tuple(block_hashes[: len(found) - 1])
            if as_named and b"".join(contents) == tokens[: len(found) * stride]:
                return list(blocks)
            found.pop()  # a hash collision, never observed
        return []

    def add_refs(self, refs: list[int], published: list[BlockHash | None], blocks: Sequence[int]) -> Sequence[int]:
        """Add one reference to each of these published blocks; return those that had none."""
        unused: list[int] = []
        for block in blocks:
            assert published[block] is not None, "a block is not published and cannot be shared"
            if not refs[block]:
                unused.append(block)
            refs[block] += 1
        return unused

    def drop_refs(
        self, refs: list[int], published: list[BlockHash | None], scratch: list[int], blocks: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Drop one reference to each block; return the published ones that are idle now, and those that are not.

        Both tails first. Others without references are added to `scratch`.
        """
        idle: list[int] = []
        held: list[int] = []
        for block in reversed(blocks):
            count = refs[block] - 1
            assert count >= 0, f"block {block} is released twice"
            refs[block] = count
            if published[block] is not None:
                (held if count else idle).append(block)
            elif not count:
                scratch.append(block)
        return idle, held

    def two_queue_factory(self, marks: bytearray, num_blocks: int) -> Callable[[int], EvictionOrder]:
        """Return what makes the orders 2q of a pool of at most so many blocks, each from its `max_protected`."""
        return lambda max_protected: TwoQueueOrder(marks, max_protected)


class _InPython(KVBlockLoops):
    """The loops as they stand above."""


PYTHON = _InPython()
