"""The scheduler's side of the store connector: which blocks of a request to load, and which computed ones to keep."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from headstart.core.cache.block_store import BlockKey, BlockStore
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.transfers import ComputeRate

ROOT = bytes(32)  # the parent of first blocks


class BlockLoad(NamedTuple):
    """The blocks of one request to load, in order, and where to."""

    request_id: str
    keys: list[BlockKey]
    block_ids: list[int]
    computing: float  # seconds to compute them; 0: not known


@dataclass
class StoreMetadata(KVConnectorMetadata):
    """The transfers of one step: loads, and computed blocks to keep."""

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[tuple[int, BlockKey]] = field(default_factory=list)
    num_scheduled: int = 0


@dataclass
class StoreReport(KVConnectorWorkerMetadata):
    """The worker's answer: seconds for a load of no blocks and for each block, and hashes that could not be read."""

    latency: float
    per_block: float
    unreadable: list[bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StoreReport":
        """Return the sum of two reports: there is one worker, so these are of two steps."""
        assert isinstance(other, StoreReport)
        return StoreReport(other.latency, other.per_block, self.unreadable + other.unreadable)


class StorePlanner:
    """The plans for all requests of a scheduler. Its store is read for its index only."""

    def __init__(self, store: BlockStore, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._block_size, self._clock = store, block_size, clock
        self._requests: dict[str, Request] = {}
        self._matched: dict[str, tuple[int, int]] = {}  # the blocks found for a request: first, number
        self._has_loaded: set[str] = set()
        self._num_saved: dict[str, int] = {}  # leading blocks of a request that need no write
        self._loads: list[BlockLoad] = []
        self._unreadable: set[bytes] = set()
        self._report = StoreReport(0.0, 0.0, [])
        self._rate = ComputeRate()
        self._step: tuple[float, int, int] | None = None  # when it began, its tokens and those of prefills

    def arrived(self, request: Request) -> None:
        """Note a request, whose hashes name its blocks."""
        self._requests[request.request_id] = request

    def num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        """Return the tokens behind the computed ones to load: 0 if computing them is as fast, or after a load.

        A request loads once, so that blocks which cannot be read are computed.
        """
        size, hashes = self._block_size, request.block_hashes
        if request.request_id in self._has_loaded or request.skip_reading_prefix_cache:
            return 0
        first, usable = num_computed_tokens // size, (request.num_tokens - 1) // size
        end = first
        while end < min(usable, len(hashes)) and self._contains(hashes[end]):
            end += 1
        num, computing = end - first, self._seconds_to_compute(end - first)
        expected = self._report.latency + num * self._report.per_block
        if not num or (computing and expected >= computing) or expected == float("inf"):
            return 0
        self._matched[request.request_id] = first, num
        return num * size

    def allocated(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan the load of a request whose blocks vLLM has allocated."""
        if not num_external_tokens:
            return
        first, num = self._matched.pop(request.request_id)
        assert num * self._block_size == num_external_tokens, (num, num_external_tokens)
        places = range(first, first + num)
        self._loads.append(
            BlockLoad(
                request.request_id,
                [self._key(request, place) for place in places],
                [block_ids[place] for place in places],
                self._seconds_to_compute(num),
            )
        )
        self._has_loaded.add(request.request_id)
        self._num_saved[request.request_id] = first  # those that cannot be read are computed, and kept again

    def plan(self, output: SchedulerOutput) -> StoreMetadata:
        """Return the transfers of a step that was just planned."""
        state, saves, num_prefill = output.kv_connector_block_state, list[tuple[int, BlockKey]](), 0
        for name, num in output.num_scheduled_tokens.items():
            request = self._requests[name]
            start, size = request.num_computed_tokens, self._block_size
            num_prefill += num if start < request.num_prompt_tokens else 0
            first = self._num_saved.setdefault(name, start // size)
            end = min((start + num) // size, len(request.block_hashes))
            if end <= first:
                continue
            self._num_saved[name] = end
            block_ids = None if state is None else state.get_block_ids(name)
            if block_ids is not None:
                missing = [place for place in range(first, end) if self._lacks(request.block_hashes[place])]
                saves += [(block_ids[0][place], self._key(request, place)) for place in missing]
                self._unreadable.difference_update(request.block_hashes[place] for place in missing)
        loads, self._loads = self._loads, []
        total = output.total_num_scheduled_tokens
        self._step = (self._clock(), total, num_prefill) if total else None
        return StoreMetadata(loads, saves, total)

    def reported(self, report: object) -> None:
        """Take in the worker's report at the end of a step."""
        if self._step is not None:
            began, num, num_prefill = self._step
            self._rate.learn(num, num_prefill, self._clock() - began)
            self._step = None
        if isinstance(report, StoreReport):
            self._report = report
            self._unreadable.update(report.unreadable)

    def finished(self, request: Request) -> None:
        """Forget a request."""
        name = request.request_id
        self._has_loaded.discard(name)
        for of_requests in (self._requests, self._matched, self._num_saved):
            of_requests.pop(name, None)

    def figures(self) -> Mapping[str, float]:
        """Return the measured rates."""
        return {"seconds_per_token": self._rate.seconds_per_token, "seconds_per_block": self._report.per_block}

    def close(self) -> None:
        """Stop reading the store."""
        self._store.close()

    def _contains(self, block_hash: bytes) -> bool:
        return block_hash not in self._unreadable and self._store.contains(BlockHash(bytes(block_hash)))

    def _lacks(self, block_hash: bytes) -> bool:
        return block_hash in self._unreadable or self._store.should_write(BlockHash(bytes(block_hash)))

    def _seconds_to_compute(self, num_blocks: int) -> float:
        return num_blocks * self._block_size * self._rate.seconds_per_token

    def _key(self, request: Request, place: int) -> BlockKey:
        """Return the identity of a block: vLLM's hash of all up to its end, its parent's, and its tokens."""
        hashes, size = request.block_hashes, self._block_size
        tokens = np.asarray(request.all_token_ids[place * size : (place + 1) * size], dtype="<u4")
        parent = bytes(hashes[place - 1]) if place else ROOT
        return BlockKey(BlockHash(bytes(hashes[place])), BlockHash(parent), tokens.tobytes())
