"""Experiment: fit a step cost to real steps of a model on this machine, and write it as a profile.

The engine runs in this process on random prompts of many lengths at many concurrencies, so that steps of few and many
decodes, short and long contexts, small and large chunks are measured. The time of a step includes scheduling.

Check of a calibrated profile: one workload on the real engine and in the simulator, side by side.

The workload was not part of the fit: Poisson arrivals, shared prefixes. Its rate is chosen in the simulator,
before anything is measured, so that the engine is busy for a given share of the time.

Fit of a step cost to measured steps: non-negative least squares of relative errors, robust against slow outliers.

A fifth of the samples is held out; the error is stated on those.
"""

from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from headstart.config.options import EngineOptions
from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError
from headstart.core.executor import Executor
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.step_time import MaxStepTime
from headstart.measurement.inprocess import EngineRunner, run_requests
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.measurement.runner import EngineSetup, describe_engine
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import write_profile_file
from headstart.sim.sim_report import fleet_report
from headstart.sim.sim_request import SimRequest, request_from_job
from headstart.sim.step_cost import AdditiveCost, StepWork
from headstart.sim.sweep import SimulationConfig
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord, percentile, summarize_records
from headstart.workload.synthetic import random_tokens, unit_poisson_arrivals

SHORTEST = 8  # tokens of a prompt
LONGEST_SHARE = 0.5  # of the context
MAX_PROMPT = 4096
ROWS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p90")
BUSY = 0.5  # share of the time in steps
HALVINGS = 12  # of the search for the rate
GROUPS = 4
MIN_SAMPLES = 50
HELD_OUT = 5  # every fifth sample
ROUNDS = 5  # of reweighting
SWEEPS = 400  # of coordinate descent
OUTLIER = 2.0  # residuals above this multiple of the median weigh less
NORMAL = 1.4826  # standard deviation / median absolute deviation, of a normal distribution


class StepSample(NamedTuple):
    """One measured step."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted cost. Errors are of held-out steps, relative to the measured seconds."""

    cost: AdditiveCost
    noise: float  # standard deviation of the logarithm of a step's duration, outliers left out
    error_p50: float
    error_p90: float
    error_total: float  # of the sum of all held-out steps, signed
    num_samples: int
    num_held_out: int

    def error_summary(self) -> dict[str, float]:
        """Return the errors as plain values."""
        return {"p50": self.error_p50, "p90": self.error_p90, "total": self.error_total}


def fit_step_cost(samples: Sequence[StepSample]) -> StepFit:
    """Return the cost that fits all samples but every fifth, and its error on those. Raises ConfigError for too few."""
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(f"{len(samples)} measured steps are too few to fit: at least {MIN_SAMPLES} are needed")
    held_out = samples[::HELD_OUT]
    fitted = [sample for index, sample in enumerate(samples) if index % HELD_OUT]
    rows = [_features(sample.work) for sample in fitted]
    weights = [1.0 / sample.seconds for sample in fitted]
    values = [0.0] * 5
    for _ in range(ROUNDS):
        values = _nnls(rows, [sample.seconds for sample in fitted], weights)
        off = [abs(_dot(values, row) / one.seconds - 1) for row, one in zip(rows, fitted, strict=True)]
        scale = max(OUTLIER * median(off), 1e-9)
        weights = [
            min(scale / one_off, 1.0) ** 0.5 / one.seconds if one_off else 1.0 / one.seconds
            for one_off, one in zip(off, fitted, strict=True)
        ]
    cost = AdditiveCost(*values)
    ratios = [max(cost.seconds(one.work), 1e-9) / one.seconds for one in held_out]
    errors = [abs(ratio - 1) for ratio in ratios]
    logs = [log(ratio) for ratio in ratios]
    middle = median(logs)
    return StepFit(
        cost=cost,
        noise=NORMAL * median([abs(value - middle) for value in logs]),
        error_p50=median(errors),
        error_p90=percentile(errors, 90),
        error_total=sum(cost.seconds(one.work) for one in held_out) / sum(one.seconds for one in held_out) - 1,
        num_samples=len(samples),
        num_held_out=len(held_out),
    )


