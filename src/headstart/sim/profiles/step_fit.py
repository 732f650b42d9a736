"""Fit of a step cost to measured steps: non-negative least squares of relative errors, robust against slow outliers.

A fifth of the samples is held out; the error is stated on those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import NamedTuple

from headstart.core.errors import ConfigError
from headstart.sim.step_cost import StepWork, SumCost
from headstart.workload.request_record import percentile

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

    cost: SumCost
    noise: float  # standard deviation of the logarithm of a step's duration, outliers left out
    error_p50: float
    error_p90: float
    error_total: float  # of the sum of all held-out steps, signed
    num_samples: int
    num_held_out: int

    def errors(self) -> dict[str, float]:
        """Return the errors as plain values."""
        return {"p50": self.error_p50, "p90": self.error_p90, "total": self.error_total}


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
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
    cost = SumCost(*values)
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
