"""BlockPool: block ids, reference counts, names, pins, and the free blocks in the order in which they are used.

It knows neither sequences nor tensors. Invariants (law 8), after every operation:

    scratch + idle + referenced + idle pinned = num_blocks - 1, pairwise disjoint; block 0 is in none of them
    every name belongs to one block, and only full, computed, finite blocks have one

Free order: unpublished *scratch* first, last in first out; then published *idle* blocks in the order of free_blocks.py.
A table is released from its end, so a chain loses its tail before its head. Every operation is O(1) per block, and
O(tenants) per allocation. What has a pinned name is never evicted and, while nobody uses it, not free either.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

from headstart.core.cache.eviction import HOT, SEEN
from headstart.core.cache.free_blocks import FreeBlocks
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.history import Evicted, EvictionHistory
from headstart.core.request import DEFAULT_RETENTION, Retention
from headstart.core.sched.queued_block_refs import QueuedBlockRefs

HISTORY_POOLS = 8  # evicted names remembered at most, in pools; at least half as many


class BlockListener(Protocol):
    """Hears of every change of the index as it happens; must not call the pool back."""

    def published(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """A block can be found from now on."""

    def removed(self, name: BlockHash) -> None:
        """A block cannot be found any more."""

    def cleared(self) -> None:
        """No block can be found any more; not told block by block."""


class BlockPool:
    """Hands out blocks `1 .. num_blocks - 1`. Block 0 is reserved: padding may point there.

    `tenant_floor` is the share of the pool, split evenly among the tenants seen, that nobody else can evict. The public
    tenant, "", has none. Of `history_pools` times the pool's size it remembers what was evicted. A pool that
    is to `grow` to `max_blocks` has the shares and the history of that size from the start.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        eviction_policy: str = "lru",
        tenant_floor: float = 0.0,
        history_pools: int = HISTORY_POOLS,
        max_blocks: int = 0,
    ) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to hand out: block 0 is reserved"
        self.num_blocks = num_blocks
        self.listeners: list[BlockListener] = []
        self.now = 0.0  # seconds; whoever drives the pool sets it, retention times are measured by it
        self.evictions = {"capacity": 0, "failed": 0, "reset": 0}  # published blocks given up, by cause
        self._refs = [0] * num_blocks
        self._versions = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._entries: dict[BlockHash, tuple[int, BlockHash, bytes]] = {}  # name -> (block, parent's name, tokens)
        self._scratch = list(range(num_blocks - 1, 0, -1))
        size = max(num_blocks, max_blocks)
        self._idle = FreeBlocks(num_blocks, eviction_policy, tenant_floor, size)
        self._marks, self._tenants = self._idle.marks, self._idle.tenants
        self._pins: dict[BlockHash, int] = {}
        self._idle_pinned: set[int] = set()
        self._wants = QueuedBlockRefs()
        self._history_pools = history_pools
        self._max_history = history_pools * size
        self._history = EvictionHistory(self._max_history)
        self._suspect: set[int] = set()  # may hold NaN: cleared before the next use
        self._to_zero: list[int] = []

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Scratch and idle blocks; idle pinned ones are not free."""
        return len(self._scratch) + len(self._idle)

    @property
    def num_scratch(self) -> int:
        return len(self._scratch)

    @property
    def num_pinned_idle(self) -> int:
        return len(self._idle_pinned)

    @property
    def num_published(self) -> int:
        return len(self._entries)

    @property
    def num_pinned_names(self) -> int:
        """Names that are pinned, published or not."""
        return len(self._pins)

    @property
    def num_evictions(self) -> int:
        """Published blocks that gave way to others."""
        return self.evictions["capacity"]

    # ------------------------------------------------------------------------------------------------- questions

    def lookup(self, names: Sequence[BlockHash], root: BlockHash, tokens: bytes, stride: int) -> list[int]:
        """Blocks of the longest run of `names` that is published, from the first on. Changes nothing.

        `tokens` are the packed ids the names stand for, `stride` bytes per block. Each entry's own tokens and its
        parent's name are compared too: a colliding name is a miss, never a wrong hit.
        """
        found = list(takewhile(bool, map(self._entries.get, names)))
        while found:
            blocks, parents, contents = zip(*found, strict=True)
            as_named = parents[0] == root and parents[1:] == tuple(names[: len(found) - 1])
            if as_named and b"".join(contents) == tokens[: len(found) * stride]:
                return list(blocks)
            found.pop()  # two chains under one name: nobody has seen that yet
        return []

    def contains(self, name: BlockHash) -> bool:
        """Whether a block of this name is published."""
        return name in self._entries

    def is_pinned(self, name: BlockHash) -> bool:
        """Whether the name is pinned, published or not."""
        return name in self._pins

    def refs(self, block: int) -> int:
        """References to a block; 0: free, or idle and pinned."""
        return self._refs[block]

    def version(self, block: int) -> int:
        """Grows whenever the block is handed out or distrusted: as long as it stays, a published block's content does.

        May be asked from any thread.
        """
        return self._versions[block]

    def entry(self, name: BlockHash) -> tuple[int, BlockHash, bytes] | None:
        """Block, parent's name and tokens of what is published under a name."""
        return self._entries.get(name)

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these would leave the free blocks when acquired; idle pinned ones are not free to begin with."""
        unused = list(map(self._refs.__getitem__, block_ids)).count(0)
        if unused and self._idle_pinned:
            unused -= sum(1 for block in block_ids if block in self._idle_pinned)
        return unused

    def num_available(self, block_ids: Sequence[int], tenant: str = "", *, last_resort: bool = False) -> int:
        """Free blocks that `tenant` may allocate once it has acquired these (vLLM #3402: a hit is not also free).

        Other tenants' shares are not available, unless as a last resort.
        """
        available = self.num_free - self.num_idle(block_ids)
        if last_resort or not self._idle.has_shares:
            return available
        return available - self._idle.num_protected([b for b in block_ids if self._is_idle(b)], tenant)

    def eviction_of(self, name: BlockHash) -> Evicted | None:
        """What became of a block that is not published any more; None if that is not known (any more)."""
        return self._history.get(name)

    def in_eviction_order(self) -> Iterator[int]:
        """Idle blocks, the next to be evicted first, if nobody wants one. The pool must not change meanwhile."""
        return iter(self._idle)

    # ------------------------------------------------------------------------------------------------- use

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Takes one more reference to published blocks."""
        refs = self._refs
        assert all(map(self._names.__getitem__, block_ids)), "a block is not published: nobody may share it"
        unused = block_ids
        if any(map(refs.__getitem__, block_ids)):
            unused = [block for block in block_ids if not refs[block]]
            for block in block_ids:
                refs[block] += 1
        else:
            for block in block_ids:
                refs[block] = 1
        if unused and self._idle_pinned:
            pinned = self._idle_pinned.intersection(unused)
            self._idle_pinned -= pinned
            for block in pinned:
                self._marks[block] = HOT | SEEN
            unused = [block for block in unused if block not in pinned] if pinned else unused
        if unused:
            self._idle.revive(unused)

    def allocate(
        self, num: int, tenant: str = "", *, by: str = "", last_resort: bool = False, zeroed: bool = False
    ) -> list[int]:
        """`num` blocks for one owner of `tenant`, evicting idle ones when scratch is used up.

        `by` names the request it is for. `zeroed`: all of them are reported by `take_blocks_to_zero`. The caller has
        checked `num_available`.
        """
        if num > len(self._scratch):
            free = self.num_available((), tenant, last_resort=last_resort)
            assert num <= free, f"{num} blocks wanted, {free} free: check before allocating"
        refs, scratch = self._refs, self._scratch
        blocks = [scratch.pop() for _ in range(min(num, len(scratch)))]
        if num > len(blocks):
            blocks += self._evict(num - len(blocks), tenant, by, last_resort)
        for block in blocks:
            refs[block] = 1
            self._versions[block] += 1
        if tenant:
            self._idle.sees(tenant)
        if self._suspect or zeroed:
            self._to_zero += [block for block in blocks if zeroed or block in self._suspect]
            self._suspect.difference_update(blocks)
        return blocks

    def release(self, block_ids: Sequence[int], retention: Retention = DEFAULT_RETENTION) -> None:
        """Gives one reference to each block back, from the end: a chain's tail is evicted before its head.

        `retention` is what their user asks for published ones.
        """
        refs, names, scratch = self._refs, self._names, self._scratch
        idle: list[int] = []
        held: list[int] = []
        for block in reversed(block_ids):
            count = refs[block] - 1
            assert count >= 0, f"block {block} is released twice"
            refs[block] = count
            if names[block] is not None:
                (held if count else idle).append(block)
            elif not count:
                scratch.append(block)
        if idle and self._pins:
            pinned = [block for block in idle if names[block] in self._pins]
            self._idle_pinned.update(pinned)
            held = pinned + held
            idle = [block for block in idle if block not in self._idle_pinned] if pinned else idle
        hot = self._idle.add(idle, retention, self.now) if idle else 0
        if held:
            self._idle.note_users(held, retention, self.now, hot)

    def publish(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes, tenant: str = "") -> bool:
        """Makes a full, computed block findable; False if an equal one is already, and this one stays private.

        It counts against the share of `tenant`.
        """
        assert self._refs[block] > 0, f"block {block} is published without an owner"
        assert self._names[block] is None, f"block {block} is published twice"
        if name in self._entries:
            return False
        self._entries[name] = (block, parent, tokens)
        self._names[block] = name
        evicted = self._history.forget(name)
        self._marks[block] = HOT if evicted is not None and evicted.cause == "capacity" else 0
        self._tenants[block] = tenant
        if tenant:
            self._idle.sees(tenant)
        for listener in self.listeners:
            listener.published(block, name, parent, tokens)
        return True

    def grow(self, num: int) -> None:
        """Adds `num` blocks, all of them scratch."""
        start = self.num_blocks
        self.num_blocks += num
        self._refs += [0] * num
        self._versions += [0] * num
        self._names += [None] * num
        self._scratch += range(self.num_blocks - 1, start - 1, -1)
        self._idle.grow(num)
        self._max_history = max(self._max_history, self._history_pools * self.num_blocks)
        self._history.resize(self._max_history)

    def dismantle(self, num: int) -> int:
        """Frees up to `num` entries of a pool that is no longer used, and returns how many: 0, and nothing is left.

        The end of a large pool frees everything at once, which takes a while.
        """
        freed = 0
        for table in (self._entries, *self._history.tables, *self._idle.tables):
            while table and freed < num:
                table.popitem()
                freed += 1
        for items in (self._names, self._idle.tenants, self._refs, self._versions, self._scratch):
            count = min(num - freed, len(items))
            del items[len(items) - count :]
            freed += count
        return freed

    # ------------------------------------------------------------------------------------------------- keeping

    def want(self, names: Sequence[BlockHash]) -> None:
        """Counts a queued request that is about to use these blocks: while idle they are evicted after all others.

        Names of one chain, published or not, from its head on.
        """
        self._wants.add(names)

    def unwant(self, names: Sequence[BlockHash]) -> None:
        """Takes back what `want` counted, in one call or several."""
        self._wants.discard(names)
        if self._idle.num_aside:
            self._wants.count()
            blocks = [self._entries[name][0] for name in reversed(names) if name in self._entries]
            self._idle.unwanted([block for block in blocks if self._is_idle(block)], self._is_wanted)

    def pin(self, names: Iterable[BlockHash]) -> None:
        """Keeps what has or will have these names from eviction, once more for each call."""
        for name in names:
            self._pins[name] = self._pins.get(name, 0) + 1
            entry = self._entries.get(name)
            if entry is not None and self._is_idle(entry[0]):
                self._idle.remove(entry[0])
                self._idle_pinned.add(entry[0])

    def unpin(self, names: Sequence[BlockHash]) -> None:
        """Takes back one `pin` of each name; the last one makes the blocks ordinary cache, just used."""
        for name in reversed(names):
            count = self._pins.get(name, 0)
            assert count > 0, f"block {name.hex()} is unpinned more often than pinned"
            if count > 1:
                self._pins[name] = count - 1
                continue
            del self._pins[name]
            entry = self._entries.get(name)
            if entry is not None and entry[0] in self._idle_pinned:
                self._idle_pinned.remove(entry[0])
                self._idle.put(entry[0])

    # ------------------------------------------------------------------------------------------------- forgetting

    def distrust(self, block_ids: Sequence[int]) -> None:
        """Blocks that may not be finite: nobody finds them any more, and they are zeroed before they are used again."""
        self._suspect.update(block_ids)
        for block in block_ids:
            self._versions[block] += 1
        published = [block for block in block_ids if self._names[block] is not None]
        self._vacate(published)
        self._forget(published, Evicted("failed", "", self.now))

    def take_blocks_to_zero(self) -> list[int]:
        """Newly allocated blocks that must be cleared; each is reported once, before its first use."""
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def clear(self, *, pinned: bool = False) -> None:
        """Forgets every published block; those in use stay with their owners, pinned ones stay published.

        `pinned`: these are forgotten too. Their names stay pinned, and may be computed again.
        """
        kept = {name for name in self._pins if name in self._entries} if not pinned else set[BlockHash]()
        blocks = [block for name, (block, _, _) in reversed(self._entries.items()) if name not in kept]
        self._vacate(blocks)
        self._forget(blocks, Evicted("reset", "", self.now), tell=bool(kept))
        if not kept:
            for listener in self.listeners:
                listener.cleared()

    def check(self) -> None:
        """Asserts law 8; O(num_blocks), for tests and post-mortems."""
        scratch, idle, pinned = set(self._scratch), set(self._idle), self._idle_pinned
        referenced = {block for block, refs in enumerate(self._refs) if refs > 0}
        states = (scratch, idle, referenced, pinned)
        assert len(scratch) == len(self._scratch), "a block is twice in scratch"
        assert len(idle) == len(self._idle), "a block is twice among the idle ones"
        everything = set[int]().union(*states)
        assert sum(map(len, states)) == len(everything), "a block is in two states"
        assert everything == set(range(1, self.num_blocks)), "a block is lost, or block 0 in use"
        assert min(self._refs) >= 0, "negative reference count"
        published = {block for block, name in enumerate(self._names) if name is not None}
        assert idle | pinned == published - referenced
        assert all(self._names[block] in self._pins for block in pinned), "a block is kept that nobody pinned"
        assert not any(self._names[block] in self._pins for block in idle), "a pinned block may be evicted"
        for name, (block, _, _) in self._entries.items():
            assert self._names[block] == name, f"block {block} and the index disagree"
            assert self._history.get(name) is None, f"block {block} is published and evicted"
        assert len(published) == len(self._entries)
        assert len(self._history) <= self._max_history
        self._idle.check()

    # ------------------------------------------------------------------------------------------------------------

    def _is_idle(self, block: int) -> bool:
        return not self._refs[block] and self._names[block] is not None and block not in self._idle_pinned

    def _is_wanted(self, block: int) -> bool:
        return self._names[block] in self._wants

    def _evict(self, num: int, tenant: str, by: str, last_resort: bool) -> list[int]:
        self._wants.count()
        wanted: Callable[[int], bool] | None = self._is_wanted if self._wants else None
        blocks = self._idle.evict(num, tenant, last_resort, self.now, wanted)
        self._forget(blocks, Evicted("capacity", by, self.now))
        return blocks

    def _vacate(self, blocks: Iterable[int]) -> None:
        """Makes those of these published blocks scratch that nobody uses, pinned or not."""
        for block in blocks:
            if block in self._idle_pinned:
                self._idle_pinned.remove(block)
            elif not self._refs[block]:
                self._idle.remove(block)
            else:
                continue
            self._scratch.append(block)

    def _forget(self, blocks: Iterable[int], evicted: Evicted, *, tell: bool = True) -> None:
        """Takes their names from published blocks that are idle no more."""
        names, entries, remember = self._names, self._entries, self._history.add
        listeners = self.listeners if tell else ()
        retentions = self._idle.retentions if self._idle.retentions else None
        num_before = len(entries)
        for block in blocks:
            name = names[block]
            assert name is not None, f"block {block} has no name to forget"
            del entries[name]
            names[block] = None
            remember(name, evicted)
            if retentions is not None:
                retentions.drop(block)
            for listener in listeners:
                listener.removed(name)
        self.evictions[evicted.cause] += num_before - len(entries)
