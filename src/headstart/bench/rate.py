"""The highest Poisson rate that a runner bears behind a cached prefix, its latencies within limits (source 002).

All rates of a search see the same draw of arrivals, stretched in time, and prompts that nobody has seen.
"""

from dataclasses import dataclass
from math import ceil
from random import Random

from headstart.bench.measure import PhaseResult, measure
from headstart.bench.progress import QUIET, Bar
from headstart.bench.runner import Runner
from headstart.bench.search import highest_rate
from headstart.workload import scenarios
from headstart.workload.record import median
from headstart.workload.slo import Slo, TooManyLate
from headstart.workload.synthetic import INTENT, Shape, random_tokens, unit_arrivals


@dataclass(frozen=True, slots=True)
class RateConfig:
    """Sizes of a search."""

    shape: Shape = INTENT
    seconds: float = 30.0  # of arrivals per rate, at least
    min_requests: int = 40  # per rate, at least
    precision: float = 1.1  # of the search
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One rate that was tried, in requests per second."""

    rate: float
    result: PhaseResult
    holds: bool


@dataclass(frozen=True, slots=True)
class RateSearch:
    """What a search found: the highest rate that holds (0: none did), and all that were tried, in order."""

    rate: float
    points: tuple[Point, ...]
    slo: Slo

    @property
    def problems(self) -> list[str]:
        """Failures; what was given up since it was sure to be late is none."""
        return [f"{point.rate:.3g} requests/s: {text}" for point in self.points for text in point.result.problems]


def unloaded_e2e(runner: Runner, config: RateConfig, bar: Bar = QUIET, requests: int = 8) -> float | None:
    """Median seconds that a request takes when it is alone, behind a cached prefix; None: none came through."""
    rng = Random(f"{config.seed}/unloaded")
    found = measure(runner, scenarios.intent(runner.vocab_size, rng, shape=config.shape, requests=requests), bar)
    known = [record.e2e for record in found["alone"].trial.records if record.e2e is not None]
    return median(known) if known else None


def search_rate(runner: Runner, slo: Slo, start: float, config: RateConfig, bar: Bar = QUIET) -> RateSearch:
    """Tries rates from `start` up or down until the highest one that holds is known to `config.precision`."""
    points: list[Point] = []

    def holds(rate: float) -> bool:
        points.append(measure_rate(runner, slo, rate, config, bar))
        return points[-1].holds

    return RateSearch(highest_rate(holds, start, precision=config.precision), tuple(points), slo)


def measure_rate(runner: Runner, slo: Slo, rate: float, config: RateConfig, bar: Bar = QUIET) -> Point:
    """One rate; given up as soon as it is sure to miss `slo`, unless that limits nothing."""
    count = max(config.min_requests, ceil(rate * config.seconds))
    due = [at / rate for at in unit_arrivals(count, Random(f"{config.seed}/arrivals"))]
    rng = Random(f"{config.seed}/{rate}")
    prefix = random_tokens(config.shape.shared, runner.vocab_size, rng)
    scenario = scenarios.poisson(runner.vocab_size, rng, due=due, prefix=prefix, shape=config.shape)
    watch = TooManyLate(count, slo) if slo else None
    result = measure(runner, scenario, bar, watch)["load"]
    whole = not result.trial.is_cut and len(result.trial.records) == count
    return Point(rate, result, whole and slo.holds(result.trial.records))
