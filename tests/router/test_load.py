import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import BLOCK

from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.load import ReplicaLoad, RequestFlight
from headstart.router.step_rates import PrefillWork, StepRates


def flight(tokens: int, output: int = 0) -> RequestFlight:
    return RequestFlight(PrefillWork.of(tokens, 0), float(tokens), 0.0, tokens, output)


def new() -> tuple[Endpoint, ReplicaLoad]:
    """A replica that needs a millisecond per token, and nothing else."""
    one = Endpoint("r0", ApproximateIndex(16), block_size=BLOCK, prior=StepRates(0.0, 0.0, 0.0, 1.0, 0.0))
    return one, one.load


def test_the_backlog_is_the_work_of_those_without_a_first_token() -> None:
    endpoint, load = new()
    one, two = flight(100), flight(50)
    load.record_sent(one, 0.0, 0)
    load.record_sent(two, 0.0, 1)
    assert endpoint.backlog_ms(0.0) == pytest.approx(150.0)
    load.record_first_token(one, 0.1)
    assert endpoint.backlog_ms(0.1) == pytest.approx(50.0)
    assert (load.num_awaiting_first_token, load.num_streams, load.num_requests) == (1, 1, 2)


def test_work_is_done_meanwhile_but_no_more_than_that_of_the_head_of_the_line() -> None:
    endpoint, load = new()
    load.record_sent(flight(100), 0.0, 0)
    load.record_sent(flight(50), 0.0, 1)
    assert endpoint.backlog_ms(0.06) == pytest.approx(90.0)
    assert endpoint.backlog_ms(5.0) == pytest.approx(50.0)


def test_a_busy_period_is_a_sample_when_the_work_of_all_its_requests_is_known() -> None:
    _, load = new()
    one, two = flight(100), flight(50)
    load.record_sent(one, 0.0, 0)
    load.record_sent(two, 0.0, 1)
    load.record_first_token(one, 0.1)
    load.record_first_token(two, 0.15)
    load.correct_prefill_work(one, one.work)
    assert load.learner.num_samples == 0
    load.correct_prefill_work(two, two.work)
    load.correct_prefill_work(two, two.work)
    assert load.learner.num_samples == 1 and load.rates.token == pytest.approx(1.0, rel=0.01)


def test_the_time_of_a_step_is_shared_by_all_that_end_in_it() -> None:
    """Found by an independent simulator: the first one got the whole step, and the others seemed to take no time."""
    _, load = new()
    for number in range(40):
        now = 10.0 * number
        flights = [flight(100), flight(100), flight(100)]
        for one in flights:
            load.record_sent(one, now, 0)
        for one in flights:
            load.record_first_token(one, now + 0.3)
            load.correct_prefill_work(one, one.work)
            load.record_finished(one, now + 0.3)
    assert load.learner.num_samples == 40
    assert load.rates.token == pytest.approx(1.0, rel=0.01) and load.rates.step == pytest.approx(0.0, abs=0.1)


def test_a_request_that_failed_makes_its_busy_period_no_sample() -> None:
    _, load = new()
    one, two = flight(100), flight(50)
    load.record_sent(one, 0.0, 0)
    load.record_sent(two, 0.0, 1)
    load.record_finished(one, 5.0)
    load.record_first_token(two, 5.1)
    load.correct_prefill_work(two, two.work)
    assert load.learner.num_samples == 0 and load.learner.slowdown_versus_fleet(load.pace, 5.1) == 1.0


def test_a_first_token_that_was_not_seen_teaches_nothing() -> None:
    _, load = new()
    one = flight(100)
    load.record_sent(one, 0.0, 0)
    load.record_first_token(one, 60.0, is_assumed=True)
    load.correct_prefill_work(one, one.work)
    load.record_finished(one, 120.0, 50)
    assert load.learner.num_samples == 0 and load.learner.slowdown_versus_fleet(load.pace, 120.0) == 1.0


