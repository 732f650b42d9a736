from array import array
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.workload.synthetic import (
    INTENT,
    RequestShape,
    poisson_arrivals,
    prompts_with_prefix,
    random_tokens,
    shared_prefix_prompts,
    token_rotations,
    unit_poisson_arrivals,
)


def test_rotation_i_starts_at_token_i_and_keeps_every_token() -> None:
    assert [prompt.tolist() for prompt in token_rotations([1, 2, 3, 4], 3)] == [
        [1, 2, 3, 4],
        [2, 3, 4, 1],
        [3, 4, 1, 2],
    ]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_every_rotation_read_in_a_circle_is_the_list(token_ids: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(token_ids)))
    for i, prompt in enumerate(token_rotations(token_ids, count)):
        assert prompt.tolist() == (token_ids + token_ids)[i : i + len(token_ids)]


@pytest.mark.parametrize("count", [0, 5])
def test_more_rotations_than_tokens_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="4 tokens"):
        token_rotations([1, 2, 3, 4], count)


def test_random_tokens_are_packed_in_range_and_repeat_with_the_seed() -> None:
    tokens = random_tokens(200, 50, Random(1))
    assert tokens.typecode == "i" and len(tokens) == 200
    assert min(tokens) >= 0 and max(tokens) < 50
    assert tokens == random_tokens(200, 50, Random(1)) != random_tokens(200, 50, Random(2))


def test_prompts_of_a_group_share_exactly_the_prefix() -> None:
    prompts = shared_prefix_prompts(2, 3, RequestShape(shared=40, own=20, output=1), 10_000, Random(0))
    assert [len(prompt) for prompt in prompts] == [60] * 6
    assert len({prompt[:40].tobytes() for prompt in prompts}) == 2
    assert len({prompt[:40].tobytes() for prompt in prompts[:3]}) == 1
    assert len({prompt[40:].tobytes() for prompt in prompts}) == 6


def test_a_given_prefix_is_not_changed() -> None:
    prefix = array("i", [1, 2])
    assert [prompt[:2].tolist() for prompt in prompts_with_prefix(prefix, 2, 3, 10, Random(0))] == [[1, 2], [1, 2]]
    assert prefix.tolist() == [1, 2]


def test_intent_shape_is_the_one_of_source_002() -> None:
    assert (INTENT.shared + INTENT.own, INTENT.shared, INTENT.output) == (1000, 900, 30)


@pytest.mark.parametrize("rate", [0.5, 4.0, 250.0])
def test_poisson_arrivals_come_at_the_rate_with_exponential_gaps(rate: float) -> None:
    times = poisson_arrivals(rate, 20_000, Random(3))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert mean(gaps) * rate == pytest.approx(1.0, rel=0.03)
    assert mean(gap * gap for gap in gaps) * rate * rate == pytest.approx(2.0, rel=0.1)  # even gaps would give 1


def test_a_longer_draw_starts_with_the_shorter_one() -> None:
    assert unit_poisson_arrivals(5, Random(1)) == unit_poisson_arrivals(9, Random(1))[:5]


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(0, 3, Random(0))
