"""The fit of a step cost: known constants are found again, with noise and with outliers."""

from random import Random

import pytest

from headstart.core.errors import ConfigError
from headstart.sim.calibration import StepSample, fit_step_cost
from headstart.sim.profile import REFERENCE_COST
from headstart.sim.step_cost import AdditiveCost, StepWork


def works(num: int) -> list[StepWork]:
    rng = Random(0)
    found: list[StepWork] = []
    for _ in range(num):
        streams = rng.choice([0, 1, 4, 16, 64])
        new = rng.choice([0, 0, 16, 200, 3000, 8192])
        done = rng.randrange(20_000)
        found.append(StepWork(streams, streams * rng.randrange(100, 8000), new, new * (done + new / 2)))
    return found


def test_exact_samples_give_the_exact_cost() -> None:
    fit = fit_step_cost([StepSample(work, REFERENCE_COST.seconds(work)) for work in works(400)])
    for name in ("step", "stream", "resident", "token", "pair"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(REFERENCE_COST, name), rel=1e-3), name
    assert fit.error_p90 < 1e-3 and fit.noise < 1e-3
    assert (fit.num_samples, fit.num_held_out) == (400, 80)


def test_noise_is_measured_and_outliers_do_not_move_the_fit() -> None:
    rng = Random(1)
    samples = [
        StepSample(w, REFERENCE_COST.seconds(w) * rng.lognormvariate(-0.005, 0.1) * (20 if rng.random() < 0.03 else 1))
        for w in works(1500)
    ]
    fit = fit_step_cost(samples)
    assert fit.cost.step == pytest.approx(REFERENCE_COST.step, rel=0.05)
    assert fit.cost.token == pytest.approx(REFERENCE_COST.token, rel=0.05)
    assert fit.cost.resident == pytest.approx(REFERENCE_COST.resident, rel=0.15)
    assert 0.07 < fit.noise < 0.13
    assert 0.04 < fit.error_p50 < 0.1


def test_no_part_is_negative() -> None:
    fit = fit_step_cost([StepSample(work, 1.0 + 1e-9 / (1 + work.new)) for work in works(100)])
    assert min(getattr(fit.cost, name) for name in AdditiveCost.__slots__) >= 0.0
    assert fit.cost.step == pytest.approx(1.0, rel=1e-3)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="49 measured steps"):
        fit_step_cost([StepSample(StepWork(), 1.0)] * 49)
