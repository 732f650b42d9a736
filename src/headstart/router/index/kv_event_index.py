"""ReplicaKVEventIndex: a replica's prefix cache from its KV events, plus the requests just sent there (precise mode).

An engine's block hashes are only handles here: the tokens of an event are hashed again with the router's root, so any
engine's events can be used. Invariant: after every event the index equals the engine's, unless an event refers to an
unknown parent block (`unknown_parents`). Blocks just sent count as cached until their events come, or for a while
(`SPECULATION`). Events that never come are counted as `silence`, since the index is useless without them.

Several handles may map to one hash, and one handle to several copies (a block on two tiers, or computed twice by an
engine that does not merge equal blocks: vLLM): it is removed with the last of them. A stored event without tokens
announces another copy of a known block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from math import inf
from typing import Any

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash, extend_block_hashes, private_parent_hash_for_domain
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.discards import Discards
from headstart.router.index.first_blocks import UNLISTED, FirstBlockTable
from headstart.router.index.prefix_index import PrefixIndex, Reservation

SPECULATION = 60.0  # seconds after sending in which a request must be computed
SPECULATION_COMPUTED = 5.0  # seconds after its first token in which its events must arrive
MAX_SPECULATIVE = 65_536
NOT_USED = ("unknown_parents", "unknown_copies", "other_block_size")  # events that could not be used
MAX_BLOCKS = 2**20  # handles, where the number of the cache's blocks is not known: about 300 MB
FREED = 4_096  # entries of former tables freed with every event: more than an event of 256 blocks adds
FREED_PER_REQUEST = 512
SILENCE = 16  # requests ended since the last usable event that indicate a fault

Root = Callable[[str | None, bytes], BlockHash]


class ReplicaKVEventIndex:
    """The event-based contents of one cache. `root(adapter, domain)` hashes the empty prefix (router_root).

    `guess` is an approximate index kept beside it: events report what was evicted, not what will be, and it replaces
    the index if events stop. `max_blocks` bounds the handles, and with them every table. A publisher that stores more
    has missed removals: the index starts anew, empty, and `over_capacity` counts it.
    """

    def __init__(
        self, block_size: int, root: Root, guess: ApproximateIndex | None = None, *, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.guess = guess
        self.first_blocks = FirstBlockTable(self)  # later that of the router, in which it has `number`
        self.number = UNLISTED
        self.handle = 0
        self.silence = 0  # requests with full blocks that ended since the last usable event
        self.counts = dict.fromkeys(("stored", "removed", "cleared", "over_capacity", *NOT_USED), 0)
        self._root = root
        self._discards = Discards()
        self._empty()

    def __len__(self) -> int:
        return len(self._uses)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._uses)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._uses or block_hash in self._speculative

    @property
    def relies_on_unusable_events(self) -> bool:
        """Whether requests end and no usable event arrives."""
        return self.silence >= SILENCE

    @property
    def cache_capacity_blocks(self) -> int:
        """Number of blocks of the cache, by the approximate index; of the events without one."""
        return len(self) if self.guess is None else self.guess.cache_capacity_blocks

    @property
    def num_unreserved_blocks(self) -> float:
        """Those of the approximate index; not known without one."""
        return inf if self.guess is None else self.guess.num_unreserved_blocks

    @property
    def prompt_based_index_or_self(self) -> PrefixIndex:
        """The approximate index beside it, if there is one."""
        return self if self.guess is None else self.guess

    def on_cache_reset(self) -> None:
        """Do nothing: the engine sends an event, in order with those of blocks stored before and after."""

    def describe(self) -> dict[str, Any]:
        """Return its mode and size as plain values, and the counts of events."""
        return {"mode": "events", "blocks": len(self), "counts": dict(self.counts)}

    def num_cached_prefix_blocks(self, block_hashes: list[BlockHash], now: float, near: int = 0) -> int:
        """Return the number of leading blocks that are cached, or expected since they were just sent."""
        known, speculative = self._match_events(block_hashes), self._speculative
        if not speculative or known == len(block_hashes):
            return known
        uses = self._uses
        rest = takewhile(
            lambda block_hash: speculative.get(block_hash, -1.0) > now or block_hash in uses,
            islice(block_hashes, known, None),
        )
        return known + sum(1 for _ in rest)

    def record_sent(self, block_hashes: list[BlockHash], now: float) -> Reservation:
        """Count the request's blocks as cached until their events come."""
        if self._discards:
            self._discards.free_discarded_entries(FREED_PER_REQUEST)
        reservation = Reservation(block_hashes, self.num_cached_prefix_blocks(block_hashes, now))
        reservation.sure = self._match_events(block_hashes)
        speculative = self._speculative
        for block_hash in block_hashes[reservation.hit :]:
            speculative[block_hash] = now + SPECULATION
        if block_hashes:
            self.first_blocks.add_holder(block_hashes[0], self.number)
        while len(speculative) > MAX_SPECULATIVE or (speculative and next(iter(speculative.values())) <= now):
            speculative.popitem(last=False)
        if self.guess is not None:
            reservation.guess = self.guess.record_sent(block_hashes, now)
        return reservation

    def record_prefilled(self, reservation: Reservation, now: float) -> None:
        """Expect its events soon."""
        for block_hash in reservation.block_hashes[reservation.hit :]:
            if block_hash in self._speculative:
                self._speculative[block_hash] = now + SPECULATION_COMPUTED
        if self.guess is not None and reservation.guess is not None:
            self.guess.record_prefilled(reservation.guess, now)

    def record_finished(self, reservation: Reservation, block_hashes: list[BlockHash], now: float) -> None:
        """Count the request as silent; usable events reset that count."""
        self.silence += len(block_hashes) > reservation.hit
        if self.guess is not None and reservation.guess is not None:
            self.guess.record_finished(reservation.guess, block_hashes, now)

    def record_failed(self, reservation: Reservation, num_kept: int = 0) -> None:
        """Stop expecting the blocks it was to compute: the events of those that were computed come anyway."""
        for block_hash in reservation.block_hashes[reservation.hit :]:
            self._speculative.pop(block_hash, None)
        if self.guess is not None and reservation.guess is not None:
            self.guess.record_failed(reservation.guess, num_kept)

    def on_hit_reported(self, reservation: Reservation, num_blocks: int, now: float) -> None:
        """Correct the approximate index only: a report is older than the last event, so the index is right."""
        if self.guess is not None and reservation.guess is not None:
            self.guess.on_hit_reported(reservation.guess, num_blocks, now)

    def expected_evicted_reusable_blocks(self, num_blocks: int) -> float:
        """Return the loss of the approximate index; 0 without one."""
        return 0.0 if self.guess is None else self.guess.expected_evicted_reusable_blocks(num_blocks)

    def count_in_use_and_prefix(self, block_hashes: list[BlockHash]) -> tuple[int, int]:
        """Return the blocks that requests in flight use, by the approximate index; none without one."""
        return (0, 0) if self.guess is None else self.guess.count_in_use_and_prefix(block_hashes)

    def clear(self) -> None:
        """Drop everything: the engine was restarted, or events are lost. Memory is freed later."""
        self._discards.free_later(self._handles, self._copies, self._uses, self._before, self._after, self._speculative)
        self._empty()

    def free_discarded_entries(self, num: int) -> int:
        """Free up to `num` entries of former tables and of `guess`; return the number freed, 0 when nothing is left."""
        freed = self._discards.free_discarded_entries(num)
        return freed + (self.guess.free_discarded_entries(num - freed) if self.guess is not None and freed < num else 0)

    def _empty(self) -> None:
        self._handles: dict[bytes, BlockHash] = {}
        self._copies: dict[bytes, int] = {}  # of handles with more than one
        self._uses: dict[BlockHash, int] = {}  # handles per block hash
        self._before: dict[BlockHash, BlockHash | None] = {}  # parent block; None: it is the first
        self._after: dict[BlockHash, int] = {}  # number of present children of a block, present or not
        self._num_orphans = 0  # present blocks without a present parent; at 0, bisection is exact
        self._speculative: OrderedDict[BlockHash, float] = OrderedDict()  # block hash -> expiry

    # ------------------------------------------------------------------------------------------------------ events

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in their order."""
        for event in events:
            if self._discards:
                self._discards.free_discarded_entries(FREED)
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    for handle in event.block_hashes:
                        self._remove(handle)
                case AllBlocksCleared():
                    self.clear()
                    if self.guess is not None:
                        self.guess.clear()
                    self.counts["cleared"] += 1
                    self.silence = 0

    def check(self) -> None:
        """Assert the consistency of all tables; for tests."""
        uses, before = self._uses, self._before
        assert uses.keys() == before.keys()
        assert self._num_orphans == sum(
            1 for block_hash in before.values() if block_hash is not None and block_hash not in uses
        )
        assert sum(uses.values()) == len(self._handles)
        assert all(block_hash in uses for block_hash in self._handles.values())
        assert all(handle in self._handles and count > 1 for handle, count in self._copies.items())
        assert sum(self._after.values()) == sum(1 for block_hash in before.values() if block_hash is not None)

    # ------------------------------------------------------------------------------------------------------------

    def _match_events(self, block_hashes: list[BlockHash]) -> int:
        uses, low, high = self._uses, 0, len(block_hashes)
        if self._num_orphans:
            return sum(1 for _ in takewhile(uses.__contains__, block_hashes))
        while low < high:
            middle = (low + high) // 2
            if block_hashes[middle] in uses:
                low = middle + 1
            else:
                high = middle
        return low

    def _stored(self, event: BlockStored) -> None:
        """Add the blocks of one chain, unless their parent is unknown."""
        if not event.token_ids:
            self._copied(event)
            return
        if event.block_size != self.block_size:
            self.counts["other_block_size"] += 1
            return
        if len(self._handles) + len(event.block_hashes) > self.max_blocks:
            self.clear()
            self.counts["over_capacity"] += 1
            return
        before: BlockHash | None = None
        if event.parent_block_hash is not None:
            before = self._handles.get(event.parent_block_hash)
            if before is None:
                self.counts["unknown_parents"] += 1
                return
        block_hashes: list[BlockHash] = []
        extend_block_hashes(block_hashes, event.token_ids, self.block_size, self._parent(event, before))
        for handle, block_hash in zip(event.block_hashes, block_hashes, strict=False):
            self._add(handle, block_hash, before)
            before = block_hash
        self.counts["stored"] += len(block_hashes)
        self.silence = 0

    def _parent(self, event: BlockStored, before: BlockHash | None) -> BlockHash:
        """Return the parent hash of an event's first block."""
        if before is None:
            return self._root(event.adapter, event.domain)
        return private_parent_hash_for_domain(before, event.domain) if event.domain else before

    def _copied(self, event: BlockStored) -> None:
        """Count further copies of known blocks."""
        for handle in event.block_hashes:
            if handle in self._handles:
                self._copies[handle] = self._copies.get(handle, 1) + 1
                self.counts["stored"] += 1
                self.silence = 0
            else:
                self.counts["unknown_copies"] += 1

    def _add(self, handle: bytes, block_hash: BlockHash, before: BlockHash | None) -> None:
        known = self._handles.get(handle)
        if known == block_hash:
            self._copies[handle] = self._copies.get(handle, 1) + 1
            return
        if known is not None:
            self._copies.pop(handle, None)
            self._remove(handle)
        self._handles[handle] = block_hash
        self._speculative.pop(block_hash, None)
        count = self._uses[block_hash] = self._uses.get(block_hash, 0) + 1
        if count > 1:
            return
        self._before[block_hash] = before
        if before is None:
            self.first_blocks.add_holder(block_hash, self.number)
        self._num_orphans -= self._after.get(block_hash, 0)
        if before is not None:
            self._after[before] = self._after.get(before, 0) + 1
            self._num_orphans += before not in self._uses

    def _remove(self, handle: bytes) -> None:
        block_hash = self._handles.get(handle)
        if block_hash is None:
            return
        self.counts["removed"] += 1
        self.silence = 0
        if handle in self._copies:
            self._copies[handle] -= 1
            if self._copies[handle] == 1:
                del self._copies[handle]
            return
        del self._handles[handle]
        self._uses[block_hash] -= 1
        if self._uses[block_hash]:
            return
        del self._uses[block_hash]
        self._num_orphans += self._after.get(block_hash, 0)
        before = self._before.pop(block_hash)
        if before is not None:
            self._num_orphans -= before not in self._uses
            self._after[before] -= 1
            if not self._after[before]:
                del self._after[before]
