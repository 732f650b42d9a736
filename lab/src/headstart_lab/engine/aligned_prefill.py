"""The same prompts scheduled freely, aligned, and aligned with whole blocks charged, to compare token budget use.

The real scheduler with an executor that computes nothing; all prompts wait from the start, prefix caching is off.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from headstart.core.batch import Batch
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.null_executor import NullExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
LIMITS = Limits(max_batched_tokens=2048, max_seqs=256, max_model_len=4096)


class Mix(NamedTuple):
    """Prompt lengths, log-uniform, and output lengths, uniform."""

    shortest: int
    longest: int
    longest_output: int = 64

    def prompt_length(self, rng: Random) -> int:
        return round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))


MIXES = {"mixed": Mix(32, 2048), "long": Mix(512, 2048), "short": Mix(17, 128)}
MODES = {
    "off": LIMITS,
    "exact": replace(LIMITS, align=BLOCK_SIZE),
    "ceil": replace(LIMITS, align=BLOCK_SIZE, charge_ceil=True),
}


class Step(NamedTuple):
    """One planned step; `batch` is valid until the next one. `pressed`: more budget would have computed more tokens."""

    batch: Batch
    num_tokens: int
    pressed: bool


def steps(limits: Limits, mix: Mix, seed: int, *, num_prompts: int, num_blocks: int) -> Iterator[Step]:
    """Run `num_prompts` prompts to completion, step by step."""
    rng = Random(f"{seed}/{mix}")
    scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE, limits, enable_prefix_caching=False, policy="fcfs"))
    executor = NullExecutor(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
    for index in range(num_prompts):
        prompt = random_tokens(mix.prompt_length(rng), VOCAB_SIZE, rng)
        outputs = SamplingParams(max_tokens=rng.randint(1, mix.longest_output), temperature=0.0)
        scheduler.add_request(Request(f"r{index}", prompt, outputs))
    while scheduler.has_work:
        batch = scheduler.schedule()
        yield Step(batch, sum(len(chunk.token_ids) for chunk in batch.chunks), _pressed(scheduler))
        scheduler.update(executor.execute(batch))


def budget_lost(limits: Limits, mix: Mix, seed: int, num_prompts: int) -> float:
    """Return the unused share of the token budget, over steps after which prompt tokens wait that fit into the pool.

    The pool holds all prompts at once, so that only the budget limits a step.
    """
    num_blocks = 1 + num_prompts * -(-(mix.longest + mix.longest_output) // BLOCK_SIZE)
    budget = limits.max_batched_tokens
    pressed = [
        step.num_tokens
        for step in steps(limits, mix, seed, num_prompts=num_prompts, num_blocks=num_blocks)
        if step.pressed
    ]
    return 1 - sum(pressed) / (budget * len(pressed)) if pressed else 0.0


def _pressed(scheduler: Scheduler) -> bool:
    if scheduler.waiting and len(scheduler.running) < scheduler.limits.max_seqs:
        return True
    return any(seq.num_computed_tokens + seq.num_scheduled_tokens < len(seq.token_ids) for seq in scheduler.running)
