"""FirstBlocks: which indexes of a fleet may hold the first block of a prompt, so that the others are not asked.

An index that lacks the first block of a prompt has none of it. The table may name indexes that have evicted the block
since, never too few. With every new entry two older ones are checked, so it stays about as large as what is cached.
"""

from collections import OrderedDict
from collections.abc import Container
from typing import Protocol
from weakref import WeakValueDictionary

from headstart.core.cache.hashing import BlockHash

CHECKED = 2  # older entries with every new one
UNLISTED = -1  # number of an index that is not in any table: it is always asked


class ListedIndex(Protocol):
    """An index in the table."""

    first_blocks: "FirstBlocks | None"
    number: int

    def __len__(self) -> int: ...

    def __contains__(self, block_hash: BlockHash) -> bool: ...


class FirstBlocks:
    """The table of one router. Indexes are referred to weakly."""

    def __init__(self) -> None:
        self._indexes: WeakValueDictionary[int, ListedIndex] = WeakValueDictionary()
        self._holders: OrderedDict[BlockHash, set[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._holders)

    def adopt(self, index: ListedIndex) -> None:
        """List an index from now on, if it is empty: what others hold is not known. It may be in no other table."""
        assert index.first_blocks in (None, self), "an index belongs to one router"
        if index.first_blocks is None and not len(index):
            index.first_blocks, index.number = self, self._count
            self._indexes[self._count] = index
            self._count += 1

    def holders(self, block_hashes: list[BlockHash]) -> Container[int]:
        """Return the numbers of the indexes that may hold the first of these blocks, and perhaps more of them."""
        return self._holders.get(block_hashes[0], ()) if block_hashes else ()

    def added(self, block_hash: BlockHash, number: int) -> None:
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
