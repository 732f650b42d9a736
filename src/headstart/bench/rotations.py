"""The vLLM #3402 benchmark: prompts with all but one token cached each, in one step instead of sixteen.

The same prompts run cold, then again warm; and warm once more on an engine with the accounting that vLLM had before:
cached tokens are charged to the step's budget although they are not computed.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan
from random import Random
from typing import Any

from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import RunResult, TimedStep, requests_from_prompts, run_requests
from headstart.measurement.machine import ContentionLog, measure_uncontended
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportChart, ReportTable, min_and_max
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.workload.request_record import median
from headstart.workload.synthetic import random_tokens, token_rotations

_ONE_TOKEN = ("one_token_step_s", "decode_step_s", "one_token_over_decode", "one_token_over_decode_executor")
BUDGET = 4096  # admits three prompts of 1,025 tokens, as in vLLM #3402


@dataclass(frozen=True, slots=True)
class TokenRotationsConfig:
    """Sizes of the experiment; the defaults are those of vLLM #3402."""

    requests: int = 48
    length: int = 1025
    runs: int = 3  # cold passes; each is followed by `warm_passes` of either kind
    warm_passes: int = 3
    decode_rounds: int = 12  # of: one step with one uncached token per row, then `decode_steps` decode steps
    decode_steps: int = 4


@dataclass(slots=True)
class _Passes:
    """All runs and steps measured."""

    cold: list[RunResult] = field(default_factory=list[RunResult])
    warm: list[RunResult] = field(default_factory=list[RunResult])
    unaware: list[RunResult] = field(default_factory=list[RunResult])
    one_token: list[TimedStep] = field(default_factory=list[TimedStep])
    decode: list[TimedStep] = field(default_factory=list[TimedStep])