def _features(work: StepWork) -> tuple[float, ...]:
    return (1.0, float(work.streams), float(work.resident), float(work.new), work.pairs)


def _dot(values: Sequence[float], row: Sequence[float]) -> float:
    return sum(value * x for value, x in zip(values, row, strict=True))


def _nnls(rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return non-negative coefficients with the least weighted squares, by coordinate descent on the normal equations.

    Columns are scaled to unit length first: their magnitudes differ by ten orders.
    """
    size = len(rows[0])
    weighted = [[weight * x for x in row] for weight, row in zip(weights, rows, strict=True)]
    aims = [weight * target for weight, target in zip(weights, targets, strict=True)]
    norms = [sum(row[i] * row[i] for row in weighted) ** 0.5 or 1.0 for i in range(size)]
    gram = [
        [sum(row[i] * row[j] for row in weighted) / (norms[i] * norms[j]) for j in range(size)] for i in range(size)
    ]
    pull = [sum(row[i] * aim for row, aim in zip(weighted, aims, strict=True)) / norms[i] for i in range(size)]
    values = [0.0] * size
    for _ in range(SWEEPS):
        for i in range(size):
            if gram[i][i]:
                rest = pull[i] - sum(gram[i][j] * values[j] for j in range(size) if j != i)
                values[i] = max(rest / gram[i][i], 0.0)
    return [value / norm for value, norm in zip(values, norms, strict=True)]


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """`concurrencies`: of one round each; `requests`: per round and running sequence."""

    out: Path | None = None
    blocks: int = 2048
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    requests: int = 3
    output: int = 24
    checked: int = 100  # requests of the check


@dataclass(frozen=True, slots=True)
class CalibrationCheck:
    """Measured and predicted figures: seconds, and prompt tokens found in the cache."""

    rate: float  # requests per second
    measured: dict[str, float]
    predicted: dict[str, float]

    def to_document(self) -> dict[str, object]:
        return {"rate": self.rate, "measured": self.measured, "predicted": self.predicted}

    def to_table(self) -> ReportTable:
        rows = [
            (
                name,
                1e3 * self.measured[name],
                1e3 * self.predicted[name],
                self.predicted[name] / self.measured[name] - 1,
            )
            for name in ROWS
        ]
        hits = (self.measured["cached_tokens"], self.predicted["cached_tokens"])
        rows.append(("cached tokens", *hits, hits[1] / max(hits[0], 1) - 1))
        title = f"an unseen workload at {self.rate:.3g} requests/s, in ms"
        return ReportTable(title, ("", "measured", "predicted", "error"), tuple(rows))


class WorkRecordingExecutor:
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


def run_calibration(setup: EngineSetup, config: CalibrationConfig, bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure, fit, and write the profile if a file is named. Raises ConfigError."""
    if config.out is not None and (config.out.suffix != ".json" or not config.out.parent.is_dir()):
        raise ConfigError(f"--out {config.out}: name a .json file in a folder that exists")
    options = setup.options(num_blocks=config.blocks)
    bar.start_stage("loading the model")
    with closing(EngineRunner.from_setup(setup, options)) as runner:
        samples = measure_rounds(runner, config, Random(setup.seed), bar)
        bar.start_stage(f"fitting {len(samples):,} steps")
        fit = fit_step_cost(samples)
        profile = _profile(setup.label, fit, runner.info, options)
        if config.out is not None:
            write_profile_file(profile, config.out, fit.error_summary())
        check = check_calibrated_profile(runner, profile, config.checked, Random(f"{setup.seed}/check"), bar)
        return _report(setup, config, fit, check, runner.info)


def measure_rounds(
    runner: EngineRunner, config: CalibrationConfig, rng: Random, bar: ProgressBar = QUIET
) -> list[StepSample]:
    """Return the measured steps of all rounds; the first step of a round, which may include one-time costs, is left."""
    recorder = WorkRecordingExecutor(runner.engine.executor)
    runner.engine.executor = recorder
    numbers = count()
    samples: list[StepSample] = []
    for at_once in config.concurrencies:
        bar.start_stage(f"measuring steps with {at_once} requests at a time", config.requests * at_once)
        recorder.works.clear()
        prompts = _prompts(runner.info, config, config.requests * at_once, rng)
        sampling = SamplingParams(max_tokens=config.output, temperature=0.0)
        requests = [Request(f"calibrate-{next(numbers)}", prompt, sampling) for prompt in prompts]
        run = run_requests(runner.engine, requests, concurrency=at_once, bar=bar)
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


def _profile(label: str, fit: StepFit, info: EngineInfo, options: EngineOptions) -> ReplicaProfile:
    """Return the profile of a server with the default options."""
    source = (
        f"{label}, {info.dtype}, {info.threads} threads: fitted to {fit.num_samples} steps in process; "
        f"error p50 {fit.error_p50:.1%}, p90 {fit.error_p90:.1%}"
    )
    return ReplicaProfile(
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


def _report(
    setup: EngineSetup, config: CalibrationConfig, fit: StepFit, check: CalibrationCheck, info: EngineInfo
) -> BenchmarkReport:
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
    return BenchmarkReport(
        "simulate calibrate",
        {
            "cost": {"shape": "sum", **{name: getattr(cost, name) for name in SHAPE}},
            "noise": fit.noise,
            "error": fit.error_summary(),
            "check": check.to_document(),
            "samples": fit.num_samples,
            "held_out": fit.num_held_out,
            "profile": None if config.out is None else str(config.out),
        },
        model=setup.label,
        seed=setup.seed,
        threads=info.threads,
        setup={**describe_engine(info), "concurrencies": list(config.concurrencies), "output": config.output},
        sheets=[
            ReportTable(
                f"step cost of {setup.label}, errors on {fit.num_held_out} held-out steps", ("part", "value"), rows
            ),
            check.to_table(),
        ],
    )


SHAPE = ("step", "stream", "resident", "token", "pair")


def check_calibrated_profile(
    runner: EngineRunner, profile: ReplicaProfile, num_requests: int, rng: Random, bar: ProgressBar = QUIET
) -> CalibrationCheck:
    """Return what the simulator predicts for a new workload, and what the engine then does with it."""
    jobs = _jobs(runner.info, num_requests, rng)
    bar.start_stage("searching a rate of requests by simulation", HALVINGS)
    rate = _rate(jobs, profile, bar)
    due = [Job(job.prompt, job.output, job.at / rate) for job in jobs]
    predicted = SimulationConfig(profile, 1).run_new_fleet([request_from_job(job) for job in due])
    bar.start_stage("checking the profile on an unseen workload", num_requests)
    runner.try_clear_prefix_cache()
    trial = runner.run(due, bar=bar)
    return CalibrationCheck(rate, _figures(trial.records), _figures([one.record for one in predicted.records]))


def _jobs(info: EngineInfo, num: int, rng: Random) -> list[Job]:
    """Return jobs at one request per second: a prefix of a group, an own part, an answer of some length."""
    longest = min(info.max_model_len // 2, 1024)
    prefixes = [random_tokens(longest // 2, info.vocab_size, rng) for _ in range(GROUPS)]
    return [
        Job(
            rng.choice(prefixes) + random_tokens(rng.randint(8, longest // 2), info.vocab_size, rng),
            rng.randint(4, 32),
            at,
        )
        for at in unit_poisson_arrivals(num, rng)
    ]


def _rate(jobs: Sequence[Job], profile: ReplicaProfile, bar: ProgressBar) -> float:
    """Return the rate at which a simulated replica is busy for the share BUSY, by bisection in powers of two."""
    low, high = 1e-3, 1e4
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        asked = [SimRequest(job.at / middle, len(job.prompt), job.output, token_ids=job.prompt) for job in jobs]
        if fleet_report(SimulationConfig(profile, 1).run_new_fleet(asked)).busy < BUSY:
            low = middle
        else:
            high = middle
        bar.advance()
    return low


def _figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    summary = summarize_records(records)
    assert summary.ttft is not None and summary.tpot is not None and summary.e2e is not None, "nothing was answered"
    return {
        "ttft_p50": summary.ttft.p50,
        "ttft_p90": summary.ttft.p90,
        "tpot_p50": summary.tpot.p50,
        "tpot_p90": summary.tpot.p90,
        "e2e_p90": summary.e2e.p90,
        "cached_tokens": summary.cached_tokens,
    }
