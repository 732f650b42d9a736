"""ApproximateIndex: an estimate of a replica's prefix cache, from requests sent there and reported cached tokens.

It is the engine's own pool (core/cache/block_pool.py) without KV (modelled_pool.py), so it evicts what the engine
evicts: chains lose their tails first, blocks of requests in flight are not evicted, and the capacity is the engine's.

The cached tokens that an engine reports correct it. If fewer were cached than predicted, the first missing block was
evicted, and so was every block used before it: they are dropped, and the capacity is corrected. If the missing block
had been used very recently, the cache was emptied, unless a later report contradicts that: then it is small. If more
were cached than predicted, the capacity is raised. A single report moves at most a few times its error, since an
engine's order of eviction is never quite the same. Reports of requests sent before a loss was noticed only repeat it.

The capacity may exceed the size a replica reports, if reports of cached tokens prove it (a store or another tier holds
more) and `allow` grants it. A cache that is emptied is a new pool, and the old one is freed in slices, so that neither
takes longer for a larger cache.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from headstart.core.cache.hashing import BlockHash
from headstart.router.index.discards import Discards
from headstart.router.index.first_blocks import UNLISTED, FirstBlockTable
from headstart.router.index.modelled_pool import MakePool, ModelledCache, ModelledPool
from headstart.router.index.prefix_index import Reservation

UNKNOWN_BLOCKS = 16_384  # initial capacity for a replica that reports none; it is corrected
MAX_UNKNOWN_BLOCKS = 65_536
FLUSHED_SHARE = 0.25  # of the capacity: if a block used this recently is missing, the cache was emptied
GROWTH = 0.25  # of the capacity times the step, for a block that was cached unexpectedly
REACH = 4  # a report moves this multiple of its error, doubled for each report in the same direction
MAX_STEP = 0.5  # towards the capacity that a report implies; halved when the direction changes
MIN_STEP = 1 / 64
MIN_BLOCKS = 16
MAX_UNPLACED = 256
FREED = 512  # entries of a former pool freed with every request, and
FREED_PER_BLOCK = 16  # with each new block, more than one takes: they do not accumulate

Allow = Callable[[int, int], int]
"""Map (granted blocks, requested blocks) to the number of blocks an index may hold; at least the first."""

_ENDED = -1  # instead of an epoch


class FlushedPool(NamedTuple):
    """The pool at the time of an inferred reset. Its idle blocks used after `serial` may be cached after all."""

    pool: ModelledCache
    serial: int
    num_younger: int  # so many they are


class ApproximateIndex:
    """The estimated contents of one cache. `num_blocks` 0: its size is not known.

    `at_pick`: a request's blocks count from the moment it is sent; else from its first token on. `allow` is called
    before the capacity exceeds `num_blocks`; without it it never does. `make_pool`: compiled pools, or those in Python.
    """

    def __init__(
        self,
        num_blocks: int = 0,
        *,
        eviction_policy: str = "lru",
        at_pick: bool = True,
        corrects: bool = True,
        allow: Allow | None = None,
        make_pool: MakePool = ModelledPool,
    ) -> None:
        self.at_pick = at_pick
        self.corrects = corrects
        self.num_flushes = 0  # detected resets of the cache
        self.num_trims = 0
        self.first_blocks = FirstBlockTable(self)  # later that of the router, in which it has `number`
        self.number = UNLISTED
        self._max_blocks = num_blocks or MAX_UNKNOWN_BLOCKS
        self._is_sized = self._is_reported = num_blocks > 0  # sized also once hits raise it: else any is better
        self._step, self._reach, self._direction = MAX_STEP, REACH, 0
        self._eviction_policy = eviction_policy
        self._epoch = 0
        self._allow = allow
        self._make_pool = make_pool
        self._discards = Discards()
        self._start(num_blocks or UNKNOWN_BLOCKS)

    @property
    def estimated_capacity(self) -> int:
        """Estimated number of blocks of the cache."""
        return self._blocks.capacity

    @property
    def max_blocks(self) -> int:
        """Upper bound of the capacity, unless more is granted."""
        return self._max_blocks

    @property
    def cache_capacity_blocks(self) -> int:
        """Number of blocks of the cache: as reported, or more if hits prove it; else an estimate."""
        return self._max_blocks if self._is_reported else self.estimated_capacity

    @property
    def num_unreserved_blocks(self) -> float:
        """Blocks that requests in flight neither hold nor wait for; below 0: so many are waited for; inf: not known."""
        return self.cache_capacity_blocks - self._blocks.num_held - self._num_missing if self._is_sized else inf

    def free_discarded_entries(self, num: int) -> int:
        """Free up to `num` entries of former pools; return the number freed, 0 when nothing is left."""
        return self._discards.free_discarded_entries(num)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    @property
    def prompt_based_index_or_self(self) -> "ApproximateIndex":
        """This index: it knows no events."""
        return self

    @property
    def relies_on_unusable_events(self) -> bool:
        """Never: it needs no events."""
        return False

    def on_cache_reset(self) -> None:
        """Empty the index, as the replica's cache was."""
        self.clear()

    def describe(self) -> dict[str, Any]:
        """Return its mode and size as plain values."""
        sizes = {
            "capacity": self.estimated_capacity,
            "flushes": self.num_flushes,
            "blocks": len(self),
            "trims": self.num_trims,
        }
        return {"mode": "guessed", **sizes}

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], now: float = 0.0, near: int = 0) -> int:
        """Return the number of leading blocks predicted to be cached. Changes nothing."""
        return self._blocks.num_cached_prefix_blocks(block_hashes, near)

    def record_sent(self, block_hashes: list[BlockHash], now: float = 0.0) -> Reservation:
        """Reserve the blocks of a request against eviction; add new ones if `at_pick`."""
        if self._discards:
            self._discards.free_discarded_entries(FREED)
        reservation = Reservation(block_hashes, self.num_cached_prefix_blocks(block_hashes))
        reservation.epoch = self._epoch
        reservation.num_losses = self._num_losses
        if reservation.hit < len(block_hashes):
            block_hash = block_hashes[reservation.hit]
            reservation.evicted = block_hash in self._unplaced or self._blocks.was_evicted(block_hash)
            if self._flushed is not None:
                reservation.doubtful = self._flushed.pool.is_idle_used_since(block_hash, self._flushed.serial)
        self._blocks.acquire_cached(reservation, reservation.hit)
        reservation.sure = self._blocks.num_leading_computed_blocks(reservation)
        if self.at_pick:
            self._extend(reservation, unsure=1)
        return reservation

    def record_prefilled(self, reservation: Reservation, now: float = 0.0) -> None:
        """Add the blocks of the computed prompt."""
        if not self._is_open(reservation):
            return
        self._extend(reservation, unsure=0)  # may take over blocks that another request is still to compute
        self._blocks.record_computed(reservation.blocks[reservation.sure :])
        self._blocks.mark_used(reservation.blocks)

    def record_finished(self, reservation: Reservation, block_hashes: list[BlockHash], now: float = 0.0) -> None:
        """Add the blocks of prompt and output, which may be evicted from now on."""
        if not self._is_open(reservation):
            return
        self.record_prefilled(reservation)
        reservation.block_hashes = block_hashes
        self._extend(reservation, unsure=0)
        self._release(reservation)

    def record_failed(self, reservation: Reservation, num_kept: int = 0) -> None:
        """Release the blocks; those the request was to compute are dropped, but for the leading `num_kept`.

        The kept ones remain unsure: a report that they were not cached means no loss.
        """
        if not self._is_open(reservation):
            return
        self._blocks.drop_uncomputed_blocks(reservation.blocks[reservation.sure :], max(num_kept - reservation.sure, 0))
        self._release(reservation)

    def on_hit_reported(self, reservation: Reservation, num_blocks: int, now: float = 0.0) -> None:
        """Correct the index by the number of blocks that were cached. Once per request."""
        if reservation.epoch != self._epoch or reservation.reported or not self.corrects:
            return
        reservation.reported = True
        if num_blocks < min(reservation.sure, reservation.hit):
            if reservation.num_losses == self._num_losses or reservation.serials[num_blocks] > self._lost_until:
                self._lost(reservation, num_blocks)  # else it is part of a loss noticed since this one was sent
        elif reservation.doubtful and self._flushed is not None:
            self._settle(self._flushed, num_blocks > reservation.hit)
        elif num_blocks > reservation.hit and reservation.evicted:
            self._kept(num_blocks - reservation.hit, reservation.block_hashes[reservation.hit] in self._unplaced)

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        """Return how many blocks evicted for `num_blocks` new ones should be requested again. Changes nothing."""
        return self._blocks.expected_evicted_reusable_blocks(num_blocks)

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        """Return the blocks that requests in flight use, and how many leading ones of `block_hashes` are among them."""
        return self._blocks.count_in_use_and_prefix(block_hashes)

    def clear(self) -> None:
        """Empty the index, as after a restart. Blocks of requests in flight are added when they are answered."""
        self._forget_flush()
        capacity = self.estimated_capacity
        self._discards.free_later(*self._blocks.teardown_parts)
        self._epoch += 1
        self._start(capacity)

    def check(self) -> None:
        """Assert the invariants; O(blocks), for tests."""
        self._blocks.check_invariants()
        assert len(self) <= self.estimated_capacity, f"{len(self)} blocks in a cache of {self.estimated_capacity}"

    # ------------------------------------------------------------------------------------------------------------

    def _start(self, capacity: int) -> None:
        self._held = capacity  # blocks apparently cached at the last loss: more is not proven
        self._lost_until = 0  # blocks last used up to then are known to be lost
        self._flushed: FlushedPool | None = None  # the last reset inferred from a report, while in doubt
        self._unplaced: dict[BlockHash, None] = {}  # no space for these blocks, nor for those after them
        self._num_missing = 0  # blocks of requests in flight without space
        self._renew(capacity, None)

    def _renew(self, capacity: int, former: ModelledCache | None) -> None:
        self._blocks = self._make_pool(capacity, self._max_blocks, self._eviction_policy, former)
        self.handle = self._blocks.handle  # of compiled code; read with every decision

    def _is_open(self, reservation: Reservation) -> bool:
        """Return whether the request is in flight; one from before a reset holds no blocks any more."""
        if reservation.epoch not in (self._epoch, _ENDED):
            reservation.blocks, reservation.hit, reservation.sure, reservation.missing = [], 0, 0, 0
            reservation.epoch, reservation.reported = self._epoch, True
        return reservation.epoch != _ENDED

    def _extend(self, reservation: Reservation, unsure: int) -> None:
        """Add the missing blocks, as many as there is space for."""
        before = len(reservation.blocks)
        if before == len(reservation.block_hashes) and not reservation.missing:
            return
        self._blocks.add_missing_blocks(reservation, unsure)
        if self._discards:
            self._discards.free_discarded_entries(FREED_PER_BLOCK * (len(reservation.blocks) - before))
        num, block_hashes = len(reservation.blocks), reservation.block_hashes
        self._miss(reservation, len(block_hashes) - num)
        if num:
            self.first_blocks.add_holder(block_hashes[0], self.number)
        if num < len(block_hashes):
            self._unplaced[block_hashes[num]] = None
            if len(self._unplaced) > MAX_UNPLACED:
                del self._unplaced[next(iter(self._unplaced))]

    def _miss(self, reservation: Reservation, num: int) -> None:
        """Set the number of blocks of a request for which there is no space."""
        self._num_missing += num - reservation.missing
        reservation.missing = num

    def _release(self, reservation: Reservation) -> None:
        self._miss(reservation, 0)
        self._blocks.release(reservation.blocks)
        reservation.blocks = []
        reservation.epoch = _ENDED

    @property
    def _num_losses(self) -> int:
        return self.num_trims + self.num_flushes

    def _lost(self, reservation: Reservation, index: int) -> None:
        """Handle the loss of block `index` of a request: every block last used before it is lost too.

        Blocks used since then prove a part of the capacity, except those that the request itself computes.
        """
        serial = reservation.serials[index]
        gone = self._blocks.num_idle_unused_since(serial)
        own = self._blocks.num_singly_referenced_among(reservation.blocks[index:])
        num_kept = len(self) - gone - own
        num_younger = self._blocks.num_idle - gone
        is_lately = num_kept < FLUSHED_SHARE * min(self.estimated_capacity, self._held) or not (num_younger or index)
        if is_lately and 2 * index <= reservation.hit:  # an error this small is no reset
            self._flush(serial, num_younger)
            reservation.blocks, reservation.serials = [], []
            reservation.hit, reservation.sure, reservation.missing, reservation.epoch = 0, 0, 0, self._epoch
            self._extend(reservation, unsure=0)  # it has computed its prompt since
            self._blocks.record_computed(reservation.blocks)
            return
        self.num_trims += 1
        self._lost_until, self._held = serial, num_kept
        self._forget_flush()
        self._turn(-1)
        most = self._reach * (reservation.hit - index)
        self._blocks.evict(min(gone, most))
        less = int(self._step * (self.estimated_capacity - num_kept))
        less = min(less, most) if self._is_sized else less
        self._blocks.resize(min(max(self.estimated_capacity - less, MIN_BLOCKS), self._max_blocks))

    def _flush(self, serial: int, num_younger: int) -> None:
        """Drop everything: the cache was emptied after `serial`. `num_younger` idle blocks were used since then.

        Blocks of requests in flight are added when they are answered.
        """
        self._forget_flush()
        self.num_flushes += 1
        self._num_missing = 0
        former = self._blocks
        self._lost_until = former.last_use_serial
        self._epoch += 1
        self._flushed = FlushedPool(former, serial, num_younger)
        self._renew(former.capacity, former)

    def _forget_flush(self) -> None:
        """Drop the record of the last reset, which is no longer in doubt."""
        if self._flushed is not None:
            self._discards.free_later(*self._flushed.pool.teardown_parts)
            self._flushed = None

    def _settle(self, flushed: FlushedPool, is_there: bool) -> None:
        """Decide whether the last reset was real: if a block from before is cached, the cache is just small."""
        if is_there:
            self._blocks.resize(
                max((self.estimated_capacity + flushed.num_younger) // 2, min(MIN_BLOCKS, self.estimated_capacity))
            )
        self._forget_flush()

    def _kept(self, num_blocks: int, is_unplaced: bool) -> None:
        """Raise the capacity for blocks that are cached unexpectedly; by all, if they never had space."""
        self._turn(1)
        self._is_sized = True
        more = min(int(GROWTH * self._step * self.estimated_capacity), self._reach * num_blocks)
        wanted = self.estimated_capacity + max(more, num_blocks if is_unplaced else 1)
        if wanted > self._max_blocks and self._allow is not None:
            self._max_blocks = self._allow(self._max_blocks, wanted)
        self._blocks.resize(min(wanted, self._max_blocks))
        self._held = self.estimated_capacity

    def _turn(self, direction: int) -> None:
        """Lengthen the step while reports agree in direction; shorten it when they disagree, near the right value."""
        if direction == -self._direction:
            self._step, self._reach = max(self._step / 2, MIN_STEP), REACH
        elif direction == self._direction:
            self._step, self._reach = min(self._step * 2, MAX_STEP), min(self._reach * 2, self._max_blocks)
        self._direction = direction
