"""Every policy by hand-made cases; endpoints are real, what they know is what was served."""

import tomllib
from collections import Counter
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import RATES, ask, endpoint, serve

from headstart.config.options import RouterOptions
from headstart.core.errors import ConfigError
from headstart.router.endpoint import ReplicaReport
from headstart.router.policies import policy_table, rendezvous
from headstart.router.policies.cost import LeastCostPolicy
from headstart.router.policies.policy import Policy
from headstart.router.policies.policy_table import PEERS, make_policy, policy_names
from headstart.router.policies.rendezvous import rank_by_key
from headstart.router.policies.scorers import SessionScorer
from headstart.router.policies.simple import PrefixThresholdPolicy
from headstart.router.policies.weighted import WeightedPolicy
from headstart.router.router import HIT_TOKENS, Router
from headstart.router.routing_decision import RoutingDecision
from headstart.router.routing_request import RoutingRequest
from headstart.router.step_rates import PrefillWork, StepRates

LAB = Path(__file__).parents[2] / "lab" / "pyproject.toml"


def fleet(policy: Policy | None = None, count: int = 3) -> Router:
    router = Router(policy)
    for index in range(count):
        router.add(endpoint(f"r{index}", 64))
    return router


def warm(router: Router, name: str, request: RoutingRequest, noise: float = 1.0) -> None:
    """Lets one replica serve a request at time 0, whatever the policy says, in the time that takes."""
    pick = router.pick(request, 0.0)
    pick = router.record_sent(pick, 0.0, name)
    took = RATES.prefill_ms(PrefillWork.of(request.prompt.num_tokens, pick.candidate.hit_tokens)) / 1e3
    router.record_first_token(pick, noise * took)
    router.record_finished(pick, noise * took)


def send(router: Router, request: RoutingRequest, now: float = 0.0, to: str | None = None) -> RoutingDecision:
    """A request that stays under way."""
    pick = router.pick(request, now)
    pick = router.record_sent(pick, now, to)
    return pick


def test_policies_have_the_names_in_the_table() -> None:
    own = {"cost", "weighted", "work", "prefix-threshold", "least-load", "round-robin"}
    listed = tomllib.loads(LAB.read_text())["project"]["entry-points"]["headstart.policies"]
    peers = {name: EntryPoint(name, value, "headstart.policies").load() for name, value in listed.items()}
    assert tuple(peers) == PEERS and all(peer().name == name for name, peer in peers.items())
    choices = next(field for field in fields(RouterOptions) if field.name == "routing_policy").metadata["choices"]
    assert set(choices) == own | set(peers)
    assert own | {"llm-d"} <= set(policy_names()) <= set(choices)  # a checkout's laboratory may be an older one
    assert all(make_policy(name).name == name for name in policy_names())
    with pytest.raises(ConfigError, match="no routing policy 'best'"):
        make_policy("best")


def test_policies_of_other_routers_need_the_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_table, "entry_points", lambda **_: ())
    assert "llm-d" not in policy_names() and "cost" in policy_names()
    with pytest.raises(ConfigError, match="llm-d is part of Headstart's laboratory"):
        make_policy("llm-d")


@pytest.mark.parametrize("name", ["cost", "weighted", "prefix-threshold", "work", "llm-d", "dynamo", "smg", "ray"])
def test_a_warm_prefix_is_asked_where_it_is(name: str) -> None:
    router = fleet(make_policy(name))
    warm(router, "r1", ask(1, 2, 3, 4))
    assert router.pick(ask(1, 2, 3, 4, 5), 1.0).endpoint.name == "r1"


def test_every_order_of_the_replicas_is_about_as_frequent_for_keys() -> None:
    digests = [rendezvous.key_digest(name.encode()) for name in ("r0", "r1", "r2", "r3")]
    ranks = (rendezvous.rendezvous_weights(number.to_bytes(4, "big"), digests) for number in range(4800))
    orders = Counter(tuple(one.argsort().tolist()) for one in ranks)
    assert len(orders) == 24 and min(orders.values()) > 140 and max(orders.values()) < 260  # 200 each; 4 deviations


# -------------------------------------------------------------------------------------------------------------- cost


