"""The common prefix by bisection against counting, on every type that it is used for."""

from array import array
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.common_prefix import common_prefix_length

RUNS = st.lists(st.integers(0, 2), max_size=40)


@given(RUNS, RUNS, RUNS)
def test_the_length_is_that_found_by_counting(common: list[int], one: list[int], other: list[int]) -> None:
    left, right = common + one, common + other
    due = len([*takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))])
    for form in (list, tuple, bytes, lambda run: array("i", run), lambda run: "".join(map(str, run))):
        assert common_prefix_length(form(left), form(right)) == due


@pytest.mark.parametrize(("one", "other", "due"), [("", "", 0), ("", "a", 0), ("ab", "ab", 2), ("abc", "abd", 2)])
def test_ends(one: str, other: str, due: int) -> None:
    assert common_prefix_length(one, other) == due == common_prefix_length(other, one)
