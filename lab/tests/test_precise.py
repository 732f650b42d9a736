import pytest

from headstart_lab.router.precise import CASES, QUICK, run_precise


@pytest.mark.long
def test_the_routers_index_is_the_engines_whatever_becomes_of_the_events() -> None:
    report = run_precise(0, QUICK)
    assert report.problems == []
    for case in CASES:
        values = {key: report.values[f"{case.name}_{key}"] for key in ("engine", "router", "missing", "wrong")}
        assert values["engine"] > 0 and values["wrong"] == 0
        assert values["missing"] == 0 or not case.replay
    assert report.values["lost_lost_on_the_way"] > 0 and report.values["lost_replays"] > 1
    assert report.values["none_lost_voids"] == 0
    assert report.values["restarted_restarts"] == 1
    assert report.values["events"] > 0 and report.values["block_us"] > 0
