"""Transfers: moves blocks between the pool and an external store, and decides whether to load or to compute.

Blocks being loaded are *promised*, like those that another sequence computes in this step: a sequence that misses one
waits, takes it over once it is published, and costs no other sequence its turn. The rule: load the run of blocks that a
sequence misses and the store has, if the expected load time is less than the time to compute them, both as measured on
this machine; cancel if it takes much longer than expected. Data arrive outside the pool and get blocks only when they
are complete and verified, so a hanging disk holds nothing but the promise, and that only until its deadline.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockKey, BlockStore, Loaded
from headstart.core.cache.hashing import BlockHash, page_hash
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


class Wanted(NamedTuple):
    """Pieces that only the store has and a sequence could use: blocks by index, or pages of a checkpoint behind one.

    With recurrent layers these are a checkpoint, whose pages come first, and the blocks before it that are missing.
    """

    pieces: tuple[tuple[int, int | None], ...] = ()  # index of a block; its page, or None for the block itself
    num_tokens: int = 0  # that need not be computed then

    @property
    def num_pages(self) -> int:
        return sum(page is not None for _, page in self.pieces)


class _Load:
    """Pieces `[index, end)` of what one sequence wants are being loaded; `index` advances as they arrive."""

    __slots__ = ("deadline", "depth", "end", "index", "names", "patience", "pieces", "seq")

    def __init__(self, seq: Sequence, wanted: Wanted, names: list[BlockHash], patience: float, now: float) -> None:
        self.seq, self.pieces, self.names, self.index, self.end = seq, wanted.pieces, names, 0, len(names)
        self.depth = wanted.pieces[0][0] + 1 if wanted.num_pages else 0  # of the checkpoint, in blocks
        self.patience, self.deadline = patience, now + patience

    def brings_state(self, seq: Sequence, start: int, block_size: int) -> bool:
        """Return whether it brings a checkpoint from which this sequence could continue behind `start`."""
        depth = self.depth
        if not start < depth * block_size < len(seq.token_ids):
            return False
        return seq.block_hashes[depth - 1 : depth] == self.seq.block_hashes[depth - 1 : depth]


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
            self._pool.page_listeners.append(self)

    def awaits(self, seq: Sequence, index: int, start: int) -> bool:
        """Return whether block `index` of the sequence, or a state behind `start`, is being loaded. Changes nothing."""
        block_hashes, size = seq.block_hashes, self._cache.block_size
        if not self._promised or not self._cache.reads(seq):
            return False
        if index < len(block_hashes) and block_hashes[index] in self._promised:
            return True
        return any(load.brings_state(seq, start, size) for load in self._loads.values())

    def finds(self, seq: Sequence, index: int, start: int) -> Wanted:
        """Return what only the store has and the sequence could use. Changes nothing.

        `index` is its first block that is not in the pool, `start` the first token that it would compute.
        """
        store, block_hashes = self._store, seq.block_hashes
        if store is None or seq.num_loads >= MAX_LOADS or not self._cache.reads(seq):
            return Wanted()
        if self._cache.checkpoints.num_pages:
            return self._finds_state(seq, index, start)
        end = index
        while end < len(block_hashes) and store.contains(block_hashes[end]):
            if self._pool.contains(block_hashes[end]) or block_hashes[end] in self._promised:
                break
            end += 1
        return Wanted(tuple((at, None) for at in range(index, end)), (end - index) * self._cache.block_size)

    def _finds_state(self, seq: Sequence, index: int, start: int) -> Wanted:
        """Return what is missing for the deepest checkpoint that pool and store have together, with its blocks."""
        block_hashes, size = seq.block_hashes, self._cache.block_size
        most, depth = min(len(block_hashes), (len(seq.token_ids) - 1) // size), index
        while depth < most and self._has(block_hashes[depth]):
            depth += 1
        for at in range(min(depth, most), start // size, -1):
            if self._has(page_hash(block_hashes[at - 1], 0)):
                names = self._cache.checkpoints.names(block_hashes[at - 1])
                if all(map(self._has, names)):
                    pages = [(at - 1, page) for page, name in enumerate(names) if not self._pool.contains(name)]
                    blocks = [(i, None) for i in range(index, at) if not self._pool.contains(block_hashes[i])]
                    return Wanted((*pages, *blocks), at * size - start)
        return Wanted()

    def _has(self, name: BlockHash) -> bool:
        """Return whether the pool has this, or the store, and it is not being loaded."""
        assert self._store is not None
        return self._pool.contains(name) or (name not in self._promised and self._store.contains(name))

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the pool or the store has a block with this hash. Changes nothing."""
        return self._pool.contains(block_hash) or (self._store is not None and self._store.contains(block_hash))

    def begin(self, seq: Sequence, wanted: Wanted, now: float) -> bool:
        """Begin to load what a sequence wants if that is faster than computing; else change nothing."""
        store, cache, num = self._store, self._cache, len(wanted.pieces)
        assert store is not None and num > 0
        expected = store.expected_seconds(num, cache.key(seq, *wanted.pieces[0]).block_hash)
        computing = wanted.num_tokens * self.rate.seconds_per_token or inf
        if not expected < computing:
            return False
        grace = BLIND_SECONDS if computing == inf else GRACE_SHARE * computing
        keys = [cache.key(seq, index, page) for index, page in wanted.pieces]
        load_id = store.load(keys)
        patience = max(PATIENCE * expected, grace) + GRACE_SECONDS
        names = [key.block_hash for key in keys]
        self._loads[load_id] = _Load(seq, wanted, names, patience, now)
        self._promised.update(names)
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
            block_hashes = seq.block_hashes[: hit.start_block + len(hit.block_ids)]
            if hit.state:
                block_hashes += self._cache.checkpoints.names(
                    block_hashes[hit.num_tokens // self._cache.block_size - 1]
                )
            self._store.touch(block_hashes)

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
        blocks = self._allocate(load, len(loaded.data))
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

    def _allocate(self, load: _Load, num: int) -> list[int]:
        """Allocate at most `num` blocks, without evicting blocks that the sequence is about to take over."""
        pool, request = self._pool, load.seq.request
        states = load.index < load.end and load.pieces[load.index][1] is not None
        if num > pool.num_scratch:
            hit = self._cache.match(load.seq)
            arrived = (entry[0] for name in load.names[: load.index] if (entry := pool.entry(name)) is not None)
            held = list(dict.fromkeys((*hit.block_ids, *hit.state, *arrived)))
            num = max(min(num, pool.num_available(held, request.tenant)), 0)
            pool.acquire(held)
            blocks = pool.allocate(num, request.tenant, by=request.request_id, states=states)
            pool.release(held)
            return blocks
        return pool.allocate(num, request.tenant, by=request.request_id, states=states)

    def _publish(self, load: _Load, blocks: list[int]) -> None:
        seq, start = load.seq, load.index
        load.index += len(blocks)
        names = load.names[start : load.index]
        self._promised.difference_update(names)
        self.num_outstanding -= len(blocks)
        for (index, page), name, block in zip(load.pieces[start : load.index], names, blocks, strict=True):
            if self._cache.publish_block(seq, index, block, page):
                self._loaded.add(name)
        self._pool.release(blocks, seq.request.retention)

    def _forget(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._promised.difference_update(load.names[load.index :])
        self.num_outstanding -= load.end - load.index
