from array import array
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from headstart.bench.intent_report import CachingVariant, IntentConfig, run_intent
from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.measurement.runner import EngineSetup
from headstart.workload.request_record import RequestRecord, percentile
from headstart.workload.slo import LatenessEarlyStop, Slo
from headstart.workload.synthetic import INTENT
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]
TINY = IntentConfig(
    runs=1, requests=2, seconds=0.01, min_requests=3, precision=8.0, limit_factor=1e6, comparison_rate=1000.0
)  # a limit that is kept however busy the machine is
KEYS = {
    *("ttft_off_ms", "ttft_on_ms", "ttft_ratio", "tpot_p90_off_ms", "tpot_p90_on_ms"),
    *("qps_off", "qps_on", "qps_ratio", "limit_ms", "unloaded_on_ms", "unloaded_off_ms", "points"),
}


@pytest.mark.long
def test_load_part_has_every_key_and_serves_all_sides(make_setup: MakeSetup) -> None:
    report = run_intent(make_setup(), TINY)
    assert report.values.keys() >= KEYS
    assert report.problems == []
    assert report.values["cached_share_load"] == pytest.approx(896 / 1000)
    assert {point["side"] for point in report.values["points"]} == {"off", "on"}
    assert report.values["limit_ms"] == pytest.approx(1e6 * report.values["unloaded_on_ms"])


def test_a_side_that_misses_the_limit_without_load_has_the_rate_zero_at_once(make_setup: MakeSetup) -> None:
    report = run_intent(make_setup(), replace(TINY, limit_factor=1e-6))
    assert report.values["qps_off"] == report.values["qps_on"] == 0.0 and report.values["qps_ratio"] is None
    assert report.values["points"] == [] and report.problems == [] and report.charts == []
    rows = next(sheet.rows for sheet in report.sheets if sheet.title == "points of the search")
    assert [(row[0], row[1], row[-1]) for row in rows] == [("off", "alone", "no"), ("on", "alone", "no")]


def test_failed_requests_invalidate_the_load_part(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    report = run_intent(make_setup(failing), TINY)
    assert any("failed" in problem for problem in report.problems)


def test_both_sides_see_the_same_fresh_prompts(make_setup: MakeSetup) -> None:
    setup = make_setup()
    seen: dict[str, list[bytes]] = {"off": [], "on": []}

    class NotingEngine(Engine):
        def add_request(self, request: Request) -> None:
            seen[request.request_id.rstrip("0123456789-")].append(request.prompt.tobytes())
            super().add_request(request)

    for name in seen:
        built, info = setup.build(setup.options(num_blocks=512))
        engine = NotingEngine(built.scheduler, built.executor)
        side = CachingVariant(name, engine, array("i", range(900)), info.vocab_size, INTENT, Random(1))
        side.run(2)
        side.run(1)
    assert seen["off"] == seen["on"] and len(set(seen["off"])) == 3


@pytest.mark.parametrize("count", [1, 9, 10, 11, 40, 41])
def test_giving_up_is_decided_exactly_when_p90_can_no_longer_hold(count: int) -> None:
    watch = LatenessEarlyStop(count, Slo(e2e=1.0))
    late = 0
    while not watch(RequestRecord("r", 0.0, 0.1, 1.5, 1, 0, 1)):
        late += 1
    in_time = [1.0] * (count - late - 1)
    assert percentile([1.5] * (late + 1) + in_time, 90) > 1.0  # sure to miss when it gives up
    if late:
        assert percentile([1.0 + 1e-9] * late + [0.0] * (count - late), 90) < 1.5  # one fewer might not
