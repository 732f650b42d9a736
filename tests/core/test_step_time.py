"""Durations of steps, and how many prompt tokens fit into one, against machines whose cost is known."""

from array import array
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import Batch, StepResult
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import (
    DECODE_STEPS,
    LEAST_SECONDS,
    LEAST_TOKENS,
    MOST_SECONDS,
    MaxStepTime,
    StepTimes,
)
from headstart.core.speculation.draft_length import DecodeCostModel
from headstart.core.warm_up import DRAFT_LENGTHS, PROMPT_TOKENS, measure_draft_cost, measure_step_times
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

BLOCK = 16


def engine_of(cost: StepCost, bound: MaxStepTime | None) -> tuple[Engine, VirtualClock]:
    """An engine that has measured its steps, in virtual time."""
    clock = VirtualClock()
    executor = VirtualExecutor(1001, BLOCK, 100, cost, clock)
    scheduler = Scheduler(
        SchedulerConfig(1001, BLOCK, Limits(max_model_len=8192, max_step_time=bound), enable_prefix_caching=False)
    )
    measure_step_times(executor, scheduler.step_times, max_tokens=8192)
    return Engine(scheduler, executor), clock


def request(name: str, num_tokens: int, max_tokens: int) -> Request:
    return Request(name, array("i", range(1, num_tokens + 1)), SamplingParams(max_tokens=max_tokens))


def test_nothing_is_bounded_before_anything_is_known_or_if_it_was_not_asked() -> None:
    assert StepTimes(MaxStepTime()).max_prompt_tokens(3) is None
    unbounded = StepTimes(None)
    unbounded.learn(100, 0, 1.0)
    assert unbounded.max_prompt_tokens(0) is None
    assert unbounded.expected_seconds(200, 0) == pytest.approx(2.0)


def test_a_bound_is_six_decode_steps_within_its_limits_and_the_most_without_decodes() -> None:
    times = StepTimes(MaxStepTime())
    times.learn(0, 4, 0.020)
    times.learn(100, 4, 0.120)  # 1 ms a token
    assert times.max_prompt_tokens(4) == 96  # 6 x 20 - 20 ms
    assert times.max_prompt_tokens(0) == int(MOST_SECONDS / 0.001) // 16 * 16
    assert times.max_prompt_tokens(4, num_prompts=4) == 96
    assert times.max_prompt_tokens(4, num_prompts=16) == 208  # twice as long: 240 - 20 ms, in sixteens
    slow = StepTimes(MaxStepTime())
    slow.learn(0, 1, 0.5)
    slow.learn(16, 1, 1.0)
    assert slow.max_prompt_tokens(1) == LEAST_TOKENS  # however long it takes
    quick = StepTimes(MaxStepTime())
    quick.learn(0, 1, 0.001)
    quick.learn(100, 1, 0.011)
    assert quick.max_prompt_tokens(1) == int((LEAST_SECONDS - 0.001) / 0.0001) // 16 * 16


def test_decodes_are_known_by_their_number_and_else_by_the_closest() -> None:
    times = StepTimes(MaxStepTime(0.1))
    times.learn(0, 8, 0.016)
    assert times.decode_step_seconds(1) == times.decode_step_seconds(15) == times.decode_step_seconds(200) == 0.016
    times.learn(0, 32, 0.050)
    assert times.decode_step_seconds(31) == 0.016 and times.decode_step_seconds(40) == 0.050


def test_one_step_on_a_busy_machine_changes_little() -> None:
    times = StepTimes(MaxStepTime())
    for _ in range(5):
        times.learn(100, 0, 0.1)
    times.learn(100, 0, 30.0)
    assert times.seconds_per_token <= 0.001 * 1.33
    times.learn(LEAST_TOKENS - 1, 0, 1.0)  # too few to say anything
    times.learn(100, 0, 0.0)
    times.learn(0, 1, 0.0)  # executors without a clock
    assert times.seconds_per_token <= 0.001 * 1.33


def test_on_a_machine_that_is_disturbed_all_the_time_chunks_stay_as_long_as_they_may_be() -> None:
    rng, times, lengths = Random(1), StepTimes(MaxStepTime()), list[int]()
    cost = StepCost(0.025, 0.0006)
    times.learn(0, 16, cost.seconds(0))
    times.learn(64, 0, cost.seconds(64))
    for _ in range(300):
        num = times.max_prompt_tokens(16)
        assert num is not None
        lengths.append(num)
        times.learn(num, 16, cost.seconds(num) + (0.1 if rng.random() < 0.3 else 0.0))
    ideal = (DECODE_STEPS - 1) * cost.step / cost.token
    assert 0.8 * ideal <= median(lengths) <= ideal


@settings(max_examples=60, deadline=None)
@given(step=st.floats(0.0005, 0.05), token=st.floats(0.00005, 0.003), decodes=st.integers(0, 20),
       prompts=st.lists(st.integers(2, 3000), min_size=1, max_size=3))  # fmt: skip
