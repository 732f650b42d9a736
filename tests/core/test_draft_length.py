"""Draft lengths: as many tokens as raise the rate of output, by measured costs; probes are rare."""

from array import array
from itertools import pairwise, product
from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.speculation.draft import Draft
from headstart.core.speculation.draft_length import (
    LEAST_PAUSE,
    MOST_PAUSE,
    AcceptanceEstimate,
    DecodeCostModel,
    choose_draft_lengths,
)


def cost_of(base: float, slope: float) -> DecodeCostModel:
    cost = DecodeCostModel()
    cost.base, cost.slope = base, slope
    return cost


def measured(times: dict[int, float]) -> DecodeCostModel:
    cost = DecodeCostModel()
    cost.calibrate(times)
    return cost


def rate(cost: DecodeCostModel, num: int, probabilities: list[list[float]], lengths: tuple[int, ...]) -> float:
    """Output tokens per second of a step."""
    survivals = [prod(p[:depth]) for p, n in zip(probabilities, lengths, strict=True) for depth in range(1, n + 1)]
    yielded = num + sum(survivals)
    return yielded / cost.expected_seconds(num + sum(lengths))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=3), min_size=1, max_size=3),
    st.integers(0, 3),
    st.one_of(
        st.floats(0.001, 2.0).map(lambda slope: cost_of(1.0, slope)),
        st.fixed_dictionaries({num: st.floats(1.0, 4.0) for num in (1, 2, 5, 8)}).map(measured),
    ),
    st.integers(0, 9),
)
def test_no_other_choice_has_a_higher_rate(
    probabilities: list[list[float]], others: int, cost: DecodeCostModel, budget: int
) -> None:
    num = len(probabilities) + others
    chosen = choose_draft_lengths(cost, num, probabilities, budget)
    assert sum(chosen) <= budget and all(0 <= n <= len(p) for n, p in zip(chosen, probabilities, strict=True))
    choices = [c for c in product(*(range(len(p) + 1) for p in probabilities)) if sum(c) <= budget]
    best = max(rate(cost, num, probabilities, choice) for choice in choices)
    assert rate(cost, num, probabilities, tuple(chosen)) == pytest.approx(best, rel=1e-9)


def test_a_draft_that_costs_as_much_as_it_yields_is_not_computed() -> None:
    assert choose_draft_lengths(cost_of(0.0, 1.0), 1, [[0.99] * 5], 100) == [0]
    assert choose_draft_lengths(cost_of(1.0, 0.0), 1, [[0.01] * 5], 100) == [5]


def test_the_curve_goes_through_what_was_measured_and_on_behind_it() -> None:
    cost = measured({1: 10.0, 2: 10.5, 5: 11.0, 8: 14.0, 16: 22.0})
    assert [cost.expected_seconds(num) for num in (1, 2, 5, 8, 16)] == pytest.approx([10.0, 10.5, 11.0, 14.0, 22.0])
    assert [cost.expected_seconds(num) for num in (3, 6, 12, 20)] == pytest.approx([10.5 + 0.5 / 3, 12.0, 18.0, 26.0])
    assert [cost.min_extra_token_seconds(num) for num in (1, 3, 5, 9, 40)] == pytest.approx(
        [0.5 / 3, 0.5 / 3, 1.0, 1.0, 1.0]
    )


def test_the_first_tokens_are_taken_where_they_cost_next_to_nothing_and_no_more() -> None:
    cost = measured({1: 10.0, 5: 10.4, 8: 16.0, 16: 24.0})
    assert choose_draft_lengths(cost, 1, [[0.6] * 15], 100) == [4]
    assert choose_draft_lengths(cost, 1, [[0.97] * 15], 100) == [15]
    assert choose_draft_lengths(cost, 1, [[0.1] * 15], 100) == [1]


