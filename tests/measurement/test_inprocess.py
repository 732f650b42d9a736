import signal
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import FrameType
from typing import Any

import pytest

from headstart.core.engine import Engine
from headstart.core.request import SamplingParams
from headstart.measurement.inprocess import requests_from_prompts, run_requests
from headstart.measurement.runner import EngineSetup
from headstart.workload.jobs import Job, JobDependencies
from headstart_lab.runners.null_executor import NullExecutor
from headstart_lab.runners.virtual_time import VirtualClock

MakeSetup = Callable[..., EngineSetup]


def make_engine(setup: EngineSetup) -> Engine:
    return setup.build(setup.options(num_blocks=64))[0]


def prompts(*lengths: int) -> "list[array[int]]":
    return [array("i", range(start, start + length)) for start, length in enumerate(lengths)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def test_records_come_in_the_order_of_the_requests_with_their_token_counts(make_setup: MakeSetup) -> None:
    run = run_requests(make_engine(make_setup()), requests_from_prompts(prompts(40, 7), greedy(3), "r"))
    assert [record.request_id for record in run.records] == ["r-0", "r-1"]
    assert [(record.prompt_tokens, record.output_tokens) for record in run.records] == [(40, 3), (7, 3)]
    assert [len(tokens) for tokens in run.outputs] == [3, 3]
    assert run.computed_tokens == 40 + 7 + 2 * 2 and sum(step.computed_tokens for step in run.steps) == 51
    assert run.problems("r") == []


def test_a_request_is_not_added_before_it_is_due(make_setup: MakeSetup) -> None:
    requests, clock = requests_from_prompts(prompts(8, 8), greedy(1), "r"), VirtualClock()
    first, second = run_requests(make_engine(make_setup()), requests, due=[0.0, 0.05], clock=clock).records
    assert first.finish is not None and first.finish < 0.05
    assert second.arrival == 0.05 and second.first_token is not None and second.first_token >= 0.05


def test_a_request_arrives_a_pause_after_those_it_waits_for(make_setup: MakeSetup) -> None:
    requests, clock = requests_from_prompts(prompts(8, 8, 8), greedy(2), "r"), VirtualClock()
    asked = [Job(request.prompt, 2) for request in requests]
    waits = JobDependencies(
        [asked[0], replace(asked[1], after=(0,), pause=0.5), replace(asked[2], after=(0, 1), pause=0.25)]
    )
    run = run_requests(make_engine(make_setup()), requests, due=[0.0, inf, inf], waits=waits, clock=clock)
    first, second, third = run.records
    assert first.finish is not None and second.finish is not None
    assert second.arrival == first.finish + 0.5 and third.arrival == second.finish + 0.25


def test_giving_up_leaves_an_idle_engine_and_the_finished_records(make_setup: MakeSetup) -> None:
    engine = make_engine(make_setup())
    requests = requests_from_prompts(prompts(8, 8), greedy(1), "short") + requests_from_prompts(
        prompts(8), greedy(50), "long"
    )
    run = run_requests(engine, requests, give_up=lambda record: record.request_id == "short-1")
    assert run.given_up and [record.request_id for record in run.records] == ["short-0", "short-1"]
    assert not engine.has_work


def test_an_interrupt_aborts_what_is_under_way(make_setup: MakeSetup) -> None:
    engine = make_engine(make_setup())

    def interrupt(record: object) -> bool:
        raise KeyboardInterrupt

    requests = requests_from_prompts(prompts(8), greedy(1), "short") + requests_from_prompts(
        prompts(8), greedy(50), "long"
    )
    with pytest.raises(KeyboardInterrupt):
        run_requests(engine, requests, give_up=interrupt)
    assert not engine.has_work


def test_ctrl_c_at_any_line_of_the_engine_leaves_it_usable(make_setup: MakeSetup) -> None:
    engine, num_lines = make_engine(make_setup()), 0
    pressed_at: int | None = None
    handler = signal.getsignal(signal.SIGINT)

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if "/headstart/core/" not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        if event == "line" and num_lines == pressed_at:
            signal.raise_signal(signal.SIGINT)
        return count

    def traced_run(press_at: int | None = None) -> None:
        nonlocal num_lines, pressed_at
        num_lines, pressed_at, before = 0, press_at, sys.gettrace()
        sys.settrace(count)
        try:
            run_requests(engine, requests_from_prompts(prompts(8, 8, 40), greedy(2), "r"))
        finally:
            sys.settrace(before)

    for _ in range(2):
        traced_run()  # the second one reads from the cache, as the others do
    assert num_lines > 500
    for line in range(1, num_lines // 2, num_lines // 100):
        with pytest.raises(KeyboardInterrupt):
            traced_run(line)
        assert not engine.has_work and signal.getsignal(signal.SIGINT) is handler
    traced_run()


def test_failed_rows_are_a_problem(make_setup: MakeSetup, failing: type[NullExecutor]) -> None:
    run = run_requests(make_engine(make_setup(failing)), requests_from_prompts(prompts(8, 8), greedy(1), "r"))
    assert [record.ok for record in run.records] == [False, False]
    assert run.problems("r") == ["r: 2 requests failed, the first with: planted"]


def test_tokens_that_do_not_add_up_are_a_problem(make_setup: MakeSetup) -> None:
    run = run_requests(make_engine(make_setup()), requests_from_prompts(prompts(8), greedy(1), "r"))
    run.computed_tokens += 1
    assert run.problems("r") == ["r: 9 tokens computed, but the requests account for 8"]