def test_samples_of_one_prompt_are_computed_once_and_prompts_that_share_a_prefix_where_it_is_faster() -> None:
    router = fleet()
    router.record_sent(router.pick(ask(50, 51), 0.0), 0.0, "r1")  # a replica has something to compute
    home = router.record_sent(router.pick(ask(1, 2, 3), 0.0), 0.0).endpoint.name
    for _ in range(3):  # an idle replica would be a step earlier
        assert router.record_sent(router.pick(ask(1, 2, 3), 0.0), 0.0).endpoint.name == home
    idle = ({"r0", "r1", "r2"} - {"r1", home}).pop()
    assert router.pick(ask(1, 2, 3, 4, 5), 0.0).endpoint.name == idle
    assert router.pick(ask(1, 2, 3), 0.0).endpoint.name == home


def test_cost_leaves_a_warm_replica_when_the_wait_there_is_longer_than_computing_again() -> None:
    router = fleet()
    warm(router, "r1", ask(1, 2, 3, 4))
    asked = [send(router, ask(1, 2, 3, 4, 100 + index)).endpoint.name for index in range(12)]
    assert asked[0] == "r1" and asked.count("r1") < 12
    busy = router.endpoints["r1"].backlog_ms(0.0)
    assert busy <= 2.5 * 17  # more than a prefill of the whole prompt, and of what is added for those behind, never


def test_cost_is_made_of_backlog_and_uncached_tokens() -> None:
    router = fleet()
    warm(router, "r1", ask(1, 2))
    send(router, ask(7, 8, 9, tail=0), to="r0")
    rows = {row["endpoint"]: row for row in router.pick(ask(1, 2, 3, tail=0), 0.0).explain()["candidates"]}
    assert rows["r1"]["cached_tokens"] == 8 and rows["r1"]["prefill_ms"] == pytest.approx(1.0 + 4)
    assert rows["r0"]["backlog_ms"] == pytest.approx(13.0)
    assert rows["r0"]["prefill_ms"] == pytest.approx(12.0)  # in the same step
    assert rows["r2"]["cost_ms"] == pytest.approx(13.0)


def test_the_parts_of_an_explanation_make_up_the_score() -> None:
    router = fleet()
    warm(router, "r1", ask(1, 2))
    for name, tail in (("r0", 0), ("r1", 1), ("r1", 2)):
        send(router, ask(7, 8, 9, tail=tail), to=name)
    rows = router.pick(ask(1, 2, 3), 0.0).explain()["candidates"]
    for row in rows:
        total = (row["backlog_ms"] + row["prefill_ms"] + row["decode_ms"]) * row["slowness"] + row["stall_ms"]
        assert row["score"] == pytest.approx(total, abs=0.01)
    assert {row["endpoint"]: row["stall_ms"] > 0.0 for row in rows} == {"r0": True, "r1": True, "r2": False}


def test_cost_avoids_a_slow_replica_by_its_learned_rates() -> None:
    router = fleet(count=2)
    for index in range(30):
        now = 10.0 * index
        pick = send(router, ask(index, 200 + index), now, to=f"r{index % 2}")
        took = 0.01 if index % 2 else 0.1
        router.record_first_token(pick, now + took)
        router.record_finished(pick, now + took)
    asked = [router.pick(ask(1000 + index, 7), 1000.0).endpoint.name for index in range(10)]
    assert asked == ["r1"] * 10


def test_cost_avoids_a_replica_that_does_not_answer_before_anything_is_learned() -> None:
    router = fleet(count=2)
    stuck = send(router, ask(1), 0.0)
    other = "r1" if stuck.endpoint.name == "r0" else "r0"
    assert {send(router, ask(10 + index), 60.0 + index).endpoint.name for index in range(3)} == {other}


