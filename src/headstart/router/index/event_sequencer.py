"""EventSequencer: orders the numbered batches of one publisher by number. Sockets are the caller's.

A gap requires a replay from its first number on; later batches wait meanwhile. Batches are opaque bytes here. A restart
of the publisher is detected by a live number that does not grow, or by a different batch under a known number: a batch
contains its time of creation. The state from its earlier events is void then.
"""

from typing import NamedTuple
from zlib import crc32

MAX_WAITING = 10_000  # batches after a gap; the number that publishers keep for replay
MAX_WAITING_BYTES = 2**27  # of those; beyond it, too, the gap is given up
MAX_SEEN = 10_000  # checksums of batches that are remembered


class DueBatches(NamedTuple):
    """The batches to apply now, in this order."""

    void: bool  # all earlier batches are void
    batches: list[bytes]


class EventSequencer:
    """The sequencer of one publisher. `replays`: earlier batches can be replayed, so they are awaited."""

    def __init__(self, *, replays: bool = False) -> None:
        self.num_gaps = 0
        self.num_lost = 0  # batches skipped
        self.num_restarts = 0
        self._replays = replays
        self._next: int | None = 0 if replays else None  # None: the first batch may have any number
        self._has_taken = False  # any batch of this publisher
        self._last_live = -1
        self._seen: dict[int, int] = {}  # checksums of the last batches, live or replayed
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0

    @property
    def replay_from(self) -> int | None:
        """First missing number; None: no gap."""
        return self._next if self._waiting else None

    @property
    def next_batch_number(self) -> int:
        """The next expected number; 0 before the first.

        A replay is best requested from the number before it: that batch shows whether the publisher is still the same.
        """
        return self._next or 0

    def offer(self, number: int, batch: bytes, *, replayed: bool = False) -> DueBatches:
        """Add a batch; return the batches that are due now."""
        checksum = crc32(batch)
        is_old = not replayed and number <= self._last_live
        is_another = is_old or self._seen.get(number, checksum) != checksum
        if is_another:
            self.reset_for_new_publisher()
            if replayed:  # this replay is void: the caller has to request all batches
                return DueBatches(True, [])
        self._seen[number] = checksum
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if not replayed:
            self._last_live = number
        due = self._in_order(number, batch)
        return DueBatches(True, due.batches) if is_another else due

    def give_up(self) -> DueBatches:
        """Continue after the gap, with an empty index: the missing batches are not available."""
        if not self._waiting or self._next is None:
            return DueBatches(False, [])
        first = min(self._waiting)
        if self._has_taken:  # else it was before the connection
            self.num_lost += first - self._next
        self._next = first
        return DueBatches(True, self._take())

    def reset_for_new_publisher(self) -> DueBatches:
        """Reset: the publisher is another one, since it lacks the batch last applied."""
        self.num_restarts += 1
        return self.reset()

    def reset(self) -> DueBatches:
        """Reset: the publisher may be another one."""
        self._next, self._has_taken, self._last_live = 0 if self._replays else None, False, -1
        self._seen.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        return DueBatches(True, [])

    def _in_order(self, number: int, batch: bytes) -> DueBatches:
        void = False
        if self._next is None:
            void = number > 0
            self._next = number
        if number < self._next:
            return DueBatches(False, [])
        if number > self._next and not self._waiting and self._has_taken:
            self.num_gaps += 1
        self._waiting_bytes += len(batch) - len(self._waiting.get(number, b""))
        self._waiting[number] = batch
        due = DueBatches(void, self._take())
        while len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            due = self.give_up()  # empties the index, so earlier due batches are void
        return due

    def _take(self) -> list[bytes]:
        """Return all batches without a gap before them."""
        assert self._next is not None
        due: list[bytes] = []
        while (batch := self._waiting.pop(self._next, None)) is not None:
            due.append(batch)
            self._waiting_bytes -= len(batch)
            self._next += 1
        self._has_taken |= bool(due)
        return due
