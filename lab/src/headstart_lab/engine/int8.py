"""Experiment: effect of int8 and int4 weights on logits. Logits of every position against float32's, beside bfloat16's.

bfloat16 rounds weights and activations; int8 and int4 round the weights further, and leave the rest as in bfloat16;
int4_a8 rounds activations to 8 bits in products with weights of int4. The bundled model reads its own conversations and
also generates answers, which count if they are exact; any other model reads random tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from headstart.bundled import bundled_intent_model_folder
from headstart.core.batch import Batch, Chunk
from headstart.core.request import GREEDY
from headstart.engine.llm import LLM
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.measurement.runner import EngineSetup
from headstart.model.model_runner import ModelRunner
from headstart.model.setup.sizing import apply_threads
from headstart.model.step_inputs import StepInputBounds, build_step_inputs
from headstart.model.weights.model_loader import LoadedModel, load_model
from headstart.workload.synthetic import random_tokens
from headstart_lab.intent.intent import is_correct
from headstart_lab.intent.intent_accuracy import MAX_TOKENS, AccuracyConfig, questions

FORMS = {
    "float32": ("float32", "none", 16),
    "bfloat16": ("bfloat16", "none", 16),
    "int8": ("bfloat16", "int8", 16),
    "int4": ("bfloat16", "int4", 16),
    "int4_a8": ("bfloat16", "int4", 8),
}
ORACLE = "float32"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Int8Config:
    """`prompts` of `tokens` random tokens, or this number of the bundled model's conversations."""

    prompts: int = 40
    tokens: int = 256


QUICK = Int8Config(prompts=4, tokens=64)


@dataclass(slots=True)
class Difference:
    """The difference between two sets of logits, by position."""

    positions: int = 0
    greatest: float = 0.0
    total: float = 0.0  # of the mean absolute difference of each position
    divergence: float = 0.0  # of the Kullback-Leibler divergences, in nats
    agreeing: int = 0  # positions with the same most likely token

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Add logits [n, vocab], both fp32."""
        apart = (found - expected).abs()
        mine, theirs = found.log_softmax(-1), expected.log_softmax(-1)
        self.positions += len(found)
        self.greatest = max(self.greatest, float(apart.max()))
        self.total += float(apart.mean(-1).sum())
        self.divergence += float((theirs.exp() * (theirs - mine)).sum())
        self.agreeing += int((found.argmax(-1) == expected.argmax(-1)).sum())

    def values(self) -> dict[str, float]:
        """Return means over positions, and the greatest difference of all."""
        return {
            "greatest_difference": self.greatest,
            "mean_difference": self.total / self.positions,
            "divergence_nats": self.divergence / self.positions,
            "same_top_token": self.agreeing / self.positions,
        }


def run_int8(setup: EngineSetup, config: Int8Config = Int8Config(), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Load the model in each form and compare. An empty `setup.model` is the bundled one."""
    apply_threads(setup.threads)
    folder, rng = Path(setup.model) if setup.model else bundled_intent_model_folder(), Random(setup.seed)
    prompts: Sequence[Sequence[int]] = []
    accuracy: dict[str, float] = {}
    if not setup.model:
        prompts, accuracy = _conversations(setup, config, bar)
    loaded = {
        name: load_model(folder, dtype=dtype, device="cpu", quantization=quantization, activation_bits=bits)
        for name, (dtype, quantization, bits) in FORMS.items()
    }
    if setup.model:
        vocab_size = loaded[ORACLE].vocab_size
        prompts = [random_tokens(config.tokens, vocab_size, rng) for _ in range(config.prompts)]
    found = {name: Difference() for name in FORMS if name != ORACLE}
    spread = 0.0
    bar.start_stage("logits", len(prompts))
    for prompt in prompts:
        expected = logits(loaded[ORACLE], prompt)
        spread += float(expected.std(-1).mean()) / len(prompts)
        for name, difference in found.items():
            difference.add(logits(loaded[name], prompt), expected)
        bar.advance(1)
    return _report(setup, config, found, spread, accuracy)


@torch.inference_mode()
def logits(loaded: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits [n, vocab] in fp32 of every position of one prompt."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE) + 1
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    ids = array("i", tokens)
    chunk = Chunk(
        request_id="prompt",
        token_ids=ids,
        start=0,
        block_ids=list(range(1, num_blocks)),
        write_from=0,
        num_logits=0,
        sampling=GREEDY,
        num_prompt_tokens=len(ids),
        history=ids,
    )
    bounds = StepInputBounds(num_blocks, BLOCK_SIZE, loaded.vocab_size, loaded.max_model_len)
    step, _, errors = build_step_inputs(Batch((chunk,)), bounds, loaded.device)
    assert step is not None and not errors, errors
    return loaded.model.logits_from_hidden(loaded.model.forward(step, runner.attention.begin_step(step))).float()


def _conversations(
    setup: EngineSetup, config: Int8Config, bar: ProgressBar
) -> tuple[list[list[int]], dict[str, float]]:
    """Return prompts with float32's answers to them, and the share of exact answers in each form."""
    examples, asked = questions(AccuracyConfig(config.prompts, preambles=min(4, config.prompts), seed=setup.seed))
    prompts: list[list[int]] = []
    accuracy: dict[str, float] = {}
    for name, (dtype, quantization, bits) in FORMS.items():
        bar.start_stage(f"answers in {name}", None)
        llm = LLM(dtype=dtype, quantization=quantization, activation_bits=str(bits), threads=setup.threads)
        answers = llm.chat(asked, {"temperature": 0, "max_tokens": MAX_TOKENS}, progress=False)
        right = sum(is_correct(answer.text, example) for answer, example in zip(answers, examples, strict=True))
        accuracy[name] = right / len(examples)
        if name == ORACLE:
            prompts = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    return prompts, accuracy


def _report(
    setup: EngineSetup, config: Int8Config, found: dict[str, Difference], spread: float, accuracy: dict[str, float]
) -> BenchmarkReport:
    values: dict[str, Any] = {"logits_deviation": spread, "positions": next(iter(found.values())).positions}
    for name, difference in found.items():
        values |= {f"{name}_{key}": value for key, value in difference.values().items()}
    values |= {f"{name}_exact_answers": share for name, share in accuracy.items()}
    keys = ("greatest_difference", "mean_difference", "divergence_nats", "same_top_token")
    rows = tuple((key.replace("_", " "), *(values[f"{name}_{key}"] for name in found)) for key in keys)
    if accuracy:
        rows += (("exact answers", *(accuracy[name] for name in found)),)
    title = f"against float32, whose logits have a standard deviation of {spread:.2f}"
    return BenchmarkReport(
        "lab int8",
        values,
        model=setup.label,
        seed=setup.seed,
        threads=setup.threads,
        setup={"prompts": config.prompts, "tokens": config.tokens},
        sheets=[ReportTable(title, ("logits", *found), rows)],
    )
