from collections.abc import Callable

from headstart.measurement.runner import EngineSetup
from headstart_lab.engine.repeat import run_repeated_prompt
from headstart_lab.runners.null_executor import NullExecutor

MakeSetup = Callable[..., EngineSetup]


def test_a_repeated_prompt_of_whole_blocks_computes_one_token(make_setup: MakeSetup) -> None:
    report = run_repeated_prompt(make_setup())
    assert report.values["tokens_computed"] == 1
    assert report.values["tokens_cached"] == 1023
    assert report.problems == []


def test_another_first_token_in_float32_invalidates_the_repeat(
    make_setup: MakeSetup, forgetful: type[NullExecutor]
) -> None:
    assert "differs" in run_repeated_prompt(make_setup(forgetful)).problems[0]
