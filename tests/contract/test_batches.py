"""The same list of batches through the simulator's executor and through the real one, on the bundled model."""

from array import array
from random import Random

import pytest

from headstart.bundled import bundled_intent_model_folder
from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data
from headstart.core.engine import Engine
from headstart.core.executor import Executor
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import LoadedModel, load_model
from headstart.sim.sim_replica import SimExecutor
from headstart.sim.step_cost import AdditiveCost

BLOCK = 16
Planned = list[tuple[str, int, int, int]]
"""(request, start, tokens, logits) of every chunk of a step."""


class Recorder:
    """An executor that notes what it is asked to compute."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks, self.block_size, self.block_bytes = inner.num_blocks, inner.block_size, 0
        self.steps: list[Planned] = []

    def execute(self, batch: Batch) -> StepResult:
        self.steps.append([(c.request_id, c.start, len(c.token_ids), c.num_logits) for c in batch.chunks])
        return self.inner.execute(batch)

    def read_block(self, block_id: int) -> Data:
        return self.inner.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        self.inner.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        self.inner.zero_blocks(block_ids)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(bundled_intent_model_folder(), dtype="float32", device="cpu")


def requests(seed: int, vocab_size: int) -> list[tuple[int, Request]]:
    """Requests with common prefixes and the step at which each arrives."""
    rng = Random(seed)
    bases = [array("i", rng.choices(range(vocab_size), k=96)) for _ in range(3)]
    found: list[tuple[int, Request]] = []
    for number in range(24):
        base = rng.choice(bases)[: rng.randint(1, 96)]
        prompt = base + array("i", rng.choices(range(vocab_size), k=rng.randint(1, 40)))
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 24))
        found.append((rng.randint(0, 30), Request(f"r{number}", prompt, sampling)))
    return sorted(found, key=lambda pair: pair[0])


def steps_of(
    executor: Executor, asked: list[tuple[int, Request]], policy: str, num_blocks: int
) -> tuple[list[Planned], dict[str, int]]:
    """Return the batches, and the cached tokens of each request."""
    limits = Limits(max_batched_tokens=48, max_seqs=8, max_model_len=512)
    config = SchedulerConfig(num_blocks, BLOCK, limits, policy=policy, eviction_policy="2q")
    recorder = Recorder(executor)
    engine, waiting, step = Engine(Scheduler(config), recorder), asked[:], 0
    cached: dict[str, int] = {}
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add_request(waiting.pop(0)[1])
        for output in engine.step():
            cached[output.request_id] = output.num_cached_tokens
        step += 1
    return recorder.steps, cached


@pytest.mark.parametrize(("seed", "policy", "num_blocks"), [(0, "fcfs", 40), (1, "lpm", 40), (2, "lpm", 24)])
def test_both_executors_get_the_same_batches_and_hits(
    loaded: LoadedModel, seed: int, policy: str, num_blocks: int
) -> None:
    asked = requests(seed, loaded.vocab_size)
    real = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK)
    simulated = SimExecutor(num_blocks, BLOCK, AdditiveCost(step=1.0))
    planned, cached = steps_of(simulated, asked, policy, num_blocks)
    assert (planned, cached) == steps_of(real, asked, policy, num_blocks)
    assert len(cached) == len(asked) and sum(cached.values()) > 0
    assert any(len(step) > 4 for step in planned), "nothing ran together"
    assert any(start % BLOCK == 0 and start for step in planned for _, start, n, _ in step if n > 1), (
        "nothing was reused"
    )
