"""ModelledPool: an engine's block pool without KV, of an estimated capacity, with the uses of every block.

It begins small and grows as blocks come, up to the capacity. Invariant: if a block is in it, so are all before it in
its chain; `match` is a bisection. It knows nothing of requests' reports: approximate_index.py corrects it. Compiled
code that does the same (model/kernels/compiled_pool.py) is an argument, `MakePool`; this is its oracle in tests.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice, takewhile
from typing import Protocol

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.router.index.discards import Discard
from headstart.router.index.prefix_index import Reservation
from headstart.router.load_rows import Prices

LOOKED_AT = 64  # number of next evicted blocks whose value is estimated
KEPT = 2  # the request that was to compute it has failed, probably after that
MIN_GROWTH = 1_024  # minimum growth of the pool in blocks, and its initial size


class ModelledCache(Protocol):
    """The blocks of one cache, by hash. Positions of blocks are its own; they stay valid while a request holds them."""

    handle: int  # of compiled code that can match many pools at once; 0: it cannot

    @property
    def last_use_serial(self) -> int:
        """The number of uses so far: time as the order of eviction knows it."""
        ...

    @property
    def capacity(self) -> int:
        """Number of blocks of the cache."""
        ...

    @property
    def num_idle(self) -> int:
        """Number of published blocks that no request in flight uses."""
        ...

    @property
    def num_held(self) -> int:
        """Number of blocks that requests in flight use."""
        ...

    @property
    def teardown_parts(self) -> "tuple[Discard, ...]":
        """All that takes memory, to be freed in slices when the pool is replaced."""
        ...

    def __len__(self) -> int: ...
    def __contains__(self, block_hash: BlockHash) -> bool: ...

    def was_evicted(self, block_hash: BlockHash) -> bool:
        """Return whether the block was evicted for lack of space, as far as remembered."""
        ...

    def is_idle_used_since(self, block_hash: BlockHash, serial: int) -> bool:
        """Return whether the block was used after `serial`, and is idle."""
        ...

    def num_singly_referenced_among(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks only one request uses."""
        ...

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], near: int = 0) -> int:
        """Return the number of leading blocks that are in it; `near` is a guess."""
        ...

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        """Return the blocks that requests in flight use, and how many leading ones of `block_hashes` are among them."""
        ...

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        """Return how many blocks evicted for `num_blocks` new ones should be requested again. Changes nothing."""
        ...

    def num_idle_unused_since(self, serial: int) -> int:
        """Return the number of idle blocks that are evicted before any that was used after `serial`."""
        ...

    def num_leading_computed_blocks(self, reservation: Reservation) -> int:
        """Return the number of leading blocks of a request that are not still being computed."""
        ...

    def acquire_cached(self, reservation: Reservation, end: int) -> None:
        """Acquire published blocks up to `end` of its block hashes."""
        ...

    def add_missing_blocks(self, reservation: Reservation, unsure: int) -> None:
        """Add the missing blocks of a request, head first, as many as there is space for."""
        ...

    def record_computed(self, blocks: Sequence[int]) -> None:
        """Record that blocks are computed."""
        ...

    def mark_used(self, blocks: Sequence[int]) -> None:
        """Record that blocks are cached now."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a request, which are cached now."""
        ...

    def drop_uncomputed_blocks(self, blocks: Sequence[int], num_kept: int) -> None:
        """Drop those of the blocks of a failed request that only it was to compute, but for the leading `num_kept`.

        What is kept stays unsure, and is not dropped when another request fails: blocks that follow it may be there.
        """
        ...

    def evict(self, num: int) -> None:
        """Drop the next `num` blocks in the order of eviction."""
        ...

    def resize(self, capacity: int) -> None:
        """Set the capacity, as far as blocks in flight allow."""
        ...

    def check_invariants(self) -> None:
        """Assert the invariants; O(blocks), for tests."""
        ...


MakePool = Callable[[int, int, str, ModelledCache | None], ModelledCache]
"""Map (capacity, maximum, eviction policy, pool whose clock and statistics go on) to an empty pool."""


class PoolFactory(Protocol):
    """Compiled pools: their maker, a MakePool, and the one that matches many at once (`MatchAll` of router.py)."""

    def __call__(
        self, capacity: int, max_blocks: int, eviction_policy: str, former: ModelledCache | None = None
    ) -> ModelledCache: ...

    @property
    def pricing_kernel(self) -> Prices:
        """The loop of pricing.py, in the same library."""
        ...

    def match_in_all_pools(self, handles: Sequence[int], block_hashes: list[BlockHash]) -> Sequence[int]:
        """Return the number of leading blocks that each pool has."""
        ...


