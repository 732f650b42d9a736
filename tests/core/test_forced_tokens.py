"""Rows with several tokens: what a grammar forces is cut, published and preempted like tokens that come one by one."""

from array import array

from checking import CheckingExecutor, expected_tokens, make_request, next_token, run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headstart.core.batch import Batch, Chunk, RowResult, StepResult
from headstart.core.engine import Engine
from headstart.core.request import FinishReason
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import MaxStepTime

BLOCK = 4


class ForcingExecutor(CheckingExecutor):
    """Appends to each sampled token those that would be sampled after it: `num_forced` of them in turn."""

    def __init__(self, num_blocks: int, num_forced: list[int]) -> None:
        super().__init__(num_blocks, BLOCK, lambda _: False)
        self.num_forced = num_forced

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        rows = [self._extended(chunk, row) for chunk, row in zip(batch.chunks, result.rows, strict=True)]
        return StepResult(tuple(rows), result.elapsed)

    def _extended(self, chunk: Chunk, row: RowResult) -> RowResult:
        if not row.token_ids:
            return row
        history = array("i", [*chunk.history, *row.token_ids])
        for _ in range(self.num_forced[len(history) % len(self.num_forced)]):
            history.append(next_token(history))
        return row._replace(token_ids=tuple(history[len(chunk.history) :]))


def make_forcing(num_blocks: int, num_forced: list[int], limits: Limits) -> Engine:
    scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK, limits))
    return Engine(scheduler, ForcingExecutor(num_blocks, num_forced))


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    return {name: [t for output in outputs for t in output.token_ids] for name, outputs in run(engine).items()}


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=6),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(8, 24),
    st.integers(8, 24),
)
@example([(5, 12), (5, 12)], [7], 9, 8)
def test_tokens_are_those_that_come_one_by_one(
    shapes: list[tuple[int, int]], num_forced: list[int], num_blocks: int, budget: int
) -> None:
    engine = make_forcing(num_blocks + 1, num_forced, Limits(budget, 6, 32))
    for _ in range(300):
        engine.scheduler.admission.record_output_length(1)  # it admits too many, so some are preempted
    prompts = [list(range(number, number + length)) for number, (length, _) in enumerate(shapes)]
    for number, (prompt, (_, num_tokens)) in enumerate(zip(prompts, shapes, strict=True)):
        engine.add_request(make_request(str(number), prompt, num_tokens))
    found = tokens_of(engine)
    for number, (prompt, (_, num_tokens)) in enumerate(zip(prompts, shapes, strict=True)):
        assert found[str(number)] == expected_tokens(prompt, min(num_tokens, 32 - len(prompt)))


def test_tokens_are_cut_at_a_stop_token_in_their_middle() -> None:
    prompt = [5, 6, 7]
    expected = expected_tokens(prompt, 8)
    stop = next(token for index, token in enumerate(expected) if index >= 2 and token not in expected[:index])
    engine = make_forcing(20, [7], Limits(64, 4, 64))
    engine.add_request(make_request("a", prompt, 8, stop=(stop,)))
    (output,) = run(engine)["a"]
    assert list(output.token_ids) == expected[: expected.index(stop) + 1]
    assert output.finish_reason is FinishReason.STOP
    assert engine.stats().counters.forced_tokens == len(output.token_ids) - 1


def test_tokens_are_cut_at_max_tokens_and_at_the_end_of_the_context() -> None:
    engine = make_forcing(20, [9], Limits(64, 4, 12))
    engine.add_request(make_request("short", [5, 6, 7], 4))
    engine.add_request(make_request("long", [1, 2, 3], 60))
    found = tokens_of(engine)
    assert found == {"short": expected_tokens([5, 6, 7], 4), "long": expected_tokens([1, 2, 3], 9)}


def test_a_decode_with_forced_tokens_advances_though_a_prompt_uses_the_time_of_the_step() -> None:
    limits = Limits(64, 4, 200, max_step_time=MaxStepTime(seconds=1.0, least_tokens=1))
    engine = make_forcing(100, [6], limits)
    engine.scheduler.step_times.seconds_per_token = 1.0
    engine.add_request(make_request("prompt", range(100), 1, priority=0))
    engine.step()
    engine.add_request(make_request("forced", [3], 40))
    seen = 0
    while engine.scheduler.counters.generation_tokens == seen:
        engine.step()
    engine.step()
    (chunk,) = [chunk for chunk in engine.executor.batches[-1].chunks if chunk.request_id == "forced"]  # type: ignore[attr-defined]
    assert len(chunk.token_ids) >= 1 and any(
        one.request_id == "prompt"
        for one in engine.executor.batches[-1].chunks  # type: ignore[attr-defined]
    )
