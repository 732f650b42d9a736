"""Transfers: moves blocks between the pool and an external store, and decides whether to load or to compute.

Blocks being loaded are *promised*, like those that another sequence computes in this step: a sequence that misses one
waits, takes it over once it is published, and costs no other sequence its turn. The rule: load the run of blocks that a
sequence misses and the store has, if the expected load time is less than the time to compute them, both as measured on
this machine; cancel if it takes much longer than expected. Data arrive outside the pool and get blocks only when they
are complete and verified, so a hanging disk holds nothing but the promise, and that only until its deadline.
"""

from collections.abc import Iterable
from math import inf

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockKey, BlockStore, Loaded
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import Hit, KVCache
from headstart.core.executor import Executor
from headstart.core.request import Sequence

MAX_LOADS = 8  # of one sequence; after that it computes
PATIENCE = 2.0  # times the expected duration
GRACE_SHARE, GRACE_SECONDS = 0.1, 0.05  # minimum patience: this share of the compute time, plus a constant
BLIND_SECONDS = 1.0  # minimum patience while the compute rate is unknown
FADING_TOKENS = 4096  # prefill tokens over which the measured rate decays


class ComputeRate:
    """The measured seconds per token of steps that mostly prefill; 0.0 until there was one."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The inverse; 0.0 until there was a step."""
        return 1 / self.seconds_per_token if self.seconds_per_token else 0.0

    def learn(self, num_tokens: int, num_prefill: int, elapsed: float) -> None:
        """Update from one step; a step that mostly decodes is ignored."""
        if 2 * num_prefill <= num_tokens or num_prefill < 16:
            return
        seen = elapsed / num_tokens
        weight = min(num_tokens / FADING_TOKENS, 1.0) if self.seconds_per_token else 1.0
        self.seconds_per_token += weight * (seen - self.seconds_per_token)


class _Load:
    """Blocks `[index, end)` of one sequence being loaded; `index` advances as they arrive."""

    __slots__ = ("deadline", "end", "index", "patience", "seq")

    def __init__(self, seq: Sequence, index: int, end: int, patience: float, now: float) -> None:
        self.seq, self.index, self.end = seq, index, end
        self.patience, self.deadline = patience, now + patience


