"""Who is next: one key decides the order of waiting, of planning, and (from the other end) of giving way."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from headstart.core.request import Sequence

Key = Callable[[Sequence], tuple[float, ...]]


def fcfs(seq: Sequence) -> tuple[float, ...]:
    """First come, first served. A preempted sequence keeps its place, so it resumes before newcomers."""
    return (seq.order,)


def priority(seq: Sequence) -> tuple[float, ...]:
    """Smaller `priority` first, then the earlier arrival."""
    return (seq.request.priority, seq.order)


POLICIES: dict[str, Key] = {"fcfs": fcfs, "priority": priority}


class OrderedSequences:
    """Sequences in the order of a key; keys are unique because arrival order is part of each."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def add(self, seq: Sequence) -> None:
        """Puts it in its place; at the end, as most are, in O(1)."""
        if self._items and self._key(self._items[-1]) > self._key(seq):
            insort(self._items, seq, key=self._key)
        else:
            self._items.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes it out; asserts that it was there."""
        index = bisect_left(self._items, self._key(seq), key=self._key)
        assert index < len(self._items) and self._items[index] is seq, f"{seq.request_id} is not in this queue"
        del self._items[index]
