"""Token events: the steps of a replica are told apart, however its events are spread, doubled or joined."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import ask, endpoint

from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage
from headstart.router.step_rates import StepRates

STEP = 0.010
RATES = StepRates(1e3 * STEP, 0.0, 0.0, 0.01, 0.0)


def started(num_streams: int) -> tuple[Router, list[RoutedInFlight]]:
    """A replica with so many streams, which had their first token in one step of STEP; its rates are known."""
    router, now = Router(), 0.0
    router.add(endpoint("r0", rates=RATES))
    for _ in range(16):
        sent = router.record_sent(router.pick(ask(tail=1), now), now)
        router.record_first_token(sent, now + STEP, ReportedTokenUsage(1, 0))
        router.record_finished(sent, now + STEP, ReportedTokenUsage(1, 0), num_output=1)
        now += STEP
    streams = [router.record_sent(router.pick(ask(tail=1), now), now) for _ in range(num_streams)]
    for stream in streams:
        router.record_first_token(stream, 1.0)
    assert not router.endpoints["r0"].load.learner.is_unreliable
    return router, streams


def num_steps(router: Router) -> int:
    return router.endpoints["r0"].load.num_observed_steps


def test_events_of_one_step_may_be_spread_over_most_of_the_next() -> None:
    router, streams = started(8)
    for number in range(1, 21):
        for place, stream in enumerate(streams):
            router.record_later_token(stream, 1.0 + number * STEP + place * STEP / 10)
        assert num_steps(router) == number


def test_a_stream_that_joins_before_behind_or_between_the_others_is_no_step_of_its_own() -> None:
    for place in range(3):
        router, streams = started(2)
        for stream in streams:
            router.record_later_token(stream, 1.0 + STEP)
        new = router.record_sent(router.pick(ask(tail=4), 1.001 + STEP), 1.001 + STEP)
        for number in (2, 3):  # the first of them began before it was sent; events are 1.5 ms apart
            events = list(streams) if number == 2 else [*streams[:place], new, *streams[place:]]
            for index, stream in enumerate(events):
                now = 1.0 + number * STEP + 0.0015 * index
                if stream is new:
                    router.record_first_token(stream, now)
                else:
                    router.record_later_token(stream, now)
        assert num_steps(router) == 3, place


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_steps_of_a_prefill_are_those_that_the_streams_showed_after_the_running_one(
    steps: int, is_first: bool
) -> None:
    router, (stream,) = started(1)
    for number in range(1, 4):
        router.record_later_token(stream, 1.0 + number * STEP)
    new = router.record_sent(router.pick(ask(tail=4), 1.001 + 3 * STEP), 1.001 + 3 * STEP)  # the fourth step runs
    for number in range(4, 5 + steps):
        at = 1.0 + number * STEP
        if number == 4 + steps and is_first:
            router.record_first_token(new, at - 0.0005)
        router.record_later_token(stream, at)
    if not is_first:
        router.record_first_token(new, at + 0.0005)
    assert new.flight.num_steps == steps


def test_two_events_of_a_stream_at_once_are_one_step() -> None:
    """An event for the role, the usage, or the rest of a token that was split."""
    router, (stream,) = started(1)
    for number in range(1, 11):
        for later in (0.0, 0.0002, 0.0009):
            router.record_later_token(stream, 1.0 + number * STEP + later)
    assert num_steps(router) == 10


def test_a_stream_whose_text_is_withheld_says_nothing_of_steps() -> None:
    """A hundred tokens of a tool call in one event; the other stream shows its steps."""
    router, (shown, withheld) = started(2)
    learner, now = router.endpoints["r0"].load.learner, 1.0
    for _ in range(100):
        now += STEP
        router.record_later_token(shown, now)
    router.record_later_token(withheld, now)
    before = learner.num_samples
    router.record_finished(withheld, now, num_output=100)
    assert learner.num_samples == before
    router.record_finished(shown, now, num_output=100)
    assert learner.num_samples > before


def test_events_of_several_tokens_are_as_many_steps_as_they_are() -> None:
    """A replica that speculates: 4 tokens a step. Its steps do not look four times as slow as the fleet's rates."""
    router, now = Router(), 0.0
    router.add(endpoint("r0", rates=RATES))
    load = router.endpoints["r0"].load
    for _ in range(40):
        stream = router.record_sent(router.pick(ask(tail=1), now), now)
        now += STEP
        router.record_first_token(stream, now)
        for _ in range(20):
            now += STEP
            router.record_later_token(stream, now)
        router.record_finished(stream, now, ReportedTokenUsage(1, 0), num_output=81)
    assert load.rates.step == pytest.approx(1e3 * STEP, rel=0.1) and load.learner.residual < 0.2
    assert load.learner.slowdown_versus_fleet(load.pace, now) == 1.0 and load.learner.mean_output == pytest.approx(81)
    assert load.learner.num_samples == 80, "a prefill and a decode of each"


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_steps_of_any_replica_are_counted(seed: int, spread: float) -> None:
    """Streams end and idle ones remain silent; each event comes up to `spread` of a step late, in any order."""
    rng = Random(seed)
    router, streams = started(rng.randrange(1, 12))
    now, steps = 1.0, 0
    while streams:
        now += STEP * rng.uniform(0.9, 1.1)
        steps += 1
        late = sorted((rng.uniform(0.0, spread * STEP), index) for index in range(len(streams)))
        for delay, index in late:
            router.record_later_token(streams[index], now + delay)
        assert num_steps(router) == steps
        for stream in list(streams):
            if rng.random() < 0.05:
                streams.remove(stream)
                router.record_finished(stream, now + spread * STEP, ReportedTokenUsage(1, 0), num_output=steps)
        if steps >= 60:
            break
