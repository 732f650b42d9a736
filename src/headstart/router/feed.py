"""Feed: the numbered batches of one publisher in their order, whatever order they come in. Sockets are the caller's.

A gap asks for a replay from its first number on; what came behind it waits meanwhile. Live numbers only grow: one that
does not is a publisher that started again, and what it told before is void.
"""

from headstart.core.events import AllBlocksCleared, Event

MAX_WAITING = 10_000  # batches behind a gap; what publishers keep for replay


class Feed:
    """Batches in, events out. `replay_from` is the number from which on batches are missing; None: none is."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self.num_lost = 0  # batches given up
        self.num_restarts = 0
        self._next: int | None = None  # the first batch may have any number: we may have come late
        self._last_live = -1
        self._waiting: dict[int, list[Event]] = {}

    @property
    def replay_from(self) -> int | None:
        return self._next if self._waiting else None

    def offer(self, number: int, events: list[Event], *, replayed: bool = False) -> list[Event]:
        """Takes in a batch; the events that are due now, in order."""
        if not replayed:
            if number <= self._last_live:
                self.num_restarts += 1
                self._waiting.clear()
                self._next = None
            self._last_live = number
        if self._next is None:
            late = number > 0 or self.num_restarts > 0
            self._next = number
            return [*([AllBlocksCleared()] if late else []), *self._take(number, events)]
        if number < self._next:
            return []
        if number > self._next and not self._waiting:
            self.num_gaps += 1
        due = self._take(number, events)
        return due if len(self._waiting) <= MAX_WAITING else due + self.give_up()

    def give_up(self) -> list[Event]:
        """Goes on behind the gap, with an empty index: what was lost cannot be had any more."""
        if not self._waiting or self._next is None:
            return []
        first = min(self._waiting)
        self.num_lost += first - self._next
        self._next = first
        return [AllBlocksCleared(), *self._take(first, self._waiting.pop(first))]

    def _take(self, number: int, events: list[Event]) -> list[Event]:
        """All batches that are due once this one is there."""
        self._waiting[number] = events
        due: list[Event] = []
        assert self._next is not None
        while self._next in self._waiting:
            due += self._waiting.pop(self._next)
            self._next += 1
        return due
