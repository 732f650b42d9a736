"""Transfers: moves blocks between the pool and an external store, and decides whether to load or to compute.

Blocks being loaded are *promised*, like those that another sequence computes in this step: a sequence that misses one
waits, takes it over once it is published, and costs no other sequence its turn. The rule: load the run of blocks that a
sequence misses and the store has, if the expected load time is less than the time to compute them, both as measured on
this machine; cancel if it takes much longer than expected. Data arrive outside the pool and get blocks only when they
are complete and verified, so a hanging disk holds nothing but the promise, and that only until its deadline.

A sequence that is the only one with a prompt to compute does not wait for more than a tenth of that time. A load that
is expected to take longer is *met* (after Cake, arXiv 2410.03065): it brings the last blocks first, the sequence
computes from the front, and takes the rest over when it gets there. What has arrived is held until then, and is given
up first if blocks run out. A shorter load that is late is passed: the sequence computes, and uses what still arrives.
One of which blocks have arrived, at a pace at which the rest takes no longer than that tenth, is waited for longer: by
the time that computing those would have taken at most, so that the first token is no later either.
Recurrent layers exclude both: a load brings one state, and computing on the way to it would be for nothing.
"""

from collections.abc import Iterable
from math import ceil, inf
from typing import NamedTuple

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockStore
from headstart.core.cache.hashing import BlockHash, checkpoint_page_hash
from headstart.core.cache.kv_cache import KVCache, PrefixHit
from headstart.core.executor import Executor
from headstart.core.sequence import Sequence, SequenceStatus

MAX_LOADS = 8  # of one sequence; after that it computes
PATIENCE = 2.0  # times the expected duration
GRACE_SHARE, GRACE_SECONDS = 0.1, 0.05  # minimum patience: this share of the compute time, plus a constant
WAIT_SECONDS = 0.02  # for which a load is waited for at least
MEET_BLOCKS, MEET_RUN = 4, 4  # the shortest load that is met; blocks that one brings in their order, for runs on a disk
MIN_CHUNK = 2  # blocks that are computed between two looks at what has arrived
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


class LoadableBlocks(NamedTuple):
    """Pieces that only the store has and a sequence could use: blocks by index, or pages of a checkpoint behind one.

    With recurrent layers these are a checkpoint, whose pages come first, and the blocks before it that are missing.
    """

    pieces: tuple[tuple[int, int | None], ...] = ()  # index of a block; its page, or None for the block itself
    num_tokens: int = 0  # that need not be computed then

    @property
    def num_checkpoint_pages(self) -> int:
        return sum(page is not None for _, page in self.pieces)


class _Load:
    """Pieces `[index, end)` of what one sequence wants are being loaded; `index` advances as they arrive.

    `is_passed`: its sequence computes meanwhile. `held`: blocks that have arrived, by their index in the sequence, if
    it is met. `expected`: seconds it takes; `longest`: seconds that a first token may wait for it beyond computing.
    """

    __slots__ = (
        "began",
        "deadline",
        "depth",
        "end",
        "expected",
        "held",
        "index",
        "is_passed",
        "longest",
        "names",
        "patience",
        "pieces",
        "seq",
        "wait_until",
    )

    def __init__(
        self, seq: Sequence, wanted: LoadableBlocks, names: list[BlockHash], patience: float, now: float
    ) -> None:
        self.seq, self.pieces, self.names, self.index, self.end = seq, wanted.pieces, names, 0, len(names)
        self.depth = wanted.pieces[0][0] + 1 if wanted.num_checkpoint_pages else 0  # of the checkpoint, in blocks
        self.patience, self.deadline = patience, now + patience
        self.began, self.expected, self.longest, self.wait_until = now, 0.0, 0.0, inf
        self.is_passed, self.held = False, dict[int, int]()

    @property
    def is_met(self) -> bool:
        """Whether it brings its last blocks first."""
        return self.wait_until == self.began

    def is_over(self, block_size: int) -> bool:
        """Return whether its sequence has computed all that it has not brought yet."""
        coming = self.pieces[self.index : min(self.index + MEET_RUN, self.end)]
        return all((index + 1) * block_size <= self.seq.next_start for index, _ in coming)

    def brings_state(self, seq: Sequence, start: int, block_size: int) -> bool:
        """Return whether it brings a checkpoint from which this sequence could continue behind `start`."""
        depth = self.depth
        if not start < depth * block_size < len(seq.token_ids):
            return False
        return seq.block_hashes[depth - 1 : depth] == self.seq.block_hashes[depth - 1 : depth]


