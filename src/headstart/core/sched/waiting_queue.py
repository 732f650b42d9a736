"""Who is next: the order of running and giving way, and the queue of those waiting.

The queue is an index: sequences wait in groups that share the name of their first missing block, so publishing a block
touches only those concerned, and a group whose missing block is promised is passed over as one. A group's match may be
stale in one direction: after an eviction it claims more than there is, and is put right when its turn comes
(`regroup`); it never claims less, since published names are taken in before every step (`refresh`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.request import Sequence

Key = Callable[[Sequence], tuple[float, ...]]


def fcfs(seq: Sequence) -> tuple[float, ...]:
    """First come, first served. A preempted sequence keeps its place, so it resumes before newcomers."""
    return (seq.order,)


def priority(seq: Sequence) -> tuple[float, ...]:
    """Smaller `priority` first, then the earlier arrival."""
    return (seq.request.priority, seq.order)


def resumed_first(seq: Sequence) -> tuple[float, ...]:
    """By arrival, but those that ran before come first."""
    return (not seq.admitted, seq.order)


POLICIES: dict[str, Key] = {"fcfs": fcfs, "priority": priority, "lpm": fcfs}  # order of running sequences
WAITING: dict[str, Key] = {"fcfs": fcfs, "priority": priority, "lpm": resumed_first}


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


class Group:
    """Waiting sequences with the same first missing block, hence with the same `depth` of published blocks before it.

    `missing` is that block's name; where nothing full is missing, or nothing may be read, a name of the sequence's own.
    Sequences that are to be computed a second time (trust.py) are one group.
    """

    __slots__ = ("age", "common", "depth", "match", "members", "missing", "num_told", "wanted")

    def __init__(self, missing: BlockHash, depth: int, common: int, key: Key) -> None:
        self.missing = missing
        self.depth = depth
        self.members = OrderedSequences(key)
        self.common = common  # leading blocks that all members are known to have in common
        self.num_told = 0  # members when it was passed over last
        self.wanted: list[BlockHash] = []  # names asked to be kept for it
        self.age: tuple[float, ...] = ()  # its place in the two heaps; an entry with another place is void
        self.match: tuple[float, ...] = ()

    def __lt__(self, other: "Group") -> bool:
        return False  # entries of one place in a heap are of one group


Entry = tuple[tuple[float, ...], Group]
_RECOMPUTE = BlockHash(b"//recompute")  # no name of a block: those are digests, and a request's own begins with one /


class WaitingQueue:
    """The waiting sequences in the order of a policy.

    `lpm` is k-LPM: in every `k` admissions the first is the oldest waiting sequence, the other k - 1 are those with the
    longest match, so that one with r older ones ahead of it is admitted within k(r + 1) admissions (arXiv 2502.04677).
    Sequences that were preempted go before all others and are not counted.
    """

    def __init__(self, pool: BlockPool, policy: str, k: int, reads: Callable[[Sequence], bool]) -> None:
        self._pool = pool
        self._key = WAITING[policy]
        self._k = k if policy == "lpm" else 1
        self._reads = reads
        self._groups: dict[BlockHash, Group] = {}
        self._of: dict[str, Group] = {}  # request id -> its group
        self._by_age: list[Entry] = []
        self._by_match: list[Entry] = []
        self._passed: list[Group] = []  # until the end of this step
        self._published: list[BlockHash] = []
        self._num_admissions = 0
        pool.listeners.append(self)

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, by age."""
        return iter(sorted((seq for group in self._groups.values() for seq in group.members), key=self._key))

    def add(self, seq: Sequence) -> None:
        """Takes in a sequence that has no blocks."""
        self._insert(seq, self._depth(seq, 0))

    def remove(self, seq: Sequence) -> None:
        """Takes it out, admitted or aborted."""
        group = self._of.pop(seq.request_id)
        first = group.members[0] is seq
        group.members.remove(seq)
        if not group.members:
            self._dissolve(group)
        elif first:
            self._enqueue(group)

    def admitted(self, seq: Sequence) -> None:
        """Takes it out, and counts it towards the turns of k-LPM."""
        self.remove(seq)
        self._num_admissions += not seq.admitted

    def next(self) -> Group | None:
        """The group whose first member is next, those that were passed over left out."""
        oldest = self._num_admissions % self._k == 0
        heap = self._by_age if oldest else self._by_match
        while heap:
            place, group = heap[0]
            if place == (group.age if oldest else group.match):
                return group
            heappop(heap)
        return None

    def pass_over(self, group: Group, num_hit_tokens: int) -> None:
        """Leaves the group out until `end_of_turn`; this is no admission and costs nobody's turn.

        What its members find now is noted with them: whatever they take over beyond it they will have followed.
        """
        group.age = group.match = ()
        self._passed.append(group)
        if group.num_told != len(group.members):
            group.num_told = len(group.members)
            for seq in group.members:
                if seq.num_hit_tokens is None:
                    seq.num_hit_tokens = num_hit_tokens

    def end_of_turn(self) -> None:
        """Those that were passed over may be next again."""
        passed, self._passed = self._passed, []
        for group in passed:
            if self._groups.get(group.missing) is group:
                self._enqueue(group)

    def refresh(self) -> None:
        """Moves those whose first missing block has been published; called before each step is planned."""
        names, self._published = self._published, []
        for name in names:
            group = self._groups.get(name)
            if group is not None and self._pool.contains(name):
                self._advance(group)

    def regroup(self, seq: Sequence, depth: int) -> None:
        """Puts a sequence right whose match turned out to be only `depth` blocks long."""
        group = self._of[seq.request_id]
        assert depth < group.depth
        self.remove(seq)
        self._insert(seq, depth)

    def depth_of(self, seq: Sequence) -> int:
        """Published leading blocks it is listed with; at least what there is."""
        return self._of[seq.request_id].depth

    def published(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Told by the pool; taken in by `refresh`."""
        if name in self._groups:
            self._published.append(name)

    def removed(self, name: BlockHash) -> None:
        """Told by the pool; those concerned are put right when their turn comes."""

    def cleared(self) -> None:
        """Told by the pool: the whole index is empty."""

    # ------------------------------------------------------------------------------------------------------------

    def _depth(self, seq: Sequence, start: int) -> int:
        """Leading blocks that are published, `start` of which are known to be: by bisection, since names are chained
        and a published block's parents usually still are."""
        if not self._reads(seq):
            return 0
        names, contains = seq.block_hashes, self._pool.contains
        low, high = start, len(names)
        while low < high:
            middle = (low + high) // 2
            if contains(names[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _insert(self, seq: Sequence, depth: int) -> None:
        if depth < len(seq.block_hashes) and self._reads(seq):
            missing = seq.block_hashes[depth]
        elif seq.recompute is not None:
            missing = _RECOMPUTE  # all in one group: only one of them runs at a time
        else:
            missing = BlockHash(b"/" + seq.request_id.encode())
        group = self._groups.get(missing)
        if group is None:
            group = self._groups[missing] = Group(missing, depth, len(seq.block_hashes), self._key)
            group.members.add(seq)
            self._want(group)
            self._enqueue(group)
        else:
            group.common = _num_common(group.members[0], seq, depth, group.common)
            group.members.add(seq)
            if group.members[0] is seq and group not in self._passed:
                self._enqueue(group)
        self._of[seq.request_id] = group

    def _advance(self, group: Group) -> None:
        """The group's missing block is there: its members go on to what they miss now, most often together."""
        first, known = group.members[0], group.depth + 1
        depth = self._depth(first, known)
        del self._groups[group.missing]
        if depth < len(first.block_hashes) and first.block_hashes[depth] not in self._groups:
            missing, apart = first.block_hashes[depth], list[Sequence]()
            if depth >= group.common:  # equal names stand for equal prefixes: who misses the same block stays
                apart = [s for s in group.members if len(s.block_hashes) <= depth or s.block_hashes[depth] != missing]
                for seq in apart:
                    group.members.remove(seq)
                group.common = depth + 1
            group.missing, group.depth = missing, depth
            self._groups[missing] = group
            self._want(group)
            self._enqueue(group)
        else:
            apart = list(group.members)
            self._unwant(group)
            group.age = group.match = ()
        for seq in apart:
            self._insert(seq, self._depth(seq, known))

    def _enqueue(self, group: Group) -> None:
        """Gives the group its place by its first member."""
        first = group.members[0]
        age = self._key(first)
        if age != group.age:
            group.age = age
            heappush(self._by_age, (age, group))
        match = (not first.admitted, -group.depth, *age) if self._k > 1 else ()
        if match and match != group.match:
            group.match = match
            heappush(self._by_match, (match, group))
        if len(self._by_age) + len(self._by_match) > 4 * len(self._groups) + 64:
            self._compact()

    def _compact(self) -> None:
        """Drops void entries."""
        self._by_age = [(group.age, group) for group in self._groups.values() if group.age]
        self._by_match = [(group.match, group) for group in self._groups.values() if group.match]
        heapify(self._by_age)
        heapify(self._by_match)

    def _dissolve(self, group: Group) -> None:
        del self._groups[group.missing]
        group.age = group.match = ()
        self._unwant(group)

    def _want(self, group: Group) -> None:
        """Asks the pool to keep what the group is about to take over."""
        names = group.members[0].block_hashes[len(group.wanted) : group.depth]
        self._pool.want(names)
        group.wanted += names

    def _unwant(self, group: Group) -> None:
        self._pool.unwant(group.wanted)
        group.wanted = []


def _num_common(a: Sequence, b: Sequence, low: int, high: int) -> int:
    """Leading blocks, `low` to `high`, that two sequences have in common; by bisection, since names are chained."""
    high = min(high, len(a.block_hashes), len(b.block_hashes))
    while low < high:
        middle = (low + high) // 2
        if a.block_hashes[middle] == b.block_hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low