def test_no_step_lasts_longer_than_its_bound_and_every_prompt_ends(
    step: float, token: float, decodes: int, prompts: list[int]
) -> None:
    cost = StepCost(step, token)
    engine, clock = engine_of(cost, MaxStepTime())
    for index in range(decodes):
        engine.add_request(request(f"decode-{index}", 1, 4000))
    for _ in range(4):
        engine.step()
    for index, length in enumerate(prompts):
        engine.add_request(request(f"prompt-{index}", length, 1))
    alone = cost.seconds(decodes) if decodes else 0.0
    ends, least = {f"prompt-{index}" for index in range(len(prompts))}, cost.seconds(decodes + LEAST_TOKENS + 3)
    while ends:
        before = clock.now()
        outputs = engine.step()
        bound = MOST_SECONDS
        if decodes:
            most = max(DECODE_STEPS * alone, LEAST_SECONDS) * max(len(ends) / decodes, 1.0) ** 0.5
            bound = min(most, MOST_SECONDS)
        # a learnt mean of the token's cost holds its share of the fixed part too: never less than it is
        assert clock.now() - before <= max(bound + 3 * token, least) + 1e-9
        assert sum(output.request_id.startswith("decode") for output in outputs) == decodes
        ends -= {output.request_id for output in outputs if output.finish_reason is not None}


def test_a_machine_that_becomes_slower_is_followed() -> None:
    engine, clock = engine_of(StepCost(0.01, 0.0005), MaxStepTime())
    engine.add_request(request("one", 8000, 1))
    lengths: list[float] = []
    while engine.has_work:
        if len(lengths) == 5:
            engine.executor.cost = StepCost(0.01, 0.002)  # type: ignore[attr-defined]
        before = clock.now()
        engine.step()
        lengths.append(clock.now() - before)
    assert max(lengths[:5]) <= MOST_SECONDS and lengths[5] > 3 * MOST_SECONDS
    slow = lengths[5:-1]
    assert all(later <= earlier for earlier, later in pairwise(slow[:8]))
    assert slow[12] <= 1.1 * MOST_SECONDS


def test_a_long_step_is_announced_and_a_short_one_is_not() -> None:
    engine, _ = engine_of(StepCost(0.01, 0.002), None)
    told: list[float] = []
    engine.on_long_step = told.append
    engine.add_request(request("short", 100, 2))
    while engine.has_work:
        engine.step()
    assert told == []
    engine.add_request(request("long", 1500, 2))
    engine.step()
    assert told == [pytest.approx(3.0, rel=0.1)]


class Executor(VirtualExecutor):
    """Takes ten times as long for its first steps, and checks that the blocks it is given exist."""

    num_slow = 4
    dirty: frozenset[int] = frozenset()

    def zero_blocks(self, block_ids: list[int]) -> None:
        self.dirty -= frozenset(block_ids)

    def execute(self, batch: Batch) -> StepResult:
        for chunk in batch.chunks:
            end = chunk.start + len(chunk.token_ids)
            assert chunk.block_ids and len(chunk.block_ids) * self.block_size >= end
            assert all(0 < block < self.num_blocks for block in chunk.block_ids)
            self.dirty |= frozenset(chunk.block_ids)
        result = super().execute(batch)
        self.num_slow -= 1
        return result if self.num_slow < 0 else result._replace(elapsed=10 * result.elapsed)


def test_the_first_steps_of_a_process_are_not_counted() -> None:
    cost = StepCost(0.01, 0.001)
    times = StepTimes(MaxStepTime())
    measure_step_times(Executor(100, BLOCK, 100, cost, VirtualClock()), times, max_tokens=4096)
    assert times.decode_step_seconds(1) == pytest.approx(cost.seconds(1))
    assert times.seconds_per_token == pytest.approx(cost.seconds(PROMPT_TOKENS) / PROMPT_TOKENS)


def test_an_engine_learns_what_its_machine_costs() -> None:
    cost = StepCost(0.01, 0.001)
    engine, _ = engine_of(cost, MaxStepTime(0.2))
    for index in range(40):
        engine.add_request(request(f"decode-{index}", 1, 4000))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.step_times.decode_step_seconds(40) == pytest.approx(cost.seconds(40))
    engine.add_request(request("prompt", 6000, 1))
    for _ in range(30):
        engine.step()
    assert engine.scheduler.step_times.seconds_per_token == pytest.approx(cost.token, rel=1e-3)


def test_warming_up_needs_no_more_room_than_there_is() -> None:
    for num_blocks, max_tokens in ((2, 4096), (2, 5), (100, 2), (100, 4)):
        executor = Executor(num_blocks, BLOCK, 100, StepCost(0.01, 0.001), VirtualClock())
        times = StepTimes(MaxStepTime())
        measure_step_times(executor, times, max_tokens=max_tokens)
        assert bool(times.expected_seconds(0, 1)) == (max_tokens > 3)
        assert not executor.dirty  # what a broken model wrote would corrupt the next user of the block


def test_the_cost_of_drafts_is_measured_behind_as_much_context_as_there_is_room_for() -> None:
    step = StepCost(0.01, 0.001)
    for num_blocks, max_tokens in ((100, 4096), (100, 40), (4, 4096), (100, 17)):
        executor, cost = Executor(num_blocks, BLOCK, 100, step, VirtualClock()), DecodeCostModel()
        measure_draft_cost(executor, cost, max_tokens=max_tokens)
        for length in DRAFT_LENGTHS:
            assert cost.expected_seconds(1 + length) == pytest.approx(step.seconds(1 + length))
        assert not executor.dirty
    for num_blocks, max_tokens in ((2, 4096), (100, 16)):
        cost = DecodeCostModel()
        measure_draft_cost(Executor(num_blocks, BLOCK, 100, step, VirtualClock()), cost, max_tokens=max_tokens)
        assert not cost.is_measured
