from collections.abc import Callable

from headstart.bench.engines import Setup
from headstart.bench.lab_repeat import run_repeat
from headstart.bench.lab_scheduler import run_scheduler
from headstart.bench.nullexec import NullExecutor

MakeSetup = Callable[..., Setup]


def test_a_repeated_prompt_of_whole_blocks_computes_one_token(make_setup: MakeSetup) -> None:
    report = run_repeat(make_setup())
    assert report.values["tokens_computed"] == 1
    assert report.values["tokens_cached"] == 1023
    assert report.problems == []


def test_another_first_token_in_float32_invalidates_the_repeat(
    make_setup: MakeSetup, forgetful: type[NullExecutor]
) -> None:
    assert "differs" in run_repeat(make_setup(forgetful)).problems[0]


def test_scheduler_lab_measures_all_three_costs() -> None:
    report = run_scheduler(seed=0, runs=1)
    assert report.values.keys() == {"step_256_decodes_us", "admit_4096_cached_us", "hash_1k_tokens_us"}
    assert all(value > 0 for value in report.values.values())
