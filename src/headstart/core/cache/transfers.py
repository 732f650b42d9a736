"""Transfers: what moves between the pool and a store of blocks outside it, and whether loading beats computing.

Blocks on their way are *promised*, like those that another sequence computes in this step: who misses one of them
waits, takes it over once it is published, and costs nobody's turn. The rule: load the run of blocks that a sequence
misses and the store has if the store expects to bring it sooner than computing it would take, both as measured here and
now; give up if it takes much longer than that. Data arrive beside the pool and get blocks only when they are there and
verified, so a disk that hangs holds nothing but the promise, and that no longer than its deadline.
"""

from collections.abc import Iterable
from math import inf

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockKey, BlockStore, Loaded
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import Hit, KVCache
from headstart.core.executor import Executor
from headstart.core.request import Sequence

MAX_LOADS = 8  # of one sequence: after that it computes, whatever the store says
PATIENCE = 2.0  # times the expected time
GRACE_SHARE, GRACE_SECONDS = 0.1, 0.05  # at least so much of the time that computing would take, and a little
BLIND_SECONDS = 1.0  # patience while nobody knows what computing takes
FADING_TOKENS = 4096  # prefill tokens over which the measured speed fades


class ComputeRate:
    """Seconds per token of steps that mostly prefill; 0.0 until there was one."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The same the other way round; 0.0 until there was a step."""
        return 1 / self.seconds_per_token if self.seconds_per_token else 0.0

    def learn(self, num_tokens: int, num_prefill: int, elapsed: float) -> None:
        """Takes in one step; one that mostly decodes says nothing about prefill."""
        if 2 * num_prefill <= num_tokens or num_prefill < 16:
            return
        seen = elapsed / num_tokens
        weight = min(num_tokens / FADING_TOKENS, 1.0) if self.seconds_per_token else 1.0
        self.seconds_per_token += weight * (seen - self.seconds_per_token)


class _Load:
    """Blocks `[index, end)` of one sequence on their way; `index` moves on as they arrive."""

    __slots__ = ("deadline", "end", "index", "patience", "seq")

    def __init__(self, seq: Sequence, index: int, end: int, patience: float, now: float) -> None:
        self.seq, self.index, self.end = seq, index, end
        self.patience, self.deadline = patience, now + patience


