"""RunningStep: what is computed in the running step, and what is left behind it; its sums never go below zero."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headstart.router.flight import Flight
from headstart.router.running_step import RunningStep
from headstart.router.step_rates import STEP_TOKENS, Work


def flight(prompt: int, cached: int = 0) -> Flight:
    return Flight(Work.of(prompt, cached), 1.0, 0.0, prompt, 1)


def test_a_long_prefill_is_computed_in_the_steps_that_were_seen() -> None:
    step, one = RunningStep(), flight(2 * STEP_TOKENS + 100)
    step.sent(one)
    step.begin(1.0, [one], 3, 50.0)
    assert (step.tokens, step.row[3]) == (STEP_TOKENS, 2 * STEP_TOKENS + 100)
    step.end()
    step.begin(1.1, [one], 3, 50.0)
    step.end()
    assert one.num_computed == 2 * STEP_TOKENS and step.row[3] == 100
    step.begin(1.2, [one], 3, 50.0)
    assert step.tokens == 100
    step.left(one)
    assert (step.tokens, step.pairs, *step.row[3:]) == (0, 0.0, 0, 0.0)


def test_steps_without_streams_are_made_up_when_the_first_token_arrives() -> None:
    step, one, other = RunningStep(), flight(STEP_TOKENS + 1), flight(10)
    for each in (one, other):
        step.sent(each)
    step.begin(1.0, [one, other], 0, 0.0)
    step.catch_up(one, [one, other])
    assert one.num_computed == STEP_TOKENS + 1 and other.num_computed == 10


@given(st.integers(0, 2**32))
def test_sums_are_those_of_what_is_pending(seed: int) -> None:
    """Requests come, are answered in any order or fail, and steps end whenever they are seen to."""
    rng, step, now = Random(seed), RunningStep(), 0.0
    pending: dict[Flight, None] = {}
    for _ in range(60):
        now += 0.01
        act = rng.random()
        if act < 0.4:
            prompt = rng.choice((1, 100, 5000, 20_000))
            one = flight(prompt, rng.randrange(prompt))
            pending[one] = None
            step.sent(one)
        elif act < 0.7:
            step.end()
            step.begin(now, pending, rng.randrange(3), 0.0)
        elif pending:
            one = rng.choice(list(pending))
            if next(iter(pending)) is one and rng.random() < 0.5:
                step.catch_up(one, pending)
            del pending[one]
            step.left(one)
        left = sum(one.work.tokens - one.num_computed for one in pending)
        assert step.row[3] == left and 0 <= step.tokens <= min(left, STEP_TOKENS)
        assert all(0 <= one.num_computed <= one.work.tokens for one in pending)
