"""The waiting queue, and the order in which sequences run and are preempted.

The queue is an index: sequences wait in groups that share the hash of their first missing block. So publishing a block
touches only the group concerned, and a group whose missing block is promised is skipped as a whole. A group's match may
be stale in one direction: after an eviction it is longer than what is published, which is corrected at the group's turn
(`regroup_sequence`). It is never shorter, since published hashes are processed before every step (`refresh`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.sequence import Sequence

Key = Callable[[Sequence], tuple[float, ...]]


def fcfs_key(seq: Sequence) -> tuple[float, ...]:
    """Order by arrival. A preempted sequence keeps its place, so it resumes before newer ones."""
    return (seq.order,)


def priority_key(seq: Sequence) -> tuple[float, ...]:
    """Order by smaller `priority`, then by arrival."""
    return (seq.request.priority, seq.order)


def resumed_first_key(seq: Sequence) -> tuple[float, ...]:
    """Order by arrival, preempted sequences first."""
    return (not seq.admitted, seq.order)


POLICIES: dict[str, Key] = {"fcfs": fcfs_key, "priority": priority_key, "lpm": fcfs_key}  # order of running sequences
WAITING: dict[str, Key] = {"fcfs": fcfs_key, "priority": priority_key, "lpm": resumed_first_key}


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
        """Insert a sequence; at the end, the usual case, in O(1)."""
        if self._items and self._key(self._items[-1]) > self._key(seq):
            insort(self._items, seq, key=self._key)
        else:
            self._items.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; asserts that it is here."""
        items = self._items
        index = 0 if items and items[0] is seq else bisect_left(items, self._key(seq), key=self._key)
        assert index < len(self._items) and self._items[index] is seq, f"{seq.request_id} is not in this queue"
        del self._items[index]


class PrefixGroup:
    """Waiting sequences with the same first missing block, hence with the same `depth` of published blocks before it.

    `missing` is the hash of that block; if no full block is missing, or nothing may be read, it is a key unique to the
    sequence. Sequences that wait for a second run (trust.py) are one group.
    """

    __slots__ = ("age", "common", "depth", "match", "members", "missing", "num_skipped", "referenced")

    def __init__(self, missing: BlockHash, depth: int, common: int, key: Key) -> None:
        self.missing = missing
        self.depth = depth
        self.members = OrderedSequences(key)
        self.common = common  # leading blocks known to be common to all members
        self.num_skipped = 0  # number of members when it was last skipped
        self.referenced: list[BlockHash] = []  # hashes referenced in the pool for this group
        self.age: tuple[float, ...] = ()  # its current key in the two heaps; an entry with another key is void
        self.match: tuple[float, ...] = ()

    def __lt__(self, other: "PrefixGroup") -> bool:
        return False  # entries with equal keys in a heap belong to one group


Entry = tuple[tuple[float, ...], PrefixGroup]
_RECOMPUTE = BlockHash(b"//recompute")  # not a block hash (a digest); keys of single sequences begin with one /


