"""BlockPool: block ids, reference counts, names, and the free blocks in eviction order.

It knows neither sequences nor tensors. Invariants (law 8), after every operation:

    scratch + idle + referenced = num_blocks - 1, pairwise disjoint; block 0 is in none of them
    every name belongs to one block, and only full, computed, finite blocks have one

Free order: unpublished *scratch* first, last in first out; then published *idle* blocks, least recently released
first. A table is released from its end, so a chain loses its tail before its head. Every operation is O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headstart.core.hashing import BlockHash


class BlockPool:
    """Hands out blocks `1 .. num_blocks - 1`. Block 0 is reserved: padding may point there."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to hand out: block 0 is reserved"
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._refs = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._entries: dict[BlockHash, tuple[int, BlockHash, bytes]] = {}  # name -> (block, parent's name, tokens)
        self._scratch = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._suspect: set[int] = set()  # may hold NaN: cleared before the next use
        self._to_zero: list[int] = []

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._scratch) + len(self._idle)

    @property
    def num_published(self) -> int:
        return len(self._entries)

    def lookup(self, names: Sequence[BlockHash], root: BlockHash, tokens: bytes, stride: int) -> list[int]:
        """Blocks of the longest run of `names` that is published, from the first on. Changes nothing.

        `tokens` are the packed ids the names stand for, `stride` bytes per block. Each entry's own tokens and its
        parent's name are compared too: a colliding name is a miss, never a wrong hit.
        """
        found: list[int] = []
        entries, parent, start = self._entries, root, 0
        for name in names:
            entry = entries.get(name)
            if entry is None or entry[1] != parent or entry[2] != tokens[start : start + stride]:
                break
            found.append(entry[0])
            parent = name
            start += stride
        return found

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these would leave the free blocks when acquired."""
        refs = self._refs
        return sum(1 for block in block_ids if refs[block] == 0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Takes one more reference to published blocks."""
        refs = self._refs
        for block in block_ids:
            assert self._names[block] is not None, f"block {block} is not published: nobody may share it"
            if refs[block] == 0:
                del self._idle[block]
            refs[block] += 1

    def allocate(self, num: int) -> list[int]:
        """`num` blocks for one owner, evicting idle ones when scratch is used up. The caller has checked `num_free`."""
        assert num <= self.num_free, f"{num} blocks wanted, {self.num_free} free: check before allocating"
        blocks: list[int] = []
        for _ in range(num):
            block = self._scratch.pop() if self._scratch else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        if self._suspect:
            self._to_zero += [block for block in blocks if block in self._suspect]
            self._suspect.difference_update(blocks)
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives one reference to each block back, from the end: a chain's tail is evicted before its head."""
        refs = self._refs
        for block in reversed(block_ids):
            assert refs[block] > 0, f"block {block} is released twice"
            refs[block] -= 1
            if refs[block] == 0:
                if self._names[block] is None:
                    self._scratch.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> bool:
        """Makes a full, computed block findable; False if an equal one is already, and this one stays private."""
        assert self._refs[block] > 0, f"block {block} is published without an owner"
        assert self._names[block] is None, f"block {block} is published twice"
        if name in self._entries:
            return False
        self._entries[name] = (block, parent, tokens)
        self._names[block] = name
        return True

    def distrust(self, block_ids: Sequence[int]) -> None:
        """Blocks of a row that failed: nobody finds them any more, and they are zeroed before they are used again."""
        for block in block_ids:
            self._suspect.add(block)
            name = self._names[block]
            if name is not None:
                del self._entries[name]
                self._names[block] = None
                if self._idle.pop(block, 0) is None:
                    self._scratch.append(block)

    def take_blocks_to_zero(self) -> list[int]:
        """Newly allocated blocks whose content may not be finite; each is reported once, before its first use."""
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def clear(self) -> None:
        """Forgets every published block; blocks in use stay with their owners."""
        for name, (block, _, _) in self._entries.items():
            assert self._names[block] == name
            self._names[block] = None
        self._entries.clear()
        self._scratch.extend(reversed(self._idle))
        self._idle.clear()

    def check(self) -> None:
        """Asserts law 8; O(num_blocks), for tests and post-mortems."""
        scratch, idle = set(self._scratch), set(self._idle)
        referenced = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(scratch) == len(self._scratch), "a block is twice in scratch"
        assert not (scratch & idle or scratch & referenced or idle & referenced), "a block is in two states"
        assert scratch | idle | referenced == set(range(1, self.num_blocks)), "a block is lost, or block 0 in use"
        assert min(self._refs) >= 0, "negative reference count"
        assert idle == {b for b, name in enumerate(self._names) if name is not None} - referenced
        for name, (block, _, _) in self._entries.items():
            assert self._names[block] == name, f"block {block} and the index disagree"
        assert sum(name is not None for name in self._names) == len(self._entries)

    def refs(self, block: int) -> int:
        """References to a block; 0: free."""
        return self._refs[block]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        name = self._names[block]
        assert name is not None, f"idle block {block} has no name"
        del self._entries[name]
        self._names[block] = None
        self.num_evictions += 1
        return block
