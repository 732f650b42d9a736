"""Requests with a grammar: admitted when it is compiled; tokens that it forces are computed as one chunk."""

from random import Random

import pytest
from checking import Grammars, executor_of, expected_tokens, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.core.request import FinishReason, Request


def test_forced_tokens_come_with_the_sampled_one_and_are_computed_in_one_step() -> None:
    engine = make_engine(num_blocks=40, grammars=Grammars())
    engine.add_request(make_request("a", range(5), 9, grammar="2"))
    outputs = run(engine)["a"]
    assert [len(output.token_ids) for output in outputs] == [3, 3, 3]
    assert [t for output in outputs for t in output.token_ids] == expected_tokens(range(5), 9)
    assert [len(batch.chunks[0].token_ids) for batch in executor_of(engine).batches] == [5, 3, 3]
    counters = engine.stats().counters
    assert (counters.generation_tokens, counters.forced_tokens) == (9, 6)


def test_forced_tokens_end_where_the_answer_may_be_no_longer() -> None:
    engine = make_engine(num_blocks=40, grammars=Grammars())
    engine.add_request(make_request("a", range(5), 4, grammar="2"))
    outputs = run(engine)["a"]
    assert [len(output.token_ids) for output in outputs] == [3, 1]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_forced_tokens_ends_the_answer() -> None:
    stop = expected_tokens(range(5), 2)[-1]
    engine = make_engine(num_blocks=40, grammars=Grammars())
    engine.add_request(make_request("a", range(5), 9, grammar="5", stop=(stop,)))
    (output,) = run(engine)["a"]
    assert list(output.token_ids) == expected_tokens(range(5), 2) and output.finish_reason is FinishReason.STOP


def test_the_context_ends_forced_tokens() -> None:
    engine = make_engine(max_model_len=8, grammars=Grammars())
    assert len(generate(engine, make_request("a", range(5), 9, grammar="7"))["a"]) == 3


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_any_mix_of_forced_and_sampled_tokens_in_a_small_pool_gives_the_expected_tokens(seed: int) -> None:
    rng = Random(seed)
    engine = make_engine(
        num_blocks=rng.randint(12, 30),
        grammars=Grammars(),
        max_batched_tokens=rng.choice((8, 16, 64)),
        expects_short_outputs=True,
    )
    shared = [rng.randrange(97) for _ in range(12)]
    requests: dict[str, Request] = {}
    for number in range(rng.randint(2, 8)):
        prompt = shared[: rng.randrange(13)] + [rng.randrange(97) for _ in range(rng.randint(1, 6))]
        grammar = rng.choice((None, "0", "1", "3", "9"))
        requests[str(number)] = make_request(str(number), prompt, rng.randint(1, 20), grammar=grammar)
    found = generate(engine, *requests.values())
    for name, request in requests.items():
        assert found[name] == expected_tokens(request.prompt, request.sampling.max_tokens)


def test_preempted_in_the_middle_of_forced_tokens_it_goes_on_with_the_same() -> None:
    engine = make_engine(num_blocks=9, grammars=Grammars(), expects_short_outputs=True)
    requests = [make_request(str(i), range(10 * i, 10 * i + 9), 14, grammar="3") for i in range(3)]
    found = generate(engine, *requests)
    assert engine.stats().counters.num_preemptions > 0
    assert all(found[r.request_id] == expected_tokens(r.prompt, 14) for r in requests)


def test_a_request_waits_for_its_grammar_while_others_run() -> None:
    grammars = Grammars(compiled=False)
    engine = make_engine(num_blocks=40, grammars=grammars)
    engine.add_request(make_request("constrained", range(5), 2, grammar="0"))
    engine.add_request(make_request("free", range(5), 2))
    assert [o.request_id for _ in range(4) for o in engine.step()] == ["free", "free"]
    assert engine.has_work and engine.step() == []
    grammars.finish()
    assert {o.request_id for _ in range(3) for o in engine.step()} == {"constrained"} and not engine.has_work


def test_a_request_can_be_aborted_while_its_grammar_is_compiled() -> None:
    grammars = Grammars(compiled=False)
    engine = make_engine(grammars=grammars)
    engine.add_request(make_request("a", range(5), 2, grammar="0"))
    assert engine.abort("a") and not engine.abort("a") and not engine.has_work
    grammars.finish()
    assert engine.step() == []


def test_a_grammar_that_does_not_compile_fails_its_request_alone() -> None:
    engine = make_engine(num_blocks=40, grammars=Grammars())
    engine.add_request(make_request("wrong", range(5), 2, grammar="wrong"))
    engine.add_request(make_request("right", range(5), 2, grammar="1"))
    outputs = run(engine)
    (failed,) = outputs["wrong"]
    assert failed.finish_reason is FinishReason.ERROR and failed.is_invalid and "wrong" in str(failed.error)
    assert [t for o in outputs["right"] for t in o.token_ids] == expected_tokens(range(5), 2)


def test_what_cannot_run_is_refused_before_its_grammar_is_compiled() -> None:
    grammars = Grammars(compiled=False)
    engine = make_engine(grammars=grammars, max_model_len=8)
    with pytest.raises(RequestTooLargeError):
        engine.add_request(make_request("a", range(9), 2, grammar="0"))
    engine.add_request(make_request("b", range(3), 2, grammar="0"))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(make_request("b", range(3), 2, grammar="0"))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(make_request("b", range(3), 2))
    with pytest.raises(InvalidRequestError, match="no grammars"):
        make_engine().add_request(make_request("a", range(3), 2, grammar="0"))
