"""Real models say the same with page-aligned prefill in both charges, and with every token written by its own slot."""

from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from model.paged import load_tiny, tiny_runner, without_spans

from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.model.weights.model_loader import LoadedModel

BLOCK = 16
FREE = Limits(max_batched_tokens=53, max_seqs=4, max_model_len=200)
MODES = {
    "off": FREE,
    "exact": Limits(max_batched_tokens=53, max_seqs=4, max_model_len=200, align=BLOCK),
    "ceil": Limits(max_batched_tokens=53, max_seqs=4, max_model_len=200, align=BLOCK, charge_ceil=True),
}


def prompts(vocab_size: int, seed: int) -> "list[array[int]]":
    """Prompts of all lengths around block boundaries, half of them behind one prefix."""
    rng = Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(2 * BLOCK)]
    lengths = [1, 15, 16, 17, 31, 32, 33, 64, 70, 100]
    return [
        array("i", (prefix if index % 2 else []) + [rng.randrange(vocab_size) for _ in range(length)])
        for index, length in enumerate(lengths)
    ]


def outputs(loaded: LoadedModel, limits: Limits, *, by_token: bool = False) -> dict[str, list[int]]:
    """Greedy tokens of all prompts through one scheduler, on a pool too small for all of them."""
    runner = tiny_runner(loaded, num_blocks=40, block_size=BLOCK)
    if by_token:
        begin = runner.attention.begin_step
        runner.attention.begin_step = lambda step: begin(replace(step, writes=without_spans(step.writes)))  # type: ignore[method-assign]
    engine = Engine(
        Scheduler(SchedulerConfig(40, BLOCK, limits, model=loaded.fingerprint, policy="lpm", eviction_policy="2q")),
        runner,
    )
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    for index, prompt in enumerate(prompts(loaded.vocab_size, seed=3)):
        engine.add_request(Request(f"r{index}", prompt, sampling))
    tokens: dict[str, list[int]] = {}
    for _ in range(500):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert not engine.has_work
    return tokens


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])  # plain; windows; Transformers' own code
def test_real_models_say_the_same_aligned_or_not(family: str, tmp_path: Path) -> None:
    loaded = load_tiny(family, tmp_path / family)
    expected = outputs(loaded, FREE, by_token=True)
    assert len(expected) == 10 and all(len(tokens) == 6 for tokens in expected.values())
    for mode, limits in MODES.items():
        assert outputs(loaded, limits) == expected, mode
