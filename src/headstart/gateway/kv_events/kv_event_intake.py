"""EventIntake: takes the batches of one publisher into the told contents of its replica, in slices.

After SLICE_SECONDS of work the event loop has a turn; what `match` sees then is a prefix of the events: a state that
the engine's cache was in. A batch or a removal that cannot be read empties the index as a gap without replay does: a
replay would bring the same bytes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from headstart.core.cache.events import AllBlocksCleared, BlockStored, Event
from headstart.gateway.kv_events.kv_event_decoding import EventDecoder
from headstart.gateway.kv_events.kv_event_trust import PublisherTrust
from headstart.router.index.kv_event_index import FREED, KVEventIndex

SLICE_SECONDS = 0.002  # of taking in events, then others have their turn

Reconfigured = Callable[[int], KVEventIndex]


class EventIntake:
    """The contents that are kept true, and the faults of what was taken in.

    `say` writes a line for people. `reconfigured` is told the block size where an empty replica turns out to have
    another one than its contents, and gives the contents to go on with; without it such events are counted and left
    out.
    """

    def __init__(
        self,
        contents: KVEventIndex,
        kind: str,
        trust: PublisherTrust,
        say: Callable[[str], None],
        reconfigured: Reconfigured | None = None,
    ) -> None:
        self.contents = contents
        self._decoder = EventDecoder(kind)
        self._trust = trust
        self._say = say
        self._reconfigured = reconfigured
        self._past = dict.fromkeys(contents.counts, 0)  # of contents that were replaced
        self._num_batches = 0
        self._num_voids = 0
        self._num_swaps = 0  # contents that others put in place
        self._num_unknown_removals = 0  # noticed so far
        self._num_overflows = 0  # of these contents, noticed so far
        self.is_taking = False
        self._turn = 0.0  # when others had theirs; seconds, time.perf_counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters of batches and events: they only grow."""
        told = {key: value + self._past[key] for key, value in self.contents.counts.items()}
        return {"batches": self._num_batches, "voids": self._num_voids, **self._decoder.counts, **told}

    def swap(self, contents: KVEventIndex) -> None:
        """Go on with other contents; a batch under way is left, since it belongs to those before."""
        self._replace(contents)
        self._num_swaps += 1
        self._decoder.cleared()

    def void(self) -> None:
        """Forget everything that was told."""
        self._num_voids += 1
        self.contents.clear()
        self._decoder.cleared()

    def refuse(self, reason: str) -> None:
        """Count a message that is no batch. Raises UntrustedPublisherError."""
        self._decoder.counts["undecodable"] += 1
        self._strike(reason)

    async def take(self, batches: Iterable[bytes]) -> None:
        """Take in batches. Raises UntrustedPublisherError."""
        self.is_taking = True
        try:
            await self._take_all(batches)
        finally:
            self.is_taking = False

    async def _take_all(self, batches: Iterable[bytes]) -> None:
        swaps = self._num_swaps
        for payload in batches:
            self._num_batches += 1
            raws = self._decoder.split(payload)
            self._look_for_faults()
            for raw in raws:
                for event in self._decoder.read(raw):
                    self._adapt(event)
                    self.contents.apply((event,))
                    await self.pause()
                    if swaps != self._num_swaps:
                        return
                self._look_for_faults()
                await self.pause()
                if swaps != self._num_swaps:
                    return
        while self.contents.free(FREED):  # what was cleared: the rest goes with what comes next
            await self.pause()

    async def pause(self) -> None:
        """Give others their turn if they have waited for SLICE_SECONDS."""
        if time.perf_counter() - self._turn > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()

    def _look_for_faults(self) -> None:
        """Empties the index if removals are unknown, and counts strikes. Raises UntrustedPublisherError."""
        if self._decoder.num_unknown_removals != self._num_unknown_removals:
            self._num_unknown_removals = self._decoder.num_unknown_removals
            self.void()
            self._strike("it sent what cannot be read, and the index starts anew")
        if self.contents.counts["over_capacity"] != self._num_overflows:
            self._num_overflows = self.contents.counts["over_capacity"]
            self._strike(f"it told of more than {self.contents.max_blocks} blocks, and the index starts anew")

    def _strike(self, reason: str) -> None:
        if self._trust.strike(reason, time.monotonic()):
            self._say(reason)

    def _adapt(self, event: Event) -> None:
        """Goes on with contents of another block size where the replica has one and nothing is known of it yet."""
        if isinstance(event, AllBlocksCleared):
            self._decoder.cleared()
        size = event.block_size if isinstance(event, BlockStored) and event.parent_block_hash is None else 0
        if self._reconfigured is None or size in (0, self.contents.block_size) or len(self.contents):
            return
        self._say(f"its blocks have {size} tokens, not {self.contents.block_size}")
        self._replace(self._reconfigured(size))

    def _replace(self, contents: KVEventIndex) -> None:
        for key, value in self.contents.counts.items():
            self._past[key] += value
        self.contents, self._num_overflows = contents, contents.counts["over_capacity"]
