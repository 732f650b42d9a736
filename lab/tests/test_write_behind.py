from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.engine.assembly import build_engine
from headstart.measurement.runner import EngineSetup
from headstart.workload.synthetic import RequestShape
from headstart_lab.runners.null_executor import NullExecutor
from headstart_lab.store.write_behind import QUICK, Workload, run_write_behind

MakeSetup = Callable[..., EngineSetup]
SMALL = replace(QUICK, workloads=(Workload("cold", 4, 1, RequestShape(0, 128, 1)),))


@pytest.mark.long
def test_every_pair_writes_blocks_on_one_side_only(tiny: str, tmp_path: Path) -> None:
    setup = EngineSetup(build_engine, tiny, "tiny", "float32", 1)
    report = run_write_behind(setup, replace(QUICK, folder=tmp_path))
    assert report.problems == [] and list(tmp_path.iterdir()) == []
    assert report.values.keys() >= {"cold_throughput_on_over_off", "mix_throughput_on_over_off"}
    for row in report.values["workloads"].values():
        assert row["throughput_on_over_off"] > 0 and row["p99_step_ms_on"] > 0
        assert row["written_blocks"] > 0 and row["pending_blocks_at_end"] <= row["most_pending_blocks"]


def test_an_engine_that_stores_nothing_invalidates_the_report(make_setup: MakeSetup) -> None:
    problems = run_write_behind(make_setup(), SMALL).problems
    assert problems == ["cold: the store was on but wrote no blocks"]


def test_requests_that_fail_invalidate_the_report(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    problems = run_write_behind(make_setup(failing), SMALL).problems
    assert any("planted" in problem for problem in problems)
