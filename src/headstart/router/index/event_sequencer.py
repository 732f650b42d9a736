"""Feed: the numbered batches of one publisher in their order, whatever order they come in. Sockets are the caller's.

A gap asks for a replay from its first number on; what came behind it waits meanwhile. Batches are bytes that nobody
reads here. A publisher that started again is known by a live number that does not grow, or by another batch under a
number that was taken already: a batch holds the time it was made. What the old one told is void then.
"""

from typing import NamedTuple
from zlib import crc32

MAX_WAITING = 10_000  # batches behind a gap; what publishers keep for replay
MAX_WAITING_BYTES = 2**27  # of them; what was missing is given up then, too
MAX_SEEN = 10_000  # batches that are known again


class Due(NamedTuple):
    """What to take in now, in this order."""

    void: bool  # all that was told before is not so any more
    batches: list[bytes]


class EventSequencer:
    """Batches in, batches out. `replays`: what was published before we came can be had, so it is waited for."""

    def __init__(self, *, replays: bool = False) -> None:
        self.num_gaps = 0
        self.num_lost = 0  # batches given up
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
        """The number from which on batches are missing; None: none is."""
        return self._next if self._waiting else None

    @property
    def position(self) -> int:
        """The number that is next in order; 0 before the first one. A replay is best asked from the one before it:
        that one tells whether the publisher is still the same."""
        return self._next or 0

    def offer(self, number: int, batch: bytes, *, replayed: bool = False) -> Due:
        """Takes in a batch; what is due now."""
        checksum = crc32(batch)
        is_old = not replayed and number <= self._last_live
        is_another = is_old or self._seen.get(number, checksum) != checksum
        if is_another:
            self.restarted()
            if replayed:  # of this replay nothing is kept: the caller has to ask for all there is
                return Due(True, [])
        self._seen[number] = checksum
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if not replayed:
            self._last_live = number
        due = self._in_order(number, batch)
        return Due(True, due.batches) if is_another else due

    def give_up(self) -> Due:
        """Goes on behind the gap, with an empty index: what was lost cannot be had any more."""
        if not self._waiting or self._next is None:
            return Due(False, [])
        first = min(self._waiting)
        if self._has_taken:  # else it was before our time
            self.num_lost += first - self._next
        self._next = first
        return Due(True, self._take())

    def restarted(self) -> Due:
        """Starts anew: the publisher is another one, since it does not have what was taken last."""
        self.num_restarts += 1
        return self.reset()

    def reset(self) -> Due:
        """Starts anew: nobody knows whether the publisher is still the same."""
        self._next, self._has_taken, self._last_live = 0 if self._replays else None, False, -1
        self._seen.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        return Due(True, [])

    def _in_order(self, number: int, batch: bytes) -> Due:
        void = False
        if self._next is None:
            void = number > 0
            self._next = number
        if number < self._next:
            return Due(False, [])
        if number > self._next and not self._waiting and self._has_taken:
            self.num_gaps += 1
        self._waiting_bytes += len(batch) - len(self._waiting.get(number, b""))
        self._waiting[number] = batch
        due = Due(void, self._take())
        while len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            due = self.give_up()  # empties the index: what was due before is of no use
        return due

    def _take(self) -> list[bytes]:
        """All batches that have nothing missing before them."""
        assert self._next is not None
        due: list[bytes] = []
        while (batch := self._waiting.pop(self._next, None)) is not None:
            due.append(batch)
            self._waiting_bytes -= len(batch)
            self._next += 1
        self._has_taken |= bool(due)
        return due
