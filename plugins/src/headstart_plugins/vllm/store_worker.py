"""The worker's side of the store connector: copies blocks between vLLM's KV and the store, in the engine's thread."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.envs import VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS

from headstart.core.cache.block_store import BlockLoadPart, BlockStore
from headstart.core.cache.transfers import BLIND_SECONDS, GRACE_SECONDS, GRACE_SHARE, PATIENCE
from headstart_plugins.vllm.store_planner import BlockLoad, StoreMetadata, StoreReport

STAGED_BYTES = 128 << 20  # copies of blocks that wait to be written; the oldest are dropped
SPARE_SECONDS = 2.0  # of those that vLLM waits for a worker to exit, for all else that it does then
IDLE_SECONDS = 0.005  # maximum wait for a load in a step that computes nothing


@dataclass(slots=True)
class _Load:
    plan: BlockLoad
    deadline: float
    patience: float
    num_done: int = 0
    num_before: int = 0  # of these, before the part that is being read: the tiers of a store have different blocks


@dataclass(slots=True)
class _Finished:
    request_ids: set[str] = field(default_factory=set)
    block_ids: set[int] = field(default_factory=set)  # of blocks that could not be loaded
    hashes: list[bytes] = field(default_factory=list)  # of the first of these of each load


class StagedBlocks:
    """Copies of computed blocks until they are written; from two threads.

    vLLM may reuse a block in the next step, so it is copied in the step that fills it. `is_chain`: several tiers
    take a copy, so it is kept until newer ones need its place.
    """

    def __init__(self, max_blocks: int, *, is_chain: bool) -> None:
        self._max_blocks, self._is_kept = max_blocks, is_chain
        self._copies: OrderedDict[int, bytes] = OrderedDict()
        self._num_staged = 0
        self._lock = Lock()

    def stage(self, data: bytes) -> int:
        """Keep a copy; return its number."""
        with self._lock:
            self._num_staged += 1
            self._copies[self._num_staged] = data
            if len(self._copies) > self._max_blocks:
                self._copies.popitem(last=False)
            return self._num_staged

    def take(self, number: int, version: int) -> bytes | None:
        """Return the copy, and drop it if nothing else takes it; None if it was dropped before. A `BlockSource`."""
        with self._lock:
            return self._copies.get(number) if self._is_kept else self._copies.pop(number, None)


class StoreWorker:
    """The transfers of one worker."""

    def __init__(self, store: BlockStore, block_bytes: int, *, is_chain: bool = False) -> None:
        self._store, self._block_bytes = store, block_bytes
        self._staged = StagedBlocks(max(1, STAGED_BYTES // block_bytes), is_chain=is_chain)
        self._layers: list[NDArray[np.uint8]] = []  # [blocks, bytes] each
        self._loads: dict[int, _Load] = {}
        self._finished = _Finished()
        store.start_writing_from(self._staged.take)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take over vLLM's KV: a tensor [blocks, heads, slots, size] in memory order for each layer.

        Raises ValueError for another layout.
        """
        for name, tensor in kv_caches.items():
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(f"the KV of {name} has strides {tensor.stride()}: blocks are not in one piece")
            self._layers.append(tensor.view(len(tensor), -1).view(torch.uint8).numpy())
        num_bytes = sum(layer.shape[1] for layer in self._layers)
        if num_bytes != self._block_bytes:
            raise ValueError(f"a block has {num_bytes} bytes in memory, {self._block_bytes} by vLLM's configuration")

    def begin_loads(self, metadata: StoreMetadata) -> None:
        """Begin the loads of a step, but those that take longer than computing from the tier that has them."""
        for plan in metadata.loads:
            expected = self._store.expected_load_seconds(len(plan.keys), plan.keys[0].block_hash)
            grace = GRACE_SHARE * plan.computing if plan.computing else BLIND_SECONDS
            patience = max(PATIENCE * expected, grace) + GRACE_SECONDS
            load = _Load(plan, time.monotonic() + patience, patience)
            if plan.computing and expected >= plan.computing:
                self._end(load)
            else:
                self._loads[self._store.begin_load(plan.keys)] = load

    def save(self, metadata: StoreMetadata) -> None:
        """Copy the blocks that this step has filled, and offer them to the store."""
        for block_id, key in metadata.saves:
            if self._store.should_write(key.block_hash):
                data = b"".join(layer[block_id].data for layer in self._layers)
                self._store.offer_block(self._staged.stage(data), 0, key)

    def poll(self, metadata: StoreMetadata) -> set[str]:
        """Copy the blocks that have arrived; return the requests whose loads have ended, in full or in part."""
        if self._loads and not metadata.num_scheduled:
            self._store.wait_for_any_load(IDLE_SECONDS)
        for loaded in self._store.poll_loads():
            load = self._loads.get(loaded.load_id)
            if load is not None:
                self._take_in(load, loaded)
            self._store.release_loaded(loaded)
        now = time.monotonic()
        for load_id, load in list(self._loads.items()):
            if now > load.deadline:
                self._store.cancel_load(load_id, is_late=True)
                self._fail(self._loads.pop(load_id))
        ended, self._finished.request_ids = self._finished.request_ids, set()
        return ended

    def failed_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        failed, self._finished.block_ids = self._finished.block_ids, set()
        return failed

    def report(self) -> StoreReport:
        """Return the report of this step."""
        unreadable, self._finished.hashes = self._finished.hashes, []
        one, many = self._store.expected_load_seconds(1), self._store.expected_load_seconds(101)
        if many == float("inf"):
            return StoreReport(many, 0.0, unreadable)
        per_block = (many - one) / 100
        return StoreReport(max(one - per_block, 0.0), per_block, unreadable)

    def close(self) -> None:
        """Write what is pending, as far as vLLM waits for its worker: it kills one that takes longer."""
        self._store.close(max(0.0, VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS - SPARE_SECONDS))

    def _take_in(self, load: _Load, loaded: BlockLoadPart) -> None:
        for data in loaded.data:
            block_id, at = load.plan.block_ids[load.num_done], 0
            content = np.frombuffer(data, dtype=np.uint8)
            for layer in self._layers:
                layer[block_id] = content[at : at + layer.shape[1]]
                at += layer.shape[1]
            load.num_done += 1
        load.deadline = time.monotonic() + load.patience
        if not loaded.is_last:
            return
        del self._loads[loaded.load_id]
        rest = load.plan.keys[load.num_done :]
        if not rest:
            self._end(load)
        elif load.num_done > load.num_before and self._store.contains(rest[0].block_hash):  # in another tier
            load.num_before = load.num_done
            self._loads[self._store.begin_load(rest)] = load
        else:
            self._fail(load)

    def _fail(self, load: _Load) -> None:
        self._finished.hashes.append(load.plan.keys[load.num_done].block_hash)
        self._end(load)

    def _end(self, load: _Load) -> None:
        self._finished.request_ids.add(load.plan.request_id)
        self._finished.block_ids.update(load.plan.block_ids[load.num_done :])
