"""The policies of other routers by hand-made cases: each decision follows from the rule its docstring names."""

from router.fleets import ask, endpoint

from headstart.router.endpoint import ReplicaReport
from headstart.router.policies.policy import Policy
from headstart.router.policies.simple import LeastUncachedTokensPolicy
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight
from headstart.router.routing_request import RoutingRequest
from headstart_lab.router.peers import DualMapPolicy, DynamoPolicy, LlmdPolicy, LmetricPolicy, RayPolicy, SmgPolicy


def fleet(policy: Policy, count: int = 3) -> Router:
    router = Router(policy)
    for index in range(count):
        router.add(endpoint(f"r{index}", 64))
    return router


def send(router: Router, request: RoutingRequest, to: str, *, answered: bool = False) -> RoutedInFlight:
    in_flight = router.record_sent(router.pick(request, 0.0), 0.0, to)
    if answered:
        router.record_first_token(in_flight, 0.0)
    return in_flight


def serve(router: Router, request: RoutingRequest, to: str) -> None:
    router.record_finished(send(router, request, to, answered=True), 0.0)


def scores(router: Router, request: RoutingRequest) -> dict[str, float]:
    choice = router.pick(request, 0.0).choice
    return {c.name: score for c, score in zip(choice.ranked, choice.scores, strict=True)}


def test_work_counts_uncached_tokens_without_a_first_token_and_those_of_the_request() -> None:
    router = fleet(LeastUncachedTokensPolicy())
    serve(router, ask(1, 2), "r1")  # 8 tokens cached
    send(router, ask(7), "r0")  # 5 tokens to compute
    send(router, ask(8, 9), "r2", answered=True)
    assert scores(router, ask(1, 2, 3)) == {"r0": 18.0, "r1": 5.0, "r2": 13.0}


def test_llmd_prefers_any_replica_with_four_fifths_of_the_prompt() -> None:
    router = fleet(LlmdPolicy())
    serve(router, ask(1, 2, 3, 4, 5), "r1")
    for number in range(4):
        send(router, ask(10 * number + 20), "r1")
    assert router.pick(ask(1, 2, 3, 4, 5, tail=4), 0.0).endpoint.name == "r1"  # 20 of 24 tokens
    assert router.pick(ask(1, 2, 3, 4, 5, tail=6), 0.0).endpoint.name != "r1"  # 20 of 26


def test_llmd_chooses_the_fewest_tokens_in_flight_among_replicas_with_the_prefix() -> None:
    router = fleet(LlmdPolicy())
    for name in ("r0", "r1"):
        serve(router, ask(1, 2, 3, 4, 5), name)
    send(router, ask(40), "r0", answered=True)  # its output is still in flight: 1.5 times 5 tokens
    assert router.pick(ask(1, 2, 3, 4, 5), 0.0).endpoint.name == "r1"


def test_llmd_leaves_the_prefix_if_that_saves_more_than_its_penalty() -> None:
    router = fleet(LlmdPolicy(max_penalty=1.0, rate=10.0))
    serve(router, ask(1, 2), "r1")
    send(router, RoutingRequest(ask(5, tail=3).prompt, max_tokens=3), "r1")  # 7 tokens and 3: exactly one second
    assert router.pick(ask(1, 2), 0.0).endpoint.name == "r1"
    send(router, RoutingRequest(ask(6, tail=3).prompt, max_tokens=3), "r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name != "r1"


def test_dynamo_adds_blocks_to_prefill_and_blocks_held_shared_ones_once() -> None:
    router = fleet(DynamoPolicy())
    serve(router, ask(1, 2), "r0")  # cached, not held
    send(router, ask(1, 2), "r1", answered=True)  # decoding: two blocks held
    send(router, ask(7, tail=0), "r2")  # one block to prefill, and held
    assert scores(router, ask(1, 2, tail=0)) == {"r0": 1 / 4 + 2, "r1": 1 / 4 + 2, "r2": 1 + 2 + 1 + 2}


def test_smg_follows_the_longest_match_above_its_threshold() -> None:
    router = fleet(SmgPolicy())
    serve(router, ask(1), "r1")
    serve(router, ask(1, 2), "r2")
    assert router.pick(ask(1, 2, 3), 0.0).endpoint.name == "r2"
    assert router.pick(ask(1, *range(50, 60)), 0.0).endpoint.name == "r0"  # 4 of 45 tokens: the smallest index


def test_smg_skips_a_replica_far_above_the_mean_and_one_that_reports_overload() -> None:
    router = fleet(SmgPolicy(), count=4)
    serve(router, ask(1, 2), "r1")
    for number in range(5):
        send(router, ask(100 + number), "r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name == "r1"  # 5 against a mean of 1.25 and a margin of 4
    for number in range(5):
        send(router, ask(200 + number), "r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name != "r1"
    router = fleet(SmgPolicy())
    serve(router, ask(1, 2), "r1")
    router.endpoints["r1"].reported = ReplicaReport(at=0.0, kv_usage=0.8)
    assert router.pick(ask(1, 2), 0.0).endpoint.name != "r1"


def test_ray_draws_two_of_the_longest_matches_and_takes_the_one_with_fewer_requests() -> None:
    router = fleet(RayPolicy(), count=5)
    for name in ("r1", "r2"):
        serve(router, ask(1, 2), name)
    send(router, ask(1, 2), "r1")
    assert {router.pick(ask(1, 2, number), 0.0).endpoint.name for number in range(20)} == {"r2"}
    chosen = set[str]()
    for number in range(40):  # no match: any two of the three with the smallest index
        router.policy.record_pick(router.pick(ask(500 + number), 0.0).choice, router.endpoints["r0"])
        chosen.add(router.pick(ask(500 + number), 0.0).endpoint.name)
    assert chosen == {"r0", "r3", "r4"}


def test_ray_does_not_leave_a_loaded_match() -> None:
    router = fleet(RayPolicy())
    serve(router, ask(1, 2), "r1")
    for number in range(30):
        send(router, ask(100 + number), "r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name == "r1"


def test_lmetric_multiplies_uncached_tokens_by_the_requests_in_flight_and_one() -> None:
    router = fleet(LmetricPolicy())
    serve(router, ask(1, 2), "r1")
    for number in range(3):
        send(router, ask(100 + number), "r1", answered=True)
    send(router, ask(200), "r2")
    assert scores(router, ask(1, 2, 3)) == {"r0": 13.0, "r1": 5.0 * 4, "r2": 13.0 * 2}


def test_dualmap_uses_one_of_two_replicas_for_prompts_that_begin_alike() -> None:
    router = fleet(DualMapPolicy(prefix_tokens=8), count=8)
    alike = {router.pick(ask(1, 2, number), 0.0).endpoint.name for number in range(20)}
    apart = {router.pick(ask(number, 2), 0.0).endpoint.name for number in range(40)}
    assert len(alike) <= 2 < len(apart)


def test_dualmap_stays_with_the_prefix_until_its_first_token_would_be_late() -> None:
    router = fleet(DualMapPolicy(prefix_tokens=8, slo=1.0, rate=20.0), count=8)
    first, second = (candidate.name for candidate in router.pick(ask(1, 2, 3), 0.0).choice.ranked[:2])
    serve(router, ask(1, 2, 3), second)
    assert router.pick(ask(1, 2, 3), 0.0).endpoint.name == second
    send(router, ask(50, 51, 52, 53), second)  # 17 tokens to compute, and one: 0.9 s
    assert router.pick(ask(1, 2, 3), 0.0).endpoint.name == second
    send(router, ask(60), second)
    assert router.pick(ask(1, 2, 3), 0.0).endpoint.name == first
