from collections.abc import Callable

from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.pinned import run_pinned
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]


def test_the_first_request_and_one_after_a_flood_take_over_every_whole_block(make_setup: MakeSetup) -> None:
    report = run_pinned(make_setup())
    assert report.values["cached_tokens"] == report.values["cached_tokens_after_flood"] == 896
    assert report.values["evicted_blocks"] > 0  # the flood was one
    assert report.values["differing_tokens"] == 0 and report.problems == []
    assert report.setup["prefix_tokens"] == 900


def test_an_answer_that_the_cache_changes_in_float32_is_a_problem(
    make_setup: MakeSetup, forgetful: type[NullExecutor]
) -> None:
    assert any("differs in float32" in problem for problem in run_pinned(make_setup(forgetful)).problems)


def test_requests_that_fail_invalidate_the_report(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    problems = run_pinned(make_setup(failing)).problems
    assert any("planted" in problem for problem in problems)
    assert any("cached_tokens is 0 instead of at least 896" in problem for problem in problems)