class SingleTenantQueue:
    """The waiting sequences of one tenant in the order of a policy.

    `lpm` is k-LPM: of every `k` admissions the first is the oldest waiting sequence, the other k - 1 are those with the
    longest match, so that a sequence with r older ones is admitted within k(r + 1) admissions (arXiv 2502.04677).
    Preempted sequences go before all others and are not counted.

    `references`: idle blocks that waiting sequences will take over are evicted after all others. With `fcfs_key` only:
    `lpm` admits such sequences in time, and with `priority` they may wait for ever (benchmarks/eviction).
    """

    def __init__(self, pool: BlockPool, policy: str, k: int, reads: Callable[[Sequence], bool]) -> None:
        self.references = policy == "fcfs"
        self._pool = pool
        self._key = WAITING[policy]
        self._k = k if policy == "lpm" else 1
        self._reads = reads
        self._groups: dict[BlockHash, PrefixGroup] = {}
        self._of: dict[str, PrefixGroup] = {}  # request id -> its group
        self._by_age: list[Entry] = []
        self._by_match: list[Entry] = []
        self._passed: list[PrefixGroup] = []  # until the end of this step
        self._published: list[BlockHash] = []
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all sequences, by age."""
        return iter(sorted((seq for group in self._groups.values() for seq in group.members), key=self._key))

    def add(self, seq: Sequence) -> None:
        """Add a sequence that has no blocks."""
        self._insert(seq, self._depth(seq, 0))

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted or aborted."""
        group = self._of.pop(seq.request_id)
        first = group.members[0] is seq
        group.members.remove(seq)
        if not group.members:
            del self._groups[group.missing]
            group.age = group.match = ()
            self._drop_refs(group)
        elif first:
            self._enqueue(group)

    def remove_admitted(self, seq: Sequence) -> None:
        """Remove an admitted sequence, and count the admission for k-LPM."""
        self.remove(seq)
        self._num_admissions += not seq.admitted

    def next_group(self) -> PrefixGroup | None:
        """Return the group whose first member is next; skipped groups are left out."""
        oldest = self._num_admissions % self._k == 0
        heap = self._by_age if oldest else self._by_match
        while heap:
            place, group = heap[0]
            if place == (group.age if oldest else group.match):
                return group
            heappop(heap)
        return None

    def skip_prefix_group(self, group: PrefixGroup, num_hit_tokens: int) -> None:
        """Skip the group until `reset_skipped`; this is no admission and costs no other sequence its turn.

        `num_hit_tokens`, which its members find now, is stored with them: what they reuse beyond it counts as followed.
        """
        group.age = group.match = ()
        self._passed.append(group)
        if group.num_skipped != len(group.members):
            group.num_skipped = len(group.members)
            for seq in group.members:
                if seq.num_hit_tokens is None:
                    seq.num_hit_tokens = num_hit_tokens

    def reset_skipped(self) -> None:
        """Make the skipped groups eligible again."""
        passed, self._passed = self._passed, []
        for group in passed:
            if self._groups.get(group.missing) is group:
                self._enqueue(group)

    def regroup_after_publish(self) -> None:
        """Move the groups whose first missing block has been published; called before each step is planned."""
        block_hashes, self._published = self._published, []
        for block_hash in block_hashes:
            group = self._groups.get(block_hash)
            if group is not None and self._pool.contains(block_hash):
                self._advance(group)

    def regroup_sequence(self, seq: Sequence, depth: int) -> None:
        """Move a sequence whose match is only `depth` blocks long to its right group."""
        group = self._of[seq.request_id]
        assert depth < group.depth
        self.remove(seq)
        self._insert(seq, depth)

    def published_blocks_upper_bound(self, seq: Sequence) -> int:
        """Return its number of published leading blocks as recorded; at least the actual number."""
        return self._of[seq.request_id].depth

    def num_tokens_to_compute(self, block_size: int, most: int) -> int:
        """Return the tokens to compute for its sequences, at most `most`: no more are counted."""
        total = 0
        for group in self._groups.values():
            for seq in group.members:
                total += max(len(seq.token_ids) - group.depth * block_size, 1)
                if total >= most:
                    return most
        return total

    def on_block_published(self, block_hash: BlockHash) -> None:
        """Record a published block, for `refresh`."""
        if block_hash in self._groups:
            self._published.append(block_hash)

    # ------------------------------------------------------------------------------------------------------------

    def _depth(self, seq: Sequence, start: int) -> int:
        """Return the number of leading published blocks; `start` of them are known to be published.

        By bisection, since hashes are chained and the parents of a published block are usually published.
        """
        if not self._reads(seq):
            return 0
        block_hashes, published = seq.block_hashes, self._pool.published_hashes
        low, high = start, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            if block_hashes[middle] in published:
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
            group = self._groups[missing] = PrefixGroup(missing, depth, len(seq.block_hashes), self._key)
            group.members.add(seq)
            self._add_refs(group)
            self._enqueue(group)
        else:
            group.common = _num_common(group.members[0], seq, depth, group.common)
            group.members.add(seq)
            if group.members[0] is seq and group not in self._passed:
                self._enqueue(group)
        self._of[seq.request_id] = group

    def _advance(self, group: PrefixGroup) -> None:
        """Move members of a group whose missing block is published to their next one, usually together."""
        first, known = group.members[0], group.depth + 1
        depth = self._depth(first, known)
        del self._groups[group.missing]
        if depth < len(first.block_hashes) and first.block_hashes[depth] not in self._groups:
            missing, apart = first.block_hashes[depth], list[Sequence]()
            if depth >= group.common:  # equal hashes mean equal prefixes: members that miss the same block stay
                apart = [s for s in group.members if len(s.block_hashes) <= depth or s.block_hashes[depth] != missing]
                for seq in apart:
                    group.members.remove(seq)
                group.common = depth + 1
            group.missing, group.depth = missing, depth
            self._groups[missing] = group
            self._add_refs(group)
            self._enqueue(group)
        else:
            apart = list(group.members)
            self._drop_refs(group)
            group.age = group.match = ()
        for seq in apart:
            self._insert(seq, self._depth(seq, known))

    def _enqueue(self, group: PrefixGroup) -> None:
        """Update the group's heap keys from its first member."""
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
        """Remove void entries."""
        self._by_age = [(group.age, group) for group in self._groups.values() if group.age]
        self._by_match = [(group.match, group) for group in self._groups.values() if group.match]
        heapify(self._by_age)
        heapify(self._by_match)

    def _add_refs(self, group: PrefixGroup) -> None:
        """Add references in the pool to the blocks that the group will take over."""
        if not self.references:
            return
        block_hashes = group.members[0].block_hashes[len(group.referenced) : group.depth]
        self._pool.add_queued_refs(block_hashes)
        group.referenced += block_hashes

    def _drop_refs(self, group: PrefixGroup) -> None:
        self._pool.drop_queued_refs(group.referenced)
        group.referenced = []


def _num_common(a: Sequence, b: Sequence, low: int, high: int) -> int:
    """Return the number of common leading blocks, `low` to `high`; by bisection, since hashes are chained."""
    high = min(high, len(a.block_hashes), len(b.block_hashes))
    while low < high:
        middle = (low + high) // 2
        if a.block_hashes[middle] == b.block_hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low
