from math import inf

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.workload.request_record import RequestRecord, median, percentile, percentiles, summarize_records

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def make_record(arrival: float = 0.0, **changes: object) -> RequestRecord:
    fields = {
        "request_id": "r",
        "arrival": arrival,
        "first_token": arrival + 1.0,
        "finish": arrival + 5.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
    }
    return RequestRecord(**{**fields, **changes})


@given(VALUES, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(VALUES, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_and_stay_within_the_values(values: list[float], a: float, b: float) -> None:
    low, high = percentile(values, min(a, b)), percentile(values, max(a, b))
    assert min(values) <= low <= high + 1e-6 and high <= max(values)


@given(VALUES)
def test_order_of_the_values_does_not_matter(values: list[float]) -> None:
    assert percentiles(values) == percentiles(reversed(values))


def test_hand_made_percentiles() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert percentile([1.0, inf], 0) == 1.0


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_no_values_or_no_percentage_is_refused(values: list[float], q: float) -> None:
    with pytest.raises(ValueError):
        percentile(values, q)


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    record = make_record(arrival=2.0)
    assert (record.ttft, record.tpot, record.e2e) == (1.0, 1.0, 5.0)


def test_one_output_token_has_no_time_per_output_token() -> None:
    assert make_record(output_tokens=1).tpot is None


def test_failed_requests_count_as_errors_and_in_no_distribution() -> None:
    failed = make_record(arrival=1.0, error="boom", finish=None, first_token=None, output_tokens=0)
    summary = summarize_records([make_record(), make_record(arrival=3.0), failed])
    assert (summary.requests, summary.errors) == (3, 1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 8, 10)
    assert summary.seconds == 8.0 and summary.output_rate == 10 / 8
    assert summary.cached_share == 0.4
    assert summary.e2e is not None and summary.e2e.max == 5.0
    assert failed.e2e is None and not failed.ok


def test_summary_of_nothing_is_all_zero() -> None:
    summary = summarize_records([])
    assert (summary.requests, summary.seconds, summary.ttft, summary.cached_share, summary.output_rate) == (
        0,
        0.0,
        None,
        0.0,
        0.0,
    )
