"""ModelledPool: an engine's block pool without KV, of an estimated capacity, with the uses of every block.

It begins small and grows as blocks come, up to the capacity. Invariant: if a block is in it, so are all before it in
its chain; `match` is a bisection. It knows nothing of requests' reports: approximate_index.py corrects it.
"""

from itertools import accumulate, islice, takewhile

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.router.index.discards import Discards
from headstart.router.index.prefix_index import Reservation
from headstart.router.index.reuse_estimate import ReuseEstimate

LOOKED_AT = 64  # number of next evicted blocks whose value is estimated
MIN_GROWTH = 1_024  # minimum growth of the pool in blocks, and its initial size
FREED_PER_BLOCK = 16  # entries of a former pool freed with each new block, more than one takes: they do not accumulate


class ModelledPool:
    """The blocks of one cache of `capacity` blocks, which may become `max_blocks`.

    `now` counts uses: time as the order of eviction knows it. Tables of pools that are replaced go to `discards`.
    """

    def __init__(
        self,
        capacity: int,
        max_blocks: int,
        eviction_policy: str,
        reuse: ReuseEstimate,
        discards: Discards,
        now: int = 0,
    ) -> None:
        usable, size = min(MIN_GROWTH, capacity), max_blocks + 1  # block 0 of a pool is never used
        self.pool = BlockPool(usable + 1, eviction_policy=eviction_policy, history_pools=1, max_blocks=size)
        self.now = now  # number of uses so far
        self.serials = [0] * (usable + 1)  # last time a block was surely cached; the same for all of one request
        self.unsure = bytearray(usable + 1)  # 1: sent, and not known to be computed yet
        self.reuse = reuse.emptied(usable + 1, size)
        self._num_ungrown: int = capacity - usable  # blocks by which the pool is to grow when needed
        self._ballast: list[int] = []  # blocks held unused: the cache is smaller than the pool
        self._worth: list[float] | None = (
            None  # prefix sums of the value of the next evicted blocks, as far as needed; None: outdated
        )
        self._discards = discards

    def __len__(self) -> int:
        return self.pool.num_published

    @property
    def capacity(self) -> int:
        """Number of blocks of the cache."""
        return self.pool.num_usable - len(self._ballast) + self._num_ungrown

    @property
    def num_idle(self) -> int:
        """Number of published blocks that no request in flight uses."""
        return self.pool.num_free - self.pool.num_scratch

    @property
    def num_held(self) -> int:
        """Number of blocks that requests in flight use."""
        return self.pool.num_usable - self.pool.num_free - len(self._ballast)

    def match(self, block_hashes: list[BlockHash], near: int = 0) -> int:
        """Return the number of leading blocks that are in it; `near` is a guess."""
        published, num = self.pool.published, len(block_hashes)
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

    def held(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        """Return the blocks that requests in flight use, and how many leading ones of `block_hashes` are among them."""
        pool, low, high = self.pool, 0, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            entry = pool.entry(block_hashes[middle])
            if entry is not None and pool.refs(entry[0]):
                low = middle + 1
            else:
                high = middle
        return self.num_held, low

    def loss(self, num_blocks: int) -> float:
        """Return how many blocks evicted for `num_blocks` new ones should be requested again. Changes nothing."""
        pool = self.pool
        num = min(num_blocks - pool.num_scratch - self._num_ungrown, self.num_idle)
        if num <= 0:
            return 0.0
        looked_at = min(num, LOOKED_AT)
        if self._worth is None or len(self._worth) < looked_at:
            chance, serials, now = self.reuse.chance, self.serials, self.now
            next_ones = islice(pool.in_eviction_order(), looked_at)
            self._worth = list(accumulate(chance(block, serials[block], now) for block in next_ones))
        return self._worth[looked_at - 1] * num / looked_at

    def num_unused_since(self, serial: int) -> int:
        """Return the number of idle blocks that are evicted before any that was used after `serial`."""
        in_order = map(self.serials.__getitem__, self.pool.in_eviction_order())
        return len(list(takewhile(serial.__ge__, in_order)))

    def num_sure(self, reservation: Reservation) -> int:
        """Return the number of leading blocks of a request that are not still being computed."""
        unsure = bytes(map(self.unsure.__getitem__, reservation.blocks)).find(1)
        return reservation.hit if unsure < 0 else unsure

    # ------------------------------------------------------------------------------------------------------- changes

    def acquire(self, reservation: Reservation, end: int) -> None:
        """Acquire published blocks up to `end` of its block hashes."""
        pool, start = self.pool, len(reservation.blocks)
        blocks = [
            entry[0]
            for block_hash in reservation.block_hashes[start:end]
            if (entry := pool.entry(block_hash)) is not None
        ]
        assert len(blocks) == end - start, "a block is there and one before it is not"
        reservation.serials += map(self.serials.__getitem__, blocks)
        pool.acquire(blocks)
        self._worth = None
        self.reuse.used(blocks)
        reservation.blocks += blocks

    def extend(self, reservation: Reservation, unsure: int) -> None:
        """Add the missing blocks of a request, head first, as many as there is space for."""
        pool, block_hashes = self.pool, reservation.block_hashes
        if len(reservation.blocks) == len(block_hashes):
            return
        self.acquire(reservation, self.match(block_hashes))
        start = len(reservation.blocks)
        wanted = len(block_hashes) - start
        if wanted > pool.num_scratch and self._num_ungrown:
            self._grow(wanted - pool.num_scratch)
        if self._discards:
            self._discards.free(FREED_PER_BLOCK * wanted)
        blocks = pool.allocate(min(wanted, pool.num_available(())))
        parent = block_hashes[start - 1] if start else BlockHash(b"")
        for block, block_hash in zip(blocks, block_hashes[start:], strict=False):
            pool.publish(block, block_hash, parent, b"")
            self.unsure[block] = unsure
            parent = block_hash
        self.reuse.added(blocks, self.now)
        reservation.blocks += blocks

    def computed(self, blocks: list[int]) -> None:
        """Record that blocks are computed."""
        for block in blocks:
            self.unsure[block] = 0

    def see(self, blocks: list[int]) -> None:
        """Record that blocks are cached now."""
        self.now += 1
        self._worth = None
        for block in blocks:
            self.serials[block] = self.now

    def release(self, blocks: list[int]) -> None:
        """Release the blocks of a request, which are cached now."""
        self.see(blocks)
        self.pool.release(blocks)
        self._worth = None

    def distrust(self, blocks: list[int]) -> None:
        """Drop those of the blocks of a failed request that only it was to compute."""
        pool = self.pool
        pool.take_blocks_to_zero()  # there is nothing to zero here
        unsure = [block for block in blocks if self.unsure[block] and pool.refs(block) == 1]
        if unsure:
            pool.distrust(unsure)

    def drop(self, num: int) -> None:
        """Drop the next `num` blocks in the order of eviction."""
        pool = self.pool
        pool.release(pool.allocate(pool.num_scratch + num))
        self._worth = None

    def resize(self, capacity: int) -> None:
        """Set the capacity, as far as blocks in flight allow."""
        pool, change = self.pool, self.capacity - capacity
        self._worth = None
        if change > 0:
            cut = min(change, self._num_ungrown)
            self._num_ungrown -= cut
            self._ballast += pool.allocate(min(change - cut, pool.num_available(())))
        elif change < 0:
            keep = max(len(self._ballast) + change, 0)
            self._num_ungrown += -change - (len(self._ballast) - keep)
            pool.release(self._ballast[keep:])
            del self._ballast[keep:]

    def _grow(self, num: int) -> None:
        """Grow the pool by `num` blocks, as far as the capacity allows."""
        num = min(max(num, MIN_GROWTH), self._num_ungrown)
        self._num_ungrown -= num
        self.pool.grow(num)
        self.serials += [0] * num
        self.unsure += bytes(num)
        self.reuse.grow(num)


class FlushedPool:
    """The pool at the time of an inferred reset. Its blocks may be cached after all."""

    __slots__ = ("_serial", "_serials", "num_younger", "pool")

    def __init__(self, modelled: ModelledPool, serial: int, num_younger: int) -> None:
        self.pool = modelled.pool
        self.num_younger = num_younger  # idle blocks used after the missing one
        self._serials = modelled.serials
        self._serial = serial

    @property
    def tables(self) -> tuple[BlockPool, list[int]]:
        """All tables it holds."""
        return self.pool, self._serials

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether this block was used after the missing one, and is idle."""
        entry = self.pool.entry(block_hash)
        return entry is not None and not self.pool.refs(entry[0]) and self._serials[entry[0]] > self._serial
