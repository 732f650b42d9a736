"""Step costs: the work of a batch, and every shape at hand-computed points."""

from array import array

import pytest

from headstart.core.batch import Batch, Chunk
from headstart.core.request import GREEDY
from headstart.sim.profile import REFERENCE_COST
from headstart.sim.step_cost import AdditiveCost, PaddedCost, RooflineCost, StepWork, SuperlinearCost


def chunk(start: int, n: int, prompt: int) -> Chunk:
    return Chunk("r", array("i", [1] * n), start, (1,), start, 1, GREEDY, prompt, array("i", [1] * (start + n)))


def test_decodes_and_prompt_tokens_are_told_apart() -> None:
    batch = Batch((chunk(0, 4, 10), chunk(4, 6, 10), chunk(10, 1, 10), chunk(12, 1, 10), chunk(9, 1, 10)))
    assert StepWork.of(batch) == StepWork(streams=2, resident=11 + 13, new=4 + 6 + 1, pairs=4 * 2 + 6 * 7 + 9.5)


def test_the_reference_costs_what_its_formula_says() -> None:
    assert REFERENCE_COST.seconds(StepWork()) == pytest.approx(8e-3)
    assert REFERENCE_COST.seconds(StepWork(streams=10, resident=20_000)) == pytest.approx(8e-3 + 0.2e-3 + 0.78e-3)
    work = StepWork(new=8192, pairs=8192 * (16_384 + 4096))
    assert REFERENCE_COST.seconds(work) == pytest.approx(8e-3 + 8192 * 62.8e-6 + 1.5e-9 * 8192 * 20_480)


def test_a_roofline_is_the_slower_of_computing_and_reading() -> None:
    cost = RooflineCost(overhead=1.0, weights=10.0, token=1.0, pair=0.0, resident=0.5)
    assert cost.seconds(StepWork(new=4)) == 11.0
    assert cost.seconds(StepWork(new=40)) == 41.0
    assert cost.seconds(StepWork(streams=2, resident=20)) == 21.0


def test_padded_sizes_are_rounded_up() -> None:
    cost = PaddedCost(AdditiveCost(stream=1.0, token=100.0), streams=8, tokens=256)
    assert cost.seconds(StepWork()) == 0.0
    assert cost.seconds(StepWork(streams=9, new=1)) == 16.0 + 25_600.0


def test_superlinear_decodes_cost_more_each() -> None:
    cost = SuperlinearCost(AdditiveCost(step=5.0, stream=1.0, token=1.0), power=2.0, knee=4.0)
    assert cost.seconds(StepWork(new=3)) == pytest.approx(8.0)
    assert cost.seconds(StepWork(streams=4, new=3)) == pytest.approx(5 + 3 + 4 * 2)
