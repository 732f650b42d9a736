"""Intervals by the bootstrap, against what is known of the data they are made of."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart_lab.bootstrap import Interval, interval, mean

RUNS = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=6), min_size=1, max_size=4)


@given(RUNS)
def test_an_interval_lies_within_the_values(runs: list[list[float]]) -> None:
    low, high = interval(runs, mean, Random(0), draws=50)
    values = [value for run in runs for value in run]
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_it_narrows_with_more_values_and_holds_the_truth() -> None:
    rng = Random(1)
    few, many = ([[rng.gauss(10, 2) for _ in range(n)] for _ in range(5)] for n in (10, 1000))
    wide, narrow = interval(few, mean, Random(0)), interval(many, mean, Random(0))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert narrow.low < 10 + 0.1 and narrow.high > 10 - 0.1


def test_runs_that_differ_as_a_whole_widen_it() -> None:
    alike, apart = [[1.0, 3.0] * 50] * 4, [[1.0] * 100, [3.0] * 100] * 2
    one, other = interval(alike, mean, Random(0)), interval(apart, mean, Random(0))
    assert other.high - other.low > 3 * (one.high - one.low)


def test_overlap_is_symmetric_and_touching_counts() -> None:
    assert Interval(1, 2).overlaps(Interval(2, 3)) and Interval(2, 3).overlaps(Interval(1, 2))
    assert not Interval(1, 2).overlaps(Interval(2.1, 3)) and not Interval(2.1, 3).overlaps(Interval(1, 2))


def test_no_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="no values"):
        interval([[]], mean, Random(0))
