"""Search for the highest Poisson request rate at which a runner keeps its latencies within limits.

All rates of a search use the same draw of arrivals, scaled in time, and prompts that the runner has not seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from headstart.bench.load_search import LEAST_LOAD, START_LOAD, highest_rate
from headstart.bench.measure import PhaseResult, measure
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.runner import Runner
from headstart.workload import scenarios
from headstart.workload.scenarios import Scenario
from headstart.workload.slo import Slo, TooManyLate
from headstart.workload.synthetic import INTENT, Shape, random_tokens, unit_arrivals

Load = Callable[[int, Random, Sequence[float]], Scenario]
"""(vocabulary size, rng, arrival time of each request) -> a scenario whose last phase is the load."""


@dataclass(frozen=True, slots=True)
class RateConfig:
    """Parameters of a search."""

    seconds: float = 30.0  # of arrivals per rate, at least
    min_requests: int = 40  # per rate, at least
    precision: float = 1.1  # of the search
    seed: int | str = 0


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One measured rate, in requests per second."""

    rate: float
    result: PhaseResult
    holds: bool


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The result of a search: the highest rate that holds (0: none), and all measured rates, in order."""

    rate: float
    points: tuple[RatePoint, ...]
    slo: Slo

    @property
    def problems(self) -> list[str]:
        """Return the failures. Requests that were not completed because the run was ended early are not failures."""
        return [f"{point.rate:.3g} requests/s: {text}" for point in self.points for text in point.result.problems]


DEFAULTS = RateConfig()


def behind_prefix(shape: Shape = INTENT) -> Load:
    """Return the load of PrefixCacheManager (blog): requests behind one prefix that is already cached."""

    def build(vocab_size: int, rng: Random, due: Sequence[float]) -> Scenario:
        prefix = random_tokens(shape.shared, vocab_size, rng)
        return scenarios.poisson(vocab_size, rng, due=due, prefix=prefix, shape=shape)

    return build


def search_rate(
    runner: Runner, load: Load, slo: Slo, alone: float, config: RateConfig = DEFAULTS, bar: Bar = QUIET
) -> RateSearch:
    """Measure rates until the highest one that holds is known to `config.precision`.

    `alone`: seconds of an unloaded request.
    """
    points: list[RatePoint] = []

    def holds(rate: float) -> bool:
        points.append(measure_rate(runner, load, slo, rate, config, bar))
        return points[-1].holds

    found = highest_rate(holds, START_LOAD / alone, precision=config.precision, least=LEAST_LOAD / alone)
    return RateSearch(found, tuple(points), slo)


def measure_rate(
    runner: Runner, load: Load, slo: Slo, rate: float, config: RateConfig = DEFAULTS, bar: Bar = QUIET
) -> RatePoint:
    """Measure one rate. The run ends early once it is certain to miss `slo`, unless `slo` has no limits."""
    count = max(config.min_requests, ceil(rate * config.seconds))
    due = [at / rate for at in unit_arrivals(count, Random(f"{config.seed}/arrivals"))]
    scenario = load(runner.vocab_size, Random(f"{config.seed}/{rate}"), due)
    result = measure(runner, scenario, bar, TooManyLate(count, slo) if slo else None).phases[-1]
    whole = not result.trial.is_cut and len(result.trial.records) == count
    return RatePoint(rate, result, whole and slo.holds(result.trial.records))
