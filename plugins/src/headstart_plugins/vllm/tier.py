"""HeadstartTier: the store under vLLM's host pool, a tier of its TieringOffloadingSpec (docs/plugins-vllm.md).

Every call is vLLM's scheduler's and returns at once; one thread copies between the host pool and the store. Blocks are
written behind: a store job ends when its blocks are copied, and a lookup finds them when they are written.
"""

import hashlib
import json
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.transfers import BLIND_SECONDS, GRACE_SECONDS, PATIENCE
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.chained_store import ChainedStore, open_store
from headstart_plugins.vllm.host import HOST_VERSION
from headstart_plugins.vllm.store_planner import ROOT
from headstart_plugins.vllm.store_settings import read_settings, weights_digest
from headstart_plugins.vllm.store_worker import SPARE_SECONDS, STAGED_BYTES, StagedBlocks

FORM = "tier 1"
KEY_TOKENS = 16  # a chunk's key stands where a block's tokens are: vLLM does not tell a tier these
LOOK_SECONDS = 0.1  # between two looks at whether the store is usable
OF_ONE_SERVER = ("engine_id", "extra_config", "enable_kv_cache_events")  # of the configuration, not of the content

logger = init_logger(f"vllm.{__name__}")


class HeadstartTier(SecondaryTierManager):
    """`options`: those of the connector: folder, size, url, secret, ttl."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Open the store. Raises ValueError for a model that is no folder, ConfigError for an unusable place."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._chunks = np.asarray(primary_kv_view).reshape(len(primary_kv_view), -1).view(np.uint8)
        store = open_store(
            **read_settings(options)._asdict(), shape=tier_shape(offloading_spec.config, self.block_size_bytes)
        )
        assert store is not None
        self._store = store
        num_staged = max(1, STAGED_BYTES // self.block_size_bytes)
        self._staged = StagedBlocks(num_staged, is_chain=isinstance(store, ChainedStore))
        store.start_writing_from(self._staged.take)
        self._jobs: Queue[TransferJob | None] = Queue()
        self._finished: deque[JobResult] = deque()
        self._failed: set[OffloadKey] = set()  # could not be read, until they are stored again
        self._is_usable = True
        self._thread = Thread(target=self._run, name="headstart-tier", daemon=True)
        self._thread.start()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_here = self._is_usable and key not in self._failed and self._store.contains(_identity(key).block_hash)
        return LookupResult.HIT if is_here else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.put(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.put(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._store.mark_used([_identity(key).block_hash for key in keys])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        self._jobs.join()

    def shutdown(self) -> None:
        """End the jobs, and write what is pending for a few seconds. Idempotent."""
        self._jobs.put(None)
        self._thread.join()
        self._store.close(SPARE_SECONDS)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LOOK_SECONDS)
            except Empty:
                self._is_usable = self._store.expected_load_seconds(1) < float("inf")
                continue
            if job is not None:
                self._finished.append(self._result(job))
            self._jobs.task_done()
            if job is None:
                return

    def _result(self, job: TransferJob) -> JobResult:
        keys, began, done = list(job.keys), time.monotonic(), 0
        try:
            done = (self._load if job.is_promotion else self._save)(keys, [int(place) for place in job.chunk_ids])
        except Exception:  # a job that never ends would hold its chunks for ever
            logger.warning("headstart: a job of the tier failed: %s", traceback.format_exc())
        if job.is_promotion:
            self._failed.update(keys[done : done + 1])
        return JobResult(
            job.job_id,
            done == len(keys),
            tuple(keys[:done]) or None if job.is_promotion and done < len(keys) else None,
            time.monotonic() - began,
            done * self.block_size_bytes,
        )

    def _save(self, keys: list[OffloadKey], places: list[int]) -> int:
        """Copy chunks and offer them to the store; return their number."""
        for key, place in zip(keys, places, strict=True):
            identity = _identity(key)
            if key in self._failed or self._store.should_write(identity.block_hash):
                self._store.offer_block(self._staged.stage(self._chunks[place].tobytes()), 0, identity)
            self._failed.discard(key)
        return len(keys)

    def _load(self, keys: list[OffloadKey], places: list[int]) -> int:
        """Read chunks into the host pool, from the first on; return how many of them were read."""
        identities, done, before = [_identity(key) for key in keys], 0, -1
        while before < done < len(keys) and self._store.contains(identities[done].block_hash):  # one tier each
            before, expected = done, self._store.expected_load_seconds(len(keys) - done, identities[done].block_hash)
            if expected == float("inf"):
                break
            patience = PATIENCE * expected + BLIND_SECONDS + GRACE_SECONDS
            load_id, until, is_last = self._store.begin_load(identities[done:]), time.monotonic() + patience, False
            while not is_last and time.monotonic() < until:
                self._store.wait_for_any_load(LOOK_SECONDS)
                for loaded in self._store.poll_loads():
                    for data in loaded.data if loaded.load_id == load_id else ():
                        self._chunks[places[done]] = np.frombuffer(data, dtype=np.uint8)
                        done += 1
                    is_last |= loaded.load_id == load_id and loaded.is_last
                    self._store.release_loaded(loaded)
            if not is_last:
                self._store.cancel_load(load_id, is_late=True)
        return done


def tier_shape(config: OffloadingConfig, chunk_bytes: int) -> StoredBlockFormat:
    """Return the shape of the stored chunks; its fingerprint names the model's files, dtypes, layout and releases.

    Raises ValueError for a model that is no folder: of one of the hub a tier is not told the revision.
    """
    folder = Path(config.model.name)
    if not folder.is_dir():
        raise ValueError(f"HeadstartTier does not start: {folder} is no folder; serve the model by its folder")
    content = {name: value for name, value in asdict(config).items() if name not in OF_ONE_SERVER}
    content["model"] = [config.model.dtype, weights_digest(str(folder), None), (folder / "config.json").read_text()]
    content["parallel"] = {name: value for name, value in content["parallel"].items() if "data_parallel" not in name}
    parts = [FORM, content, HOST_VERSION, torch.__version__]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()
    return StoredBlockFormat(fingerprint, KEY_TOKENS, chunk_bytes)


def _identity(key: OffloadKey) -> BlockKey:
    """Return the identity of a chunk: its key is vLLM's hash of all tokens up to its end, and a group of layers."""
    tokens = key.ljust(4 * KEY_TOKENS, b"\0")
    return BlockKey(BlockHash(hashlib.sha256(key).digest()), BlockHash(ROOT), tokens)
