"""FirstBlockTable: which indexes of a fleet may hold the first block of a prompt, so that the others are not asked.

An index that lacks the first block of a prompt has none of it. The table may name indexes that have evicted the block
since, never too few. With every new entry two older ones are checked, so it stays about as large as what is cached.
An index has a table of its own until a router lists it, so that one that was filled before is listed as well.
"""

from collections import OrderedDict
from collections.abc import Set
from typing import Protocol
from weakref import WeakValueDictionary

from headstart.core.cache.hashing import BlockHash

CHECKED = 2  # older entries with every new one
UNLISTED = -1  # number of an index that no router has listed

NONE = frozenset[int]()


class TabledPrefixIndex(Protocol):
    """An index in the table."""

    first_blocks: "FirstBlockTable"
    number: int

    def __contains__(self, block_hash: BlockHash) -> bool: ...


class FirstBlockTable:
    """The table of one router, or of one index until a router lists it. Indexes are referred to weakly."""

    def __init__(self, own: TabledPrefixIndex | None = None) -> None:
        self._indexes: WeakValueDictionary[int, TabledPrefixIndex] = WeakValueDictionary()
        self._is_own = own is not None
        if own is not None:
            self._indexes[UNLISTED] = own
        self._holders: OrderedDict[BlockHash, set[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._holders)

    def add_index(self, index: TabledPrefixIndex) -> None:
        """List an index from now on, with what it holds. It may be in the table of no other router."""
        former = index.first_blocks
        if former is self:
            return
        assert former._is_own, "an index belongs to one router"  # noqa: SLF001
        index.first_blocks, index.number = self, self._count
        self._indexes[self._count] = index
        self._count += 1
        for block_hash in former._holders:  # noqa: SLF001
            self.add_holder(block_hash, index.number)

    def possible_holders(self, block_hashes: list[BlockHash]) -> Set[int]:
        """Return the numbers of the indexes that may hold the first of these blocks, and perhaps more of them."""
        return self._holders.get(block_hashes[0], NONE) if block_hashes else NONE

    def add_holder(self, block_hash: BlockHash, number: int) -> None:
        """Record that an index holds a first block."""
        holders = self._holders.get(block_hash)
        if holders is None:
            self._holders[block_hash] = {number}
            self._check()
        else:
            holders.add(number)

    def _check(self) -> None:
        """Drop what indexes do not hold any more from the entries that were checked least recently."""
        for _ in range(min(CHECKED, len(self._holders) - 1)):
            block_hash, holders = self._holders.popitem(last=False)
            for number in list(holders):
                index = self._indexes.get(number)
                if index is None or block_hash not in index:
                    holders.discard(number)
            if holders:
                self._holders[block_hash] = holders
