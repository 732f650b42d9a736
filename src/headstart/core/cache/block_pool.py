"""BlockPool: block ids, reference counts, block hashes, pins, and the eviction order of free blocks.

It holds no sequences and no tensors. Invariant 8 holds after every operation:

    scratch + idle + referenced + idle pinned = num_blocks - 1, pairwise disjoint; block 0 is in none of them
    every published hash belongs to one block, and only full, computed, finite blocks have one

Allocation order: unpublished *scratch* blocks first, last in first out; then published *idle* blocks in the order of
idle_blocks.py. A block table is released from its end, so a chain loses its tail before its head. Every operation is
O(1) per block, and O(tenants) per allocation. A block with a pinned hash is never evicted; while it is unreferenced it
is not free either.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from headstart.core.cache.eviction import HOT, PYTHON, SEEN, Entries, KVBlockLoops
from headstart.core.cache.hashing import BlockHash, is_checkpoint_page_hash
from headstart.core.cache.history import EvictionHistory, EvictionRecord
from headstart.core.cache.idle_blocks import IdleBlocks
from headstart.core.request import DEFAULT_RETENTION, RetentionHint
from headstart.core.sched.queued_block_refs import QueuedBlockRefCounts

HISTORY_POOLS = 8  # upper bound of the eviction history, in pools; at least half as many hashes are remembered


class PublishedBlockSnapshot(NamedTuple):
    """A published block at one moment. `is_reused`: used again after it had been idle or evicted."""

    block: int
    block_hash: BlockHash
    parent: BlockHash
    num_refs: int
    is_pinned: bool
    is_reused: bool
    tenant: str


class BlockListener(Protocol):
    """Receiver of every change of the block index, called synchronously; must not call the pool."""

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Handle a block that can now be found."""

    def on_block_removed(self, block_hash: BlockHash) -> None:
        """Handle a block that can no longer be found."""

    def on_cache_cleared(self) -> None:
        """Handle the removal of all blocks; `removed` is not called for each."""


