"""Intervals by the bootstrap: of figures of several runs of many requests each, without a law they would have to obey.

Efron, 1979. In two steps, as the data came about: runs are drawn with replacement, and of each run its requests; what
makes whole runs differ (the machine, the draw of arrivals) is in the interval too.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from headstart.workload.request_record import percentile

DRAWS = 1000
CONFIDENCE = 0.95

Figure = Callable[[Sequence[float]], float]


class Interval(NamedTuple):
    """Where a figure lies with `CONFIDENCE`."""

    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two have a point in common."""
        return self.low <= other.high and other.low <= self.high


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean. ZeroDivisionError if there are none."""
    return sum(values) / len(values)


def interval(runs: Sequence[Sequence[float]], figure: Figure, rng: Random, draws: int = DRAWS) -> Interval:
    """The interval of a figure of all values of all runs. ValueError if there are none."""
    filled = [run for run in runs if run]
    if not filled:
        raise ValueError("an interval of no values")
    found = [figure(_drawn(filled, rng)) for _ in range(draws)]
    rest = 50 * (1 - CONFIDENCE)
    return Interval(percentile(found, rest), percentile(found, 100 - rest))


def _drawn(runs: Sequence[Sequence[float]], rng: Random) -> list[float]:
    chosen = rng.choices(runs, k=len(runs))
    return [value for run in chosen for value in rng.choices(run, k=len(run))]
