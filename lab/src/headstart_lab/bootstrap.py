"""Bootstrap confidence intervals for figures of several runs of many requests each; no distribution is assumed.

Efron, 1979. Two-stage resampling: runs are drawn with replacement, then the requests of each drawn run. The interval
therefore includes the variation between runs (the machine, the draw of arrivals).
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from headstart.workload.request_record import percentile

DRAWS = 1000
CONFIDENCE = 0.95

Figure = Callable[[Sequence[float]], float]


class Interval(NamedTuple):
    """The interval of a figure, with confidence `CONFIDENCE`."""

    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Return whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. Raises ZeroDivisionError without values."""
    return sum(values) / len(values)


def interval(runs: Sequence[Sequence[float]], figure: Figure, rng: Random, draws: int = DRAWS) -> Interval:
    """Return the interval of a figure over all values of all runs. Raises ValueError without values."""
    filled = [run for run in runs if run]
    if not filled:
        raise ValueError("an interval of no values")
    found = [figure(_drawn(filled, rng)) for _ in range(draws)]
    rest = 50 * (1 - CONFIDENCE)
    return Interval(percentile(found, rest), percentile(found, 100 - rest))


def _drawn(runs: Sequence[Sequence[float]], rng: Random) -> list[float]:
    chosen = rng.choices(runs, k=len(runs))
    return [value for run in chosen for value in rng.choices(run, k=len(run))]
