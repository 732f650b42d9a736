"""The rows by which engines are compared: what is measured of which scenario. One definition for whoever serves.

`measure_row(name, runner, seed)` is one repetition, on prompts that nobody has seen. Figures are in seconds, or per
second where `Row.is_rate`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headstart.bench.measure import Measured, PhaseResult, measure
from headstart.bench.progress_bar import QUIET, Bar
from headstart.bench.rate import DEFAULTS, RateConfig, behind_prefix, search_rate
from headstart.bench.runners.runner import Runner
from headstart.workload import scenarios
from headstart.workload.jobs import GREEDY, Sampling
from headstart.workload.request_record import median
from headstart.workload.scenarios import Scenario
from headstart.workload.slo import Slo
from headstart.workload.synthetic import INTENT, Shape

Build = Callable[[int, Random], Scenario]  # (vocabulary size, chance) -> one repetition
Figure = Callable[[PhaseResult], float | None]


@dataclass(frozen=True, slots=True)
class Part:
    """One figure of a row: how it is read off which phases; several of one name give their median."""

    key: str
    phase: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Row:
    """What is served, and the figures read off it."""

    build: Build
    parts: tuple[Part, ...]
    is_rate: bool = False  # tokens per second: more is better. Else seconds: less is better


@dataclass(frozen=True, slots=True)
class Outcome:
    """One repetition of a row. A figure is None if its phase failed or was cut."""

    figures: dict[str, float | None]
    redundancy: dict[str, float | None]  # by the same keys; None: cached tokens are not reported
    computed: dict[str, int | None]
    ideal: dict[str, int]
    problems: tuple[str, ...]


def ttft(result: PhaseResult) -> float | None:
    """Median seconds to the first token."""
    return result.trial.ttft


def tpot(result: PhaseResult) -> float | None:
    """Median seconds per output token after the first."""
    return result.trial.tpot


def seconds(result: PhaseResult) -> float | None:
    """Seconds from the start to the last token of all."""
    return result.trial.seconds


def decode_rate(result: PhaseResult) -> float | None:
    """Output tokens per second while all streams decode."""
    return result.trial.decode_rate


def _decode(is_shared: bool, sampling: Sampling = GREEDY) -> Build:
    return lambda vocab_size, rng: scenarios.decode(vocab_size, rng, is_shared=is_shared, sampling=sampling)


SAMPLED = {
    "decode_temperature": Sampling(temperature=1.0),
    "decode_top_p": Sampling(temperature=1.0, top_p=0.95),
    "decode_top_k": Sampling(temperature=1.0, top_p=0.8, top_k=20),
}
"""Rows that are `decode_shared` with sampled tokens."""


ROWS: dict[str, Row] = {
    "single_stream": Row(scenarios.single_stream, (Part("single_stream", "alone", tpot),)),
    "warm_ttft": Row(scenarios.warm_ttft, (Part("warm_ttft", "warm", ttft),)),
    "cold_ttft": Row(scenarios.cold_ttft, (Part("cold_ttft", "cold", ttft),)),
    "rotations": Row(
        lambda vocab_size, rng: scenarios.rotations(vocab_size, rng, passes=3),
        (Part("rotations_cold", "cold", seconds), Part("rotations_warm", "warm", seconds)),
    ),
    "decode_shared": Row(_decode(True), (Part("decode_shared", "shared", decode_rate),), is_rate=True),
    "decode_distinct": Row(_decode(False), (Part("decode_distinct", "distinct", decode_rate),), is_rate=True),
    **{
        name: Row(_decode(True, sampling), (Part(name, "shared", decode_rate),), is_rate=True)
        for name, sampling in SAMPLED.items()
    },
    "shared_prefix": Row(scenarios.shared_prefix, (Part("shared_prefix", "cold", seconds),)),
    "twins": Row(scenarios.twins, (Part("twins", "cold", seconds),)),
}
"""All rows but `poisson`, which is a search (`measure_poisson`)."""


def measure_row(name: str, runner: Runner, seed: int | str, bar: Bar = QUIET) -> Outcome:
    """One repetition of one of ROWS; `seed` must be another one for each repetition. Raises KeyError."""
    row = ROWS[name]
    return read_off(row.parts, measure(runner, row.build(runner.vocab_size, Random(f"{seed}/{name}")), bar))


def measure_poisson(
    runner: Runner,
    slo_seconds: float | None,
    config: RateConfig = DEFAULTS,
    bar: Bar = QUIET,
    *,
    shape: Shape = INTENT,
) -> tuple[Outcome, float | None]:
    """(the highest rate whose p90 latency is within `slo_seconds`, seconds that a request takes when it is alone).

    Without `slo_seconds` four times the runner's own latency alone is allowed. A rate of 0: none held.
    """
    alone = unloaded_e2e(runner, config.seed, bar, shape=shape)
    if alone is None:
        return Outcome({"poisson": None}, {}, {}, {}, ("no request alone came through",)), None
    slo = Slo(e2e=slo_seconds or 4 * alone)
    found = search_rate(runner, behind_prefix(shape), slo, 0.5 / alone, config, bar)
    held = [point.result for point in found.points if point.holds and point.rate == found.rate]
    return Outcome(
        {"poisson": found.rate},
        {"poisson": held[0].redundancy} if held else {},
        {"poisson": held[0].computed} if held else {},
        {"poisson": held[0].ideal} if held else {},
        tuple(found.problems),
    ), alone


def unloaded_e2e(
    runner: Runner, seed: int | str, bar: Bar = QUIET, *, shape: Shape = INTENT, requests: int = 8
) -> float | None:
    """Median seconds that a request takes when it is alone, behind a cached prefix; None: none came through."""
    rng = Random(f"{seed}/unloaded")
    found = measure(runner, scenarios.intent(runner.vocab_size, rng, shape=shape, requests=requests), bar)
    known = [record.e2e for record in found["alone"].trial.records if record.e2e is not None]
    return median(known) if known else None


def read_off(parts: tuple[Part, ...], found: Measured) -> Outcome:
    """The figures of a measured scenario. Phases of one name count as repetitions of each other."""
    figures: dict[str, float | None] = {}
    redundancy: dict[str, float | None] = {}
    computed: dict[str, int | None] = {}
    ideal: dict[str, int] = {}
    for part in parts:
        results = [result for result in found.phases if result.phase.name == part.phase]
        values = [part.figure(result) for result in results if not result.problems and not result.trial.is_cut]
        known = [value for value in values if value is not None]
        figures[part.key] = median(known) if len(known) == len(results) else None
        worst = max(results, key=lambda result: result.redundancy or 0.0)
        redundancy[part.key], computed[part.key], ideal[part.key] = worst.redundancy, worst.computed, worst.ideal
    return Outcome(figures, redundancy, computed, ideal, tuple(found.problems))
