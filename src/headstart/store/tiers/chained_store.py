"""ChainedStore: several stores as one `BlockStore`: a local disk, then a server behind it.

A run of blocks is loaded from the store that is expected to be the fastest of those that have its first block, up to
the first block that this one lacks; the rest is another load. Blocks are offered to every store that lacks them, so
what one machine has loaded from the server is on its disk afterwards: such copies wait for the end of loads, whose
requests wait too. Each store keeps its own threads, rates and health: one that hangs delays none of the others.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from itertools import takewhile
from typing import Any

from headstart.core.cache.block_store import BlockKey, BlockLoadPart, BlockSource, BlockStore, StoreStats
from headstart.core.cache.hashing import BlockHash
from headstart.store.disk import DiskStore, SingleTierStore
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.tier import StoreTierLocations

REDIS_TIER = "headstart.store.tiers.redis_tier"  # imported if a server is named: needs the extra [redis]
MAX_COPIES = 1024  # that wait for the end of loads


def open_store(
    found: StoreTierLocations,
    shape: StoredBlockFormat,
    max_bytes: int,
    *,
    password: str | None,
    secrets: Sequence[bytes],
    ttl: int,
) -> BlockStore | None:
    """Open the tiers at these places: a folder alone, a server alone, one after the other, or none. Raises ConfigError.

    `max_bytes`: of the folder. The first secret seals what is written to the server; blocks of the others are read too.
    """
    stores: list[BlockStore] = []
    if found.folder is not None:
        stores.append(DiskStore(found.folder, shape, max_bytes))
    if found.url is not None:
        tier: Any = import_module(REDIS_TIER)
        for number, secret in enumerate(secrets):
            redis = tier.RedisTier(found.url, password, shape, secret, ttl)
            stores.append(SingleTierStore(redis, shape.block_bytes, writes=number == 0))
    return stores[0] if len(stores) == 1 else ChainedStore(stores) if stores else None


class ChainedStore:
    """See the module. Ids of loads are this store's own."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self._stores = tuple(stores)
        self._loads: dict[int, tuple[BlockStore, int]] = {}  # in flight: the store, and its own id
        self._ids: dict[tuple[int, int], int] = {}  # (number of a store, its own id) -> id
        self._num_loads = 0
        self._copies: deque[tuple[int, int, BlockKey]] = deque()  # offers that wait

    def start_writing_from(self, source: BlockSource) -> None:
        for store in self._stores:
            store.start_writing_from(source)

    def contains(self, block_hash: BlockHash) -> bool:
        return any(store.contains(block_hash) for store in self._stores)

    def should_write(self, block_hash: BlockHash) -> bool:
        return any(store.should_write(block_hash) for store in self._stores)

    def expected_load_seconds(self, num_blocks: int, first: BlockHash | None = None) -> float:
        return self._stores[self._fastest(num_blocks, first)].expected_load_seconds(num_blocks)

    def begin_load(self, keys: Sequence[BlockKey]) -> int:
        number = self._fastest(len(keys), keys[0].block_hash if keys else None)
        store = self._stores[number]
        own_id = store.begin_load(list(takewhile(lambda key: store.contains(key.block_hash), keys)))
        self._num_loads += 1
        self._loads[self._num_loads], self._ids[number, own_id] = (store, own_id), self._num_loads
        return self._num_loads

    def cancel_load(self, load_id: int, *, is_late: bool) -> None:
        if load_id in self._loads:
            store, own_id = self._loads[load_id]
            self._end(self._stores.index(store), own_id)
            store.cancel_load(own_id, is_late=is_late)

    def poll_loads(self) -> list[BlockLoadPart]:
        found: list[BlockLoadPart] = []
        for number, store in enumerate(self._stores):
            for loaded in store.poll_loads():
                load_id = self._ids[number, loaded.load_id]
                found.append(loaded._replace(load_id=load_id))
                if loaded.is_last:
                    self._end(number, loaded.load_id)
        self._offer_copies(0 if self._loads else len(self._copies))
        return found

    def release_loaded(self, loaded: BlockLoadPart) -> None:
        for store in self._stores:  # only the one that lent the data knows them
            store.release_loaded(loaded)

    def wait_for_any_load(self, timeout: float) -> None:
        waited = {id(store): store for store, _ in self._loads.values()}
        for store in waited.values():
            began, part = time.monotonic(), timeout / len(waited)
            store.wait_for_any_load(part)
            if time.monotonic() - began < part:
                return  # it has something

    def offer_block(self, block: int, version: int, key: BlockKey) -> None:
        if self._loads and self.contains(key.block_hash):
            self._copies.append((block, version, key))
            self._offer_copies(len(self._copies) - MAX_COPIES)
        else:
            self._offer(block, version, key)

    def mark_used(self, block_hashes: Sequence[BlockHash]) -> None:
        for store in self._stores:
            store.mark_used(block_hashes)

    def set_pinned_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        kept = list(block_hashes)
        for store in self._stores:
            store.set_pinned_blocks(kept)

    def discard_corrupt(self, block_hashes: Sequence[BlockHash]) -> None:
        self._copies = deque(copy for copy in self._copies if copy[2].block_hash not in block_hashes)
        for store in self._stores:
            store.discard_corrupt(block_hashes)

    def clear(self) -> None:
        self._copies.clear()
        for store in self._stores:
            store.clear()

    def stats(self) -> StoreStats:
        """Return the sums over all stores; a block that two have counts twice. No limit: a server has its own."""
        found = [store.stats() for store in self._stores]
        sums = {one.name: _joined([getattr(stats, one.name) for stats in found]) for one in fields(StoreStats)}
        longest = max(stats.pending_seconds for stats in found)
        pending = sums["num_pending"] + len(self._copies)
        return replace(StoreStats(**sums), max_bytes=0, pending_seconds=longest, num_pending=pending)

    def close(self, max_seconds: float = float("inf")) -> None:
        self._offer_copies(len(self._copies))
        until = time.monotonic() + max_seconds
        for store in self._stores:
            store.close(max(0.0, until - time.monotonic()))

    def _offer_copies(self, num: int) -> None:
        for _ in range(num):
            self._offer(*self._copies.popleft())

    def _offer(self, block: int, version: int, key: BlockKey) -> None:
        for store in self._stores:
            if store.should_write(key.block_hash):
                store.offer_block(block, version, key)

    def _fastest(self, num_blocks: int, first: BlockHash | None) -> int:
        """Return the number of the store to load from: among equals the first."""
        having = [n for n, store in enumerate(self._stores) if first is None or store.contains(first)]
        return min(having or range(len(self._stores)), key=lambda n: self._stores[n].expected_load_seconds(num_blocks))

    def _end(self, number: int, own_id: int) -> None:
        del self._loads[self._ids.pop((number, own_id))]


def _joined(values: list[Any]) -> Any:
    """Return the sum of numbers, the sums by reason, or the texts that are not empty."""
    if isinstance(values[0], dict):
        reasons = dict.fromkeys(reason for counts in values for reason in counts)
        return {reason: sum(counts.get(reason, 0) for counts in values) for reason in reasons}
    return "; ".join(filter(None, values)) if isinstance(values[0], str) else sum(values)
