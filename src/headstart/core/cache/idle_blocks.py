"""IdleBlocks: published blocks without references, and the order in which they are evicted.

The order has three levels: first the tenant with the most blocks beyond its protected share; then the lowest retention
priority; then the eviction policy. Blocks referenced by queued requests are evicted after all other evictable ones.
One tenant without hints or queued references, the usual case, is one queue with no extra cost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from headstart.core.cache.eviction import (
    HOT,
    PROTECTED_SHARE,
    PYTHON,
    SEEN,
    EvictionOrder,
    KVBlockLoops,
    LruOrder,
    TwoQueueOrder,
)
from headstart.core.cache.hit_density import HitDensityOrder, ReuseModel
from headstart.core.cache.retention import DEFAULT_PRIORITY, RetentionHints
from headstart.core.request import DEFAULT_RETENTION, RetentionHint

Wanted = Callable[[int], bool]

EVICTION_POLICIES: dict[str, Callable[[bytearray, int], EvictionOrder]] = {
    "2q": TwoQueueOrder,
    "lru": LruOrder,
    "lhd": HitDensityOrder,
}


class _Shelf:
    """The idle blocks of one tenant."""

    __slots__ = ("_model", "_new_order", "aside", "levels")

    def __init__(self, new_order: Callable[[], EvictionOrder], model: ReuseModel | None) -> None:
        self._new_order = new_order
        self._model = model
        self.levels: dict[int, EvictionOrder] = {DEFAULT_PRIORITY: new_order()}
        self.aside: OrderedDict[int, None] = OrderedDict()  # next to be evicted, but referenced by queued requests

    def __len__(self) -> int:
        return sum(map(len, self.levels.values())) + len(self.aside)

    def __iter__(self) -> Iterator[int]:
        for level in sorted(self.levels):
            yield from self.levels[level]
        yield from self.aside

    def order(self, level: int) -> EvictionOrder:
        """Return the order of one retention priority."""
        order = self.levels.get(level)
        if order is None:
            order = self.levels[level] = self._new_order()
        return order

    def take(self, num: int, wanted: Wanted | None) -> list[int]:
        """Remove up to `num` blocks in order; those that queued requests reference are moved to `aside`."""
        found: list[int] = []
        for level in sorted(self.levels):
            order = self.levels[level]
            while order:
                if len(found) == num:
                    return found
                block = order.pop_victim()
                if self._model is not None:
                    self._model.detach_child(block)
                if wanted is None or not wanted(block):
                    found.append(block)
                else:
                    self.aside[block] = None
            if level != DEFAULT_PRIORITY:
                del self.levels[level]
        return found


class IdleBlocks:
    """The idle blocks of a pool. `marks` and `tenants` hold the state of each block, idle or not.

    Shares are those of a pool of `size` blocks, to which this one may grow.
    """

    def __init__(
        self, num_blocks: int, policy: str, tenant_floor: float, size: int, ops: KVBlockLoops = PYTHON
    ) -> None:
        make, max_protected = EVICTION_POLICIES[policy], int(PROTECTED_SHARE * (size - 1))
        self.marks = bytearray(num_blocks)  # see eviction.py
        self.tenants = [""] * num_blocks  # the tenant whose share a published block counts against
        self.retentions = RetentionHints(self.marks)
        self._size = 0
        self.num_aside = 0  # idle blocks skipped because queued requests reference them
        self._protected_share = tenant_floor * (size - 1)
        self._seen: set[str] = set()  # tenants other than the public one
        self.model = ReuseModel(num_blocks, size - 1) if make is HitDensityOrder else None
        self._new_order: Callable[[], EvictionOrder] = lambda: make(self.marks, max_protected)
        if self.model is not None:
            self._new_order = lambda: HitDensityOrder(self.marks, model=self.model)
        elif make is TwoQueueOrder:
            two_queue = ops.two_queue_factory(self.marks, size)
            self._new_order = lambda: two_queue(max_protected)
        self._shelves = {"": _Shelf(self._new_order, self.model)}
        self._queue = self._shelves[""].levels[DEFAULT_PRIORITY]  # the only order, in the usual case

    @property
    def may_protect_tenant_blocks(self) -> bool:
        """Whether some blocks may be protected from other tenants."""
        return bool(self._seen) and self._protected_share > 0

    @property
    def teardown_tables(self) -> list[OrderedDict[int, None]]:
        """All tables that hold idle blocks, for a pool that is dismantled."""
        levels = (order for shelf in self._shelves.values() for order in shelf.levels.values())
        return [table for order in levels for table in order.teardown_tables] + [
            s.aside for s in self._shelves.values()
        ]

    def grow_capacity_by(self, num: int) -> None:
        """Add state for `num` more blocks, none of them idle."""
        self.marks += bytes(num)
        self.tenants += [""] * num
        if self.model is not None:
            self.model.grow_capacity_by(num)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for shelf in self._shelves.values():
            yield from shelf

    def register_tenant(self, tenant: str) -> None:
        """Record a tenant other than the public one: from now on it has a share."""
        self._seen.add(tenant)

    def add_idle(self, blocks: Sequence[int], retention: RetentionHint, now: float) -> int:
        """Add idle blocks of one chain, tails first; return HOT if the last one is worth protecting."""
        self._size += len(blocks)
        if self._is_plain and retention == DEFAULT_RETENTION:
            return self._queue.add_chain(blocks)
        hot = 0
        for block in blocks:
            self.retentions.record_hint(block, retention, now)
            hot = self._order_of(block).add_chain((block,), hot)
        return hot

    def record_shared_release(self, blocks: Sequence[int], retention: RetentionHint, now: float, hot: int) -> None:
        """Record that one request releases blocks of one chain, tails first, that other requests or pins still hold.

        `hot`: HOT if a block after them in the chain is worth protecting; then so are they.
        """
        marks = self.marks
        if retention == DEFAULT_RETENTION and not self.retentions:
            for block in blocks:
                hot |= marks[block] & HOT
                marks[block] |= hot | SEEN
            return
        for block in blocks:
            hot |= marks[block] & HOT
            marks[block] |= hot
            self.retentions.record_hint(block, retention, now)

    def add_most_recent(self, block: int) -> None:
        """Add a block as most recently released: one that was pinned, or set aside."""
        self._size += 1
        self._order_of(block).add_chain((block,))

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        """Remove blocks that are used again."""
        self._size -= len(blocks)
        if self._is_plain:
            self._queue.remove_for_reuse(blocks)
            return
        for block in blocks:
            if not self._leave_aside(block):
                self._order_of(block).remove_for_reuse((block,))

    def remove(self, block: int) -> None:
        """Remove an idle block that must not be idle."""
        self._size -= 1
        if not self._leave_aside(block):
            self._order_of(block).remove(block)

    def num_protected_from_tenant(self, leaving: Sequence[int], tenant: str) -> int:
        """Return the blocks of other tenants that `tenant` may not evict, once those `leaving` are no longer idle."""
        gone: dict[str, int] = {}
        for block in leaving:
            gone[self.tenants[block]] = gone.get(self.tenants[block], 0) + 1
        floor = self._floor
        others = ((name, len(shelf) - gone.get(name, 0)) for name, shelf in self._shelves.items())
        return sum(min(size, floor) for name, size in others if name and name != tenant)

    def evict(self, num: int, tenant: str, last_resort: bool, now: float, wanted: Wanted | None) -> list[int]:
        """Remove and return `num` blocks for `tenant`; protected blocks of other tenants only as a last resort."""
        self._expire(now)
        if len(self._shelves) == 1:
            found = self._evict_from([(-self._size, "", self._shelves[""])], num, wanted)
        else:
            found = self._evict_from(self._spare(tenant, self._floor), num, wanted)
            if last_resort and len(found) < num:
                found += self._evict_from(self._spare(tenant, 0), num - len(found), wanted)
            for name in [name for name, shelf in self._shelves.items() if name and not len(shelf)]:
                del self._shelves[name]
        self._size -= len(found)
        assert len(found) == num, f"{num} blocks to evict for tenant {tenant!r}, {len(found)} may be"
        return found

    def restore_set_aside(self, blocks: Sequence[int], wanted: Wanted) -> None:
        """Return blocks that were set aside to their order if no queued request references them any more.

        `blocks` are of one chain, tails first. All heads of such a block are moved after it, referenced or not, so that
        they are evicted after it.
        """
        moved = False
        for block in blocks:
            aside = block in self._shelves[self.tenants[block]].aside
            moved = moved or (aside and not wanted(block))
            if moved:
                self.remove(block)
                self.add_most_recent(block)

    def check_invariants(self) -> None:
        """Assert that counts and places agree; for tests."""
        shelves = self._shelves
        assert self._size == sum(map(len, shelves.values())), "idle blocks are miscounted"
        assert self.num_aside == sum(len(shelf.aside) for shelf in shelves.values()), "blocks set aside are miscounted"
        for name, shelf in shelves.items():
            assert all(self.tenants[block] == name for block in shelf), "a block is on the shelf of another tenant"
            for level, order in shelf.levels.items():
                assert len(list(order)) == len(order)
                assert all(self.retentions.block_priority(block) == level for block in order), (
                    "a block has another priority"
                )

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _is_plain(self) -> bool:
        return len(self._shelves) == 1 and not self.num_aside and not self.retentions and not self._seen

    @property
    def _floor(self) -> int:
        """Idle blocks protected for each tenant; the public one has none."""
        return int(self._protected_share / len(self._seen)) if self._seen else 0

    def _order_of(self, block: int) -> EvictionOrder:
        tenant = self.tenants[block]
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = _Shelf(self._new_order, self.model)
        return shelf.order(self.retentions.block_priority(block))

    def _leave_aside(self, block: int) -> bool:
        if not self.num_aside:
            return False
        aside = self._shelves[self.tenants[block]].aside
        if block not in aside:
            return False
        del aside[block]
        self.num_aside -= 1
        return True

    def _expire(self, now: float) -> None:
        """Move blocks whose retention time is over, as if they had just been released."""
        for block, level in self.retentions.take_expired(now):
            shelf = self._shelves.get(self.tenants[block])
            order = shelf.levels.get(level) if shelf is not None else None
            if order is not None and block in order:
                order.remove(block)
                self._order_of(block).add_chain((block,))

    def _spare(self, tenant: str, floor: int) -> list[tuple[int, str, _Shelf]]:
        """Return a heap of the tenants with evictable blocks, most first: (-number, tenant, its blocks)."""
        heap: list[tuple[int, str, _Shelf]] = []
        for name, shelf in self._shelves.items():
            size = len(shelf)
            spare = size - (min(size, floor) if name and name != tenant else 0)
            if spare:
                heap.append((-spare, name, shelf))
        heapify(heap)
        return heap

    def _evict_from(self, heap: list[tuple[int, str, _Shelf]], num: int, wanted: Wanted | None) -> list[int]:
        """Take up to `num` blocks, each from the tenant with most to spare; referenced blocks come last."""
        found: list[int] = []
        only_wanted: list[tuple[int, str, _Shelf]] = []
        while heap and len(found) < num:
            spare, name, shelf = heap[0]
            before = len(shelf.aside)
            blocks = shelf.take(min(num - len(found), -spare if len(heap) == 1 else 1), wanted)
            self.num_aside += len(shelf.aside) - before
            found += blocks
            spare += len(blocks)
            if not blocks:
                only_wanted.append(heappop(heap))
            elif spare:
                heapreplace(heap, (spare, name, shelf))
            else:
                heappop(heap)
        heapify(only_wanted)
        while only_wanted and len(found) < num:
            spare, name, shelf = heappop(only_wanted)
            while shelf.aside and spare and len(found) < num:
                found.append(shelf.aside.popitem(last=False)[0])
                self.num_aside -= 1
                spare += 1
        return found
