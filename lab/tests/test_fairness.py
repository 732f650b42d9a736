from array import array

import pytest

from headstart.core.request import Request
from headstart_lab.engine.fairness import DEFAULT_K, FairnessConfig, displacements, run_fairness

SMALL = FairnessConfig(requests=400, hot_prefixes=2, ks=(1, 64))


def test_every_k_keeps_its_bound_and_serving_matches_first_pays_on_average() -> None:
    report = run_fairness(0, SMALL)
    assert report.problems == []
    assert 0 < report.values["max_displacement_over_bound"] <= 1
    rows = {row["policy"]: row for row in report.values["policies"]}
    assert rows.keys() == {"fcfs", "lpm k=1", f"lpm k={DEFAULT_K}", "lpm k=64", "lpm k=inf"}
    assert rows["lpm k=inf"]["mean_ttft_over_fcfs"] < 1 and rows["lpm k=inf"]["displacement_over_bound"] is None
    assert rows["lpm k=inf"]["max_displacement"] > 1


def test_lpm_of_one_is_fcfs() -> None:
    rows = {row["policy"]: row for row in run_fairness(0, SMALL).values["policies"]}
    assert {**rows["lpm k=1"], "policy": "fcfs"} == rows["fcfs"]
    assert rows["fcfs"]["max_displacement"] == 1.0


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    config = FairnessConfig(requests=200, hot_prefixes=2, ks=())
    assert run_fairness(3, config).values == run_fairness(3, config).values
    assert run_fairness(3, config).values != run_fairness(4, config).values


def test_hot_requests_hit_96_percent_and_cold_ones_nothing() -> None:
    row, *_ = run_fairness(0, SMALL).values["policies"]
    assert 0.96 * 0.90 < row["hit_rate"] < 0.96


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        # b and c come while a runs; c overtakes b
        ({"a": 0.0, "c": 2.0, "b": 2.0}, [1.0, 2.0, 1 / 2]),
        ({"a": 0.0, "b": 2.0, "c": 2.0}, [1.0, 1.0, 1.0]),
        # b is in before c comes: no request waits ahead of c
        ({"a": 0.0, "b": 1.0, "c": 2.0}, [1.0, 1.0, 1.0]),
    ],
)
def test_displacement_counts_admissions_since_arrival_over_those_ahead(
    admitted: dict[str, float], expected: list[float]
) -> None:
    requests = [Request(name, array("i", [1])) for name in "abc"]
    assert displacements(admitted, requests, [0.0, 0.5, 1.5]) == expected
