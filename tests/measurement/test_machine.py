import json

import pytest

from headstart.measurement import machine
from headstart.measurement.machine import ContentionLog, describe_machine, describe_versions, measure_uncontended


def fake_meter(monkeypatch: pytest.MonkeyPatch, shares: list[float | None]) -> None:
    class Meter:
        def start(self) -> None: ...

        def cores_used_by_others(self) -> float | None:
            return shares.pop(0)

    monkeypatch.setattr(machine, "ContentionMeter", Meter)


def test_machine_and_versions_are_plain_json() -> None:
    described = json.loads(json.dumps([describe_machine(), describe_versions()]))
    assert described[0]["cores"] >= 1 and described[1]["python"]


def test_a_contended_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_meter(monkeypatch, [0.9, 0.0])
    log, results = ContentionLog.empty(), iter(["disturbed", "clean"])
    assert measure_uncontended(lambda: next(results), log) == "clean"
    assert log.as_dict() == {"other_cores_max": 0.0, "contended_runs": 0, "measurements": 1, "repeated_runs": 1}


def test_the_least_contended_one_is_kept_and_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_meter(monkeypatch, [0.5, 0.9])
    log, results = ContentionLog.empty(), iter(["better", "worse"])
    assert measure_uncontended(lambda: next(results), log) == "better"
    assert log.as_dict() == {"other_cores_max": 0.5, "contended_runs": 1, "measurements": 1, "repeated_runs": 1}


def test_where_contention_is_unknown_one_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_meter(monkeypatch, [None])
    log = ContentionLog.empty()
    assert measure_uncontended(lambda: "only", log) == "only"
    assert log.as_dict() == {"other_cores_max": None, "contended_runs": 0, "measurements": 1, "repeated_runs": 0}


def test_a_machine_that_is_never_quiet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_meter(monkeypatch, [0.9] * 8)
    log = ContentionLog.empty()
    for _ in range(5):
        measure_uncontended(lambda: None, log)
    assert log.as_dict() == {"other_cores_max": 0.9, "contended_runs": 5, "measurements": 5, "repeated_runs": 3}
