"""The chunks in which prompts of traced requests are computed, as their outputs report them."""

import pytest
from checking import CheckingExecutor, make_engine, make_request, run
from checking_async import AsyncCheckingExecutor

from headstart.core.batch import RequestStepOutput
from headstart.core.sched import step_time


def prefill_of(outputs: list[RequestStepOutput]) -> list[int]:
    """The tokens of the chunks; at most one output may have any."""
    (found,) = [output for output in outputs if output.prefill] or [RequestStepOutput("")]
    return [chunk.num_tokens for chunk in found.prefill]


@pytest.mark.parametrize("executor_class", [CheckingExecutor, AsyncCheckingExecutor])
def test_a_traced_prompt_reports_its_chunks_with_its_first_token_and_others_nothing(
    executor_class: type[CheckingExecutor],
) -> None:
    engine = make_engine(40, max_batched_tokens=8, executor_class=executor_class)
    engine.add_request(make_request("traced", range(20), 3, is_traced=True))
    engine.add_request(make_request("other", range(50, 70), 3))
    outputs = run(engine)
    assert sum(prefill_of(outputs["traced"])) == 20 and len(prefill_of(outputs["traced"])) > 2
    assert outputs["traced"][0].prefill and not prefill_of(outputs["other"]) and not engine._prefills


def test_cached_tokens_are_in_no_chunk() -> None:
    engine = make_engine(40)
    engine.add_request(make_request("a", range(20)))
    run(engine)
    engine.add_request(make_request("b", range(20), is_traced=True))
    (output,) = run(engine)["b"]
    assert sum(prefill_of([output])) == 20 - output.num_cached_tokens > 0


def test_chunks_have_the_times_that_the_engine_was_given() -> None:
    engine = make_engine(40, max_batched_tokens=8)
    engine.add_request(make_request("a", range(12), is_traced=True))
    found = [output for at in (5.0, 6.0) for output in engine.step(at)]
    assert [chunk.planned_at for chunk in found[0].prefill] == [5.0, 6.0]


def test_nothing_is_kept_of_a_request_that_is_aborted_or_fails() -> None:
    engine = make_engine(40, poison=lambda chunk: chunk.request_id == "fails")
    for name in ("fails", "aborted"):
        engine.add_request(make_request(name, range(9), is_traced=True))
    assert engine._prefills
    engine.abort("aborted")
    run(engine)
    assert not engine._prefills


def test_a_prompt_of_many_chunks_reports_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "MAX_PREFILL_CHUNKS", 3)
    engine = make_engine(40, max_batched_tokens=4, max_seqs=4)
    engine.add_request(make_request("a", range(24), is_traced=True))
    (output,) = run(engine)["a"]
    assert prefill_of([output]) == [4, 4, 16]
