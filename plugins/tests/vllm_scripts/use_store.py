"""Checks of the store connector in vLLM's scheduler, with KV whose content is known: use_store.py FOLDER.

The model is replaced by one that writes each token and the sum of all tokens up to it into the KV of its slot, and that
counts every slot of the context that holds anything else. Prints one JSON object: each check, and null or its error.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from steps import BLOCK, LLAMA, ideal, make_request, make_scheduler, model_config, run_checks
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from headstart.core.errors import ConfigError
from headstart_plugins.vllm import Scheduler, store_worker
from headstart_plugins.vllm.connector import HeadstartConnector
from headstart_plugins.vllm.store_planner import BlockLoad, StoreMetadata, StoreReport

FOLDER = Path(sys.argv[1])
NUM_BLOCKS, SECONDS = 600, 600.0
store_worker.BLIND_SECONDS = SECONDS  # a busy machine is not a slow disk


def transfer(folder: Path | None, url: str = "", **changes: Any) -> KVTransferConfig:
    places: dict[str, Any] = {} if folder is None else {"folder": str(folder), "size": "64MiB"}
    if url:
        secret = FOLDER / "secret"
        secret.write_text("a secret of more than thirty-two bytes")
        secret.chmod(0o600)
        places |= {"url": url, "secret": str(secret), "ttl": 600}
    settings: dict[str, Any] = {
        "kv_connector": "HeadstartConnector",
        "kv_connector_module_path": "headstart_plugins.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": places,
    }
    return KVTransferConfig(**{**settings, **changes})


class Engine:
    """A scheduler with a connector, a worker's connector, and the model's stand-in."""

    def __init__(
        self,
        folder: Path | None,
        *,
        weights: bytes = b"w",
        num_blocks: int = NUM_BLOCKS,
        cls: type[VllmScheduler] = VllmScheduler,
        url: str = "",
    ) -> None:
        model = FOLDER / f"model-{weights.hex()}"
        model.mkdir(exist_ok=True)
        config = model_config(model, weights)
        self.scheduler = make_scheduler(
            cls, transfer=transfer(folder, url), model=config, num_blocks=num_blocks, cap=0, budget=512
        )
        self.worker = HeadstartConnector(
            self.scheduler.vllm_config, KVConnectorRole.WORKER, self.scheduler.kv_cache_config
        )
        self.kv = torch.zeros(num_blocks, 1, BLOCK, 2, dtype=torch.float32)
        self.worker.register_kv_caches({"layer": self.kv})
        self.planner = self.scheduler.connector._planner
        self.planner._rate.learn = lambda *of_step: None  # computing is free here, so nothing would be loaded
        self.num_wrong = self.num_computed = 0
        self.finished: list[str] = []

    def serve(self, prompts: Iterable[Sequence[int]], name: str = "r") -> None:
        """Serve prompts to their end. Asserts that this takes less than SECONDS."""
        for i, prompt in enumerate(prompts):
            self.scheduler.add_request(make_request(f"{name}{i}", prompt, max_tokens=3, age=i))
        until = time.monotonic() + SECONDS
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < until, self.scheduler.get_request_counts()
            output = self.scheduler.schedule()
            results = self.scheduler.update_from_output(output, self._execute(output))
            for of_client in results.values():
                self.finished += [each.request_id for each in of_client.outputs if each.finish_reason is not None]

    def settle(self) -> None:
        """Wait until all is written, and the scheduler's side has seen it."""
        until, store = time.monotonic() + SECONDS, self.worker._worker._store
        while store.stats().num_pending or store.stats().num_blocks > self.planner._store.stats().num_blocks:
            assert time.monotonic() < until, (store.stats(), self.planner._store.stats())
            time.sleep(0.05)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert output.kv_connector_metadata is not None
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        rows = [self._compute(name, num) for name, num in output.num_scheduled_tokens.items()]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        moved = self.worker.get_transfer_results(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=moved.finished_sending,
            finished_recving=moved.finished_recving,
            failed_recving=moved.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        places = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, places, rows, kv_connector_output=connector_output)

    def _compute(self, name: str, num: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        start = end - num
        tokens = np.asarray(request.all_token_ids[:end], dtype=np.float32)
        expected = np.stack([tokens, np.cumsum(tokens)], axis=1)
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        for place in range(-(-end // BLOCK)):
            of_block = expected[place * BLOCK : (place + 1) * BLOCK]
            slots = self.kv[blocks[place], 0].numpy()
            known = min(max(start - place * BLOCK, 0), len(of_block))
            self.num_wrong += int((slots[:known] != of_block[:known]).any(axis=1).sum())
            slots[known : len(of_block)] = of_block[known:]
        self.num_computed += max(0, min(end, request.num_prompt_tokens) - start)
        return [int(expected[-1, 1]) % 30_000] if end >= request.num_tokens else []


def tokens(seed: object, num: int) -> list[int]:
    rng = Random(f"{seed}")
    return [rng.randrange(10, 1_000) for _ in range(num)]  # sums of them are exact in float32


def sessions() -> list[list[int]]:
    return [tokens(f"stem{i % 6}", 400) + tokens(i, 60 + i) for i in range(24)]


def new_folder(name: str) -> Path:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def filled(name: str, **settings: Any) -> Path:
    """Return a folder with the blocks of all sessions."""
    folder = new_folder(name)
    engine = Engine(folder, **settings)
    engine.serve(sessions())
    assert len(engine.finished) == 24 and not engine.num_wrong
    engine.settle()
    engine.close()
    return folder


def check_a_second_start_loads_what_the_first_computed() -> None:
    folder = filled("restart")
    engine = Engine(folder)
    engine.serve(sessions())
    engine.close()
    total, least = sum(map(len, sessions())), sum((len(p) - 1) % BLOCK + 1 for p in sessions())
    print(f"restart: {engine.num_computed} of {total} computed, {least} at least", file=sys.stderr)
    assert engine.num_wrong == 0 and len(engine.finished) == 24
    assert engine.num_computed <= 1.05 * least, (engine.num_computed, least)


def check_blocks_are_read_only_if_that_is_expected_to_be_faster() -> None:
    folder = filled("faster")
    engine = Engine(folder)
    request, size = make_request("x", sessions()[0]), (len(sessions()[0]) - 1) // BLOCK * BLOCK
    for seconds_per_token, report, expected in (
        (0.0, StoreReport(9.0, 1.0, []), size),  # not measured yet
        (0.1, StoreReport(0.0, 3.0, []), size),  # 3.2 s to compute a block
        (0.1, StoreReport(0.0, 3.3, []), 0),
        (0.1, StoreReport(float("inf"), 0.0, []), 0),  # the store is degraded
    ):
        engine.planner._rate.seconds_per_token = seconds_per_token
        engine.planner.reported(report)
        assert engine.planner.num_loadable(request, 0) == expected, (report, expected)
    engine.close()


def check_a_tier_that_is_slower_than_computing_is_not_read() -> None:
    """The scheduler's side does not know from which tier a block comes, so the worker asks once more."""
    engine = Engine(filled("slower"))
    request, copies = make_request("x", sessions()[0]), engine.worker._worker
    keys = [engine.planner._key(request, place) for place in range(2)]
    copies._store.expected_load_seconds = lambda num, first=None: 1.0 if first == keys[0].block_hash else 0.0
    for computing, failed in (0.5, {7, 9}), (2.0, set[int]()):
        metadata = StoreMetadata(loads=[BlockLoad("x", keys, [7, 9], computing)])
        copies.begin_loads(metadata)
        until, ended = time.monotonic() + SECONDS, set[str]()
        while not ended:
            assert time.monotonic() < until
            ended = copies.poll(metadata)
        assert ended == {"x"} and copies.failed_blocks() == failed and not copies.report().unreadable
    engine.close()


def check_blocks_that_are_being_loaded_are_promised() -> None:
    """With both plug-ins, requests behind one stored prefix load it once; with vLLM's scheduler, each loads it."""
    folder = new_folder("promised")
    prompts = [tokens("long", 480) + tokens(i, 20) for i in range(8)]
    first = Engine(folder)
    first.serve(prompts)
    first.settle()
    first.close()
    loaded: list[int] = []
    for cls in (VllmScheduler, Scheduler):
        engine = Engine(folder, cls=cls)
        engine.serve(prompts)
        loaded.append(engine.worker._worker._store.stats().loaded_blocks)
        engine.close()
        assert engine.num_wrong == 0 and len(engine.finished) == 8
    print(f"promised loads: {loaded} blocks", file=sys.stderr)
    assert loaded[1] == 480 // BLOCK < loaded[0], loaded


def check_other_weights_find_nothing() -> None:
    folder = filled("weights")
    engine = Engine(folder, weights=b"other")
    engine.serve(sessions())
    engine.close()
    assert engine.num_computed >= ideal(sessions()), engine.num_computed


def check_no_flipped_byte_reaches_an_answer() -> None:
    """The folder is read by a new engine after every 300 of 3,000 flips of bytes in use."""
    folder, rng, num_recomputed = filled("flips"), Random(5), 0
    for _ in range(10):
        files = {path: np.fromfile(path, dtype=np.uint8) for path in folder.glob("*.kv")}
        used = [(path, int(place)) for path, content in files.items() for place in np.flatnonzero(content)]
        for path, place in rng.sample(used, 300):
            files[path][place] ^= 1 << rng.randrange(8)
        for path, content in files.items():
            content.tofile(path)
        engine = Engine(folder)
        engine.serve(sessions())
        engine.close()
        assert engine.num_wrong == 0 and len(engine.finished) == 24
        num_recomputed += engine.num_computed
    print(f"flips: {num_recomputed} tokens computed in 10 passes", file=sys.stderr)


def check_blocks_that_vanish_after_they_were_found_are_computed() -> None:
    folder = filled("vanish")
    engine = Engine(folder)
    assert engine.scheduler.connector.get_num_new_matched_tokens(make_request("x", sessions()[0]), 0)[0]
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            with path.open("r+b") as file:
                file.truncate(4096)
    engine.serve(sessions())
    engine.close()
    assert engine.num_wrong == 0 and len(engine.finished) == 24


def check_a_pool_that_is_too_small_for_all_uses_the_store() -> None:
    folder = new_folder("small")
    engine = Engine(folder, num_blocks=60)
    engine.serve(sessions())
    first = engine.num_computed
    engine.settle()
    engine.serve(sessions(), name="again")
    engine.close()
    print(f"small pool: {first} computed, then {engine.num_computed - first}", file=sys.stderr)
    assert engine.num_wrong == 0 and engine.num_computed - first < 0.5 * first


def check_two_engines_share_one_folder() -> None:
    folder = new_folder("two")
    one, two = Engine(folder), Engine(folder)
    one.serve(sessions()[:12])
    one.settle()
    two.settle()
    two.serve(sessions())
    one.serve(sessions()[12:], name="late")
    for engine in (one, two):
        engine.close()
        assert engine.num_wrong == 0
    assert two.num_computed < 0.8 * ideal(sessions()), two.num_computed


@contextmanager
def redis() -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server of Redis; yield its URL and process."""
    folder = new_folder("redis")
    folder.mkdir()
    options = ["--port", "0", "--unixsocket", str(folder / "sock"), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + SECONDS
        while not (folder / "sock").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"unix://{folder}/sock?db=0", server
    finally:
        server.kill()
        server.wait()


def check_a_server_of_redis_gives_another_machine_the_blocks() -> None:
    """The second has an empty folder of its own, which has all blocks afterwards; the third has some of them."""
    least = sum((len(p) - 1) % BLOCK + 1 for p in sessions())
    parts = new_folder("redis-parts")
    third = Engine(parts)
    third.serve([prompt[:200] for prompt in sessions()])
    third.settle()
    third.close()
    with redis() as (url, _):
        for folder, expected in (None, None), (new_folder("redis-second"), least), (parts, least):
            engine = Engine(folder, url=url)
            engine.serve(sessions())
            engine.settle()
            engine.close()
            print(f"redis: {engine.num_computed} computed, {least} at least", file=sys.stderr)
            assert engine.num_wrong == 0 and len(engine.finished) == 24
            assert expected is None or engine.num_computed <= 1.05 * expected, engine.num_computed
    again = Engine(FOLDER / "redis-second")
    again.serve(sessions())
    again.close()
    assert again.num_computed <= 1.05 * least, again.num_computed


def check_a_server_of_redis_that_ends_stops_no_request() -> None:
    with redis() as (url, server):
        engine = Engine(None, url=url)
        engine.serve(sessions()[:12])
        engine.settle()
        server.kill()
        server.wait()
        engine.serve(sessions()[12:], name="late")
        engine.close()
    assert engine.num_wrong == 0 and len(engine.finished) == 24


def check_a_folder_that_cannot_be_written_stops_no_request() -> None:
    folder = filled("broken")
    engine = Engine(folder)
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    engine.serve(sessions())
    engine.close()
    folder.unlink()
    assert engine.num_wrong == 0 and len(engine.finished) == 24


def check_what_it_cannot_serve_is_refused_by_name() -> None:
    folder = new_folder("refused")
    model = FOLDER / "model-refused"
    model.mkdir(exist_ok=True)
    config = model_config(model, b"w")
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("kv_load_failure_policy is 'fail'", {"kv_load_failure_policy": "fail"}, {}),
        ("kv_role is 'kv_consumer'", {"kv_role": "kv_consumer"}, {}),
        ("no option 'path'", {"kv_connector_extra_config": {"path": "x"}}, {}),
        ("name the folder", {"kv_connector_extra_config": {}}, {}),
        ("at least 60 seconds", {"kv_connector_extra_config": {"folder": "x", "ttl": 1}}, {}),
        ("it must be a string", {"kv_connector_extra_config": {"folder": 1}}, {}),
        ("--kv-store-secret", {"kv_connector_extra_config": {"url": "redis://127.0.0.1:6379"}}, {}),
        ("hybrids are not supported", {}, {"is_hybrid": True}),
        ("xxhash gives other hashes", {}, {"hash_algorithm": "xxhash"}),
    ]
    for message, changes, settings in cases:
        try:
            make_scheduler(VllmScheduler, transfer=transfer(folder, **changes), model=config, **settings)
        except (ValueError, ConfigError) as error:
            assert message in str(error), (message, error)
        else:
            raise AssertionError(f"not refused: {message}")


if __name__ == "__main__":
    assert LLAMA["num_hidden_layers"] == 1
    run_checks(globals(), sys.argv[2:])