def run_rotations(setup: EngineSetup, config: TokenRotationsConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure two engines of one model: cold, warm, and warm with cache-unaware accounting."""
    bar.start_stage("loading the model twice", None)
    num_blocks = config.requests * (-(-config.length // 16) + 2) + 64  # of 16 tokens: prompts, outputs, decode rounds
    options = setup.options(num_blocks=num_blocks, max_batched_tokens=BUDGET)
    engine, info = setup.build(options)
    unaware, _ = setup.build(options, charge_cached=True)
    prompts = token_rotations(random_tokens(config.length, info.vocab_size, Random(setup.seed)), config.requests)
    log, passes = ContentionLog.empty(), _Passes()
    _measure_passes(engine, unaware, prompts, config, passes, log, bar)
    _measure_one_token(engine, prompts, config, passes, bar)
    return _report(setup, config, info, passes, log)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _measure_passes(
    engine: Engine,
    unaware: Engine,
    prompts: "list[array[int]]",
    config: TokenRotationsConfig,
    passes: _Passes,
    log: ContentionLog,
    bar: ProgressBar,
) -> None:
    """Run cold, then warm and unaware in turn, so that noise on the machine affects both."""
    names = _names()

    def one_pass(target: Engine, label: str, *, cold: bool = False) -> RunResult:
        def measure() -> RunResult:
            if cold:
                assert target.reset_prefix_cache(), "an idle engine did not clear its prefix cache"
            bar.start_stage(label, len(prompts))
            return run_requests(target, requests_from_prompts(prompts, _greedy(1), next(names)), bar=bar)

        return measure_uncontended(measure, log)

    bar.start_stage("filling the second engine", len(prompts))
    run_requests(unaware, requests_from_prompts(prompts, _greedy(1), next(names)), bar=bar)
    for number in range(1, config.runs + 1):
        passes.cold.append(one_pass(engine, f"cold {number}/{config.runs}", cold=True))
        for _ in range(config.warm_passes):
            passes.warm.append(one_pass(engine, "warm"))
            passes.unaware.append(one_pass(unaware, "warm, cache-unaware accounting"))


def _measure_one_token(
    engine: Engine, prompts: "list[array[int]]", config: TokenRotationsConfig, passes: _Passes, bar: ProgressBar
) -> None:
    """Measure steps with one uncached token per row, each followed by decode steps of the same batch."""
    bar.start_stage("one uncached token against a decode", len(prompts) * config.decode_rounds)
    names = _names()
    for number in range(config.decode_rounds + 1):
        requests = requests_from_prompts(prompts, _greedy(config.decode_steps + 1), "t" + next(names))
        run = run_requests(engine, requests, bar=bar if number else QUIET)
        steps = [step for step in run.steps if step.computed_tokens == len(prompts)]
        if number and len(steps) > 1:  # the first round is a warm-up; failed rounds have no such steps
            passes.one_token.append(steps[0])
            passes.decode += steps[1:]


def _names() -> Iterator[str]:
    number = 0
    while True:
        yield f"pass{number}"
        number += 1


def _report(
    setup: EngineSetup, config: TokenRotationsConfig, info: EngineInfo, passes: _Passes, log: ContentionLog
) -> BenchmarkReport:
    series = {
        "cold_s": [run.seconds for run in passes.cold],
        "warm_s": [run.seconds for run in passes.warm],
        "unaware_warm_s": [run.seconds for run in passes.unaware],
        "one_token_step_s": [step.seconds for step in passes.one_token],
        "decode_step_s": [step.seconds for step in passes.decode],
        "one_token_executor_s": [step.executor_seconds for step in passes.one_token],
        "decode_executor_s": [step.executor_seconds for step in passes.decode],
    }
    middle = {key: median(values) if values else nan for key, values in series.items()}
    every = passes.cold + passes.warm + passes.unaware
    differing = sum(a != b for run in every for a, b in zip(passes.cold[0].outputs, run.outputs, strict=True))
    values: dict[str, Any] = {
        "cold_s": middle["cold_s"],
        "warm_s": middle["warm_s"],
        "ratio": middle["cold_s"] / middle["warm_s"],
        "warm_steps": max(len(run.steps) for run in passes.warm),
        "warm_tokens_computed": max(run.computed_tokens for run in passes.warm),
        "unaware_warm_s": middle["unaware_warm_s"],
        "unaware_warm_steps": max(len(run.steps) for run in passes.unaware),
        "unaware_over_warm": middle["unaware_warm_s"] / middle["warm_s"],
        "one_token_over_decode": middle["one_token_step_s"] / middle["decode_step_s"],
        "one_token_over_decode_executor": middle["one_token_executor_s"] / middle["decode_executor_s"],
        "one_token_step_s": middle["one_token_step_s"],
        "decode_step_s": middle["decode_step_s"],
        "cold_steps": len(passes.cold[0].steps),
        "cold_tokens_computed": passes.cold[0].computed_tokens,
        "differing_tokens": differing,
    }
    report = BenchmarkReport(
        "rotations",
        values,
        model=setup.label,
        seed=setup.seed,
        runs=config.runs,
        threads=info.threads,
        spread={key: min_and_max(found) for key, found in series.items() if found},
        setup={
            "requests": config.requests,
            "prompt_tokens": config.length,
            "output_tokens": 1,
            "max_num_batched_tokens": BUDGET,
            "warm_passes": len(passes.warm),
            "decode_rounds": config.decode_rounds,
            **describe_engine(info),
        },
        contention=log.as_dict(),
    )
    report.problems = _problems(config, info, passes, values)
    _add_views(report, passes)
    return report


def _problems(config: TokenRotationsConfig, info: EngineInfo, passes: _Passes, values: dict[str, Any]) -> list[str]:
    """Return the problems that invalidate the figures."""
    problems = [
        problem
        for label, runs in (("cold", passes.cold), ("warm", passes.warm), ("unaware", passes.unaware))
        for run in runs
        for problem in run.problems(label)
    ]
    for run in passes.warm:
        if (len(run.steps), run.computed_tokens) != (1, config.requests):
            problems.append(
                f"a warm pass took {len(run.steps)} steps and computed {run.computed_tokens} tokens; "
                f"it must take 1 and compute {config.requests}"
            )
    if values["differing_tokens"] and info.dtype == "float32":
        problems.append(f"{values['differing_tokens']} first tokens differ between cold and warm in float32")
    return problems


def _add_views(report: BenchmarkReport, passes: _Passes) -> None:
    """Add the tables and the chart."""
    kinds = {
        "cold": (report.values["cold_s"], passes.cold[0]),
        "warm, cache-unaware accounting": (report.values["unaware_warm_s"], passes.unaware[0]),
        "warm": (report.values["warm_s"], passes.warm[0]),
    }
    rows = tuple((name, seconds, len(run.steps), run.computed_tokens) for name, (seconds, run) in kinds.items())
    report.sheets.append(
        ReportTable(
            f"{report.setup['requests']} rotations of {report.setup['prompt_tokens']} tokens, one output token",
            ("pass", "seconds", "steps", "tokens computed"),
            rows,
        )
    )
    report.sheets.append(
        ReportTable(
            "one uncached token per row against a decode step of the same batch",
            ("one token s", "decode s", "ratio", "ratio without scheduling"),
            (tuple(report.values[key] for key in _ONE_TOKEN),),
        )
    )
    series = {"seconds": tuple(seconds for seconds, _ in kinds.values())}
    report.charts.append(ReportChart(report.sheets[0].title, "pass", "seconds", tuple(kinds), series, log_y=True))