def test_tokens_that_pay_only_together_are_taken_together() -> None:
    cost = measured({1: 10.0, 2: 20.0, 3: 20.0, 8: 20.0})
    assert choose_draft_lengths(cost, 1, [[0.9] * 7], 100) == [7]
    assert choose_draft_lengths(cost, 1, [[0.9] * 1], 100) == [0]
    assert (
        measured({1: 2.0, 2: 1.0, 8: 1.0}).expected_seconds(8) == 2.0
    )  # noise: no step is shorter than one of fewer tokens


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_curve_keeps_its_shape_while_the_machine_changes_its_speed(factor: float) -> None:
    times = {1: 10.0, 2: 10.2, 5: 11.0, 8: 14.0, 16: 22.0}
    cost, rng = measured(times), Random(3)
    for _ in range(400):
        num = rng.choice([1, 2, 5, 8, 16])
        cost.learn(num, factor * times[num] * rng.uniform(0.97, 1.03))
    assert all(cost.expected_seconds(num) == pytest.approx(factor * times[num], rel=0.05) for num in times)


@pytest.mark.parametrize(("base", "slope"), [(7.0, 0.17), (1.0, 0.5), (0.02, 0.0001)])
def test_the_measured_cost_approaches_that_of_noisy_steps(base: float, slope: float) -> None:
    rng, cost = Random(5), DecodeCostModel()
    for _ in range(600):
        num = rng.choice([1, 1, 4, 8, 16])
        noise = rng.choice([1.0, 1.0, 1.0, 1.05, 0.95, 20.0 if rng.random() < 0.02 else 1.0])
        cost.learn(num, (base + slope * num) * noise)
    assert cost.expected_seconds(1) == pytest.approx(base + slope, rel=0.2)
    assert cost.slope == pytest.approx(slope, rel=0.5)


def test_the_measurement_recovers_after_the_machine_was_slow() -> None:
    cost = DecodeCostModel()
    for factor, rounds in ((1.0, 50), (3.0, 200), (1.0, 100)):
        for num in (1, 8, 16) * rounds:
            cost.learn(num if factor == 1.0 else 1, (1.0 + 0.05 * num) * factor)
    assert cost.expected_seconds(1) == pytest.approx(1.05, rel=0.05) and cost.slope == pytest.approx(0.05, rel=0.2)


def draft(length: int, num: int = 4, agreed: int = 4) -> Draft:
    return Draft(array("i", range(num)), length, agreed)


def test_rejected_drafts_lower_the_estimate_and_accepted_ones_raise_it() -> None:
    acceptance = AcceptanceEstimate()
    first = acceptance.acceptance_probabilities(draft(2))[0]
    for _ in range(50):
        acceptance.learn(draft(2), 0)
    assert all(0.0 < p < 0.02 for p in acceptance.acceptance_probabilities(draft(2)))
    assert acceptance.acceptance_probabilities(draft(8))[0] > first  # of longer matches nothing is known yet
    for _ in range(50):
        acceptance.learn(draft(2), 4)
    assert all(0.95 < p < 1.0 for p in acceptance.acceptance_probabilities(draft(2)))


def test_tokens_that_other_matches_contradict_are_estimated_apart() -> None:
    acceptance = AcceptanceEstimate()
    first = acceptance.acceptance_probabilities(draft(2))[0]
    for _ in range(50):
        acceptance.learn(draft(2, agreed=2), 2)  # always the third is rejected
    assert [round(p, 1) for p in acceptance.acceptance_probabilities(draft(2, num=3, agreed=2))] == [1.0, 1.0, 0.0]
    assert acceptance.acceptance_probabilities(draft(4, agreed=2)) == AcceptanceEstimate().acceptance_probabilities(
        draft(4, agreed=2)
    )
    for _ in range(50):
        acceptance.learn(draft(2, agreed=4), 0)
    assert [round(p, 1) for p in acceptance.acceptance_probabilities(draft(2, num=2, agreed=1))] == [0.0, 0.0]
    assert first == AcceptanceEstimate().acceptance_probabilities(draft(2, agreed=0))[0]


def test_probes_become_rarer_until_one_is_accepted() -> None:
    acceptance = AcceptanceEstimate()
    probes = [number for number in range(4000) if acceptance.decide_probe()]
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert probes[0] == LEAST_PAUSE - 1 and gaps == sorted(gaps) and gaps[-1] == MOST_PAUSE
    acceptance.learn(draft(2, num=1, agreed=1), 1)
    assert [acceptance.decide_probe() for _ in range(LEAST_PAUSE)].count(True) == 1
