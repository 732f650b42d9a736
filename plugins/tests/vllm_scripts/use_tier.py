"""Checks of the secondary tier under vLLM's own tiering manager, over a memoryview: use_tier.py FOLDER.

Prints one JSON object: each check, and null or its error.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from steps import model_config, run_checks
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

FOLDER = Path(sys.argv[1])
NUM_CHUNKS, CHUNK_BYTES, SECONDS = 16, 8192, 120.0


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(Random(number).randbytes(CHUNK_BYTES), dtype=np.uint8)


class Server:
    """vLLM's manager with a host pool of NUM_CHUNKS, and the tier under it."""

    def __init__(self, folder: Path, weights: bytes = b"w", **options: Any) -> None:
        model = FOLDER / f"model-{weights.hex()}"
        model.mkdir(exist_ok=True)
        model_config(model, weights)
        one: dict[str, Any] = dict.fromkeys(("rank", "data_parallel_index"), 0) | {"data_parallel_rank_local": None}
        sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
        config = OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=f"{time.monotonic()}",
            model=OffloadingModelConfig(str(model), "float16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(**one, **sizes, is_parallelism_agnostic=False),
        )
        self.pool = np.zeros((NUM_CHUNKS, CHUNK_BYTES), dtype=np.uint8)
        region = SimpleNamespace(create_kv_memoryview=lambda: memoryview(self.pool), cleanup=lambda: None)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=NUM_CHUNKS, mmap_region=region)
        named = {
            "type": "HeadstartTier",
            "module_path": "headstart_plugins.vllm.tier",
            "folder": str(folder),
            **options,
        }
        spec: Any = SimpleNamespace(config=config)
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(named, primary.get_kv_memoryview(), spec)
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[self.tier])
        self._num_requests = 0

    def store(self, numbers: Sequence[int]) -> None:
        """Store chunks in the host pool as a worker does, and let them cascade; returns when they are written."""
        context = self._begin()
        keys = [key(number) for number in numbers]
        found = self.manager.prepare_store(keys, context)
        assert found is not None and found.keys_to_store == keys
        for number, place in zip(numbers, found.store_spec.block_ids, strict=True):  # type: ignore[attr-defined]
            self.pool[place] = content(number)
        self.manager.complete_store(keys, context)
        self._step()
        until = time.monotonic() + SECONDS
        self.tier.drain_jobs()
        while self.tier._store.stats().num_pending:
            assert time.monotonic() < until
            time.sleep(0.01)
        self._step()
        self.manager.on_request_finished(context)

    def load(self, numbers: Sequence[int]) -> list[bool | None]:
        """Return for each chunk whether the host pool has its content after a promotion; None: it was not found."""
        context, until = self._begin(), time.monotonic() + SECONDS
        results: list[LookupResult] = []
        while not results or {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
            assert time.monotonic() < until
            results = [self.manager.lookup(key(number), context) for number in numbers]
            self._step()
            time.sleep(0.005)
        found: list[bool | None] = []
        for number, result in zip(numbers, results, strict=True):
            if result is not LookupResult.HIT:
                found.append(None)
                continue
            spec: Any = self.manager.prepare_load([key(number)], context)
            found.append(bool((self.pool[spec.block_ids[0]] == content(number)).all()))
            self.manager.complete_load([key(number)], context)
        self.manager.on_request_finished(context)
        return found

    def close(self) -> None:
        self.tier.shutdown()

    def _begin(self) -> ReqContext:
        self._num_requests += 1
        context = ReqContext(req_id=str(self._num_requests))
        self.manager.on_new_request(context)
        return context

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))


def check_a_second_server_finds_what_the_first_stored() -> None:
    numbers = range(8)
    first = Server(FOLDER / "restart")
    first.store(numbers)
    first.close()
    second = Server(FOLDER / "restart")
    assert second.load([*numbers, 99]) == [True] * 8 + [None]
    second.close()
    other = Server(FOLDER / "restart", weights=b"other")
    assert other.load(numbers) == [None] * 8
    other.close()


def check_more_than_the_host_pool_holds_is_found() -> None:
    server = Server(FOLDER / "small")
    for start in range(0, 64, 8):
        server.store(range(start, start + 8))
    assert server.load(range(8)) == [True] * 8
    server.close()


def check_no_flipped_byte_reaches_the_host_pool() -> None:
    rng, wrong, lost = Random(1), 0, 0
    for each in range(30):
        folder, numbers = FOLDER / f"flips-{each}", range(8)
        first = Server(folder)
        first.store(numbers)
        first.close()
        for path in folder.glob("*.kv"):
            data = np.fromfile(path, dtype=np.uint8)
            for place in rng.sample(list(np.flatnonzero(data)), 10):
                data[place] ^= 1 << rng.randrange(8)
            data.tofile(path)
        second = Server(folder)
        found = second.load(numbers)
        second.close()
        wrong, lost = wrong + found.count(False), lost + found.count(None)
    print(f"tier: {lost} of 240 chunks lost to 300 flips", file=sys.stderr)
    assert wrong == 0 < lost


def check_a_folder_that_ends_is_a_miss() -> None:
    folder = FOLDER / "gone"
    first = Server(folder)
    first.store(range(8))
    first.close()
    second = Server(folder)
    for path in folder.glob("*.kv"):
        with path.open("r+b") as file:
            file.truncate(4096)
    assert second.load(range(8)) == [None] * 8
    second.store(range(8, 12))
    second.close()


def check_what_it_cannot_serve_is_refused_by_name() -> None:
    for message, options in (("no option 'path'", {"path": "x"}), ("--kv-store-secret", {"url": "redis://127.0.0.1"})):
        try:
            Server(FOLDER / "refused", **options)
        except Exception as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not refused: {message}")


if __name__ == "__main__":
    run_checks(globals(), sys.argv[2:])
