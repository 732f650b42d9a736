"""Writer: a thread that writes blocks in the background, indexes other processes' blocks, and drops distrusted ones.

It has a low priority. Where busy cores keep it from writing, a second thread of normal priority takes its turns.

The engine passes messages through a bounded queue, which costs it an append; everything else happens here, in rounds,
so that a disk that hangs blocks only this thread. Distrusted blocks are dropped before any later offer is written. The
same thread refreshes the folder, between two runs of a few megabytes.
"""

import os
import sys
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from headstart.core.cache.block_store import BlockKey, BlockSource, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store.direct import allocate_page_aligned
from headstart.store.store_health import SideHealth, describe_error, write_stderr_line
from headstart.store.tiers.tier import StorageTier

ROUND_SECONDS = 0.02  # between two checks of the folder and of the offers
RUN_BYTES = 4 << 20  # copied out of the pool and written at once
MAX_RUN_BLOCKS = 256
MAX_PENDING = 16_384  # blocks; also the maximum of queued messages
RENEW_SECONDS = 5.0  # interval in which the files of pinned blocks are marked as recent
NICE = 10  # below the compute threads
KEEP_RATE = 0.8  # the weight of the past in the measured rate
OVERDUE_SECONDS = 5.0  # for one round
LATE_SECONDS = 0.25  # a block that has waited this long is written at normal priority: it is what a kill loses
LOST = ("overwritten", "overload", "degraded", "closing")


class BlockOffer(NamedTuple):
    """One block of the pool, valid as long as the block has this version."""

    block: int
    version: int
    key: BlockKey
    offered_at: float = float("inf")


_Offers = OrderedDict[BlockHash, BlockOffer]


class PendingOffers:
    """At most `max_blocks` offers: pinned ones first, then those used since they were offered, then the rest.

    Among equals the first offered, so that the head of a chain precedes its tail. A block that is offered again
    replaces its earlier offer.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._pinned, self._used, self._rest = self._places = (_Offers(), _Offers(), _Offers())
        self._kept: Container[BlockHash] = ()

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def add(self, offer: BlockOffer) -> int:
        """Add an offer; return the number dropped for it (0 or 1): the oldest of the lowest priority."""
        block_hash = offer.key.block_hash
        place = self._pinned if block_hash in self._kept else self._used if block_hash in self._used else self._rest
        place[block_hash] = offer
        return self._drop(len(self) - self._max_blocks, self._places)

    def mark_used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Mark blocks as used."""
        for block_hash in block_hashes:
            if (offer := self._rest.pop(block_hash, None)) is not None:
                self._used[block_hash] = offer

    def set_pinned_blocks(self, block_hashes: Container[BlockHash]) -> None:
        """Set the pinned blocks: these, and only these."""
        self._kept = block_hashes
        for place in (self._used, self._rest):
            for block_hash in [block_hash for block_hash in place if block_hash in block_hashes]:
                self._pinned[block_hash] = place.pop(block_hash)
        for block_hash in [block_hash for block_hash in self._pinned if block_hash not in block_hashes]:
            self._used[block_hash] = self._pinned.pop(block_hash)

    def oldest_offer_time(self) -> float:
        """Return when the oldest of the next ones of each kind was offered; inf: there are none."""
        return min((next(iter(place.values())).offered_at for place in self._places if place), default=float("inf"))

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        """Remove these."""
        for block_hash in block_hashes:
            for place in self._places:
                place.pop(block_hash, None)

    def clear(self) -> int:
        """Remove all; return their number."""
        return self._drop(len(self), self._places)

    def take(self, num: int) -> list[BlockOffer]:
        """Remove and return the next `num`, or all there are."""
        taken: list[BlockOffer] = []
        for place in self._places:
            while place and len(taken) < num:
                taken.append(place.popitem(last=False)[1])
        return taken

    def put_back(self, taken: Iterable[BlockOffer]) -> None:
        """Return offers from `take` to the front of their kind, unless they have been offered again since."""
        for offer in reversed(list(taken)):
            block_hash = offer.key.block_hash
            if not any(block_hash in place for place in self._places):
                place = self._pinned if block_hash in self._kept else self._used
                place[block_hash] = offer
                place.move_to_end(block_hash, last=False)

    def trim_to_newest(self, num_left: int) -> int:
        """Drop the oldest unpinned offers until `num_left` of them remain; return the number dropped."""
        places = (self._used, self._rest)
        return self._drop(sum(map(len, places)) - num_left, places)

    def _drop(self, num: int, places: tuple[_Offers, ...]) -> int:
        """Drop up to `num`, the lowest priority first."""
        left = num
        for place in reversed(places):
            while place and left > 0:
                place.popitem(last=False)
                left -= 1
        return max(0, num) - max(0, left)


class _Touch(NamedTuple):
    block_hashes: Sequence[BlockHash]


class _Keep(NamedTuple):
    block_hashes: frozenset[BlockHash]