class Transfers:
    """Between one pool and one store, or none. Each step begins with `take_in`; planning asks `awaits` and `begin`s."""

    def __init__(self, cache: KVCache, store: BlockStore | None) -> None:
        self.rate = ComputeRate()
        self.num_outstanding = 0  # blocks promised by loads
        self._cache = cache
        self._pool: BlockPool = cache.pool
        self._store = store
        self._loads: dict[int, _Load] = {}
        self._promised: set[BlockHash] = set()
        self._loaded: set[BlockHash] = set()  # names that came from the store and are still published
        self._offered: set[BlockHash] = set()  # published names that the store did not have then
        if store is not None:
            self._pool.listeners.append(self)

    def awaits(self, seq: Sequence, index: int) -> bool:
        """Whether block `index` of the sequence is on its way. Changes nothing."""
        names = seq.block_hashes
        return index < len(names) and names[index] in self._promised and self._cache.reads(seq)

    def finds(self, seq: Sequence, index: int) -> int:
        """How many blocks of the sequence, from `index` on, the store has and nobody else does. Changes nothing."""
        store, names = self._store, seq.block_hashes
        if store is None or index >= len(names) or seq.num_loads >= MAX_LOADS or not self._cache.reads(seq):
            return 0
        end = index
        while end < len(names) and store.contains(names[end]):
            if self._pool.contains(names[end]) or names[end] in self._promised:
                break
            end += 1
        return end - index

    def holds(self, name: BlockHash) -> bool:
        """Return whether the pool or the store has a block of this name. Changes nothing."""
        return self._pool.contains(name) or (self._store is not None and self._store.contains(name))

    def begin(self, seq: Sequence, index: int, num: int, now: float) -> bool:
        """Begins to load `num` blocks from `index` on if that beats computing them; else changes nothing."""
        store, cache = self._store, self._cache
        assert store is not None and num > 0
        expected = store.expected_seconds(num)
        computing = num * cache.block_size * self.rate.seconds_per_token or inf
        if not expected < computing:
            return False
        grace = BLIND_SECONDS if computing == inf else GRACE_SHARE * computing
        names = seq.block_hashes[index : index + num]
        load_id = store.load([cache.key(seq, at) for at in range(index, index + num)])
        patience = max(PATIENCE * expected, grace) + GRACE_SECONDS
        self._loads[load_id] = _Load(seq, index, index + num, patience, now)
        self._promised.update(names)
        self.num_outstanding += num
        seq.num_loads += 1
        return True

    def take_in(self, executor: Executor, now: float) -> None:
        """Puts what has arrived into the pool, where its sequences will find it, and gives up what is overdue."""
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
        """Waits for something to arrive, if anything is on its way."""
        if self._store is not None and self._loads:
            self._store.wait(timeout)

    def num_loaded_tokens(self, seq: Sequence, start: int, end: int) -> int:
        """How many of the tokens `[start, end)`, which it takes over, came from the store."""
        if not self._loaded or start >= end:
            return 0
        size, names, total = self._cache.block_size, seq.block_hashes, 0
        for index in range(start // size, -(-end // size)):
            if index < len(names) and names[index] in self._loaded:
                total += min(end, (index + 1) * size) - max(start, index * size)
        return total

    def used(self, seq: Sequence, hit: Hit) -> None:
        """Tells the store what a sequence takes over: that is in use, and not to be given up."""
        if self._store is not None and hit.block_ids:
            self._store.touch(seq.block_hashes[: hit.start_block + len(hit.block_ids)])

    def keep(self, names: Iterable[BlockHash]) -> None:
        """These are pinned: the store is to have them for good. What it has not yet it is offered again."""
        if self._store is None:
            return
        pinned = list(names)
        self._store.keep(pinned)
        for name in pinned:
            entry = self._pool.entry(name)
            if entry is not None:
                self._offer(entry[0], name, entry[1], entry[2])

    def offered(self, names: list[BlockHash]) -> list[BlockHash]:
        """Those of these names whose content in the store, if there is any, comes from what is published here now."""
        return [name for name in names if name in self._offered]

    def distrust(self, names: list[BlockHash]) -> None:
        """These are corrupt, or may be: they must not come back from the store."""
        if self._store is not None and names:
            self._store.distrust(names)

    # ------------------------------------------------------------------------------------------- what the pool says

    def published(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Offers it to the store."""
        self._offer(block, name, parent, tokens)

    def removed(self, name: BlockHash) -> None:
        """Forgets where it came from."""
        self._loaded.discard(name)
        self._offered.discard(name)

    def cleared(self) -> None:
        """Forgets where they came from."""
        self._loaded.clear()
        self._offered.clear()

    # ------------------------------------------------------------------------------------------------------ private

    def _offer(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        assert self._store is not None
        if not self._store.contains(name):
            self._offered.add(name)
            self._store.offer(block, self._pool.version(block), BlockKey(name, parent, tokens))

    def _take_in(self, load: _Load, loaded: Loaded, executor: Executor, now: float) -> None:
        """Blocks, content and names for what arrived; the rest of the load is given up if there is no room for it."""
        assert self._store is not None
        blocks = self._allocate(load.seq, len(loaded.data))
        dirty = self._pool.take_blocks_to_zero()
        if dirty:  # before they are written: nobody may clear them after
            executor.zero_blocks(dirty)
        for block, data in zip(blocks, loaded.data, strict=False):
            executor.write_block(block, data)
        self._publish(load, blocks)
        load.deadline = now + load.patience
        if len(blocks) < len(loaded.data):
            load.seq.num_loads = MAX_LOADS  # there is no room, so it computes what it has room for
            if not loaded.is_last:
                self._store.cancel(loaded.load_id, is_late=False)
            self._forget(loaded.load_id)
        elif loaded.is_last:
            self._forget(loaded.load_id)

    def _allocate(self, seq: Sequence, num: int) -> list[int]:
        """At most `num` blocks, without evicting what the sequence is about to take over."""
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
        names = seq.block_hashes[start : load.index]
        self._promised.difference_update(names)
        self.num_outstanding -= len(blocks)
        for index, block in enumerate(blocks, start):
            if self._cache.publish_block(seq, index, block):
                self._loaded.add(names[index - start])
        self._pool.release(blocks, seq.request.retention)

    def _forget(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._promised.difference_update(load.seq.block_hashes[load.index : load.end])
        self.num_outstanding -= load.end - load.index
