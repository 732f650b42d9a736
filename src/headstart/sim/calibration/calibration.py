"""Experiment: fit a step cost to real steps of a model on this machine, and write it as a profile.

The engine runs in this process on random prompts of many lengths at many concurrencies, so that steps of few and many
decodes, short and long contexts, small and large chunks are measured. The time of a step includes scheduling.
"""

from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from math import exp, log
from pathlib import Path
from random import Random

from headstart.config.options import EngineOptions
from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data
from headstart.core.engine import EngineInfo
from headstart.core.errors import ConfigError
from headstart.core.executor import Executor
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.step_time import MaxStepTime
from headstart.measurement.engine_runner import EngineRunner
from headstart.measurement.engines import Setup, describe
from headstart.measurement.inprocess import drive
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.report import Report, Sheet
from headstart.sim.calibration.calibration_check import Check, check_profile
from headstart.sim.profile import Profile
from headstart.sim.profiles.profile_file import write_profile
from headstart.sim.profiles.step_fit import StepFit, StepSample, fit_steps
from headstart.sim.step_cost import StepWork
from headstart.workload.synthetic import random_tokens

SHORTEST = 8  # tokens of a prompt
LONGEST_SHARE = 0.5  # of the context
MAX_PROMPT = 4096


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """`concurrencies`: of one round each; `requests`: per round and running sequence."""

    out: Path | None = None
    blocks: int = 2048
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    requests: int = 3
    output: int = 24
    checked: int = 100  # requests of the check


class RecordingExecutor:
    """An executor that records the work of every step of another one."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks, self.block_size, self.block_bytes = inner.num_blocks, inner.block_size, inner.block_bytes
        self.works: list[StepWork] = []

    def execute(self, batch: Batch) -> StepResult:
        self.works.append(StepWork.of(batch))
        return self.inner.execute(batch)

    def read_block(self, block_id: int) -> Data:
        return self.inner.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        self.inner.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        self.inner.zero_blocks(block_ids)


def run_calibration(setup: Setup, config: CalibrationConfig, bar: Bar = QUIET) -> Report:
    """Measure, fit, and write the profile if a file is named. Raises ConfigError."""
    if config.out is not None and (config.out.suffix != ".json" or not config.out.parent.is_dir()):
        raise ConfigError(f"--out {config.out}: name a .json file in a folder that exists")
    options = setup.options(num_blocks=config.blocks)
    bar.stage("loading the model")
    with closing(EngineRunner.build(setup, options)) as runner:
        samples = measure(runner, config, Random(setup.seed), bar)
        bar.stage(f"fitting {len(samples):,} steps")
        fit = fit_steps(samples)
        profile = _profile(setup.label, fit, runner.info, options)
        if config.out is not None:
            write_profile(profile, config.out, fit.errors())
        check = check_profile(runner, profile, config.checked, Random(f"{setup.seed}/check"), bar)
        return _report(setup, config, fit, check, runner.info)


def measure(runner: EngineRunner, config: CalibrationConfig, rng: Random, bar: Bar = QUIET) -> list[StepSample]:
    """Return the measured steps of all rounds; the first step of a round, which may include one-time costs, is left."""
    recorder = RecordingExecutor(runner.engine.executor)
    runner.engine.executor = recorder
    numbers = count()
    samples: list[StepSample] = []
    for at_once in config.concurrencies:
        bar.stage(f"measuring steps with {at_once} requests at a time", config.requests * at_once)
        recorder.works.clear()
        prompts = _prompts(runner.info, config, config.requests * at_once, rng)
        sampling = SamplingParams(max_tokens=config.output, temperature=0.0)
        requests = [Request(f"calibrate-{next(numbers)}", prompt, sampling) for prompt in prompts]
        run = drive(runner.engine, requests, concurrency=at_once, bar=bar)
        pairs = zip(recorder.works, run.steps, strict=True)
        samples += [StepSample(work, step.seconds) for work, step in pairs][1:]
    runner.engine.executor = recorder.inner
    return samples


def _prompts(info: EngineInfo, config: CalibrationConfig, num: int, rng: Random) -> "Sequence[array[int]]":
    """Return random prompts with log-uniform lengths that fit into the context."""
    longest = min(int(LONGEST_SHARE * info.max_model_len), MAX_PROMPT, info.num_blocks * info.block_size // 4)
    low, high = log(SHORTEST), log(max(longest, SHORTEST + 1))
    lengths = [round(exp(low + (high - low) * rng.random())) for _ in range(num)]
    return [random_tokens(length, info.vocab_size, rng) for length in lengths]


def _profile(label: str, fit: StepFit, info: EngineInfo, options: EngineOptions) -> Profile:
    """Return the profile of a server with the default options."""
    source = (
        f"{label}, {info.dtype}, {info.threads} threads: fitted to {fit.num_samples} steps in process; "
        f"error p50 {fit.error_p50:.1%}, p90 {fit.error_p90:.1%}"
    )
    return Profile(
        f"calibrated-{label}",
        source,
        fit.cost,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_batched_tokens=options.max_num_batched_tokens,
        max_seqs=options.max_num_seqs,
        max_model_len=info.max_model_len,
        noise=fit.noise,
        scheduling_policy=options.scheduling_policy,
        eviction_policy=options.eviction_policy,
        step_bound=MaxStepTime() if info.device == "cpu" else None,
    )


def _report(setup: Setup, config: CalibrationConfig, fit: StepFit, check: Check, info: EngineInfo) -> Report:
    cost = fit.cost
    rows = (
        ("step, ms", 1e3 * cost.step),
        ("decoding stream, us", 1e6 * cost.stream),
        ("resident token, us", 1e6 * cost.resident),
        ("prompt token, us", 1e6 * cost.token),
        ("pair of tokens, ns", 1e9 * cost.pair),
        ("noise", fit.noise),
        ("error p50", fit.error_p50),
        ("error p90", fit.error_p90),
        ("error of the sum", fit.error_total),
    )
    return Report(
        "simulate calibrate",
        {
            "cost": {"shape": "sum", **{name: getattr(cost, name) for name in SHAPE}},
            "noise": fit.noise,
            "error": fit.errors(),
            "check": check.document(),
            "samples": fit.num_samples,
            "held_out": fit.num_held_out,
            "profile": None if config.out is None else str(config.out),
        },
        model=setup.label,
        seed=setup.seed,
        threads=info.threads,
        setup={**describe(info), "concurrencies": list(config.concurrencies), "output": config.output},
        sheets=[
            Sheet(f"step cost of {setup.label}, errors on {fit.num_held_out} held-out steps", ("part", "value"), rows),
            check.sheet(),
        ],
    )


SHAPE = ("step", "stream", "resident", "token", "pair")