class _Forget(NamedTuple):
    order: int
    block_hashes: Sequence[BlockHash] | None  # None: all blocks


class BlockWriter:
    """The thread's body and its counters, which other threads may read."""

    def __init__(self, catalog: StorageTier, block_bytes: int, clock: Callable[[], float]) -> None:
        self.source: BlockSource | None = None  # nothing is written before it is set
        self.health = SideHealth("writing")
        self.folder_health = SideHealth("looking for other processes' blocks", max_errors=3)
        self.written_blocks = 0
        self.evicted_blocks = 0
        self.bytes_per_s = 0.0
        self.num_settled = 0  # the last order to forget that was executed
        self._lost: dict[str, int] = dict.fromkeys(LOST, 0)
        self._num_offered = 0  # put into the queue, by the engine's thread
        self._num_read = 0  # of these, taken out of it
        self._num_writing = 0
        self._num_refused = 0  # offers while the queue was full; the engine's thread counts them
        self._catalog, self._block_bytes, self._clock = catalog, block_bytes, clock
        self._run_blocks = max(1, min(MAX_RUN_BLOCKS, RUN_BYTES // block_bytes))
        self._run = allocate_page_aligned(self._run_blocks * block_bytes)
        self._inbox: deque[BlockOffer | _Touch | _Keep | _Forget] = deque()
        self._num_orders = 0  # to forget; the engine's thread counts them
        self._pending = PendingOffers(MAX_PENDING)
        self._kept: frozenset[BlockHash] = frozenset()
        self._forgets: deque[_Forget] = deque()
        self._look_at = float("-inf")
        self._renew_at = float("-inf")
        self._busy_since = float("inf")
        self._oldest_at = float("inf")  # when the first block in line was offered, as of this round
        self._turn = threading.Lock()  # of a round
        self._wake = threading.Event()
        self._end_at: float | None = None

    # Called by the engine's thread; never blocks. ----------------------------------------------------------------

    def offer(self, offer: BlockOffer) -> None:
        """Queue a block to write."""
        if len(self._inbox) < MAX_PENDING:
            self._num_offered += 1
            self._inbox.append(offer)
        else:
            self._num_refused += 1

    def mark_used(self, block_hashes: Sequence[BlockHash]) -> None:
        """Mark blocks as used. From any thread."""
        if len(self._inbox) < MAX_PENDING:
            self._inbox.append(_Touch(block_hashes))

    def set_pinned_blocks(self, block_hashes: frozenset[BlockHash]) -> None:
        """Set the pinned blocks: these, and only these."""
        self._inbox.append(_Keep(block_hashes))

    def queue_discard(self, block_hashes: Sequence[BlockHash] | None) -> int:
        """Order to drop these, or all; executed once `num_settled` has reached the returned number."""
        self._num_orders += 1
        self._inbox.append(_Forget(self._num_orders, block_hashes))
        return self._num_orders

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be written or are being written."""
        return self._num_offered - self._num_read + len(self._pending) + self._num_writing

    def oldest_pending_seconds(self, now: float) -> float:
        """Return how long the first block in line has waited; 0 if none waits."""
        oldest_at = self._oldest_at
        with suppress(IndexError, AttributeError):  # nothing new, or no offer
            oldest_at = min(oldest_at, self._inbox[0].offered_at)  # pyrefly: ignore[missing-attribute]
        return max(0.0, now - oldest_at) if self.num_pending else 0.0

    def num_lost_by_reason(self) -> dict[str, int]:
        """Return the blocks that were offered and not written, by reason."""
        return {**self._lost, "overload": self._lost["overload"] + self._num_refused}

    @property
    def num_times_degraded(self) -> int:
        """The number of times that either side stopped working."""
        return self.health.num_degraded + self.folder_health.num_degraded

    def current_fault_descriptions(self, now: float) -> list[str]:
        """Return descriptions of the current faults."""
        found = [health.failure_text for health in (self.health, self.folder_health) if health.failure_text]
        if now - self._busy_since > OVERDUE_SECONDS:
            found.append(f"{self.health.side}: no answer for {now - self._busy_since:.0f} s")
        return found

    def stop(self, seconds: float) -> None:
        """Stop after pending blocks have been written, or after `seconds`."""
        self._end_at = self._clock() + seconds
        self._wake.set()

    # The thread. ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run rounds until `stop`."""
        _lower_priority()
        while self._end_at is None:
            if not self.round():
                self._wake.wait(ROUND_SECONDS)
        while self.round() and self._clock() < self._end_at:
            pass
        self._lost["closing"] += self._pending.clear()

    def run_overdue_rounds(self) -> None:
        """Run rounds at the priority of the caller while a block has waited for LATE_SECONDS, until `stop`."""
        while self._end_at is None:
            is_late = self.oldest_pending_seconds(self._clock()) >= LATE_SECONDS and not self.health.reason
            if not is_late or not self.round():
                self._wake.wait(LATE_SECONDS / 2)

    def round(self) -> bool:
        """Process the queue, refresh the folder if due, drop distrusted blocks, and write one run.

        Returns whether there is more to write at once.
        """
        with self._turn:
            return self._round()

    def _round(self) -> bool:
        self._busy_since = now = self._clock()
        try:
            self._read_inbox()
            self._oldest_at = self._pending.oldest_offer_time()
            self.refresh_if_due()
            self._renew()
            if self.health.may_attempt(now):
                with self._guard(self.health):
                    self._forget()
                    return self._write()
            self._lost["degraded"] += self._pending.trim_to_newest(self._run_blocks)  # some stay, for the next attempt
            return False
        finally:
            self._num_writing = 0
            self._oldest_at = self._pending.oldest_offer_time()
            self._busy_since = float("inf")

    def refresh_if_due(self) -> None:
        """Index what other processes wrote, if due. Called once before the thread starts."""
        now = self._clock()
        if now >= self._look_at and self.folder_health.may_attempt(now):
            with self._guard(self.folder_health):
                self._catalog.refresh_from_other_writers()
                self.folder_health.record_success(now)
            self._look_at = self._clock() + ROUND_SECONDS

    def _renew(self) -> None:
        """Mark pinned blocks as recent, so that other processes, which do not see the pins, evict them last."""
        now = self._clock()
        if self._kept and now >= self._renew_at:
            self._renew_at = now + RENEW_SECONDS
            self._catalog.mark_used(self._kept)

    def _read_inbox(self) -> None:
        used: list[BlockHash] = []
        for _ in range(len(self._inbox)):
            match self._inbox.popleft():
                case BlockOffer() as offer:
                    if self._forgets or not self._catalog.contains(offer.key.block_hash):
                        self._lost["overload"] += self._pending.add(offer)
                    self._num_read += 1
                case _Touch(block_hashes):
                    self._pending.mark_used(block_hashes)
                    used += block_hashes
                case _Keep(block_hashes):
                    self._kept, self._renew_at = block_hashes, float("-inf")
                    self._pending.set_pinned_blocks(block_hashes)
                case _Forget(_, block_hashes) as forget:
                    self._pending.clear() if block_hashes is None else self._pending.remove(block_hashes)
                    self._forgets.append(forget)
        if used:
            with suppress(OSError):  # to other processes they look slightly older
                self._catalog.mark_used(used)

    def _forget(self) -> None:
        """Execute the orders to forget. Raises OSError; then the rest waits, and so do all writes."""
        while self._forgets:
            order, block_hashes = self._forgets[0]
            self._catalog.clear() if block_hashes is None else self._catalog.discard_blocks(block_hashes)
            self._forgets.popleft()
            self.num_settled = order

    def _write(self) -> bool:
        """Write one run; return whether there is more. Raises OSError, and then keeps the unwritten blocks."""
        source = self.source
        if source is None or not self._pending:
            if self.health.reason:  # no block to try: check whether there would be space
                self._catalog.make_room(self._block_bytes, kept=self._kept)
                self.health.record_success(self._clock())
            return False
        self._num_writing = min(self._run_blocks, len(self._pending))
        taken = self._pending.take(self._run_blocks)
        blocks: list[tuple[BlockKey, Data]] = []
        for offer in taken:
            data = source(offer.block, offer.version)
            if data is None:
                self._lost["overwritten"] += 1
            else:  # copied at once: allocating and freeing memory for each run costs more in page faults
                place = self._run[len(blocks) * self._block_bytes :][: self._block_bytes]
                place[:] = data
                blocks.append((offer.key, place))
        if blocks:
            try:
                self._append(blocks)
            except OSError:
                unwritten = {key.block_hash for key, _ in blocks if not self._catalog.contains(key.block_hash)}
                self._pending.put_back(offer for offer in taken if offer.key.block_hash in unwritten)
                raise
        return bool(self._pending)

    def _append(self, blocks: Sequence[tuple[BlockKey, Data]]) -> None:
        began, num_bytes = self._clock(), len(blocks) * self._block_bytes
        self.evicted_blocks += self._catalog.make_room(num_bytes, kept=self._kept)
        self.written_blocks += self._catalog.write_new_blocks(blocks)
        now = self._clock()
        rate = num_bytes / max(now - began, 1e-9)
        self.bytes_per_s = KEEP_RATE * self.bytes_per_s + (1 - KEEP_RATE) * rate if self.bytes_per_s else rate
        self.health.record_success(now)

    @contextmanager
    def _guard(self, health: SideHealth) -> Generator[None]:
        """Treat any error as one of this side: even an internal error must not end the thread."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError):
                write_stderr_line(traceback.format_exc())
            health.record_failure(describe_error(error), self._clock())


def _lower_priority() -> None:
    """Lower the priority of this thread below the compute threads, where the system supports it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
