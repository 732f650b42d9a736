"""Experiment: the same prompt again. Every block is cached; only the last token is computed, for its logits."""

from random import Random
from typing import Any

from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import requests_from_prompts, run_requests
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.synthetic import random_tokens

PROMPT = 1024
NUM_BLOCKS = 256


def run_repeated_prompt(setup: EngineSetup, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Send one prompt of 1,024 tokens twice, one output token each."""
    bar.start_stage("loading the model", None)
    engine, info = setup.build(setup.options(num_blocks=NUM_BLOCKS))
    prompt = random_tokens(PROMPT, info.vocab_size, Random(setup.seed))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    bar.start_stage("the same prompt twice", 2)
    first, again = (
        run_requests(engine, requests_from_prompts([prompt], sampling, name), bar=bar) for name in ("first", "again")
    )
    values: dict[str, Any] = {
        "tokens_computed": again.computed_tokens,
        "tokens_cached": again.records[0].cached_tokens,
        "first_tokens_computed": first.computed_tokens,
        "first_ms": 1e3 * first.seconds,
        "again_ms": 1e3 * again.seconds,
        "differing_tokens": int(first.outputs != again.outputs),
    }
    rows = (
        ("first", first.computed_tokens, first.records[0].cached_tokens, values["first_ms"]),
        ("again", again.computed_tokens, again.records[0].cached_tokens, values["again_ms"]),
    )
    report = BenchmarkReport(
        "lab repeat",
        values,
        model=setup.label,
        seed=setup.seed,
        threads=info.threads,
        setup={"prompt_tokens": PROMPT, **describe_engine(info)},
        sheets=[
            ReportTable("one prompt of 1,024 tokens, twice", ("time", "tokens computed", "tokens cached", "ms"), rows)
        ],
        problems=first.problems("first") + again.problems("again"),
    )
    if again.computed_tokens != 1:
        report.problems.append(f"the repeated prompt computed {again.computed_tokens} tokens instead of 1")
    if values["differing_tokens"] and info.dtype == "float32":
        report.problems.append("the first output token differs between the two times in float32")
    return report