class BlockPool:
    """The allocator of blocks `1 .. num_blocks - 1`. Block 0 is reserved: padding may point to it.

    `tenant_floor` is the share of the pool, split evenly among the tenants seen, that other tenants cannot evict. The
    public tenant, "", has none. The eviction history holds up to `history_pools` times the pool's size. A pool that
    will `grow` to `max_blocks` has the shares and the history of that size from the start.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        eviction_policy: str = "lru",
        tenant_floor: float = 0.0,
        history_pools: int = HISTORY_POOLS,
        max_blocks: int = 0,
        ops: KVBlockLoops = PYTHON,
    ) -> None:
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to hand out: block 0 is reserved"
        self.num_blocks = num_blocks
        self._ops = ops
        self.listeners: list[BlockListener] = []
        self.planners: list[BlockListener] = []  # they are told of blocks published ahead, too
        self.num_pages = 0  # published ones, of checkpoints
        self.page_listeners: list[BlockListener] = []  # told of pages of checkpoints, too: published by checkpoints.py
        self.now = 0.0  # seconds; set by the pool's owner; retention times are measured by it
        self.evictions = {
            "capacity": 0,
            "failed": 0,
            "reset": 0,
            "replaced": 0,
        }  # published blocks evicted or discarded, by cause
        self._refs = [0] * num_blocks
        self._versions = [0] * num_blocks
        self._block_hashes: list[BlockHash | None] = [None] * num_blocks
        self._entries: Entries = {}  # block hash -> (block, parent hash, tokens)
        self._scratch = list(range(num_blocks - 1, 0, -1))
        size = max(num_blocks, max_blocks)
        self._idle = IdleBlocks(num_blocks, eviction_policy, tenant_floor, size, ops)
        self._marks, self._tenants = self._idle.marks, self._idle.tenants
        self._model = self._idle.model
        self._pins: dict[BlockHash, int] = {}
        self._idle_pinned: set[int] = set()
        self._queued_refs = QueuedBlockRefCounts()
        self._history_pools = history_pools
        self._max_history = history_pools * size
        self._history = EvictionHistory(self._max_history)
        self._ahead: set[int] = set()  # published for the next step only: not computed yet
        self._suspect: set[int] = set()  # may hold NaN: cleared before the next use
        self._to_zero: list[int] = []

    @property
    def usable_capacity(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Scratch and idle blocks; idle pinned blocks are not free."""
        return len(self._scratch) + len(self._idle)

    @property
    def num_scratch(self) -> int:
        return len(self._scratch)

    @property
    def num_pinned_idle(self) -> int:
        return len(self._idle_pinned)

    @property
    def published_hashes(self) -> Container[BlockHash]:
        """The hashes of published blocks, for many questions at once. The pool's own table."""
        return self._entries

    @property
    def num_published(self) -> int:
        return len(self._entries)

    @property
    def num_pinned_hashes(self) -> int:
        """Pinned block hashes, published or not."""
        return len(self._pins)

    @property
    def num_capacity_evictions(self) -> int:
        """Published blocks evicted for lack of space."""
        return self.evictions["capacity"]

    # ------------------------------------------------------------------------------------------------- questions

    def match_prefix(self, block_hashes: list[BlockHash], root: BlockHash, tokens: bytes, stride: int) -> list[int]:
        """Return the blocks of the longest published prefix of `block_hashes`. Changes nothing.

        `tokens` are the packed token ids of those blocks, `stride` bytes per block. The tokens and the parent hash of
        each entry are compared too: a hash collision is a miss, never a wrong hit.
        """
        return self._ops.find_prefix(self._entries, block_hashes, root, tokens, stride)

    def contains(self, block_hash: BlockHash) -> bool:
        """Return whether a block with this hash is published."""
        return block_hash in self._entries

    def is_pinned(self, block_hash: BlockHash) -> bool:
        """Return whether the hash is pinned, published or not."""
        return block_hash in self._pins

    def published_in_id_range(self, start: int, stop: int) -> list[PublishedBlockSnapshot]:
        """Return the published blocks of tokens with ids in [start, stop). Changes nothing."""
        refs, marks, tenants, pins = self._refs, self._marks, self._tenants, self._pins
        return [
            PublishedBlockSnapshot(
                block,
                block_hash,
                self._entries[block_hash][1],
                refs[block],
                block_hash in pins,
                bool(marks[block] & HOT),
                tenants[block],
            )
            for block, block_hash in enumerate(self._block_hashes[start:stop], start)
            if block_hash is not None and not is_checkpoint_page_hash(block_hash)
        ]

    def ref_count(self, block: int) -> int:
        """Return the number of references to a block; 0: free, or idle and pinned."""
        return self._refs[block]

    def block_version(self, block: int) -> int:
        """Return the version of a block's content. Callable from any thread.

        It increases when the block is allocated or distrusted. While it is unchanged, so is the content of a published
        block.
        """
        return self._versions[block]

    def published_entry(self, block_hash: BlockHash) -> tuple[int, BlockHash, bytes] | None:
        """Return block, parent hash and tokens of the entry published under a hash."""
        return self._entries.get(block_hash)

    def num_idle_among(self, block_ids: Sequence[int]) -> int:
        """Return how many of these free blocks `acquire` would take; idle pinned ones are not free."""
        unused = list(map(self._refs.__getitem__, block_ids)).count(0)
        if unused and self._idle_pinned:
            unused -= sum(1 for block in block_ids if block in self._idle_pinned)
        return unused

    def num_available_after_acquire(
        self, block_ids: Sequence[int], tenant: str = "", *, last_resort: bool = False
    ) -> int:
        """Return the free blocks left to `tenant` after it acquires these (vLLM #3402: a hit is not also free).

        Other tenants' shares are not available, except as a last resort.
        """
        available = self.num_free - self.num_idle_among(block_ids)
        if last_resort or not self._idle.may_protect_tenant_blocks:
            return available
        return available - self._idle.num_protected_from_tenant([b for b in block_ids if self._is_idle(b)], tenant)

    def find_eviction_record(self, block_hash: BlockHash) -> EvictionRecord | None:
        """Return why a block was evicted; None if it is unknown or no longer remembered."""
        return self._history.get(block_hash)

    def iterate_in_eviction_order(self) -> Iterator[int]:
        """Iterate idle blocks in eviction order, ignoring queued references. The pool must not change meanwhile."""
        return iter(self._idle)

    # ------------------------------------------------------------------------------------------------- use

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these published blocks."""
        unused = self._ops.add_refs(self._refs, self._block_hashes, block_ids)
        if unused and self._idle_pinned:
            pinned = self._idle_pinned.intersection(unused)
            self._idle_pinned -= pinned
            for block in pinned:
                self._marks[block] = HOT | SEEN
            unused = [block for block in unused if block not in pinned] if pinned else unused
        if unused:
            self._idle.remove_for_reuse(unused)

    def allocate(
        self,
        num: int,
        tenant: str = "",
        *,
        by: str = "",
        last_resort: bool = False,
        zeroed: bool = False,
        states: bool = False,
    ) -> list[int]:
        """Allocate `num` blocks for one owner of `tenant`, evicting idle blocks when no scratch blocks are left.

        `by` is the id of the request. `zeroed`: `take_unzeroed_blocks` reports all of them. `states`: they hold numbers
        that are no keys, so they are cleared before their next use. The caller has checked `num_available`.
        """
        if num > len(self._scratch):
            free = self.num_available_after_acquire((), tenant, last_resort=last_resort)
            assert num <= free, f"{num} blocks wanted, {free} free: check before allocating"
        refs, scratch = self._refs, self._scratch
        blocks = [scratch.pop() for _ in range(min(num, len(scratch)))]
        if num > len(blocks):
            blocks += self._evict(num - len(blocks), tenant, by, last_resort)
        for block in blocks:
            refs[block] = 1
            self._versions[block] += 1
        if tenant:
            self._idle.register_tenant(tenant)
        if states:
            self._suspect.update(blocks)
        elif self._suspect or zeroed:
            self._to_zero += [block for block in blocks if zeroed or block in self._suspect]
            self._suspect.difference_update(blocks)
        return blocks

    def release(self, block_ids: Sequence[int], retention: RetentionHint = DEFAULT_RETENTION) -> None:
        """Drop one reference to each block, from the end: a chain's tail is evicted before its head.

        `retention` is what the releasing request asks for its published blocks.
        """
        block_hashes = self._block_hashes
        idle, held = self._ops.drop_refs(self._refs, block_hashes, self._scratch, block_ids)
        if idle and self._pins:
            pinned = [block for block in idle if block_hashes[block] in self._pins]
            self._idle_pinned.update(pinned)
            held = [*pinned, *held]
            idle = [block for block in idle if block not in self._idle_pinned] if pinned else idle
        hot = self._idle.add_idle(idle, retention, self.now) if idle else 0
        if held:
            self._idle.record_shared_release(held, retention, self.now, hot)

    def publish(
        self,
        block: int,
        block_hash: BlockHash,
        parent: BlockHash,
        tokens: bytes,
        tenant: str = "",
        *,
        ahead: bool = False,
    ) -> bool:
        """Publish a full, computed block; return False, and keep it private, if an equal one is published.

        The block counts against the share of `tenant`. `ahead`: a step in flight computes it, so it may be found, but
        listeners are told when it is confirmed. It must be confirmed or withdrawn while it has an owner.
        """
        assert self._refs[block] > 0, f"block {block} is published without an owner"
        assert self._block_hashes[block] is None, f"block {block} is published twice"
        if block_hash in self._entries:
            return False
        self._entries[block_hash] = (block, parent, tokens)
        self._block_hashes[block] = block_hash
        evicted = self._history.pop(block_hash)
        is_again = evicted is not None and evicted.cause == "capacity"
        self._marks[block] = HOT if is_again else 0
        if self._model is not None:
            before = self._entries.get(parent)
            self._model.record_published(
                block, before[0] if before else 0, evicted.memo if evicted and is_again else -1
            )
        self._tenants[block] = tenant
        if tenant:
            self._idle.register_tenant(tenant)
        if ahead:
            self._ahead.add(block)
        for listener in self.planners:
            listener.on_block_published(block, block_hash, parent, tokens)
        page = is_checkpoint_page_hash(block_hash)
        self.num_pages += page
        for listener in () if ahead or page else self.listeners:
            listener.on_block_published(block, block_hash, parent, tokens)
        return True

    def confirm_published(self, block: int) -> None:
        """Tell the listeners of a block that was published ahead and is computed now."""
        self._ahead.remove(block)
        block_hash = self._block_hashes[block]
        assert block_hash is not None and self._refs[block], f"block {block} was published ahead and is gone"
        _, parent, tokens = self._entries[block_hash]
        for listener in self.listeners:
            listener.on_block_published(block, block_hash, parent, tokens)

    def unpublish_failed(self, block_ids: Iterable[int]) -> None:
        """Unpublish blocks published ahead whose step has failed; their owners keep them."""
        for block in block_ids:
            self._ahead.remove(block)
            block_hash = self._block_hashes[block]
            assert block_hash is not None and self._refs[block], f"block {block} was published ahead and is gone"
            del self._entries[block_hash]
            self._block_hashes[block] = None
            if self._model is not None:
                self._model.record_content_lost(block)
            if self._idle.retentions:
                self._idle.retentions.drop_block_hint(block)
            for listener in self.planners:
                listener.on_block_removed(block_hash)

    def add_blocks(self, num: int) -> None:
        """Add `num` scratch blocks."""
        start = self.num_blocks
        self.num_blocks += num
        self._refs += [0] * num
        self._versions += [0] * num
        self._block_hashes += [None] * num
        self._scratch += range(self.num_blocks - 1, start - 1, -1)
        self._idle.grow_capacity_by(num)
        self._max_history = max(self._max_history, self._history_pools * self.num_blocks)
        self._history.grow_capacity(self._max_history)

    def dismantle_some(self, num: int) -> int:
        """Free up to `num` entries of a pool no longer used, since all would block; return how many, 0 at the end."""
        freed = 0
        tables: list[dict[Any, Any]] = [self._entries, *self._history.teardown_tables, *self._idle.teardown_tables]
        for table in tables:
            while table and freed < num:
                table.popitem()
                freed += 1
        for items in (self._block_hashes, self._idle.tenants, self._refs, self._versions, self._scratch):
            count = min(num - freed, len(items))
            del items[len(items) - count :]
            freed += count
        return freed

    # ------------------------------------------------------------------------------------------------- keeping

    def add_queued_refs(self, block_hashes: Sequence[BlockHash]) -> None:
        """Count a queued request that will use these blocks: while idle they are evicted after all others.

        `block_hashes` are the block hashes of one chain, published or not, from its head on.
        """
        self._queued_refs.add(block_hashes)

    def drop_queued_refs(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo `add_queued_refs` for these block hashes, in one call or several."""
        self._queued_refs.discard(block_hashes)
        if self._idle.num_aside:
            self._queued_refs.add_pending_to_counts()
            blocks = [
                self._entries[block_hash][0] for block_hash in reversed(block_hashes) if block_hash in self._entries
            ]
            self._idle.restore_set_aside([block for block in blocks if self._is_idle(block)], self._is_queued)

    def pin_hashes(self, block_hashes: Iterable[BlockHash]) -> None:
        """Keep the blocks that have or will have these hashes from eviction; calls are counted."""
        for block_hash in block_hashes:
            self._pins[block_hash] = self._pins.get(block_hash, 0) + 1
            entry = self._entries.get(block_hash)
            if entry is not None and self._is_idle(entry[0]):
                self._idle.remove(entry[0])
                self._idle_pinned.add(entry[0])

    def unpin_hashes(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin` of each hash; the last one makes the blocks ordinary cache, most recently used."""
        for block_hash in reversed(block_hashes):
            count = self._pins.get(block_hash, 0)
            assert count > 0, f"block {block_hash.hex()} is unpinned more often than pinned"
            if count > 1:
                self._pins[block_hash] = count - 1
                continue
            del self._pins[block_hash]
            entry = self._entries.get(block_hash)
            if entry is not None and entry[0] in self._idle_pinned:
                self._idle_pinned.remove(entry[0])
                self._idle.add_most_recent(entry[0])

    # ------------------------------------------------------------------------------------------------- forgetting

    def discard_corrupt(self, block_ids: Sequence[int]) -> None:
        """Withdraw blocks that may not be finite: they can no longer be found, and are zeroed before their next use."""
        self._suspect.update(block_ids)
        for block in block_ids:
            self._versions[block] += 1
        published = [block for block in block_ids if self._block_hashes[block] is not None]
        self._vacate(published)
        self._forget(published, EvictionRecord("failed", "", self.now))

    def discard_replaced(self, block_ids: Sequence[int]) -> None:
        """Withdraw those of these published blocks that no sequence holds: what is in them has been replaced."""
        unused = [block for block in block_ids if not self._refs[block]]
        self._vacate(unused)
        self._forget(unused, EvictionRecord("replaced", "", self.now))

    def take_unzeroed_blocks(self) -> list[int]:
        """Return newly allocated blocks that must be cleared; each is reported once, before its first use."""
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def clear_published(self, *, pinned: bool = False) -> None:
        """Remove all published blocks from the index; used blocks stay with their owners, pinned ones published.

        `pinned`: these are removed too. Their hashes stay pinned, and may be computed again.
        """
        kept = (
            {block_hash for block_hash in self._pins if block_hash in self._entries} if not pinned else set[BlockHash]()
        )
        blocks = [block for block_hash, (block, _, _) in reversed(self._entries.items()) if block_hash not in kept]
        self._vacate(blocks)
        self._forget(blocks, EvictionRecord("reset", "", self.now), tell=bool(kept))
        if not kept:
            for listener in (*self.planners, *self.listeners):
                listener.on_cache_cleared()

    def check_invariants(self) -> None:
        """Assert invariant 8; O(num_blocks), for tests and post-mortems."""
        scratch, idle, pinned = set(self._scratch), set(self._idle), self._idle_pinned
        referenced = {block for block, refs in enumerate(self._refs) if refs > 0}
        states = (scratch, idle, referenced, pinned)
        assert len(scratch) == len(self._scratch), "a block is twice in scratch"
        assert len(idle) == len(self._idle), "a block is twice among the idle ones"
        everything = set[int]().union(*states)
        assert sum(map(len, states)) == len(everything), "a block is in two states"
        assert everything == set(range(1, self.num_blocks)), "a block is lost, or block 0 in use"
        assert min(self._refs) >= 0, "negative reference count"
        published = {block for block, block_hash in enumerate(self._block_hashes) if block_hash is not None}
        assert idle | pinned == published - referenced
        assert all(self._block_hashes[block] in self._pins for block in pinned), "a block is kept that is not pinned"
        assert not any(self._block_hashes[block] in self._pins for block in idle), "a pinned block may be evicted"
        for block_hash, (block, _, _) in self._entries.items():
            assert self._block_hashes[block] == block_hash, f"block {block} and the index disagree"
            assert self._history.get(block_hash) is None, f"block {block} is published and evicted"
        assert len(published) == len(self._entries)
        assert self.num_pages == sum(map(is_checkpoint_page_hash, self._entries))
        assert self._ahead <= published & referenced, "a block published ahead has no owner"
        assert len(self._history) <= self._max_history
        self._idle.check_invariants()

    # ------------------------------------------------------------------------------------------------------------

    def _is_idle(self, block: int) -> bool:
        return not self._refs[block] and self._block_hashes[block] is not None and block not in self._idle_pinned

    def _is_queued(self, block: int) -> bool:
        return self._block_hashes[block] in self._queued_refs

    def _evict(self, num: int, tenant: str, by: str, last_resort: bool) -> list[int]:
        self._queued_refs.add_pending_to_counts()
        wanted: Callable[[int], bool] | None = self._is_queued if self._queued_refs else None
        blocks = self._idle.evict(num, tenant, last_resort, self.now, wanted)
        self._forget(blocks, EvictionRecord("capacity", by, self.now, tenant=tenant))
        return blocks

    def _vacate(self, blocks: Iterable[int]) -> None:
        """Turn those of these published blocks that are unreferenced, pinned or not, into scratch blocks."""
        for block in blocks:
            if block in self._idle_pinned:
                self._idle_pinned.remove(block)
            elif not self._refs[block]:
                self._idle.remove(block)
            else:
                continue
            self._scratch.append(block)

    def _forget(self, blocks: Iterable[int], evicted: EvictionRecord, *, tell: bool = True) -> None:
        """Remove the hashes of published blocks that are no longer idle."""
        block_hashes, entries, remember = self._block_hashes, self._entries, self._history.add
        listeners = (*self.planners, *self.listeners) if tell else ()
        retentions = self._idle.retentions if self._idle.retentions else None
        num_before = len(entries)
        model = self._model
        for block in blocks:
            block_hash = block_hashes[block]
            assert block_hash is not None, f"block {block} has no name to forget"
            del entries[block_hash]
            block_hashes[block] = None
            if model is not None:
                evicted = evicted._replace(memo=model.record_content_lost(block))
            remember(block_hash, evicted)
            if retentions is not None:
                retentions.drop_block_hint(block)
            page = is_checkpoint_page_hash(block_hash)
            self.num_pages -= page
            for listener in self.page_listeners if page else listeners:
                listener.on_block_removed(block_hash)
        self.evictions[evicted.cause] += num_before - len(entries)
