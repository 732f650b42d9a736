"""KVEventApplier: applies the batches of one publisher to the KV event index of its replica, in slices.

After SLICE_SECONDS of work other tasks of the event loop run; `match` then sees a prefix of the events: a state that
the engine's cache was in. A batch or a removal that cannot be read clears the index, as a gap without replay does: a
replay would bring the same bytes.

PublisherAbuseRecord: when a publisher of KV events is suspended, and for how long.

A strike is a batch that cannot be read, a removal that cannot be read, or an index that exceeded its capacity. Several
strikes in a short time, or more bytes than any engine publishes, suspend the publisher; a suspension soon after another
one is twice as long. Time is an argument: seconds, of any steady clock.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from headstart.core.cache.events import AllBlocksCleared, BlockStored, Event
from headstart.gateway.kv_events.kv_event_decoding import KVEventDecoder
from headstart.router.index.kv_event_index import FREED, ReplicaKVEventIndex

SLICE_SECONDS = 0.002  # of applying events before other tasks run

Reconfigured = Callable[[int], ReplicaKVEventIndex]
MAX_STRIKES = 8  # within STRIKE_SECONDS
STRIKE_SECONDS = 60.0
FIRST_SUSPENSION = 5.0  # seconds
MAX_SUSPENSION = 300.0
BURST_BYTES = 2**30  # a replay of 10,000 batches of a full prefill step is 600 MB
BYTES_PER_SECOND = 2**26  # an engine that prefills 100,000 tokens a second publishes 1 MB


class UntrustedPublisherError(Exception):
    """The publisher is suspended."""


class PublisherAbuseRecord:
    """The strikes and bytes of one publisher."""

    def __init__(self) -> None:
        self._strikes: deque[float] = deque(maxlen=MAX_STRIKES)
        self._bytes = float(BURST_BYTES)  # that may still arrive at once
        self._refilled_at = 0.0
        self._suspended_at = -MAX_SUSPENSION
        self._suspension = 0.0

    def count_strike(self, reason: str, now: float) -> bool:
        """Count a strike; return whether it is the first in STRIKE_SECONDS and is logged.

        Raises UntrustedPublisherError if there were too many.
        """
        is_first = not self._strikes or now - self._strikes[-1] > STRIKE_SECONDS
        self._strikes.append(now)
        if len(self._strikes) == MAX_STRIKES and now - self._strikes[0] <= STRIKE_SECONDS:
            raise UntrustedPublisherError(f"{reason}, and {MAX_STRIKES} such faults within {STRIKE_SECONDS:.0f} s")
        return is_first

    def enforce_byte_rate(self, num_bytes: int, now: float) -> None:
        """Count bytes. Raises UntrustedPublisherError if there were too many."""
        self._bytes += (now - self._refilled_at) * BYTES_PER_SECOND
        self._bytes = min(self._bytes, BURST_BYTES) - num_bytes
        self._refilled_at = now
        if self._bytes < 0:
            raise UntrustedPublisherError(
                f"it sent more than {BURST_BYTES >> 20} MiB at more than {BYTES_PER_SECOND >> 20} MiB a second"
            )

    def suspend_publisher(self, now: float) -> float:
        """Reset strikes and bytes, and return for how many seconds the publisher is suspended."""
        is_again = now - self._suspended_at <= 2 * self._suspension + STRIKE_SECONDS
        self._suspension = min(2 * self._suspension, MAX_SUSPENSION) if is_again else FIRST_SUSPENSION
        self._suspension = max(self._suspension, FIRST_SUSPENSION)
        self._suspended_at = now
        self._strikes.clear()
        self._bytes = BURST_BYTES
        return self._suspension


class KVEventApplier:
    """The index that is kept current, and the faults in the applied batches.

    `say` writes a log line. `reconfigured` is called with the block size if a replica with an empty cache has another
    one than its index, and returns the index to continue with; without it such events are counted and ignored.
    """

    def __init__(
        self,
        index: ReplicaKVEventIndex,
        kind: str,
        trust: PublisherAbuseRecord,
        say: Callable[[str], None],
        reconfigured: Reconfigured | None = None,
    ) -> None:
        self.index = index
        self._decoder = KVEventDecoder(kind)
        self._trust = trust
        self._say = say
        self._reconfigured = reconfigured
        self._past = dict.fromkeys(index.counts, 0)  # counts of indexes that were replaced
        self._num_batches = 0
        self._num_voids = 0
        self._num_swaps = 0  # indexes set by `replace_index`
        self._num_unknown_removals = 0  # handled so far
        self._num_overflows = 0  # of this index, handled so far
        self.is_applying = False
        self._turn = 0.0  # when other tasks last ran; seconds, time.perf_counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters of batches and events: they only grow."""
        of_index = {key: value + self._past[key] for key, value in self.index.counts.items()}
        return {"batches": self._num_batches, "voids": self._num_voids, **self._decoder.counts, **of_index}

    def replace_index(self, index: ReplicaKVEventIndex) -> None:
        """Continue with another index; a batch in progress is abandoned, since it belongs to the previous one."""
        self._replace(index)
        self._num_swaps += 1
        self._decoder.reset()

    def clear_index(self) -> None:
        """Clear the index."""
        self._num_voids += 1
        self.index.clear()
        self._decoder.reset()

    def strike_for_invalid_message(self, reason: str) -> None:
        """Count a message that is no batch. Raises UntrustedPublisherError."""
        self._decoder.counts["undecodable"] += 1
        self._strike(reason)

    async def take(self, batches: Iterable[bytes]) -> None:
        """Apply batches. Raises UntrustedPublisherError."""
        self.is_applying = True
        try:
            await self._take_all(batches)
        finally:
            self.is_applying = False

    async def _take_all(self, batches: Iterable[bytes]) -> None:
        swaps = self._num_swaps
        for payload in batches:
            self._num_batches += 1
            raws = self._decoder.split_batch(payload)
            self._look_for_faults()
            for raw in raws:
                for event in self._decoder.decode_event(raw):
                    self._adapt(event)
                    self.index.apply((event,))
                    await self.yield_if_due()
                    if swaps != self._num_swaps:
                        return
                self._look_for_faults()
                await self.yield_if_due()
                if swaps != self._num_swaps:
                    return
        while self.index.free_discarded_entries(FREED):  # free what was cleared; later batches free the rest
            await self.yield_if_due()

    async def yield_if_due(self) -> None:
        """Let other tasks run if they have waited for SLICE_SECONDS."""
        if time.perf_counter() - self._turn > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()

    def _look_for_faults(self) -> None:
        """Clear the index after unknown removals, and count strikes. Raises UntrustedPublisherError."""
        if self._decoder.num_unknown_removals != self._num_unknown_removals:
            self._num_unknown_removals = self._decoder.num_unknown_removals
            self.clear_index()
            self._strike("it sent what cannot be read, and the index starts anew")
        if self.index.counts["over_capacity"] != self._num_overflows:
            self._num_overflows = self.index.counts["over_capacity"]
            self._strike(f"it reported more than {self.index.max_blocks} blocks, and the index starts anew")

    def _strike(self, reason: str) -> None:
        if self._trust.count_strike(reason, time.monotonic()):
            self._say(reason)

    def _adapt(self, event: Event) -> None:
        """Continue with an index of the replica's block size if the current one differs and is empty."""
        if isinstance(event, AllBlocksCleared):
            self._decoder.reset()
        size = event.block_size if isinstance(event, BlockStored) and event.parent_block_hash is None else 0
        if self._reconfigured is None or size in (0, self.index.block_size) or len(self.index):
            return
        self._say(f"its blocks have {size} tokens, not {self.index.block_size}")
        self._replace(self._reconfigured(size))

    def _replace(self, index: ReplicaKVEventIndex) -> None:
        for key, value in self.index.counts.items():
            self._past[key] += value
        self.index, self._num_overflows = index, index.counts["over_capacity"]
