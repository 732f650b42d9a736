"""RunningStep: what is computed in the running step, and what is left behind it; its sums never go below zero."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headstart.router.flight import RequestFlight
from headstart.router.running_step import RunningStep
from headstart.router.step_rates import STEP_TOKENS, PrefillWork


def flight(prompt: int, cached: int = 0) -> RequestFlight:
    return RequestFlight(PrefillWork.of(prompt, cached), 1.0, 0.0, prompt, 1)


def test_a_long_prefill_is_computed_in_the_steps_that_were_seen() -> None:
    step, one = RunningStep(), flight(2 * STEP_TOKENS + 100)
    step.record_sent(one)
    step.begin(1.0, [one], 3, 50.0)
    assert (step.tokens, step.pricing_row[3]) == (STEP_TOKENS, 2 * STEP_TOKENS + 100)
    step.end()
    step.begin(1.1, [one], 3, 50.0)
    step.end()
    assert one.num_computed == 2 * STEP_TOKENS and step.pricing_row[3] == 100
    step.begin(1.2, [one], 3, 50.0)
    assert step.tokens == 100
    step.record_left(one)
    assert (step.tokens, step.pairs, *step.pricing_row[3:]) == (0, 0.0, 0, 0.0, STEP_TOKENS, 0)


def test_steps_without_streams_are_made_up_when_the_first_token_arrives() -> None:
    step, one, other = RunningStep(), flight(STEP_TOKENS + 1), flight(10)
    for each in (one, other):
        step.record_sent(each)
    step.begin(1.0, [one, other], 0, 0.0)
    step.end_steps_until_computed(one, [one, other])
    assert one.num_computed == STEP_TOKENS + 1 and other.num_computed == 10


def follower(leader: RequestFlight, prompt: int, cached: int) -> RequestFlight:
    """A request whose cached tokens are those that its leader computes, all but those that this one had cached."""
    one = flight(prompt, cached)
    one.leader, one.awaited = leader, cached - (leader.prompt_tokens - leader.work.tokens)
    return one


def test_a_request_is_computed_in_a_step_after_the_one_that_computes_its_prefix() -> None:
    step, first = RunningStep(), flight(1000)
    second = follower(first, 1100, 1000)
    third = follower(second, 1300, 1100)
    other = flight(50)
    for each in (pending := [first, second, third, other]):
        step.record_sent(each)
    step.begin(1.0, pending, 1, 0.0)
    assert step.tokens == 1000 + 50 and step.pricing_row[-1] == 2
    step.end()
    step.begin(1.1, pending, 1, 0.0)
    assert step.tokens == 100 and step.pricing_row[-1] == 1 and third.num_computed == 0
    step.end()
    step.begin(1.2, pending, 1, 0.0)
    assert step.tokens == 200 and step.pricing_row[-1] == 0


def test_a_follower_waits_only_for_the_part_of_a_long_prefill_that_it_shares() -> None:
    step, first = RunningStep(), flight(3 * STEP_TOKENS)
    second = flight(STEP_TOKENS + 10, STEP_TOKENS)
    second.leader, second.awaited = first, STEP_TOKENS
    for each in (first, second):
        step.record_sent(each)
    step.begin(1.0, [first, second], 1, 0.0)
    step.end()
    assert second.num_computed == 0
    step.begin(1.1, [second, first], 1, 0.0)
    step.end()
    assert second.num_computed == 10


def test_a_follower_whose_leader_has_left_waits_for_nothing() -> None:
    step, first = RunningStep(), flight(1000)
    second = follower(first, 1100, 1000)
    for each in (first, second):
        step.record_sent(each)
    step.record_left(first)
    step.begin(1.0, [second], 1, 0.0)
    assert step.tokens == 100 and step.pricing_row[-1] <= 1


@given(st.integers(0, 2**32))
def test_sums_are_those_of_what_is_pending(seed: int) -> None:
    """Requests come, are answered in any order or fail, and steps end whenever they are seen to."""
    rng, step, now = Random(seed), RunningStep(), 0.0
    pending: dict[RequestFlight, None] = {}
    for _ in range(60):
        now += 0.01
        act = rng.random()
        if act < 0.4:
            prompt = rng.choice((1, 100, 5000, 20_000))
            one = flight(prompt, rng.randrange(prompt))
            if pending and rng.random() < 0.5:
                leader = rng.choice(list(pending))
                one.leader, one.awaited = leader, rng.randrange(leader.work.tokens + 1)
            pending[one] = None
            step.record_sent(one)
        elif act < 0.7:
            step.end()
            step.begin(now, pending, rng.randrange(3), 0.0)
        elif pending:
            one = rng.choice(list(pending))
            if next(iter(pending)) is one and rng.random() < 0.5:
                step.end_steps_until_computed(one, pending)
            del pending[one]
            step.record_left(one)
        left = sum(one.work.tokens - one.num_computed for one in pending)
        assert step.pricing_row[3] == left and 0 <= step.tokens <= min(left, STEP_TOKENS)
        assert all(0 <= one.num_computed <= one.work.tokens for one in pending)
        leaders = [(one, one.leader) for one in pending if one.leader in pending]
        assert all(leader.num_computed >= one.awaited for one, leader in leaders if one.num_computed)


def test_the_tokens_of_a_step_are_the_most_seen_in_one_once_a_prefill_took_several() -> None:
    step = RunningStep()
    step.learn_step_tokens(3000, 1)
    assert step.step_tokens == STEP_TOKENS
    found = list[int]()
    for tokens, num_steps in ((3000, 2), (8000, 4), (500, 1), (2040, 1), (3000, 2)):
        step.learn_step_tokens(tokens, num_steps)
        found.append(step.step_tokens)
    assert found == [1500, 2000, 2000, 2040, 2040]


def test_a_prefill_that_takes_more_steps_than_it_should_begins_the_count_anew() -> None:
    step = RunningStep()
    step.learn_step_tokens(12_000, 1)
    assert step.step_tokens == 12_000
    step.learn_step_tokens(9000, 5)
    assert step.step_tokens == 1800


def test_the_stated_tokens_of_a_step_are_not_exceeded_and_may_not_be_reached() -> None:
    step = RunningStep()
    step.set_max_step_tokens(4096)
    step.learn_step_tokens(9000, 1)
    assert step.step_tokens == 4096
    step.learn_step_tokens(9000, 6)  # steps that are bounded in time
    assert step.step_tokens == 1500


def test_a_prefill_that_waited_says_nothing_about_the_tokens_of_a_step() -> None:
    step = RunningStep()
    step.learn_step_tokens(1000, 100)
    assert step.step_tokens == STEP_TOKENS