def test_cold_prefixes_are_spread_and_each_goes_where_its_first_new_block_says() -> None:
    router = fleet()
    for number in range(60):
        request = ask(1, 100 + number)
        pick = router.pick(request, 0.0)
        hit = max(candidate.hit_blocks for candidate in pick.choice.ranked)
        hashes = request.prompt.block_hashes(4)
        key = hashes[min(hit + HIT_TOKENS // 4, len(hashes)) - 1]
        assert pick.endpoint.name == rank_by_key(key, router.endpoints)[0]
    counts = [0, 0, 0]
    for number in range(60):
        counts[int(router.pick(ask(500 + number), 0.0).endpoint.name[1])] += 1
    assert min(counts) >= 10


def test_placement_never_gives_up_what_is_cached_elsewhere() -> None:
    router = fleet()
    warm(router, "r1", ask(1))
    asked = {router.pick(ask(1, *range(100 + number, 112 + number)), 0.0).endpoint.name for number in range(30)}
    assert asked == {"r1"}


def test_replicas_that_were_hardly_asked_are_taken_to_be_like_the_others() -> None:
    """Found on agent traces: one replica turned out faster than its prior, and the others were never asked."""
    router = Router()
    for index in range(3):
        router.add(endpoint(f"r{index}", 64, rates=StepRates(50.0, 0.0, 0.0, 5.0, 0.0)))
    chosen = list[str]()
    for number in range(30):
        pick = send(router, ask(number, 7), 10.0 * number)
        router.record_finished(pick, 10.0 * number + 0.01)
        chosen.append(pick.endpoint.name)
    assert min(chosen.count(f"r{index}") for index in range(3)) >= 3
    assert len({id(one.load.learner) for one in router.endpoints.values()}) == 1


def test_a_first_block_that_all_have_does_not_place_anything() -> None:
    router = fleet()
    for name in router.endpoints:
        warm(router, name, ask(1))
    asked = [router.pick(ask(1, 100 + number, 5), 0.0).endpoint.name for number in range(60)]
    assert min(asked.count(name) for name in router.endpoints) >= 10


def test_load_overrides_the_placement_of_cold_prompts() -> None:
    router = fleet()
    request = ask(1, 2, 3, 4)
    first = router.pick(request, 0.0).endpoint.name
    send(router, ask(*range(50, 60)), to=first)
    assert router.pick(request, 0.0).endpoint.name != first


def test_fallbacks_are_all_others_the_best_first() -> None:
    router = fleet()
    warm(router, "r1", ask(1, 2, 3))
    send(router, ask(9, 9, 9, 9), to="r2")
    pick = router.pick(ask(1, 2, 3, 4), 0.0)
    assert (pick.endpoint.name, *pick.fallbacks) == ("r1", "r0", "r2")


@given(st.integers(2, 8), st.integers(0, 10_000))
def test_two_routers_that_never_talked_agree_on_cold_prefixes_at_equal_loads(count: int, seed: int) -> None:
    """Law: whatever either has served before, a prefix new to both goes to the same replica."""
    rng, one, two = Random(seed), fleet(count=count), fleet(count=count)
    for router in (one, two):
        for _ in range(rng.randrange(8)):
            warm(router, f"r{rng.randrange(count)}", ask(rng.randrange(4), rng.randrange(4)), rng.uniform(0.95, 1.05))
    for number in range(20):
        request = ask(100 + number, 5, 6)
        assert one.pick(request, 1e3).endpoint.name == two.pick(request, 1e3).endpoint.name


# ---------------------------------------------------------------------------------------------------------- weighted


def test_the_gateway_prefers_an_empty_queue_to_a_small_match() -> None:
    router = fleet(WeightedPolicy())
    warm(router, "r1", ask(1, 2))
    for _ in range(3):
        send(router, ask(50), to="r1")
    pick = router.pick(ask(1, 2, 3, 4, 5, 6), 0.0)
    assert pick.endpoint.name != "r1"
    assert pick.choice.scores[-1] == pytest.approx(2.0 * 0 + 2.0 + 3.0 * 8 / 25)


def test_kv_usage_and_adapters_are_what_replicas_say_of_themselves() -> None:
    router = fleet(WeightedPolicy({"kv-usage": 1.0}))
    for name, usage in (("r0", 0.9), ("r1", 0.2), ("r2", 0.5)):
        router.endpoints[name].reported = ReplicaReport(at=0.0, kv_usage=usage)
    assert (router.pick(ask(1), 1.0).endpoint.name, *router.pick(ask(1), 1.0).fallbacks) == ("r1", "r2", "r0")
    router = fleet(WeightedPolicy({"lora": 1.0}), count=4)
    states = (ReplicaReport(0.0, max_adapters=1, adapters=frozenset("b")), ReplicaReport(0.0, max_adapters=2))
    waiting = ReplicaReport(0.0, max_adapters=1, waiting_adapters=frozenset("a"))
    for name, state in zip(
        ("r0", "r1", "r2", "r3"), (*states, waiting, ReplicaReport(0.0, adapters=frozenset("a"))), strict=True
    ):
        router.endpoints[name].reported = state
    pick = router.pick(RoutingRequest(ask(1).prompt, adapter="a"), 0.0)
    assert [(c.name, score) for c, score in zip(pick.choice.ranked, pick.choice.scores, strict=True)] == [
        ("r3", 1.0),
        ("r1", 0.8),
        ("r2", 0.6),
        ("r0", 0.0),
    ]


def test_inflight_tokens_count_what_is_to_be_generated_too() -> None:
    """Law: 1.5 times the prompt, unless the request allows less (llm-d)."""
    router = fleet(WeightedPolicy({"inflight-tokens": 1.0}), count=2)
    send(router, RoutingRequest(ask(*range(20)).prompt, max_tokens=1000), to="r0")
    send(router, RoutingRequest(ask(*range(40)).prompt, max_tokens=1), to="r1")
    assert [one.load.inflight_tokens for one in router.endpoints.values()] == [81 + 122, 161 + 1]
    assert router.pick(ask(5), 0.0).endpoint.name == "r1"


def test_inflight_tokens_count_what_the_prompt_adds_less_its_hit() -> None:
    router = fleet(WeightedPolicy({"inflight-tokens": 1.0}), count=4)
    name = serve(router, ask(*range(9))).endpoint.name
    picks = [router.pick(ask(*range(9), 50 + number), 2.0) for number in range(8)]
    assert {pick.endpoint.name for pick in picks} == {name}
    assert picks[0].choice.scores[:2] == (1 - 5 / 4_194_304, 1 - 41 / 4_194_304)


def test_a_session_stays_where_it_was_served_last() -> None:
    router = fleet(WeightedPolicy({"session": 1.0}))
    first = router.pick(ask(1, session="s"), 0.0)
    first = router.record_sent(first, 0.0, "r2")
    assert all(router.pick(ask(number, session="s"), 0.0).endpoint.name == "r2" for number in range(20))
    others = {router.pick(ask(number, session="t"), 0.0).endpoint.name for number in range(20)}
    assert len(others) > 1


def test_sessions_are_bounded_and_the_oldest_is_forgotten() -> None:
    scorer = SessionScorer(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        scorer.record_pick(name, endpoint("r0"))
    assert len(scorer) == 2 and list(scorer._last) == ["a", "c"]


def test_weights_that_make_no_sense_are_refused() -> None:
    for weights in ({"prefx": 1.0}, {}, {"prefix": -1.0}):
        with pytest.raises(ConfigError):
            WeightedPolicy(weights)


def test_drawing_by_score_gives_each_its_share() -> None:
    router = fleet(WeightedPolicy({"kv-usage": 1.0}, rng=Random(0)), count=2)
    router.endpoints["r0"].reported = ReplicaReport(0.0, kv_usage=0.75)
    router.endpoints["r1"].reported = ReplicaReport(0.0, kv_usage=0.25)
    picks = [router.pick(ask(1), 0.0).endpoint.name for _ in range(400)]
    assert 70 <= picks.count("r0") <= 130


# ------------------------------------------------------------------------------------------------------ the simple ones


def test_prefix_threshold_follows_a_match_only_above_its_share() -> None:
    router = fleet(PrefixThresholdPolicy(cache_threshold=0.5))
    warm(router, "r1", ask(1, 2))
    send(router, ask(9), to="r1")
    assert router.pick(ask(1, 2, tail=1), 0.0).endpoint.name == "r1"
    assert router.pick(ask(1, 2, 3, 4, tail=1), 0.0).endpoint.name != "r1"


def test_prefix_threshold_follows_no_match_out_of_balance() -> None:
    router = fleet(PrefixThresholdPolicy(balance_abs=2))
    warm(router, "r1", ask(1, 2))
    for _ in range(2):
        send(router, ask(9), to="r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name == "r1"
    send(router, ask(9), to="r1")
    assert router.pick(ask(1, 2), 0.0).endpoint.name != "r1"


def test_least_load_counts_requests_and_takes_turns_among_equals() -> None:
    router = fleet(make_policy("least-load"))
    assert [send(router, ask(1)).endpoint.name for _ in range(6)] == ["r0", "r1", "r2"] * 2
    router.endpoints["r0"].reported = ReplicaReport(0.0, waiting=9)
    assert {send(router, ask(1)).endpoint.name for _ in range(4)} == {"r1", "r2"}


def test_round_robin_takes_turns_and_remembers_only_who_is_there() -> None:
    router = fleet(make_policy("round-robin"))
    assert [serve(router, ask(1)).endpoint.name for _ in range(4)] == ["r0", "r1", "r2", "r0"]
    router.remove("r1")
    assert [serve(router, ask(1)).endpoint.name for _ in range(3)] == ["r2", "r0", "r2"]
    router.add(endpoint("r9"))
    assert serve(router, ask(1)).endpoint.name == "r9"


def test_a_report_is_not_true_for_ever() -> None:
    one = endpoint("r0")
    one.reported = ReplicaReport(at=0.0, waiting=5, running=2)
    assert (one.waiting(1.0), one.num_requests(1.0)) == (5, 7)
    assert (one.waiting(60.0), one.num_requests(60.0)) == (0, 0)


def test_requests_of_other_routers_count_in_the_backlog() -> None:
    router = fleet(LeastCostPolicy(), count=2)
    send(router, ask(1, 2, 3), to="r0")
    one = router.endpoints["r0"]
    assert one.backlog_ms(0.0) == pytest.approx(14.0)
    one.reported = ReplicaReport(at=0.0, waiting=3)
    assert one.backlog_ms(0.0) == pytest.approx(3 * 14.0)


def test_own_requests_in_a_report_are_not_those_of_other_routers_once_they_are_answered() -> None:
    router = fleet(LeastCostPolicy(), count=2)
    sent = [send(router, ask(number, number + 1), to="r0") for number in range(3)]
    one = router.endpoints["r0"]
    one.reported = ReplicaReport(at=0.0, waiting=3)
    for each in sent:
        router.record_first_token(each, 0.1)
        router.record_finished(each, 0.2)
    assert one.backlog_ms(0.2) == 0.0


# ---------------------------------------------------------------------------------------------------------------- laws

Served = tuple[list[int], int, bool]


@pytest.mark.parametrize("name", policy_names())
@given(
    st.integers(1, 5), st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 9), st.booleans()))
)
def test_whatever_happened_all_are_ranked_once_and_picking_changes_nothing(
    name: str, count: int, served: list[Served]
) -> None:
    router = fleet(make_policy(name), count)
    for index, (blocks, who, stays) in enumerate(served):
        pick = router.pick(ask(*blocks), float(index))
        again = router.pick(ask(*blocks), float(index))
        assert again.choice == pick.choice
        assert sorted(c.name for c in pick.choice.ranked) == sorted(router.endpoints)
        scores = [-score if router.policy.name == "weighted" else score for score in pick.choice.scores]
        assert scores[1:] == sorted(scores[1:])
        pick = router.record_sent(pick, float(index), f"r{who % count}")
        if not stays:
            router.record_first_token(pick, index + 0.5)
            router.record_finished(pick, index + 0.5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5))
