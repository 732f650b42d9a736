"""The rows by which engines are compared: scenarios and the figures read from them. All engines share one definition.

`measure_row(name, runner, seed)` is one repetition, on prompts that no server has seen. Figures are in seconds, or per
second where `RowResult.is_rate`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headstart.bench.measure import PhaseResult, ScenarioResult, measure_scenario
from headstart.bench.rate_report import DEFAULTS, RateSearchConfig, cached_prefix_workload, measure_rates_until_highest
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import JobRunner
from headstart.workload import scenarios
from headstart.workload.jobs import GREEDY, TokenSampling
from headstart.workload.request_record import median
from headstart.workload.scenarios import WorkloadScenario
from headstart.workload.slo import Slo
from headstart.workload.synthetic import INTENT, RequestShape

Build = Callable[[int, Random], WorkloadScenario]  # (vocabulary size, rng) -> one repetition
Figure = Callable[[PhaseResult], float | None]


@dataclass(frozen=True, slots=True)
class Part:
    """One figure of a row: its key, its phase and its function. Phases of one name give their median."""

    key: str
    phase: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario and the figures read from it."""

    build: Build
    parts: tuple[Part, ...]
    is_rate: bool = False  # tokens per second: more is better; otherwise seconds: less is better


@dataclass(frozen=True, slots=True)
class Outcome:
    """One repetition of a row. A figure is None if its phase failed or was ended early."""

    figures: dict[str, float | None]
    redundancy: dict[str, float | None]  # same keys; None: cached tokens are not reported
    computed: dict[str, int | None]
    ideal: dict[str, int]
    problems: tuple[str, ...]


def ttft(result: PhaseResult) -> float | None:
    """Return the median seconds to the first token."""
    return result.trial.median_ttft


def tpot(result: PhaseResult) -> float | None:
    """Return the median seconds per output token after the first."""
    return result.trial.median_tpot


def seconds(result: PhaseResult) -> float | None:
    """Return the seconds from the start to the last token of the phase."""
    return result.trial.seconds


def decode_rate(result: PhaseResult) -> float | None:
    """Return the output tokens per second while all streams decode."""
    return result.trial.concurrent_decode_rate


def _decode(is_shared: bool, sampling: TokenSampling = GREEDY) -> Build:
    return lambda vocab_size, rng: scenarios.concurrent_decode_scenario(
        vocab_size, rng, is_shared=is_shared, sampling=sampling
    )


SAMPLED = {
    "decode_temperature": TokenSampling(temperature=1.0),
    "decode_top_p": TokenSampling(temperature=1.0, top_p=0.95),
    "decode_top_k": TokenSampling(temperature=1.0, top_p=0.8, top_k=20),
}
"""Rows that are `decode_shared` with sampled tokens."""


LONG_LENGTH = 4000

ROWS: dict[str, Row] = {
    "single_stream": Row(scenarios.single_stream_scenario, (Part("single_stream", "alone", tpot),)),
    "warm_ttft": Row(scenarios.warm_ttft_scenario, (Part("warm_ttft", "warm", ttft),)),
    "cold_ttft": Row(scenarios.cold_ttft_scenario, (Part("cold_ttft", "cold", ttft),)),
    "long_ttft": Row(
        lambda vocab_size, rng: scenarios.cold_ttft_scenario(vocab_size, rng, length=LONG_LENGTH, requests=1),
        (Part("long_ttft", "cold", ttft),),
    ),
    "rotations": Row(
        lambda vocab_size, rng: scenarios.token_rotations_scenario(vocab_size, rng, passes=3),
        (Part("rotations_cold", "cold", seconds), Part("rotations_warm", "warm", seconds)),
    ),
    "decode_shared": Row(_decode(True), (Part("decode_shared", "shared", decode_rate),), is_rate=True),
    "decode_distinct": Row(_decode(False), (Part("decode_distinct", "distinct", decode_rate),), is_rate=True),
    **{
        name: Row(_decode(True, sampling), (Part(name, "shared", decode_rate),), is_rate=True)
        for name, sampling in SAMPLED.items()
    },
    "shared_prefix": Row(scenarios.shared_prefix_scenario, (Part("shared_prefix", "cold", seconds),)),
    "twins": Row(scenarios.shared_burst_scenario, (Part("twins", "cold", seconds),)),
}
"""All rows except `poisson_intent_recognition_scenario`, which is a search (`measure_poisson`)."""


def measure_row(name: str, runner: JobRunner, seed: int | str, bar: ProgressBar = QUIET) -> Outcome:
    """Measure one repetition of one of ROWS. Each repetition needs a different `seed`. Raises KeyError."""
    row = ROWS[name]
    return read_off(row.parts, measure_scenario(runner, row.build(runner.vocab_size, Random(f"{seed}/{name}")), bar))


def measure_poisson(
    runner: JobRunner,
    slo_seconds: float | None,
    config: RateSearchConfig = DEFAULTS,
    bar: ProgressBar = QUIET,
    *,
    shape: RequestShape = INTENT,
) -> tuple[Outcome, float | None]:
    """Return (highest rate whose p90 latency is within `slo_seconds`, seconds of an unloaded request).

    Without `slo_seconds` the limit is four times the runner's own unloaded latency. A rate of 0 means that none held.
    """
    alone = unloaded_e2e(runner, config.seed, bar, shape=shape)
    if alone is None:
        return Outcome({"poisson": None}, {}, {}, {}, ("no request alone came through",)), None
    slo = Slo(e2e=slo_seconds or 4 * alone)
    found = measure_rates_until_highest(runner, cached_prefix_workload(shape), slo, alone, config, bar)
    held = [point.result for point in found.points if point.holds and point.rate == found.rate]
    return Outcome(
        {"poisson": found.rate},
        {"poisson": held[0].redundancy_factor} if held else {},
        {"poisson": held[0].computed_prompt_tokens} if held else {},
        {"poisson": held[0].ideal} if held else {},
        tuple(found.problems),
    ), alone


def unloaded_e2e(
    runner: JobRunner, seed: int | str, bar: ProgressBar = QUIET, *, shape: RequestShape = INTENT, requests: int = 8
) -> float | None:
    """Return the median seconds of an unloaded request behind a cached prefix; None if none succeeded."""
    rng = Random(f"{seed}/unloaded")
    found = measure_scenario(
        runner, scenarios.intent_recognition_scenario(runner.vocab_size, rng, shape=shape, requests=requests), bar
    )
    known = [record.e2e for record in found["alone"].trial.records if record.e2e is not None]
    return median(known) if known else None


def read_off(parts: tuple[Part, ...], found: ScenarioResult) -> Outcome:
    """Return the figures of a measured scenario. Phases of the same name count as repetitions of each other."""
    figures: dict[str, float | None] = {}
    redundancy: dict[str, float | None] = {}
    computed: dict[str, int | None] = {}
    ideal: dict[str, int] = {}
    for part in parts:
        results = [result for result in found.phases if result.phase.name == part.phase]
        values = [part.figure(result) for result in results if not result.problems and not result.trial.is_cut]
        known = [value for value in values if value is not None]
        figures[part.key] = median(known) if len(known) == len(results) else None
        worst = max(results, key=lambda result: result.redundancy_factor or 0.0)
        redundancy[part.key], computed[part.key], ideal[part.key] = (
            worst.redundancy_factor,
            worst.computed_prompt_tokens,
            worst.ideal,
        )
    return Outcome(figures, redundancy, computed, ideal, tuple(found.problems))
