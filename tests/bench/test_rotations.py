from collections.abc import Callable

import pytest

from headstart.bench.rotations import TokenRotationsConfig, run_rotations
from headstart.measurement.runner import EngineSetup
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]
QUICK = TokenRotationsConfig(runs=1, warm_passes=1, decode_rounds=1, decode_steps=2)
KEYS = {
    *("cold_s", "warm_s", "ratio", "warm_steps", "warm_tokens_computed"),
    *("unaware_warm_s", "unaware_warm_steps", "one_token_over_decode"),
}


def test_second_pass_is_one_step_of_48_tokens_and_sixteen_steps_without_aware_accounting(make_setup: MakeSetup) -> None:
    report = run_rotations(make_setup(), QUICK)
    assert report.values.keys() >= KEYS
    assert report.values["warm_steps"] == 1
    assert report.values["warm_tokens_computed"] == 48
    assert report.values["unaware_warm_steps"] == 16
    assert report.values["cold_tokens_computed"] == 48 * 1025
    assert report.problems == []


@pytest.mark.parametrize(("dtype", "valid"), [("float32", False), ("bfloat16", True)])
def test_different_first_tokens_invalidate_float32_only(
    make_setup: MakeSetup, forgetful: type[NullExecutor], dtype: str, valid: bool
) -> None:
    report = run_rotations(make_setup(forgetful, dtype=dtype), QUICK)
    assert report.values["differing_tokens"] > 0
    assert (report.problems == []) is valid


def test_failed_requests_invalidate_the_run(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    report = run_rotations(make_setup(failing), QUICK)
    assert "failed" in report.problems[0]