def test_more_cached_or_less_to_do_never_makes_a_replica_less_attractive(blocks: list[int], extra: int) -> None:
    router = fleet(count=2)
    warm(router, "r0", ask(*blocks))
    for _ in range(extra):
        send(router, ask(77), to="r1")
    pick = router.pick(ask(*blocks), 0.0)
    rows = {row["endpoint"]: row for row in pick.explain()["candidates"]}
    assert rows["r0"]["cost_ms"] <= rows["r1"]["cost_ms"]
    if rows["r0"]["cost_ms"] * 1.2 < rows["r1"]["cost_ms"]:
        assert pick.endpoint.name == "r0"


def test_cost_asks_who_has_room_before_who_would_lose_what_comes_back() -> None:
    router = Router()
    for index in range(3):
        router.add(endpoint(f"r{index}", 12))
    hot = [ask(100 * index + 1, 100 * index + 2, 100 * index + 3, 100 * index + 4) for index in range(4)]
    for _ in range(4):
        for index, name in enumerate(("r0", "r0", "r0", "r1")):  # r0 is full of what comes back, r1 and r2 have room
            warm(router, name, hot[index])
    for number in range(20):
        pick = router.pick(ask(1000 + number, 2000 + number, 3000 + number), 1.0)
        assert pick.endpoint.name != "r0"
        rows = {row["endpoint"]: row for row in pick.explain()["candidates"]}
        assert rows["r0"]["eviction_ms"] > 0.0
        assert rows["r1"]["eviction_ms"] == rows["r2"]["eviction_ms"] == 0.0


def test_cost_evicts_rather_than_wait_for_long() -> None:
    router = fleet(count=0)
    for name in ("full", "busy"):
        router.add(endpoint(name, 12))
    for _ in range(3):
        for index in range(3):
            warm(router, "full", ask(*(100 * index + block for block in range(1, 5))))
    for number in range(10):
        send(router, ask(*(1000 * number + block for block in range(500, 504))), now=1.0, to="busy")
    assert router.pick(ask(7, 8, 9), 1.0).endpoint.name == "full"
