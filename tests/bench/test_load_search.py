import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.rate_report import search_highest_rate


@given(st.floats(0.05, 200), st.floats(0.05, 200))
def test_finds_the_edge_of_a_sharp_limit_within_the_precision(edge: float, start: float) -> None:
    found = search_highest_rate(lambda rate: rate <= edge, start, precision=1.1, max_points=60)
    assert found <= edge <= found * 1.1


def test_measures_no_rate_twice_and_no_more_than_allowed() -> None:
    seen: list[float] = []

    def holds(rate: float) -> bool:
        seen.append(rate)
        return rate < 5.3

    search_highest_rate(holds, 1.0, max_points=6)
    assert len(seen) == len(set(seen)) == 6


def test_nothing_holds_gives_zero() -> None:
    assert search_highest_rate(lambda rate: False, 1.0, max_points=5) == 0.0


def test_rates_below_the_least_are_not_measured() -> None:
    seen: list[float] = []

    def holds(rate: float) -> bool:
        seen.append(rate)
        return False

    assert search_highest_rate(holds, 1.0, factor=2.0, least=0.3) == 0.0
    assert seen == [1.0, 0.5, 0.3]
    assert search_highest_rate(lambda rate: rate < 0.4, 1.0, factor=2.0, least=0.3) == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize(("start", "factor", "precision"), [(0, 2, 1.1), (1, 1, 1.1), (1, 2, 1)])
def test_a_search_that_cannot_move_is_refused(start: float, factor: float, precision: float) -> None:
    with pytest.raises(ValueError):
        search_highest_rate(lambda rate: True, start, factor=factor, precision=precision)