class ModelledPool:
    """The blocks of one cache of `capacity` blocks, which may become `max_blocks`. A ModelledCache."""

    handle = 0

    def __init__(
        self, capacity: int, max_blocks: int, eviction_policy: str, former: ModelledCache | None = None
    ) -> None:
        assert former is None or isinstance(former, ModelledPool)
        usable, size = min(MIN_GROWTH, capacity), max_blocks + 1  # block 0 of a pool is never used
        self.pool = BlockPool(usable + 1, eviction_policy=eviction_policy, history_pools=1, max_blocks=size)
        self.last_use_serial = former.last_use_serial if former is not None else 0
        self.serials = [0] * (usable + 1)  # last time a block was surely cached; the same for all of one request
        self.unsure = bytearray(usable + 1)  # 1: sent, and not known to be computed yet; or KEPT
        self.reuse = (former.reuse if former is not None else BlockReuseEstimate(0, size)).copy_for_empty_pool(
            usable + 1, size
        )
        self._num_ungrown: int = capacity - usable  # blocks by which the pool is to grow when needed
        self._ballast: list[int] = []  # blocks held unused: the cache is smaller than the pool
        self._worth: list[float] | None = (
            None  # prefix sums of the value of the next evicted blocks, as far as needed; None: outdated
        )

    def __len__(self) -> int:
        return self.pool.num_published

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.pool.published_hashes

    @property
    def teardown_parts(self) -> tuple[Discard, ...]:
        return self.pool, self.serials, *self.reuse.teardown_tables

    @property
    def capacity(self) -> int:
        return self.pool.usable_capacity - len(self._ballast) + self._num_ungrown

    @property
    def num_idle(self) -> int:
        return self.pool.num_free - self.pool.num_scratch

    @property
    def num_held(self) -> int:
        return self.pool.usable_capacity - self.pool.num_free - len(self._ballast)

    def was_evicted(self, block_hash: BlockHash) -> bool:
        evicted = self.pool.find_eviction_record(block_hash)
        return evicted is not None and evicted.cause == "capacity"

    def is_idle_used_since(self, block_hash: BlockHash, serial: int) -> bool:
        entry = self.pool.published_entry(block_hash)
        return entry is not None and not self.pool.ref_count(entry[0]) and self.serials[entry[0]] > serial

    def num_singly_referenced_among(self, blocks: Sequence[int]) -> int:
        return list(map(self.pool.ref_count, blocks)).count(1)

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], near: int = 0) -> int:
        published, num = self.pool.published_hashes, len(block_hashes)
        low, high = 0, num
        if 0 < near <= num:
            if block_hashes[near - 1] not in published:
                high = near - 1
            elif near == num or block_hashes[near] not in published:
                return near
            else:
                low = near + 1
        if low < high and not low:  # most often all or nothing
            if block_hashes[0] not in published:
                return 0
            low = 1
        if low < high == num:
            if block_hashes[-1] in published:
                return num
            high -= 1
        while low < high:
            middle = (low + high) // 2
            if block_hashes[middle] in published:
                low = middle + 1
            else:
                high = middle
        return low

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        pool, low, high = self.pool, 0, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            entry = pool.published_entry(block_hashes[middle])
            if entry is not None and pool.ref_count(entry[0]):
                low = middle + 1
            else:
                high = middle
        return self.num_held, low

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        pool = self.pool
        num = min(num_blocks - pool.num_scratch - self._num_ungrown, self.num_idle)
        if num <= 0:
            return 0.0
        looked_at = min(num, LOOKED_AT)
        if self._worth is None or len(self._worth) < looked_at:
            chance, serials, now = self.reuse.reuse_probability, self.serials, self.last_use_serial
            next_ones = islice(pool.iterate_in_eviction_order(), looked_at)
            self._worth = list(accumulate(chance(block, serials[block], now) for block in next_ones))
        return self._worth[looked_at - 1] * num / looked_at

    def num_idle_unused_since(self, serial: int) -> int:
        in_order = map(self.serials.__getitem__, self.pool.iterate_in_eviction_order())
        return len(list(takewhile(serial.__ge__, in_order)))

    def num_leading_computed_blocks(self, reservation: Reservation) -> int:
        unsure = bytes(map(self.unsure.__getitem__, reservation.blocks))
        first = len(unsure) - len(unsure.lstrip(b"\0"))
        return reservation.hit if first == len(unsure) else first

    # ------------------------------------------------------------------------------------------------------- changes

    def acquire_cached(self, reservation: Reservation, end: int) -> None:
        pool, start = self.pool, len(reservation.blocks)
        blocks = [
            entry[0]
            for block_hash in reservation.block_hashes[start:end]
            if (entry := pool.published_entry(block_hash)) is not None
        ]
        assert len(blocks) == end - start, "a block is there and one before it is not"
        reservation.serials += map(self.serials.__getitem__, blocks)
        pool.acquire(blocks)
        self._worth = None
        self.reuse.record_block_uses(blocks)
        reservation.blocks += blocks

    def add_missing_blocks(self, reservation: Reservation, unsure: int) -> None:
        pool, block_hashes = self.pool, reservation.block_hashes
        if len(reservation.blocks) == len(block_hashes):
            return
        self.acquire_cached(reservation, self.num_cached_prefix_blocks(block_hashes))
        start = len(reservation.blocks)
        wanted = len(block_hashes) - start
        if wanted > pool.num_scratch and self._num_ungrown:
            self._grow(wanted - pool.num_scratch)
        blocks = pool.allocate(min(wanted, pool.num_available_after_acquire(())))
        parent = block_hashes[start - 1] if start else BlockHash(b"")
        for block, block_hash in zip(blocks, block_hashes[start:], strict=False):
            pool.publish(block, block_hash, parent, b"")
            self.unsure[block] = unsure
            parent = block_hash
        self.reuse.record_added(blocks, self.last_use_serial)
        reservation.blocks += blocks

    def record_computed(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.unsure[block] = 0

    def mark_used(self, blocks: Sequence[int]) -> None:
        self.last_use_serial += 1
        self._worth = None
        for block in blocks:
            self.serials[block] = self.last_use_serial

    def release(self, blocks: Sequence[int]) -> None:
        self.mark_used(blocks)
        self.pool.release(blocks)
        self._worth = None

    def drop_uncomputed_blocks(self, blocks: Sequence[int], num_kept: int) -> None:
        pool = self.pool
        pool.take_unzeroed_blocks()  # there is nothing to zero here
        for block in blocks[:num_kept]:
            self.unsure[block] = KEPT if self.unsure[block] else 0
        unsure = [block for block in blocks[num_kept:] if self.unsure[block] == 1 and pool.ref_count(block) == 1]
        if unsure:
            pool.discard_corrupt(unsure)

    def evict(self, num: int) -> None:
        pool = self.pool
        pool.release(pool.allocate(pool.num_scratch + num))
        self._worth = None

    def resize(self, capacity: int) -> None:
        pool, change = self.pool, self.capacity - capacity
        self._worth = None
        if change > 0:
            cut = min(change, self._num_ungrown)
            self._num_ungrown -= cut
            self._ballast += pool.allocate(min(change - cut, pool.num_available_after_acquire(())))
        elif change < 0:
            keep = max(len(self._ballast) + change, 0)
            self._num_ungrown += -change - (len(self._ballast) - keep)
            pool.release(self._ballast[keep:])
            del self._ballast[keep:]

    def check_invariants(self) -> None:
        self.pool.check_invariants()

    def _grow(self, num: int) -> None:
        """Grow the pool by `num` blocks, as far as the capacity allows."""
        num = min(max(num, MIN_GROWTH), self._num_ungrown)
        self._num_ungrown -= num
        self.pool.add_blocks(num)
        self.serials += [0] * num
        self.unsure += bytes(num)
        self.reuse.grow_capacity_by(num)


class BlockReuseEstimate:
    """The probability that a block is used again, by the uses of each block of a pool that may grow to `size`.

    A block with a mean interval `gap` between uses that has been idle for `away` is used again with probability
    gap / (gap + away): after a burst of uses its value decays quickly. A block used once has the probability with which
    blocks have had a second use so far. Time is a count of uses.
    """

    __slots__ = ("_first", "_num_new", "_num_reused", "_remembered", "_uses")

    def __init__(self, num_blocks: int, size: int) -> None:
        self._uses = [0] * num_blocks
        self._first = [0] * num_blocks  # first use
        self._remembered = 2 * size
        self._num_new = 0
        self._num_reused = 0

    @property
    def reused_share(self) -> float:
        """The share of added blocks that were used a second time; older ones count less."""
        return self._num_reused / max(self._num_new, 1)

    def copy_for_empty_pool(self, num_blocks: int, size: int) -> "BlockReuseEstimate":
        """Return an estimate for an empty pool, with the same statistics."""
        fresh = BlockReuseEstimate(num_blocks, size)
        fresh._num_new, fresh._num_reused = self._num_new, self._num_reused
        return fresh

    @property
    def teardown_tables(self) -> tuple[list[int], list[int]]:
        """All tables of blocks."""
        return self._uses, self._first

    def grow_capacity_by(self, num: int) -> None:
        """Add state for `num` more blocks."""
        self._uses += [0] * num
        self._first += [0] * num

    def record_added(self, blocks: list[int], now: int) -> None:
        """Record new blocks, and their first use."""
        uses, first = self._uses, self._first
        for block in blocks:
            uses[block] = 1
            first[block] = now
        self._num_new += len(blocks)
        if self._num_new > self._remembered:
            self._num_new //= 2
            self._num_reused //= 2

    def record_block_uses(self, blocks: list[int]) -> None:
        """Record a further use of blocks."""
        uses = self._uses
        for block in blocks:
            self._num_reused += uses[block] == 1
            uses[block] += 1

    def reuse_probability(self, block: int, last: int, now: int) -> float:
        """Return the probability that a block last used at `last` is used again."""
        uses = self._uses[block]
        if uses < 2:
            return self.reused_share
        gap = (last - self._first[block]) / (uses - 1)
        return gap / max(gap + now - last, 1.0)
