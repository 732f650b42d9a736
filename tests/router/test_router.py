"""The router's books: what a pick's way through it leaves behind, and what goes wrong on the way."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import BLOCK, RATES, ROOT, ask, endpoint, names, prompt, serve
from router.test_kv_event_index import new, stored

from headstart.core.errors import NoReplicaError
from headstart.router.decision_log import DecisionRecord
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.cached_tokens import count_reported_cached_blocks
from headstart.router.index.kv_event_index import SILENCE, ReplicaKVEventIndex
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.router.policies.rendezvous import rank_by_key
from headstart.router.router import Router
from headstart.router.routing_decision import RoutingDecision
from headstart.router.routing_request import ReportedTokenUsage, RoutingPrompt, RoutingRequest


def fleet(count: int = 2) -> Router:
    router = Router()
    for index in range(count):
        router.add(endpoint(f"r{index}"))
    return router


def shadow_of(router: Router, name: str = "r0") -> ApproximateIndex:
    index = router.endpoints[name].index
    assert isinstance(index, ApproximateIndex)
    return index


# ---------------------------------------------------------------------------------------------------------- filters


def test_no_replica_is_reported_with_the_reason_of_each() -> None:
    router = fleet(3)
    router.endpoints["r0"].health.draining = True
    router.endpoints["r1"].models = frozenset({"other"})
    with pytest.raises(NoReplicaError) as caught:
        router.pick(RoutingRequest(ask(1).prompt, model="m", subset=frozenset({"r0", "r1"})), 0.0)
    assert caught.value.reasons == {"r0": "draining", "r1": "other models", "r2": "not in the subset"}
    with pytest.raises(NoReplicaError):
        Router().pick(ask(1), 0.0)


def test_who_is_absent_is_not_asked() -> None:
    router = fleet(2)
    router.endpoints["r0"].health.absent = True
    pick = router.pick(ask(1), 0.0)
    assert pick.endpoint.name == "r1" and pick.excluded == {"r0": "absent"}
    router.endpoints["r1"].health.absent = True
    with pytest.raises(NoReplicaError):
        router.pick(ask(1), 0.0)


def test_an_answer_in_one_piece_is_no_late_first_token_and_teaches_nothing() -> None:
    router = fleet(1)
    replica = router.endpoints["r0"]
    replica.index = ApproximateIndex(256)  # of 1,024 tokens: answers of the length that is assumed fit
    before = replica.load.rates
    pick = router.pick(ask(1, 2), 0.0)
    pick = router.record_sent(pick, 0.0)
    assert replica.slowdown_versus_fleet(60.0) > 10
    router.assume_first_token(pick, 1.0)
    assert replica.slowdown_versus_fleet(60.0) == 1.0 and replica.backlog_ms(60.0) == 0.5  # half a step of the answer
    assert replica.load.num_awaiting_first_token == 0 and replica.load.num_streams == 1
    router.record_finished(pick, 60.0, ReportedTokenUsage(9, 0))
    assert replica.load.rates == before and replica.load.num_requests == 0
    router.assume_first_token(pick, 61.0)
    assert replica.load.num_requests == 0


def test_who_failed_this_request_is_not_asked_again() -> None:
    router = fleet(3)
    pick = router.pick(ask(1), 0.0)
    again = router.pick(ask(1), 0.0, tried=frozenset({pick.endpoint.name}))
    assert again.endpoint is not pick.endpoint and again.excluded == {pick.endpoint.name: "tried"}


def test_an_ejected_replica_is_left_out_until_it_may_come_back() -> None:
    router = fleet(2)
    pick = router.pick(ask(1), 0.0)
    pick = router.record_sent(pick, 0.0)
    assert router.record_failed(pick, 0.0, refused=True)
    assert router.pick(ask(1), 0.5).excluded == {pick.endpoint.name: "ejected"}
    assert router.pick(ask(1), 1.5).excluded == {}


def test_the_last_one_is_asked_even_if_it_is_ejected() -> None:
    router = fleet(2)
    for name, at in (("r1", 0.0), ("r0", 0.2)):
        router.endpoints[name].health.record_failed(at, refused=True)
    pick = router.pick(ask(1), 0.5)
    assert pick.endpoint.name == "r1" and pick.excluded == {"r0": "ejected"}


# ----------------------------------------------------------------------------------------------------- what is learned


def test_a_refused_request_leaves_nothing_behind() -> None:
    router = fleet(1)
    pick = router.pick(ask(1, 2), 0.0)
    pick = router.record_sent(pick, 0.0)
    router.record_failed(pick, 0.1)
    load = router.endpoints["r0"].load
    assert (len(shadow_of(router)), load.num_requests, load.inflight_tokens, load.learner.num_samples) == (0, 0, 0, 0)


def test_a_client_that_goes_away_is_no_failure_of_the_replica() -> None:
    router = fleet(1)
    for _ in range(5):
        pick = router.pick(ask(1), 0.0)
        pick = router.record_sent(pick, 0.0)
        router.record_client_disconnect(pick, 0.0)
    assert router.endpoints["r0"].health.num_ejections == 0


def test_a_prompt_whose_client_went_away_is_expected_where_it_was_being_computed() -> None:
    router = fleet(2)
    request = ask(*range(1, 11))  # 10 blocks, about 42 ms of prefill
    sent = router.record_sent(router.pick(request, 0.0), 0.0)
    router.record_client_disconnect(sent, 0.039)  # at more than nine tenths
    later = router.pick(request, 0.04)
    assert later.endpoint is sent.endpoint and later.candidate.hit_tokens == 9 * BLOCK
    retry = router.record_sent(later, 0.04)
    router.record_first_token(
        retry, 0.05, ReportedTokenUsage(request.prompt.num_tokens, 6 * BLOCK)
    )  # it was slower than expected
    index = sent.endpoint.index
    assert isinstance(index, ApproximateIndex) and (index.num_flushes, index.num_trims) == (0, 0)
    router.record_finished(retry, 0.05)
    index.check()


def test_control_a_prompt_that_the_replica_refused_is_not_expected_there() -> None:
    router = fleet(2)
    request = ask(*range(1, 11))
    sent = router.record_sent(router.pick(request, 0.0), 0.0)
    router.record_failed(sent, 0.037, blame=False)
    assert router.pick(request, 0.04).candidate.hit_tokens == 0


def test_the_index_learns_whom_the_request_really_went_to() -> None:
    router = fleet(2)
    pick = router.pick(ask(1), 0.0)
    other = pick.fallbacks[0]
    pick = router.record_sent(pick, 0.0, other)
    assert shadow_of(router, other).num_cached_prefix_blocks(names(1)) == 1
    with pytest.raises(KeyError):
        router.record_sent(router.pick(ask(1), 0.0), 0.0, "r9")


def test_the_last_token_of_a_prompt_is_never_believed_to_be_cached() -> None:
    router = fleet(1)
    serve(router, ask(1, 2, tail=0))
    candidate = router.pick(ask(1, 2, tail=0), 5.0).candidate
    assert (candidate.hit_blocks, candidate.hit_tokens) == (2, 7)


def test_rates_are_learned_from_what_was_really_to_do() -> None:
    """Believed to be cached and not: a long prefill, not a slow replica."""
    router = Router()
    router.add(endpoint("r0", 256))
    serve(router, ask(*range(50)), 0.0)
    for turn in range(20):
        shadow_of(router).corrects = False
        request, now = ask(*range(50)), 10.0 * (turn + 1)
        pick = router.pick(request, now)
        assert pick.candidate.hit_tokens == 200
        pick = router.record_sent(pick, now)
        router.record_first_token(pick, now + 0.202)
        router.record_finished(pick, now + 0.202, ReportedTokenUsage(201, 0))
    assert router.endpoints["r0"].load.rates.token == pytest.approx(RATES.token, rel=0.05)
    assert router.prediction_error == 20 * 200 and router.num_reported == 21


def test_tokens_of_the_answer_are_known_where_a_body_tells_them() -> None:
    router = fleet(1)
    one = RoutingPrompt(range(6), ask(1).prompt._root)
    pick = router.pick(RoutingRequest(one), 0.0)
    pick = router.record_sent(pick, 0.0)
    router.record_finished(pick, 1.0, output=[6, 7, 8])
    assert shadow_of(router).num_cached_prefix_blocks(one.block_hashes_with_output([6, 7, 8], BLOCK)) == 2


def test_a_replica_that_was_removed_or_reconfigured_does_not_trouble_requests_under_way() -> None:
    router = fleet(2)
    picks: list[RoutingDecision] = []
    for name in ("r0", "r1"):
        pick = router.pick(ask(1, 2), 0.0)
        pick = router.record_sent(pick, 0.0, name)
        picks.append(pick)
    router.remove("r0")
    router.endpoints["r1"].reset_for_block_size(8, ApproximateIndex(4))
    for pick in picks:
        router.record_first_token(pick, 0.1, ReportedTokenUsage(9, 0))
        router.record_finished(pick, 0.2, ReportedTokenUsage(9, 0))
    assert len(shadow_of(router, "r1")) == 0
    assert serve(router, ask(1, 2), 1.0).endpoint.block_size == 8


def test_events_of_no_use_are_given_up_for_guesses() -> None:
    router = Router()
    router.add(Endpoint("r0", new(), block_size=BLOCK))
    for number in range(SILENCE):
        assert isinstance(router.endpoints["r0"].index, ReplicaKVEventIndex)
        serve(router, ask(number))
    assert router.num_blind == 1
    serve(router, ask(7, 8))
    assert router.pick(ask(7, 8, 9), 5.0).candidate.hit_tokens == 8


def test_what_was_guessed_meanwhile_is_what_is_left() -> None:
    guess = ApproximateIndex(64)
    told = ReplicaKVEventIndex(BLOCK, new()._root, guess)
    router = Router()
    router.add(Endpoint("r0", told, block_size=BLOCK))
    for number in range(SILENCE):
        serve(router, ask(number))
    assert router.endpoints["r0"].index is guess and len(guess) == SILENCE
    assert router.pick(ask(3, 4), 5.0).candidate.hit_tokens == BLOCK


def test_precise_mode_believes_events_and_what_was_just_sent() -> None:
    router, told = Router(), new()
    router.add(Endpoint("r0", told, block_size=BLOCK))
    told.apply([stored("ab", 1, 2)])
    assert router.pick(ask(1, 2, 3), 0.0).candidate.hit_tokens == 8
    router.record_sent(router.pick(ask(1, 2, 3), 0.0), 0.0)
    assert router.pick(ask(1, 2, 3), 0.1).candidate.hit_tokens == 12


def text_ask(*blocks: int) -> RoutingRequest:
    """As `ask`, but counted in text: no event ever names its blocks."""
    tokens = [1000 + 10 * block + i for block in blocks for i in range(BLOCK)]
    return RoutingRequest(RoutingPrompt([*tokens, 9], ROOT, exact=False), form="chat")


def precise_fleet(count: int = 1) -> Router:
    router = Router()
    for index in range(count):
        told = ReplicaKVEventIndex(BLOCK, new()._root, ApproximateIndex(64))
        router.add(Endpoint(f"r{index}", told, block_size=BLOCK, prior=RATES))
    return router


def test_a_prompt_that_is_not_exact_is_matched_by_what_was_sent_where_events_are_heard() -> None:
    router = precise_fleet(2)
    first = serve(router, text_ask(*range(8)), cached=0)
    again = router.pick(text_ask(*range(8)), 100.0)
    assert again.endpoint is first.endpoint and again.candidate.hit_tokens == 8 * BLOCK
    told = first.endpoint.index
    assert isinstance(told, ReplicaKVEventIndex) and len(told) == 0
    told.apply([stored("ab", 1, 2)])
    assert router.pick(ask(1, 2, 3), 100.0).candidate.hit_tokens == 2 * BLOCK, "exact prompts go by events all the same"


def test_prompts_that_are_not_exact_are_no_sign_of_silent_events() -> None:
    router = precise_fleet()
    for number in range(2 * SILENCE):
        serve(router, text_ask(number), cached=0)
    assert router.num_blind == 0 and isinstance(router.endpoints["r0"].index, ReplicaKVEventIndex)


def test_what_is_reported_of_a_prompt_that_is_not_exact_corrects_the_guess() -> None:
    router = precise_fleet()
    for _ in range(2):  # believed to be there the second time, and it was not
        serve(router, text_ask(*range(8)), cached=0)
    told = router.endpoints["r0"].index
    assert isinstance(told, ReplicaKVEventIndex) and isinstance(told.guess, ApproximateIndex)
    assert told.guess.num_flushes + told.guess.num_trims == 1


def test_a_replica_that_counts_another_number_of_tokens_is_guessed_at_for_prompts_of_that_form() -> None:
    """Its chat template is another one: however the router names its prompts, no event will have these names."""
    router = precise_fleet()
    chat = RoutingRequest(prompt(*range(8)), form="chat")
    pick = router.pick(chat, 0.0)
    pick = router.record_sent(pick, 0.0)
    router.record_finished(pick, 1.0, ReportedTokenUsage(40, 0))  # 33 as the router counts
    told = router.endpoints["r0"].index
    assert isinstance(told, ReplicaKVEventIndex)
    told.apply([stored("ab", 21, 22)])  # what the replica computed in fact
    late = 100.0  # speculation is over
    assert router.pick(chat, late).candidate.hit_tokens == 8 * BLOCK
    assert router.pick(RoutingRequest(prompt(*range(8))), late).candidate.hit_tokens == 0, "other forms go by events"
    serve(router, chat, late)  # it counts alike now
    assert router.pick(chat, 2 * late).candidate.hit_tokens == 0


def test_a_prompt_with_an_image_says_nothing_of_how_a_replica_counts_others() -> None:
    router = precise_fleet()
    chat = RoutingRequest(prompt(*range(8)), form="chat", has_parts=True)
    router.record_finished(router.record_sent(router.pick(chat, 0.0), 0.0), 1.0, ReportedTokenUsage(1000, 0))
    told = router.endpoints["r0"].index
    assert isinstance(told, ReplicaKVEventIndex)
    told.apply([stored("ab", 0, 1)])
    for has_parts in (False, True):  # both go by events
        asked = RoutingRequest(prompt(*range(8)), form="chat", has_parts=has_parts)
        assert router.pick(asked, 100.0).candidate.hit_tokens == 2 * BLOCK


# -------------------------------------------------------------------------------------------------------------- reports


def blocks(cached: int, *, expected: int, total: int = 41, one: Endpoint | None = None, exact: bool = True) -> int:
    prompt = RoutingPrompt(range(total), ask(1).prompt._root, exact=exact)
    return count_reported_cached_blocks(
        one or endpoint("r0"), prompt, ReportedTokenUsage(total if exact else 2 * total, cached), expected
    )


def test_a_report_is_in_whole_blocks() -> None:
    assert blocks(8, expected=5) == 2
    assert blocks(0, expected=5) == 0


def test_all_but_the_last_token_is_all_of_it() -> None:
    assert blocks(39, expected=3, total=40) == 10
    assert blocks(40, expected=10) == 10


def test_larger_blocks_of_the_engine_round_down_and_are_no_evictions() -> None:
    one = endpoint("r0")
    for cached in (16, 32, 16):
        blocks(cached, expected=cached // 4, one=one)
    assert one.granule == 16
    assert blocks(16, expected=7, one=one) == 7  # 28 tokens: an engine with blocks of 16 says 16
    assert blocks(0, expected=7, one=one) == 0


def test_tokens_of_text_are_scaled_and_nearly_is_enough() -> None:
    assert blocks(40, expected=5, exact=False) == 5  # of twice as many tokens
    assert blocks(44, expected=5, exact=False) == 5
    assert blocks(0, expected=5, exact=False) == 0


def test_text_in_the_middle_of_a_prompt_may_be_off_by_more_than_at_its_ends() -> None:
    """The tokens per character of a text differ from place to place, but all of it has as many as the engine says."""
    for expected, least in ((50, 36), (100, 98), (2, 0)):  # of 100 blocks
        said = [
            found for found in range(101) if blocks(8 * found, expected=expected, total=400, exact=False) == expected
        ]
        assert said[0] == least and expected in said


# ------------------------------------------------------------------------------------------------- explain, log, regret


def test_the_explanation_is_json_and_says_who_was_chosen_and_what_all_cost() -> None:
    router = fleet(2)
    serve(router, ask(1, 2))
    router.endpoints["r1"].health.draining = True
    found = json.loads(json.dumps(router.pick(ask(1, 2, 3), 2.0).explain()))
    assert found["endpoint"] == "r0" and found["policy"] == "cost" and found["excluded"] == {"r1": "draining"}
    (row,) = found["candidates"]
    assert {"endpoint", "cached_tokens", "backlog_ms", "prefill_ms", "slowness", "cost_ms", "score"} < row.keys()


def test_a_decision_can_be_read_back_and_made_again() -> None:
    log: list[DecisionRecord] = []
    router = Router(log=log.append)
    router.add(endpoint("r0"))
    serve(router, ask(1, 2, session="s"), 5.0)
    decision = DecisionRecord.from_dict(json.loads(json.dumps(log[0].as_dict())))
    assert decision == log[0]
    assert (decision.at, decision.endpoint, decision.cached_tokens, decision.ok) == (5.0, "r0", 0, True)
    again = Router()
    again.add(endpoint("r0"))
    for _ in range(2):
        request = decision.to_routing_request()
        assert (request.prompt.num_tokens, request.session) == (9, "s")
        pick = again.pick(request, 0.0)
        again.record_sent(pick, 0.0)
    assert pick.candidate.hit_tokens == 8


def test_the_log_holds_no_tokens() -> None:
    log: list[DecisionRecord] = []
    router = Router(log=log.append)
    router.add(endpoint("r0"))
    serve(router, ask(1, 2))
    assert len(bytes.fromhex(log[0].names)) == 2 * 8


def test_shadow_policies_decide_too_and_their_regret_is_counted() -> None:
    router = Router(shadow_policies=[make_policy("round-robin")])
    for index in range(2):
        router.add(endpoint(f"r{index}"))
    for turn in range(10):
        serve(router, ask(1, 2, 3, 5), 10.0 * turn)
    regret = router.regrets["round-robin"]
    assert regret.decisions == 10 and regret.agreed == 5
    is_first_other = next(iter(router.endpoints)) != router.pick(ask(1, 2, 3, 5), 900.0).endpoint.name
    assert regret.total_ms == pytest.approx((5 - is_first_other) * 16.0)  # 16 tokens each; the first was new to both
    pick = router.pick(ask(1, 2, 3, 5), 1000.0)
    assert pick.explain()["shadow_policies"].keys() == {"round-robin"}


def test_a_retry_is_one_decision_of_every_shadow_policy() -> None:
    router = Router(shadow_policies=[make_policy("round-robin")])
    for index in range(3):
        router.add(endpoint(f"r{index}"))
    for turn in range(4):
        now = 100.0 * turn
        pick = router.pick(ask(turn), now)
        first = pick.regrets
        tried: list[str] = []
        for _ in range(2):  # two replicas fail, the third one answers
            pick = router.record_sent(pick, now)
            router.record_failed(pick, now, blame=False)
            tried.append(pick.endpoint.name)
            pick = router.pick(ask(turn), now, tried=frozenset(tried), before=pick)
        pick = router.record_sent(pick, now)
        router.record_finished(pick, now + 1.0)
        assert pick.regrets == first, "what they decided is still told"
    regret = router.regrets["round-robin"]
    assert regret.decisions == 4


def test_a_pick_that_is_not_sent_is_in_no_book() -> None:
    router = Router(shadow_policies=[make_policy("round-robin")])
    for index in range(2):
        router.add(endpoint(f"r{index}"))
    told = [next(iter(router.pick(ask(1), 0.0).regrets.values()))[0] for _ in range(5)]
    assert router.regrets["round-robin"].decisions == 0
    assert len(set(told)) == 1, "the policy remembers nothing of it either"


# ---------------------------------------------------------------------------------------------------------------- laws

act = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 7))


@pytest.mark.parametrize("name", policy_names())
@given(st.booleans(), st.lists(act, max_size=60))
def test_when_all_is_over_no_replica_has_anything_to_do(
    name: str, at_pick: bool, acts: list[tuple[int, list[int], int]]
) -> None:
    """Law: whatever order things happen in, and however often, the books come out even."""
    router = Router(make_policy(name))
    shadows = [ApproximateIndex(8, at_pick=at_pick) for _ in range(3)]
    for index, shadow in enumerate(shadows):
        router.add(Endpoint(f"r{index}", shadow, block_size=BLOCK))
    under_way: list[RoutingDecision] = []
    for now, (kind, chain, which) in enumerate(acts):
        if kind < 2 or not under_way:
            pick = router.pick(ask(*chain), float(now))
            pick = router.record_sent(pick, float(now))
            under_way.append(pick)
        elif kind == 2:
            router.record_first_token(under_way[which % len(under_way)], float(now))
        elif kind == 3:
            pick = under_way.pop(which % len(under_way))
            router.record_finished(
                pick,
                float(now),
                ReportedTokenUsage(pick.view.num_prompt_tokens, min(which * BLOCK, pick.view.num_prompt_tokens)),
            )
        elif kind == 4:
            router.record_failed(under_way.pop(which % len(under_way)), float(now), refused=which == 0)
        else:
            shadows[which % 3].clear()
        for shadow in shadows:
            shadow.check()
    for pick in under_way:
        router.record_finished(pick, 1000.0)
    for one in router.endpoints.values():
        assert (one.load.num_requests, one.load.inflight_tokens, one.backlog_ms(2000.0)) == (0, 0, 0.0)
    assert all(shadow._blocks.pool.num_free == 8 for shadow in shadows)


@given(st.binary(max_size=8), st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=8))
def test_when_a_replica_leaves_only_its_own_keys_move(key: bytes, addresses: set[str]) -> None:
    order = rank_by_key(key, addresses)
    assert sorted(order) == sorted(addresses)
    for gone in addresses:
        assert rank_by_key(key, addresses - {gone}) == [name for name in order if name != gone]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_smaller_block_size_brings_no_requests_by_itself(size: int) -> None:
    """Prompts that begin alike for less than a block of the others say nothing about where they belong."""
    router = Router()
    for index in range(4):
        router.add(Endpoint(f"r{index}", ApproximateIndex(10_000), block_size=size if index == 0 else 16))
    counts = dict.fromkeys(router.endpoints, 0)
    for number in range(60):
        tokens = [*range(12), *[1_000 * number + at for at in range(100, 300)]]
        in_flight = router.record_sent(
            router.pick(RoutingRequest(RoutingPrompt(tokens, ROOT)), float(number)), float(number)
        )
        router.record_finished(in_flight, number + 0.5)
        counts[in_flight.endpoint.name] += 1
    assert max(counts.values()) <= 30, counts


def test_hits_of_small_blocks_count_where_all_replicas_have_such() -> None:
    router = Router()
    for index in range(2):
        router.add(Endpoint(f"r{index}", ApproximateIndex(10_000), block_size=1))
    first = router.record_sent(router.pick(RoutingRequest(RoutingPrompt(list(range(8)), ROOT)), 0.0), 0.0)
    router.record_finished(first, 0.5)
    assert router.pick(RoutingRequest(RoutingPrompt([*range(8), 99], ROOT)), 1.0).candidate.hit_tokens == 8