def test_a_decode_is_a_sample_of_as_many_steps_as_it_has_tokens() -> None:
    """An answer of 101 tokens, alone, at 20 ms per step."""
    load = ReplicaLoad()
    for number in range(60):
        one, now = flight(10), 100.0 * number
        load.record_sent(one, now, 0)
        load.record_first_token(one, now + 0.0206)
        load.correct_prefill_work(one, one.work)
        load.record_finished(one, now + 2.0206, 101)
    rates = load.rates
    assert load.learner.mean_output == pytest.approx(101)
    assert rates.decode_steps_ms(1, 1, 10 + 50) == pytest.approx(20.0, rel=0.05)


def test_one_that_is_late_makes_its_replica_slower_before_anything_was_learned() -> None:
    endpoint, load = new()
    load.record_sent(flight(100), 0.0, 0)
    assert endpoint.slowdown_versus_fleet(0.2) == 1.0
    assert endpoint.slowdown_versus_fleet(2.0) == pytest.approx(10.0)


def test_who_waits_behind_others_is_not_late() -> None:
    endpoint, load = new()
    flights = [flight(1000) for _ in range(5)]
    for one in flights:
        load.record_sent(one, 0.0, 0)
    for index, one in enumerate(flights):
        assert endpoint.slowdown_versus_fleet(index + 0.99) == 1.0
        load.record_first_token(one, index + 1.0)


def test_who_shares_a_step_with_others_is_not_late() -> None:
    endpoint, load = new()
    for _ in range(5):
        load.record_sent(flight(1000), 0.0, 0)
    assert endpoint.slowdown_versus_fleet(4.99) == 1.0


@pytest.mark.parametrize("answered", [False, True])
def test_nothing_is_left_of_a_request_that_is_over(answered: bool) -> None:
    endpoint, load = new()
    one = flight(100, output=30)
    load.record_sent(one, 0.0, 0)
    assert (load.inflight_tokens, load.pending_tokens) == (130, 100)
    if answered:
        load.record_first_token(one, 0.1)
        assert (load.inflight_tokens, load.pending_tokens, load.stream_tokens) == (30, 0, 100)
    for _ in range(2):
        load.record_finished(one, 0.2)
        assert (load.num_requests, load.inflight_tokens, endpoint.backlog_ms(1.0)) == (0, 0, 0.0)
        assert (load.pending_tokens, load.pending_pairs, load.pending_prompts, load.stream_tokens) == (0, 0.0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 20_000), st.floats(0.0, 2.0))))
def test_whatever_order_things_happen_in_the_counts_are_of_what_is_in_flight(
    acts: list[tuple[int, int, int, float]],
) -> None:
    """Law: tokens, pairs and streams are sums over the requests in flight, and no cost is negative or infinite."""
    endpoint, load = new()
    now, pending, streams = 0.0, list[RequestFlight](), list[RequestFlight]()
    for kind, which, tokens, later in acts:
        now += later
        if kind < 2:
            pending.append(flight(tokens))
            load.record_sent(pending[-1], now, 0)
        elif kind == 2 and pending:
            streams.append(pending.pop(which % len(pending)))
            load.record_first_token(streams[-1], now)
        elif pending or streams:
            found = streams if streams else pending
            one = found.pop(which % len(found))
            load.correct_prefill_work(one, PrefillWork.of(one.prompt_tokens, which))
            load.record_finished(one, now, tokens % 50)
        assert load.pending_tokens == sum(one.work.tokens for one in pending)
        assert load.pending_pairs == pytest.approx(sum(one.work.pairs for one in pending))
        assert (load.num_awaiting_first_token, load.num_streams) == (len(pending), len(streams))
        assert load.stream_tokens == sum(one.prompt_tokens for one in streams)
        assert 0.0 <= endpoint.backlog_ms(now) < float("inf") and 1.0 <= endpoint.slowdown_versus_fleet(now) < float(
            "inf"
        )
