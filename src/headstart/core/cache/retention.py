"""Retentions: the retention hints of blocks. Blocks without hints cost nothing.

A block has the highest priority of its users. A priority with a time limit (`ttl`) falls back to the highest of the
others when the latest such limit is over, and to the default if there are no others. So the head of a chain, which
every user of its tail uses too, never has a lower priority than the tail.
"""

from heapq import heapify, heappop, heappush

from headstart.core.cache.eviction import SEEN
from headstart.core.request import DEFAULT_RETENTION, RetentionHint

DEFAULT_PRIORITY = DEFAULT_RETENTION.priority


class _Hint:
    """The hints for one block."""

    __slots__ = ("base", "deadline", "last_use", "priority", "queued")

    def __init__(self, base: int) -> None:
        self.base = base  # without a time limit; -1: none yet
        self.priority = -1  # until `deadline`; -1: none
        self.deadline = 0.0
        self.last_use = 0  # in the order of all uses
        self.queued = False

    @property
    def block_priority(self) -> int:
        return max(self.base, self.priority)


class RetentionHints:
    """The hints of all blocks whose priority differs from the default."""

    def __init__(self, marks: bytearray) -> None:
        self._marks = marks
        self._hints: dict[int, _Hint] = {}
        self._due: list[tuple[float, int, int, _Hint]] = []  # heap of (deadline, use, block, hint); some are void
        self._count = 0  # of uses with a hint

    def __len__(self) -> int:
        return len(self._hints)

    def block_priority(self, block: int) -> int:
        """Return the priority of a block, as of the last `take_expired`."""
        hint = self._hints.get(block)
        return DEFAULT_PRIORITY if hint is None else hint.block_priority

    def record_hint(self, block: int, retention: RetentionHint, now: float) -> None:
        """Record the hint of a request that releases the block. Call only while the block is not idle."""
        hint, marks = self._hints.get(block), self._marks
        if retention == DEFAULT_RETENTION and hint is None:
            marks[block] |= SEEN
            return
        if hint is None:
            hint = self._hints[block] = _Hint(DEFAULT_PRIORITY if marks[block] & SEEN else -1)
        self._count += 1
        hint.last_use = self._count
        priority, ttl = retention
        hint.base = max(hint.base, min(priority, DEFAULT_PRIORITY) if ttl > 0 else priority)
        if ttl > 0 and priority > DEFAULT_PRIORITY:
            hint.priority = max(hint.priority, priority)
            hint.deadline = max(hint.deadline, now + ttl)
            if not hint.queued:
                self._enqueue(block, hint)
        elif hint.base == DEFAULT_PRIORITY and hint.priority < 0:
            marks[block] |= SEEN
            del self._hints[block]

    def drop_block_hint(self, block: int) -> None:
        """Drop the hints of a block that lost its content."""
        self._hints.pop(block, None)

    def take_expired(self, now: float) -> list[tuple[int, int]]:
        """Return blocks whose time limit has passed, each with the priority it had; in the order of their last use."""
        found: list[tuple[int, int, int]] = []
        while self._due and self._due[0][0] <= now:
            _, _, block, hint = heappop(self._due)
            hint.queued = False
            if self._hints.get(block) is not hint:
                continue
            if hint.deadline > now:  # it has been used again since
                self._enqueue(block, hint)
                continue
            if hint.priority > hint.base:
                found.append((hint.last_use, block, hint.priority))
            hint.priority = -1
            if hint.base == DEFAULT_PRIORITY:
                self._marks[block] |= SEEN
                del self._hints[block]
        return [(block, priority) for _, block, priority in sorted(found)]

    def _enqueue(self, block: int, hint: _Hint) -> None:
        """Add one entry per hint; entries of dropped hints are removed when they are the majority."""
        if len(self._due) > 2 * len(self._hints) + 64:
            self._due = [entry for entry in self._due if self._hints.get(entry[2]) is entry[3]]
            heapify(self._due)
        hint.queued = True
        heappush(self._due, (hint.deadline, hint.last_use, block, hint))
