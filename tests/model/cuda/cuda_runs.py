"""Runs of small models on CudaRunner, here in Triton's interpreter, and on a GPU."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tiny import make_checkpoint

from headstart.core.engine import Engine
from headstart.core.executor import Executor
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement import inprocess
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.model.weights.model_loader import LoadedModel, load_model
from headstart.workload.synthetic import random_tokens


def load(family: str, folder: Path, *, exact: bool = False) -> LoadedModel:
    """Return a tiny model with plain float32 weights, as it is on a GPU."""
    checkpoint = make_checkpoint(family, folder)
    return replace(
        load_model(checkpoint, dtype="float32", device="cpu", linear_dispatch="torch", attention_backend="reference"),
        batch_invariant=exact,
    )


def make_runner(loaded: LoadedModel, *, num_blocks: int = 60) -> CudaRunner:
    return CudaRunner(loaded, num_blocks=num_blocks, block_size=16, max_rows=16, max_graph_tokens=64)


def make_engine(executor: Executor, *, budget: int, max_len: int = 512, **options: Any) -> Engine:
    limits = Limits(max_batched_tokens=budget, max_seqs=16, max_model_len=max_len)
    config = SchedulerConfig(executor.num_blocks, executor.block_size, limits, policy="lpm", **options)
    return Engine(Scheduler(config), executor)


def drive(executor: Executor, requests: Sequence[Request], *, budget: int = 256, **options: Any) -> list[Any]:
    """Return the tokens of each request."""
    run = inprocess.run_requests(make_engine(executor, budget=budget, **options), requests, concurrency=8)
    assert not run.errors, run.errors[:2]
    return run.outputs


def random_requests(
    vocab_size: int, count: int, random: Random, *, lengths: tuple[int, ...] = (1, 2, 17, 60, 150), tokens: int = 4
) -> list[Request]:
    """Prompts with and without shared beginnings; greedy, drawn, edited, and with log-probabilities."""
    bases = [random_tokens(max(lengths), vocab_size, random) for _ in range(2)]
    made: list[Request] = []
    for index in range(count):
        base = random.choice(bases)[: random.choice((0, *lengths))]
        prompt = base + random_tokens(random.choice(lengths[:3]), vocab_size, random)
        made.append(Request(f"q{index}", array("i", prompt), _sampling(index, random, tokens)))
    return made


def _sampling(index: int, random: Random, tokens: int) -> SamplingParams:
    kind, count = random.random(), random.randint(1, tokens)
    if kind > 0.85:
        return SamplingParams(max_tokens=count, temperature=0.8, top_p=0.9, seed=index)
    if kind > 0.7:
        return SamplingParams(max_tokens=count, temperature=1.0, top_k=9, min_p=0.01, seed=index)
    if kind > 0.6:
        return SamplingParams(max_tokens=count, temperature=0.0, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1)
    return SamplingParams(max_tokens=count, temperature=0.0)
