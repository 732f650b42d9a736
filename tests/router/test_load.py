import pytest

from headstart.router.load import Flight, Load
from headstart.router.prefill_model import PrefillModel, Work


def flight(tokens: int, load: Load, output: int = 0) -> Flight:
    work = Work.of(tokens, 0)
    return Flight(work, load.rates.prefill_ms(work), load.backlog_ms(0.0), output)


def new() -> Load:
    return Load(PrefillModel(0.0, 1.0, 0.0, 0.0))  # a millisecond per token


def test_the_backlog_is_the_work_of_those_without_a_first_token() -> None:
    load = new()
    one, two = flight(100, load), flight(50, load)
    load.sent(one, 0.0, 0)
    load.sent(two, 0.0, 1)
    assert load.backlog_ms(0.0) == pytest.approx(150.0)
    load.answered(one, 0.1)
    assert load.backlog_ms(0.1) == pytest.approx(50.0)
    assert (load.num_pending, load.num_streams, load.num_requests) == (1, 1, 2)


def test_work_is_done_meanwhile_but_no_more_than_that_of_the_head_of_the_line() -> None:
    load = new()
    load.sent(flight(100, load), 0.0, 0)
    load.sent(flight(50, load), 0.0, 1)
    assert load.backlog_ms(0.06) == pytest.approx(90.0)
    assert load.backlog_ms(5.0) == pytest.approx(50.0)


def test_a_prefill_is_timed_from_when_the_one_before_it_was_done() -> None:
    load = new()
    one, two = flight(100, load), flight(50, load)
    load.sent(one, 0.0, 0)
    load.sent(two, 0.0, 1)
    load.answered(one, 0.1)
    load.answered(two, 0.16)
    assert two.took_ms == pytest.approx(60.0)
    load.learn(two, two.work)
    load.learn(two, two.work)
    assert load.learner.num_samples == 1


def test_one_that_is_late_makes_its_replica_slower_before_anything_was_learned() -> None:
    load = new()
    load.sent(flight(100, load), 0.0, 0)
    assert load.slowness(0.2) == 1.0
    assert load.slowness(2.5) == pytest.approx(10.0)


def test_who_waits_behind_others_is_not_late() -> None:
    load = new()
    flights = [flight(1000, load) for _ in range(5)]
    for one in flights:
        load.sent(one, 0.0, 0)
    for index, one in enumerate(flights):
        assert load.slowness(index + 0.99) == 1.0
        load.answered(one, index + 1.0)


@pytest.mark.parametrize("answered", [False, True])
def test_nothing_is_left_of_a_request_that_is_over(answered: bool) -> None:
    load = new()
    one = flight(100, load, output=30)
    load.sent(one, 0.0, 0)
    assert load.inflight_tokens == 130
    if answered:
        load.answered(one, 0.1)
        assert load.inflight_tokens == 30
    for _ in range(2):
        load.finished(one, 0.2)
        assert (load.num_requests, load.inflight_tokens, load.backlog_ms(1.0)) == (0, 0, 0.0)
