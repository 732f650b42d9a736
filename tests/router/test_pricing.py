"""Prices by plain numbers are those by arrays, to the last bit, and so are the choices."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router.fleets import BLOCK, ask, endpoint

from headstart.model.kernels.compiled_pool import compiled_pool_factory
from headstart.router.endpoint import Endpoint, ReplicaReport
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.cost import LeastCostPolicy
from headstart.router.pricing import cost_at_each, cost_at_replica
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import ReportedTokenUsage, RoutingRequest
from headstart.router.step_rates import STEP_TOKENS, StepRates

POOLS = compiled_pool_factory()


def lively(seed: int, count: int, prior: StepRates | None, *, tokens: bool = True) -> tuple[Router, float]:
    """A fleet after a random history: requests in all states, reports, a slow replica, rates that are learned.

    `tokens`: with events of tokens behind the first of an answer.
    """
    rng, router, now = Random(seed), Router(), 100.0
    for number in range(count):
        index = ApproximateIndex(rng.choice((4, 16, 64)))
        router.add(Endpoint(f"r{number}", index, block_size=BLOCK, prior=prior))
    under_way: list[RoutedInFlight] = []
    for _ in range(rng.randrange(60)):
        now += rng.expovariate(20.0)
        act = rng.random()
        if act < 0.5 or not under_way:
            request = ask(*[rng.randrange(6) for _ in range(rng.randrange(8))], tail=rng.randrange(1, 4))
            target = rng.choice([None, f"r{rng.randrange(count)}"])
            under_way.append(router.record_sent(router.pick(request, now), now, target))
        elif act < 0.7:
            one = rng.choice(under_way)
            if tokens and one.first_token is not None:
                router.record_later_token(one, now)
            else:
                router.record_first_token(one, now)
        elif act < 0.95:
            done = under_way.pop(rng.randrange(len(under_way)))
            router.record_finished(
                done, now, ReportedTokenUsage(done.view.num_prompt_tokens, 0), num_output=rng.randrange(40)
            )
        else:
            replica = router.endpoints[f"r{rng.randrange(count)}"]
            replica.reported = ReplicaReport(
                at=now - rng.choice((0.0, 9.0)), waiting=rng.randrange(4), running=rng.randrange(9)
            )
            replica.load.pace.learn(rng.choice((1.0, 7.0)), now)
    return router, now + rng.choice((0.0, 0.01, 3.0))


histories = st.tuples(
    st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([None, StepRates(5.0, 0.3, 1e-3, 0.07, 1e-4)])
)


@given(histories, st.integers(0, 3 * STEP_TOKENS), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_one_price_is_that_of_the_fleet_to_the_last_bit(
    history: tuple[int, int, StepRates | None], prompt_tokens: int, seed: int
) -> None:
    router, now = lively(*history)
    endpoints, rng = list(router.endpoints.values()), Random(seed)
    hits = [rng.randrange(prompt_tokens + 1) for _ in endpoints]
    costs = cost_at_each(endpoints, prompt_tokens, hits, now)
    if POOLS is not None:
        router.endpoints["r0"].load.learner.prices = POOLS.pricing_kernel
        assert repr([part.tolist() for part in cost_at_each(endpoints, prompt_tokens, hits, now)]) == repr(
            [part.tolist() for part in costs]
        )
    for number, one in enumerate(endpoints):
        price = cost_at_replica(one, prompt_tokens, hits[number], now)
        assert list(map(repr, map(float, price))) == [repr(float(part[number])) for part in costs]
        assert (
            price.expected_ttft_ms == costs.expected_ttft_ms[number]
            and price.cost_without_evictions == costs.cost_without_evictions[number]
        )


@given(histories, st.lists(st.integers(0, 5), max_size=8), st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=200, deadline=None)
def test_choices_among_few_are_those_by_arrays(
    history: tuple[int, int, StepRates | None], blocks: list[int], slack: float
) -> None:
    router, now = lively(*history)
    policy = LeastCostPolicy(slack)
    view = router.pick(ask(*blocks), now).view
    assert repr(policy.rank_by_scalars(view)) == repr(policy.rank_by_arrays(view))


@pytest.mark.parametrize("prior", [None, StepRates(5.0, 0.3, 1e-3, 0.07, 1e-4)])
def test_choices_of_large_fleets_are_those_by_plain_numbers(prior: StepRates | None) -> None:
    """By arrays and in compiled code, with 25 to 80 replicas, of which some tie; 3,000 decisions."""
    rng = Random(7)
    for seed in range(150):
        router, now = lively(seed, rng.randrange(25, 80), prior)
        for _ in range(10):
            policy = LeastCostPolicy(rng.choice((0.0, 0.05, 1.0)))
            view = router.pick(ask(*[rng.randrange(6) for _ in range(rng.randrange(8))]), now).view
            expected = repr(policy.rank_by_scalars(view))
            for prices in (None, POOLS.pricing_kernel if POOLS is not None else None):
                router.endpoints["r0"].load.learner.prices = prices
                assert repr(policy.rank_by_arrays(view)) == expected


def test_a_waiting_prefill_and_a_late_answer_are_priced_alike() -> None:
    router = Router()
    router.add(endpoint("r0"))
    router.record_sent(router.pick(ask(1, 2, 3), 0.0), 0.0)
    early, late = (cost_at_replica(router.endpoints["r0"], 13, 0, now) for now in (0.001, 2.0))
    assert early.backlog == pytest.approx(13.0) and early.factor == 1.0
    assert late.backlog == 0.0 and late.factor > 10.0


def streaming(step_ms: float) -> tuple[Router, float]:
    """A replica whose stream had its last of four tokens just now, in steps of `step_ms`."""
    router, now = Router(), 0.0
    router.add(Endpoint("r0", ApproximateIndex(64), block_size=BLOCK, prior=StepRates(step_ms, 0.0, 0.0, 1.0, 0.0)))
    for _ in range(16):  # so that the rates are believed
        sent = router.record_sent(router.pick(ask(tail=1), now), now)
        now += (step_ms + 1.0) / 1e3
        router.record_first_token(sent, now, ReportedTokenUsage(1, 0))
        router.record_finished(sent, now, ReportedTokenUsage(1, 0), num_output=1)
    sent = router.record_sent(router.pick(ask(tail=1), now), now)
    router.record_first_token(sent, now + (step_ms + 1.0) / 1e3)
    now += (step_ms + 1.0) / 1e3
    for _ in range(3):
        now += step_ms / 1e3
        router.record_later_token(sent, now)
    return router, now


def test_the_rest_of_a_step_is_counted_from_the_last_token_of_a_stream() -> None:
    router, now = streaming(10.0)
    replica = router.endpoints["r0"]
    assert not replica.load.learner.is_unreliable
    whole, rest = (cost_at_replica(replica, 1, 0, now + later).backlog for later in (0.0, 0.008))
    assert whole == pytest.approx(replica.load.rates.step, rel=0.2) and whole - rest == pytest.approx(8.0, rel=0.05)


def test_a_stream_that_has_been_silent_for_long_is_half_a_step() -> None:
    router, now = streaming(10.0)
    replica = router.endpoints["r0"]
    assert cost_at_replica(replica, 1, 0, now + 1.0).backlog == pytest.approx(replica.load.rates.step / 2, rel=0.05)


def queued(router: Router, now: float, *requests: RoutingRequest) -> list[RoutedInFlight]:
    """Send requests at once to the replica `r0`."""
    return [router.record_sent(router.pick(request, now), now, "r0") for request in requests]


def test_requests_that_wait_for_each_others_prefixes_take_a_step_each() -> None:
    router, now = streaming(10.0)
    replica = router.endpoints["r0"]
    before = cost_at_replica(replica, 1, 0, now).backlog
    queued(router, now, ask(1, 2), ask(1, 2, 3), ask(1, 2, 3, 4))
    chained = cost_at_replica(replica, 1, 0, now).backlog - before
    router, now = streaming(10.0)
    queued(router, now, ask(1, 2), ask(5, 6), ask(7, 8))
    apart = cost_at_replica(router.endpoints["r0"], 1, 0, now).backlog - before
    tokens, step = replica.load.rates.token, replica.load.rates.step
    assert chained == pytest.approx((9 + 5 + 5) * tokens + 3 * step, rel=0.05)
    assert apart == pytest.approx(3 * 9 * tokens + step, rel=0.05)


def test_where_a_prefix_is_computed_and_used_in_one_step_no_wait_is_expected() -> None:
    router, now = streaming(10.0)
    learner = router.endpoints["r0"].load.learner
    for number in range(8):
        first, second = queued(router, now, ask(10 + number, 30), ask(10 + number, 30, 50))
        now += 0.040
        for one in (first, second):
            router.record_first_token(one, now)
            router.record_finished(one, now)
    assert not learner.replicas_wait_for_prefix_leader
    queued(router, now, ask(1, 2), ask(1, 2, 3))
    assert router.endpoints["r0"].load.pricing_row[-1] == 0


def test_a_cold_prompt_is_placed_where_no_answer_is_generated_if_there_is_such_a_replica() -> None:
    for number in range(20):
        router = Router()
        for name in ("r0", "r1", "r2"):
            router.add(endpoint(name, 64, StepRates(1e-3, 1e-3, 1e-3, 1.0, 0.0)))
        router.record_first_token(queued(router, 0.0, ask(1))[0], 0.1)
        assert router.pick(ask(*range(100 + number, 112 + number)), 0.2).endpoint.name != "r0"


def test_a_full_cache_costs_the_time_until_answers_have_released_what_is_missing() -> None:
    router, now = streaming(10.0)
    replica = router.endpoints["r0"]
    load, step = replica.load, replica.load.rates.step
    replica.index = ApproximateIndex(16)  # 64 tokens
    (held,) = queued(router, now, ask(*range(15)))  # 60 of them
    before = cost_at_replica(replica, 13, 0, now)
    assert before.wait > 0.0 and before.backlog >= before.wait
    output, streams = load.learner.mean_output, load.num_streams
    answers = (streams + 1) * output  # one is pending
    missing, claimed = 13 + output + answers - 4, 60 + answers
    release = (streams + 1) * output * step / (claimed * streams)
    assert before.wait == pytest.approx(missing * release, rel=0.01)
    cached = cost_at_replica(replica, 13, 8, now)
    assert before.decode - cached.decode == pytest.approx(8 * (streams + 1) * release, rel=0.01), "others wait for them"
    assert cost_at_replica(replica, 40, 0, now).wait > before.wait
    router.record_first_token(held, now + 0.1)
    router.record_finished(held, now + 0.2)
    assert cost_at_replica(replica, 13, 0, now + 0.2).wait < before.wait


def test_a_prefix_in_flight_is_priced_as_cached_plus_what_is_left_of_its_prefill() -> None:
    router = Router()
    router.add(endpoint("r0"))
    replica = router.endpoints["r0"]
    queued(router, 0.0, ask(1, 2, 3))  # 13 tokens of a millisecond, and a step
    hit = router.pick(ask(1, 2, 3, 4), 0.0).candidate.hit_tokens
    assert hit == 12
    totals = [cost_at_replica(replica, 17, hit, ms / 1e3).expected_ttft_ms for ms in (0.0, 5.0, 10.0)]
    assert totals == pytest.approx([14.0 + 5.0, 9.0 + 5.0, 4.0 + 5.0])


def test_of_answers_that_stand_still_those_count_that_would_not_anywhere() -> None:
    router = Router()
    router.add(endpoint("r0", 64))
    priced = [cost_at_replica(router.endpoints["r0"], 40, 0, 0.0)]
    for number in range(3):
        router.record_first_token(queued(router, 0.0, ask(number))[0], 0.0)
        priced.append(cost_at_replica(router.endpoints["r0"], 40, 0, 0.0))
    assert {one.prefill for one in priced} == {41.0}
    shares = [0.75 * 41.0 * share for share in (0, 1 / 2, 2 / 3, 3 / 4)]
    assert [one.extra_stall_cost(0.0) for one in priced] == pytest.approx(shares)
    assert [one.extra_stall_cost(1.0) for one in priced[1:]] == pytest.approx(
        [share - 0.375 * 41.0 for share in shares[1:]]
    )


@given(histories, st.integers(0, 3 * STEP_TOKENS))
@settings(max_examples=100, deadline=None)
def test_stalls_cost_less_than_the_prefill_and_nothing_where_there_are_the_fewest(
    history: tuple[int, int, StepRates | None], prompt_tokens: int
) -> None:
    router, now = lively(*history)
    costs = cost_at_each(list(router.endpoints.values()), prompt_tokens, [0] * len(router.endpoints), now)
    stalls, most = costs.extra_stall_cost(costs.requests.min()), 0.75 * costs.prefill * costs.factor
    assert (stalls >= 0.0).all() and (stalls <= most).all() and not stalls[costs.requests.argmin()]


def test_beside_other_routers_no_stalls_are_priced() -> None:
    router = Router()
    router.add(endpoint("r0", 64))
    router.record_first_token(queued(router, 0.0, ask(1))[0], 0.0)
    router.endpoints["r0"].reported = ReplicaReport(at=0.0, waiting=0, running=40)
    assert cost_at_replica(router.endpoints["r0"], 40, 0, 0.0).extra_stall_cost(0.0) == 0.0


def test_a_long_prompt_leaves_a_prefix_whose_replica_answers_others_if_computing_it_again_costs_less() -> None:
    for hit, stays in ((2, False), (8, True)):
        router = Router()
        for name in ("r0", "r1"):
            router.add(endpoint(name, 256))
        for number in range(2):
            router.record_first_token(queued(router, 0.0, ask(*range(hit), 50 + number))[0], 0.1)
        new = ask(*range(hit), *range(100, 110))  # 41 tokens, of which stalls cost half
        assert (router.pick(new, 0.2).endpoint.name == "r0") is stays
