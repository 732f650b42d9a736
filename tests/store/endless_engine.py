"""A process that computes prompts of known tokens without end, with a store: the victim of test_killed_engines.py.

Its executor is the checking one, which takes as long as TOKENS_PER_S says; engine and store are those of the product.
A line `NANOSECONDS TOKENS REQUESTS` on stdout after each step: the time, the prompt tokens computed so far, and the
requests that had begun.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from random import Random

from checking import VOCAB, CheckingExecutor, make_request

from headstart.config.options import EngineOptions
from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data
from headstart.core.cache.transfers import StoreTransfers
from headstart.core.engine import Engine
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.engine.engine_checks import step_limits_of
from headstart.store.disk import DiskStore
from headstart.store.format import StoredBlockFormat

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 16, 64 << 10, 4096
PROMPT_BLOCKS = 300  # and one token; the prompt of a request takes longer than a second
NUM_RUNNING = 2
TOKENS_PER_S = 4000.0
SHAPE = StoredBlockFormat(hashlib.sha256(b"killed engine").digest(), BLOCK_SIZE, BLOCK_BYTES)
MAX_BYTES = 4 << 30


class PacedExecutor(CheckingExecutor):
    """Takes as long as a model would, while the threads of the store run; its blocks are as large as those of one."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self._seconds = 1 / tokens_per_s
        self.block_bytes, self._used = BLOCK_BYTES, self.block_bytes

    def execute(self, batch: Batch) -> StepResult:
        began = time.monotonic()
        found = super().execute(batch)
        self.batches.clear()
        due = began + self._seconds * sum(len(chunk.token_ids) for chunk in batch.chunks)
        time.sleep(max(0.0, due - time.monotonic()))
        return found._replace(elapsed=time.monotonic() - began)

    def read_block(self, block_id: int) -> bytes:
        return super().read_block(block_id).ljust(BLOCK_BYTES, b"\0")

    def write_block(self, block_id: int, data: Data) -> None:
        self.block_bytes = self._used
        super().write_block(block_id, data[: self._used])
        self.block_bytes = BLOCK_BYTES


def prompt(seed: int, number: int) -> list[int]:
    rng = Random(f"{seed}/{number}")
    return [rng.randrange(VOCAB) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE + 1)]


def make_paced_engine(folder: Path, tokens_per_s: float) -> Engine:
    """With the limits that options of a GPU or of `headstart.LLM` give where there is a store."""
    store = DiskStore(folder, SHAPE, MAX_BYTES)
    limits = step_limits_of(EngineOptions(kv_store="/", max_step_time=0), 16 * 1024, on_cpu=True)
    scheduler = Scheduler(SchedulerConfig(NUM_BLOCKS, BLOCK_SIZE, limits), store=store)
    return Engine(scheduler, PacedExecutor(tokens_per_s), store=store)


def hold_back_until_prompts_are_computed(engine: Engine) -> None:
    """The planted bug: blocks go to the store when the prompts end that run together."""
    transfers, held = engine.scheduler.transfers, list[tuple[object, ...]]()
    offer = StoreTransfers._offer

    def hold(*block: object) -> None:
        held.append(block)
        if len(held) == NUM_RUNNING * PROMPT_BLOCKS:
            for one in held:
                offer(transfers, *one)  # type: ignore[arg-type]
            held.clear()

    transfers._offer = hold  # type: ignore[method-assign]


def main(folder: str, seed: int, is_planted: bool) -> None:
    engine, begun = make_paced_engine(Path(folder), TOKENS_PER_S), 0
    if is_planted:
        hold_back_until_prompts_are_computed(engine)
    os.write(1, b"ready\n")
    while True:
        while engine.stats().num_running + engine.stats().num_waiting < NUM_RUNNING:
            engine.add_request(make_request(f"{begun}", prompt(seed, begun)))
            begun += 1
        engine.step(time.monotonic())
        os.write(1, b"%d %d %d\n" % (time.monotonic_ns(), engine.stats().counters.prefill_tokens, begun))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["planted"])