class StoreTransfers:
    """The transfers between one pool and one store, or none. Each step begins with `publish_loaded`.

    While it plans, the scheduler calls `should_await_load`, `may_load_from_store`, `find_loadable` and `begin`.
    """

    def __init__(self, cache: KVCache, store: BlockStore | None) -> None:
        self.rate = ComputeRate()
        self.num_outstanding = 0  # blocks promised by loads
        self._cache = cache
        self._now = 0.0  # at the last `publish_loaded`
        self._pool: BlockPool = cache.pool
        self._store = store
        self._loads: dict[int, _Load] = {}
        self._promised: dict[BlockHash, _Load] = {}
        self._arrived: dict[Sequence, int] = {}  # blocks that a waiting sequence has loaded and not taken over yet
        self._loaded: set[BlockHash] = set()  # published hashes that came from the store
        self._offered: set[BlockHash] = (
            set()
        )  # published hashes that were offered: the store, or one tier of it, lacked them
        if store is not None:
            self._pool.listeners.append(self)
            self._pool.page_listeners.append(self)

    def should_await_load(self, seq: Sequence, index: int, start: int, *, alone: bool = False) -> bool:
        """Return whether to wait for block `index` of the sequence, or a state behind `start`, that is being loaded.

        `alone`: no other sequence has a prompt to compute. Then a load that is late is passed.
        """
        block_hashes, size = seq.block_hashes, self._cache.block_size
        if not self._promised or not self._cache.may_read_cache(seq):
            return False
        load = self._promised.get(block_hashes[index]) if index < len(block_hashes) else None
        if load is not None:
            load.is_passed = load.is_passed or (alone and self._now >= load.wait_until)
            return not load.is_passed
        return any(load.brings_state(seq, start, size) for load in self._loads.values())

    def may_load_from_store(self, seq: Sequence) -> bool:
        """Return whether the store is asked for what this sequence misses."""
        return self._store is not None and seq.num_loads < MAX_LOADS and self._cache.may_read_cache(seq)

    def num_reserved_by_others(self, seq: Sequence, *, may_wait: bool) -> int:
        """Return the blocks that loads of other sequences take, or took and are about to be taken over.

        Without `may_wait`, which says that another sequence runs, what was loaded for one that waits does not count.
        """
        if not self._arrived:
            return self.num_outstanding
        loading = {load.seq for load in self._loads.values()}
        arrived = (n for other, n in self._arrived.items() if other is not seq and (may_wait or other in loading))
        return self.num_outstanding + sum(arrived)

    def find_loadable(self, seq: Sequence, index: int, start: int) -> LoadableBlocks:
        """Return what only the store has and the sequence, for which it is asked, could use. Changes nothing.

        `index` is its first block that is not in the pool, `start` the first token that it would compute.
        """
        store, block_hashes = self._store, seq.block_hashes
        assert store is not None
        if self._cache.checkpoints.num_pages:
            return self._finds_state(seq, index, start)
        if self._passed(seq) is not None:
            return LoadableBlocks()
        end = index
        while end < len(block_hashes) and store.contains(block_hashes[end]):
            if self._pool.contains(block_hashes[end]) or block_hashes[end] in self._promised:
                break
            end += 1
        return LoadableBlocks(tuple((at, None) for at in range(index, end)), (end - index) * self._cache.block_size)

    def _finds_state(self, seq: Sequence, index: int, start: int) -> LoadableBlocks:
        """Return what is missing for the deepest checkpoint that pool and store have together, with its blocks."""
        block_hashes, size = seq.block_hashes, self._cache.block_size
        most, depth = min(len(block_hashes), (len(seq.token_ids) - 1) // size), index
        while depth < most and self._has(block_hashes[depth]):
            depth += 1
        for at in range(min(depth, most), start // size, -1):
            if self._has(checkpoint_page_hash(block_hashes[at - 1], 0)):
                names = self._cache.checkpoints.page_hashes_of_checkpoint(block_hashes[at - 1])
                if all(map(self._has, names)):
                    pages = [(at - 1, page) for page, name in enumerate(names) if not self._pool.contains(name)]
                    blocks = [(i, None) for i in range(index, at) if not self._pool.contains(block_hashes[i])]
                    return LoadableBlocks((*pages, *blocks), at * size - start)
        return LoadableBlocks()

    def _has(self, name: BlockHash) -> bool:
        """Return whether the pool has this, or the store, and it is not being loaded."""
        assert self._store is not None
        return self._pool.contains(name) or (name not in self._promised and self._store.contains(name))

    def in_pool_or_store(self, block_hash: BlockHash) -> bool:
        """Return whether the pool or the store has a block with this hash. Changes nothing."""
        return self._pool.contains(block_hash) or (self._store is not None and self._store.contains(block_hash))

    def begin_load_if_faster(
        self, seq: Sequence, wanted: LoadableBlocks, now: float, *, may_meet: bool = False
    ) -> bool:
        """Begin to load what a sequence wants if that is faster than computing; else change nothing.

        Return whether the sequence waits for it; if it `may_meet` a long load, it does not.
        """
        store, cache, num = self._store, self._cache, len(wanted.pieces)
        assert store is not None and num > 0
        expected = store.expected_load_seconds(num, cache.block_key(seq, *wanted.pieces[0]).block_hash)
        computing = wanted.num_tokens * self.rate.seconds_per_token or inf
        if not expected < computing:
            return False
        grace = BLIND_SECONDS if computing == inf else GRACE_SHARE * computing
        longest = max(GRACE_SHARE * computing, WAIT_SECONDS)
        meets = may_meet and num >= MEET_BLOCKS and expected > longest and not cache.checkpoints.num_pages
        if meets:
            runs = [wanted.pieces[at : at + MEET_RUN] for at in range(0, num, MEET_RUN)]
            wanted = wanted._replace(pieces=tuple(piece for run in reversed(runs) for piece in run))
        keys = [cache.block_key(seq, index, page) for index, page in wanted.pieces]
        load_id = store.begin_load(keys)
        patience = max(PATIENCE * expected, grace) + GRACE_SECONDS
        names = [key.block_hash for key in keys]
        load = self._loads[load_id] = _Load(seq, wanted, names, patience, now)
        load.expected, load.longest, load.is_passed = expected, longest, meets
        if not cache.checkpoints.num_pages:
            load.wait_until = now if meets else now + max(expected, longest)
        self._promised.update(dict.fromkeys(names, load))
        self.num_outstanding += num
        seq.num_loads += 1
        return not meets

    def max_chunk_len(self, seq: Sequence, start: int, num: int) -> int:
        """Return how many of `num` tokens from `start` on to compute until the next look at a load that is passed.

        That is up to the first block that has arrived, and no longer than until load and sequence should meet.
        """
        load = self._passed(seq) if self._loads and num > 1 else None
        if load is None:
            return num
        size, late = self._cache.block_size, self._now - load.began
        first, last = start // size, max(index for index, _ in load.pieces) + 1
        ahead = (index for index in load.held if index * size >= start + (not seq.num_scheduled_tokens))
        stop = min(ahead, default=last)
        if load.index < load.end and stop > first:
            coming = load.expected - late if late < load.expected else late
            share = coming / (coming + (stop - first) * size * self.rate.seconds_per_token)
            stop = min(stop, first + max(ceil((stop - first) * share), MIN_CHUNK))
        elif stop == last:
            return num
        return min(num, max(stop * size - start, 0))

    def on_sequence_left(self, seq: Sequence) -> None:
        """Give up the loads that a sequence was to meet: it is finished, or begins again."""
        self._arrived.pop(seq, None)
        for load_id in [load_id for load_id, load in self._loads.items() if load.is_met and load.seq is seq]:
            self._drop(load_id, is_late=False)

    def cancel_loads_holding_blocks(self) -> bool:
        """Give up the loads that hold blocks, which others need; return whether there were any."""
        found = [load_id for load_id, load in self._loads.items() if load.held]
        for load_id in found:
            self._drop(load_id, is_late=False)
        return bool(found)

    def publish_loaded(self, executor: Executor, now: float) -> None:
        """Publish the blocks that have arrived, so that their sequences find them, and cancel overdue loads."""
        store = self._store
        self._now = now
        if store is None:
            return
        for loaded in store.poll_loads():
            load = self._loads.get(loaded.load_id)
            if load is not None:
                self._take_in(load, loaded, executor, now)
            store.release_loaded(loaded)
        for load_id, load in list(self._loads.items()):
            self._publish_held(load)
            is_running = load.is_met and load.seq.status is SequenceStatus.RUNNING
            if load.is_met and not load.held and load.index == load.end:
                self._forget(load_id)
            elif is_running and not load.held and load.is_over(self._cache.block_size):
                self._drop(load_id, is_late=not load.index)
            elif not is_running and now > load.deadline:
                load.seq.num_loads = MAX_LOADS
                self._drop(load_id, is_late=True)

    def wait_for_any_load(self, timeout: float) -> None:
        """Wait for loaded blocks, if any load is in flight."""
        if self._store is not None and self._loads:
            self._store.wait_for_any_load(timeout)

    def num_loaded_tokens_in_range(self, seq: Sequence, start: int, end: int) -> int:
        """Return how many of the tokens `[start, end)`, which the sequence takes over, came from the store."""
        if not self._loaded or start >= end:
            return 0
        size, block_hashes, total = self._cache.block_size, seq.block_hashes, 0
        for index in range(start // size, -(-end // size)):
            if index < len(block_hashes) and block_hashes[index] in self._loaded:
                total += min(end, (index + 1) * size) - max(start, index * size)
        return total

    def mark_used(self, seq: Sequence, hit: PrefixHit) -> None:
        """Mark the blocks that a sequence takes over as used in the store, so that they are not removed."""
        self._arrived.pop(seq, None)
        if self._store is not None and hit.block_ids:
            block_hashes = seq.block_hashes[: hit.start_block + len(hit.block_ids)]
            if hit.state:
                block_hashes += self._cache.checkpoints.page_hashes_of_checkpoint(
                    block_hashes[hit.num_tokens // self._cache.block_size - 1]
                )
            self._store.mark_used(block_hashes)

    def set_pinned_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Make the store keep these pinned blocks, and offer it those that it lacks."""
        if self._store is None:
            return
        pinned = list(block_hashes)
        self._store.set_pinned_blocks(pinned)
        for block_hash in pinned:
            entry = self._pool.published_entry(block_hash)
            if entry is not None:
                self._offer(entry[0], block_hash, entry[1], entry[2])

    def filter_offered_hashes(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """Return those of these hashes whose content in the store, if any, came from the blocks published now."""
        return [block_hash for block_hash in block_hashes if block_hash in self._offered]

    def discard_corrupt(self, block_hashes: list[BlockHash]) -> None:
        """Discard blocks that are or may be corrupt from the store."""
        if self._store is not None and block_hashes:
            self._store.discard_corrupt(block_hashes)
            for load_id, load in list(self._loads.items()):
                if not {load.seq.block_hashes[index] for index in load.held}.isdisjoint(block_hashes):
                    self._drop(load_id, is_late=False)

    # ------------------------------------------------------------------------------------------- called by the pool

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Offer the block to the store."""
        self._offer(block, block_hash, parent, tokens)

    def on_block_removed(self, block_hash: BlockHash) -> None:
        """Drop the block's origin."""
        self._loaded.discard(block_hash)
        self._offered.discard(block_hash)

    def on_cache_cleared(self) -> None:
        """Drop the origin of all blocks; what is held goes with the next step."""
        for load in self._loads.values():
            load.deadline = -inf if load.held else load.deadline
        self._loaded.clear()
        self._offered.clear()
        self._arrived.clear()

    # ------------------------------------------------------------------------------------------------------ private

    def _offer(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        assert self._store is not None
        if self._store.should_write(block_hash):
            self._offered.add(block_hash)
            self._store.offer_block(block, self._pool.block_version(block), BlockKey(block_hash, parent, tokens))

    def _take_in(self, load: _Load, loaded: BlockLoadPart, executor: Executor, now: float) -> None:
        """Write and publish the blocks that arrived; cancel the rest of the load if there is no space for it."""
        assert self._store is not None
        blocks = self._allocate(load, len(loaded.data))
        dirty = self._pool.take_unzeroed_blocks()
        if dirty:  # before they are written, never after
            executor.zero_blocks(dirty)
        for block, data in zip(blocks, loaded.data, strict=False):
            executor.write_block(block, data)
        self._publish(load, blocks)
        if load.seq.status is SequenceStatus.WAITING:
            most = len(load.seq.block_hashes)
            self._arrived[load.seq] = min(self._arrived.get(load.seq, 0) + len(blocks), most)
        load.deadline = now + load.patience
        late, saved = now - load.began, load.index * self._cache.block_size * self.rate.seconds_per_token
        if not load.is_met and late * (load.end - load.index) <= load.longest * load.index:
            load.wait_until = max(load.wait_until, min(now, load.began + saved) + load.longest)
        if len(blocks) < len(loaded.data):
            load.seq.num_loads = MAX_LOADS  # out of space: the sequence computes as much as fits
            if not loaded.is_last:
                self._store.cancel_load(loaded.load_id, is_late=False)
        if loaded.is_last or len(blocks) < len(loaded.data):
            self._end(load)
            if not load.held:
                self._forget(loaded.load_id)

    def _allocate(self, load: _Load, num: int) -> list[int]:
        """Allocate at most `num` blocks, without evicting blocks that the sequence is about to take over."""
        pool, request = self._pool, load.seq.request
        states = load.index < load.end and load.pieces[load.index][1] is not None
        if num > pool.num_scratch:
            hit = self._cache.match_prefix(load.seq)
            arrived = (
                entry[0] for name in load.names[: load.index] if (entry := pool.published_entry(name)) is not None
            )
            held = list(dict.fromkeys((*hit.block_ids, *hit.state, *arrived)))
            num = max(min(num, pool.num_available_after_acquire(held, request.tenant)), 0)
            pool.acquire(held)
            blocks = pool.allocate(num, request.tenant, by=request.request_id, states=states)
            pool.release(held)
            return blocks
        return pool.allocate(num, request.tenant, by=request.request_id, states=states)

    def _publish(self, load: _Load, blocks: list[int]) -> None:
        """Publish the next blocks of a load, or hold them if it is met."""
        seq, start = load.seq, load.index
        load.index += len(blocks)
        names = load.names[start : load.index]
        for name in names:
            del self._promised[name]
        self.num_outstanding -= len(blocks)
        if load.is_met:
            load.held.update((index, block) for (index, _), block in zip(load.pieces[start:], blocks, strict=False))
            return
        for (index, page), name, block in zip(load.pieces[start : load.index], names, blocks, strict=True):
            if self._cache.publish_block(seq, index, block, page):
                self._loaded.add(name)
        self._pool.release(blocks, seq.request.retention)

    def _publish_held(self, load: _Load) -> None:
        """Publish the blocks that are held and whose sequence has come to them, from the front on."""
        seq, size, published = load.seq, self._cache.block_size, list[int]()
        for index in sorted(load.held):
            is_behind = not seq.num_scheduled_tokens and index > 0 and self._pool.contains(seq.block_hashes[index - 1])
            if index * size > seq.num_computed_tokens and not is_behind:
                break
            published.append(load.held.pop(index))
            if self._cache.publish_block(seq, index, published[-1]):
                self._loaded.add(seq.block_hashes[index])
        self._pool.release(published, seq.request.retention)

    def _passed(self, seq: Sequence) -> _Load | None:
        """Return the load that this sequence does not wait for."""
        return next((load for load in self._loads.values() if load.is_passed and load.seq is seq), None)

    def _end(self, load: _Load) -> None:
        """End a load: what has not arrived is promised no more."""
        for name in load.names[load.index : load.end]:
            del self._promised[name]
        self.num_outstanding -= load.end - load.index
        load.end = load.index

    def _drop(self, load_id: int, *, is_late: bool) -> None:
        """Cancel a load, unless all has arrived, and forget it."""
        assert self._store is not None
        if self._loads[load_id].index < self._loads[load_id].end:
            self._store.cancel_load(load_id, is_late=is_late)
        self._forget(load_id)

    def _forget(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._end(load)
        self._pool.release(list(load.held.values()))
