"""Limits on latencies, by hand: what meets them, at which rate, and when a run is sure to miss them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.workload.request_record import RequestRecord
from headstart.workload.slo import LatenessEarlyStop, Slo


def record(ttft: float, e2e: float, tokens: int = 11, arrival: float = 0.0, error: str | None = None) -> RequestRecord:
    return RequestRecord("r", arrival, arrival + ttft, arrival + e2e, 4, 0, tokens, error=error)


def test_every_limit_must_be_met_and_a_failure_meets_none() -> None:
    found = record(ttft=1.0, e2e=2.0)  # 0.1 s per token
    assert Slo(1.0, 0.1, 2.0).is_met(found)
    assert not Slo(ttft=0.9).is_met(found) and not Slo(tpot=0.09).is_met(found) and not Slo(e2e=1.9).is_met(found)
    assert not Slo().is_met(record(1.0, 2.0, error="x"))
    assert Slo(tpot=0.01).is_met(record(1.0, 1.0, tokens=1))
    assert not Slo() and Slo(e2e=1.0)


def test_goodput_counts_what_met_the_limits_per_second_of_the_whole_run() -> None:
    records = [record(0.1, 1.0), record(0.1, 4.0, arrival=1.0)]
    assert Slo(e2e=2.0).goodput(records) == pytest.approx(1 / 5)
    assert Slo(e2e=2.0).attainment(records) == 0.5
    assert Slo().goodput(records) == pytest.approx(2 / 5)
    assert Slo().goodput([]) == 0.0 and Slo().attainment([]) == 1.0


def test_a_rate_holds_when_the_90th_percentile_of_every_latency_does() -> None:
    records = [record(0.1, 1.0)] * 10 + [record(0.1, 9.0)]
    assert Slo(e2e=1.0).is_met_at_percentile(records)
    assert not Slo(e2e=1.0).is_met_at_percentile([*records, record(0.1, 9.0)])
    assert not Slo(ttft=0.05, e2e=1.0).is_met_at_percentile(records)
    assert not Slo(e2e=1.0).is_met_at_percentile([*records, record(0.1, 1.0, error="x")])


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=40), st.floats(0.1, 3.0))
def test_what_is_called_sure_to_miss_does_miss(latencies: list[float], limit: float) -> None:
    records, slo = [record(0.05, e2e) for e2e in latencies], Slo(e2e=limit)
    watch = LatenessEarlyStop(len(records), slo)
    if any([watch(found) for found in records]):
        assert not slo.is_met_at_percentile(records)