class Transfers:
    """The transfers between one pool and one store, or none. Each step begins with `take_in`.

    While it plans, the scheduler calls `awaits`, `finds` and `begin`.
    """

    def __init__(self, cache: KVCache, store: BlockStore | None) -> None:
        self.rate = ComputeRate()
        self.num_outstanding = 0  # blocks promised by loads
        self._cache = cache
        self._pool: BlockPool = cache.pool
        self._store = store
        self._loads: dict[int, _Load] = {}
        self._promised: set[BlockHash] = set()
        self._loaded: set[BlockHash] = set()  # published hashes that came from the store
        self._offered: set[BlockHash] = (
            set()
        )  # published hashes that were offered: the store, or one tier of it, lacked them
        if store is not None:
            self._pool.listeners.append(self)

    def awaits(self, seq: Sequence, index: int) -> bool:
        """Return whether block `index` of the sequence is being loaded. Changes nothing."""
        block_hashes = seq.block_hashes
        return index < len(block_hashes) and block_hashes[index] in self._promised and self._cache.reads(seq)

    def finds(self, seq: Sequence, index: int) -> int:
        """Return the number of blocks from `index` on that only the store has. Changes nothing."""
        store, block_hashes = self._store, seq.block_hashes
        if store is None or index >= len(block_hashes) or seq.num_loads >= MAX_LOADS or not self._cache.reads(seq):
            return 0
        end = index
        while end < len(block_hashes) and store.contains(block_hashes[end]):
            if self._pool.contains(block_hashes[end]) or block_hashes[end] in self._promised:
                break
            end += 1
        return end - index

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the pool or the store has a block with this hash. Changes nothing."""
        return self._pool.contains(block_hash) or (self._store is not None and self._store.contains(block_hash))

    def begin(self, seq: Sequence, index: int, num: int, now: float) -> bool:
        """Begin to load `num` blocks from `index` on if that is faster than computing; else change nothing."""
        store, cache = self._store, self._cache
        assert store is not None and num > 0
        expected = store.expected_seconds(num, seq.block_hashes[index])
        computing = num * cache.block_size * self.rate.seconds_per_token or inf
        if not expected < computing:
            return False
        grace = BLIND_SECONDS if computing == inf else GRACE_SHARE * computing
        block_hashes = seq.block_hashes[index : index + num]
        load_id = store.load([cache.key(seq, at) for at in range(index, index + num)])
        patience = max(PATIENCE * expected, grace) + GRACE_SECONDS
        self._loads[load_id] = _Load(seq, index, index + num, patience, now)
        self._promised.update(block_hashes)
        self.num_outstanding += num
        seq.num_loads += 1
        return True

    def take_in(self, executor: Executor, now: float) -> None:
        """Publish the blocks that have arrived, so that their sequences find them, and cancel overdue loads."""
        store = self._store
        if store is None:
            return
        for loaded in store.poll():
            load = self._loads.get(loaded.load_id)
            if load is not None:
                self._take_in(load, loaded, executor, now)
            store.done_with(loaded)
        for load_id, load in list(self._loads.items()):
            if now > load.deadline:
                load.seq.num_loads = MAX_LOADS
                store.cancel(load_id, is_late=True)
                self._forget(load_id)

    def wait(self, timeout: float) -> None:
        """Wait for loaded blocks, if any load is in flight."""
        if self._store is not None and self._loads:
            self._store.wait(timeout)

    def num_loaded_tokens(self, seq: Sequence, start: int, end: int) -> int:
        """Return how many of the tokens `[start, end)`, which the sequence takes over, came from the store."""
        if not self._loaded or start >= end:
            return 0
        size, block_hashes, total = self._cache.block_size, seq.block_hashes, 0
        for index in range(start // size, -(-end // size)):
            if index < len(block_hashes) and block_hashes[index] in self._loaded:
                total += min(end, (index + 1) * size) - max(start, index * size)
        return total

    def used(self, seq: Sequence, hit: Hit) -> None:
        """Mark the blocks that a sequence takes over as used in the store, so that they are not removed."""
        if self._store is not None and hit.block_ids:
            self._store.touch(seq.block_hashes[: hit.start_block + len(hit.block_ids)])

    def keep(self, block_hashes: Iterable[BlockHash]) -> None:
        """Make the store keep these pinned blocks, and offer it those that it lacks."""
        if self._store is None:
            return
        pinned = list(block_hashes)
        self._store.keep(pinned)
        for block_hash in pinned:
            entry = self._pool.entry(block_hash)
            if entry is not None:
                self._offer(entry[0], block_hash, entry[1], entry[2])

    def offered(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """Return those of these hashes whose content in the store, if any, came from the blocks published now."""
        return [block_hash for block_hash in block_hashes if block_hash in self._offered]

    def distrust(self, block_hashes: list[BlockHash]) -> None:
        """Discard blocks that are or may be corrupt from the store."""
        if self._store is not None and block_hashes:
            self._store.distrust(block_hashes)

    # ------------------------------------------------------------------------------------------- called by the pool

    def published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Offer the block to the store."""
        self._offer(block, block_hash, parent, tokens)

    def removed(self, block_hash: BlockHash) -> None:
        """Drop the block's origin."""
        self._loaded.discard(block_hash)
        self._offered.discard(block_hash)

    def cleared(self) -> None:
        """Drop the origin of all blocks."""
        self._loaded.clear()
        self._offered.clear()

    # ------------------------------------------------------------------------------------------------------ private

    def _offer(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        assert self._store is not None
        if self._store.lacks(block_hash):
            self._offered.add(block_hash)
            self._store.offer(block, self._pool.version(block), BlockKey(block_hash, parent, tokens))

    def _take_in(self, load: _Load, loaded: Loaded, executor: Executor, now: float) -> None:
        """Write and publish the blocks that arrived; cancel the rest of the load if there is no space for it."""
        assert self._store is not None
        blocks = self._allocate(load.seq, len(loaded.data))
        dirty = self._pool.take_blocks_to_zero()
        if dirty:  # before they are written, never after
            executor.zero_blocks(dirty)
        for block, data in zip(blocks, loaded.data, strict=False):
            executor.write_block(block, data)
        self._publish(load, blocks)
        load.deadline = now + load.patience
        if len(blocks) < len(loaded.data):
            load.seq.num_loads = MAX_LOADS  # out of space: the sequence computes as much as fits
            if not loaded.is_last:
                self._store.cancel(loaded.load_id, is_late=False)
            self._forget(loaded.load_id)
        elif loaded.is_last:
            self._forget(loaded.load_id)

    def _allocate(self, seq: Sequence, num: int) -> list[int]:
        """Allocate at most `num` blocks, without evicting blocks that the sequence is about to take over."""
        pool, request = self._pool, seq.request
        if num <= pool.num_scratch:
            return pool.allocate(num, request.tenant, by=request.request_id)
        hit = self._cache.match(seq)
        num = max(min(num, self._cache.num_available(seq, hit)), 0)
        pool.acquire(hit.block_ids)
        blocks = pool.allocate(num, request.tenant, by=request.request_id)
        pool.release(hit.block_ids)
        return blocks

    def _publish(self, load: _Load, blocks: list[int]) -> None:
        seq, start = load.seq, load.index
        load.index += len(blocks)
        block_hashes = seq.block_hashes[start : load.index]
        self._promised.difference_update(block_hashes)
        self.num_outstanding -= len(blocks)
        for index, block in enumerate(blocks, start):
            if self._cache.publish_block(seq, index, block):
                self._loaded.add(block_hashes[index - start])
        self._pool.release(blocks, seq.request.retention)

    def _forget(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._promised.difference_update(load.seq.block_hashes[load.index : load.end])
        self.num_outstanding -= load.end - load.index
