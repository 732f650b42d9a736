"""TenantQueues: a waiting queue per tenant, so that the order of a tenant's sequences depends on its own only.

The scheduler says which tenant is next (`rank`); within it, the order is that of its SingleTenantQueue.
"""

from collections.abc import Callable, Iterator

from headstart.core.cache.block_pool import BlockListener, BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.sched.waiting_queue import WAITING, PrefixGroup, SingleTenantQueue
from headstart.core.sequence import Sequence

Rank = Callable[[str], tuple[float, ...]]


class TenantQueues(BlockListener):
    """The waiting sequences of all tenants. Removals of blocks do nothing: a match is corrected at its group's turn."""

    def __init__(
        self, pool: BlockPool, policy: str, k: int, reads: Callable[[Sequence], bool], rank: Rank = lambda _: ()
    ) -> None:
        """`rank`: the tenant with the smallest is next."""
        self._key = WAITING[policy]
        self.references = policy == "fcfs"  # of each queue; see SingleTenantQueue
        self._new = lambda: SingleTenantQueue(pool, policy, k, reads)
        self._rank = rank
        self._queues: dict[str, SingleTenantQueue] = {}  # kept when empty: k-LPM counts admissions
        self._waiting: dict[str, SingleTenantQueue] = {}  # those that are not empty
        self._skipped: set[str] = set()  # until the end of this step
        pool.planners.append(self)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all sequences, by age."""
        return iter(sorted((seq for queue in self._waiting.values() for seq in queue), key=self._key))

    @property
    def tenants(self) -> list[str]:
        """The tenants of waiting sequences."""
        return list(self._waiting)

    def queue_of(self, tenant: str) -> SingleTenantQueue:
        """Return the queue of a tenant that has waiting sequences."""
        return self._waiting[tenant]

    def add(self, seq: Sequence) -> None:
        """Add a sequence that has no blocks."""
        tenant = seq.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = self._new()
            queue.references = self.references
        self._waiting[tenant] = queue
        queue.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is aborted."""
        self._queue(seq).remove(seq)
        self._drop_if_empty(seq)

    def remove_admitted(self, seq: Sequence) -> None:
        """Remove an admitted sequence, and count the admission for k-LPM."""
        self._queue(seq).remove_admitted(seq)
        self._drop_if_empty(seq)

    def next_group(self) -> PrefixGroup | None:
        """Return the group whose first member is next; skipped tenants and groups are left out."""
        names = [name for name in self._waiting if name not in self._skipped]
        for name in sorted(names, key=self._rank) if len(names) > 1 else names:
            group = self._waiting[name].next_group()
            if group is not None:
                return group
        return None

    def skip_tenant(self, tenant: str) -> None:
        """Skip a tenant until `reset_skipped`."""
        self._skipped.add(tenant)

    def skip_prefix_group(self, group: PrefixGroup, num_hit_tokens: int) -> None:
        """Skip a group until `reset_skipped`."""
        self._queue(group.members[0]).skip_prefix_group(group, num_hit_tokens)

    def reset_skipped(self) -> None:
        """Make skipped tenants and groups eligible again."""
        self._skipped.clear()
        for queue in self._waiting.values():
            queue.reset_skipped()

    def regroup_after_publish(self) -> None:
        """Move the groups whose first missing block has been published; called before each step is planned."""
        for queue in self._waiting.values():
            queue.regroup_after_publish()

    def regroup_sequence(self, seq: Sequence, depth: int) -> None:
        """Move a sequence whose match is only `depth` blocks long to its right group."""
        self._queue(seq).regroup_sequence(seq, depth)

    def published_blocks_upper_bound(self, seq: Sequence) -> int:
        """Return its number of published leading blocks as recorded; at least the actual number."""
        return self._queue(seq).published_blocks_upper_bound(seq)

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Record a published block, for `refresh`."""
        for queue in self._waiting.values():
            queue.on_block_published(block_hash)

    def _queue(self, seq: Sequence) -> SingleTenantQueue:
        return self._queues[seq.request.tenant]

    def _drop_if_empty(self, seq: Sequence) -> None:
        if not self._queue(seq):
            del self._waiting[seq.request.tenant]
