from array import array

import pytest

from headstart.core.engine import Engine
from headstart.core.request import SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.measurement.inprocess import requests_from_prompts, run_requests
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

BLOCKS = 64


def make_engine(max_seqs: int = 8) -> tuple[Engine, VirtualExecutor]:
    """A step takes 1 s and 0.5 s per token."""
    executor = VirtualExecutor(BLOCKS, 4, 100, StepCost(step=1.0, token=0.5), VirtualClock())
    return Engine(Scheduler(SchedulerConfig(BLOCKS, 4, Limits(64, max_seqs))), executor), executor


def prompts(*lengths: int) -> "list[array[int]]":
    return [array("i", range(start, start + length)) for start, length in enumerate(lengths)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def test_records_say_exactly_what_the_cost_of_the_steps_adds_up_to() -> None:
    engine, executor = make_engine()
    run = run_requests(engine, requests_from_prompts(prompts(6), greedy(3), "r"), clock=executor.clock)
    (record,) = run.records
    assert record.ttft == 1.0 + 6 * 0.5
    assert record.e2e == record.ttft + 2 * 1.5
    assert run.seconds == record.e2e and [step.executor_seconds for step in run.steps] == [4.0, 1.5, 1.5]


def test_an_idle_engine_waits_for_the_next_arrival_whatever_the_clock_says_already() -> None:
    engine, executor = make_engine()
    executor.clock.sleep(1e6 / 3)  # so late that a tenth of a second is no exact difference any more
    due = [0.1, 100.1]
    run = run_requests(engine, requests_from_prompts(prompts(2, 2), greedy(1), "r"), due=due, clock=executor.clock)
    assert [record.ttft for record in run.records] == pytest.approx([2.0, 2.0])


def test_first_chunks_are_in_the_order_of_admission_with_the_start_of_their_step() -> None:
    engine, executor = make_engine(max_seqs=1)
    run_requests(engine, requests_from_prompts(prompts(2, 4, 2), greedy(1), "r"), clock=executor.clock)
    assert list(executor.first_chunks.items()) == [("r-0", 0.0), ("r-1", 2.0), ("r-2", 5.0)]


def test_time_does_not_go_back() -> None:
    with pytest.raises(AssertionError, match="does not go back"):
        VirtualClock().sleep(-1.0)
