"""Other routers in front of the same replicas: noticed by what replicas report, and met at the homes of prompts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.fleets import BLOCK, RATES, ROOT, ask, endpoint, prompt, serve
from sim.fleets import check_conservation, fleet, profile, requests

from headstart.router.endpoint import Endpoint, ReplicaReport
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.load import MAX_AGE
from headstart.router.policies.cost import COUNTED, LeastCostPolicy, PromptBeginnings, PromptHitRecord
from headstart.router.rate_learner import LEAST_SHARE, OtherRoutersShare
from headstart.router.router import Router
from headstart.router.routing_request import RoutingRequest
from headstart.router.step_rates import StepRates
from headstart.sim.sim_fleet import FleetOptions
from headstart.sim.sim_request import SimRequest
from headstart.sim.sweep import SimulationConfig

FOREIGN = ReplicaReport(at=0.0, running=60)


def router_of(count: int = 4, reported: ReplicaReport | None = None, policy: LeastCostPolicy | None = None) -> Router:
    """Return a router with replicas of one learner, each of which reports the same."""
    router = Router(policy or LeastCostPolicy())
    for index in range(count):
        router.add(endpoint(f"r{index}", 64))
    if reported is not None:
        for one in router.endpoints.values():
            one.reported = reported
    return router


def share_of(router: Router) -> float:
    return next(iter(router.endpoints.values())).load.learner.others.share


def chats(seed: int, count: int) -> list[RoutingRequest]:
    """Return the turns of some chats behind one system prompt of two blocks, each with its prefix."""
    rng = Random(seed)
    turns = dict.fromkeys(range(12), 2)
    found: list[RoutingRequest] = []
    for _ in range(count):
        chat = rng.choice(list(turns))
        turns[chat] += rng.randint(1, 3)
        found.append(ask(1, 2, *(100 * (chat + 1) + turn for turn in range(turns[chat]))))
    return found


def test_a_prompt_is_sent_where_every_router_would() -> None:
    """A router that was started since sends the next turn of a chat to the replica of the last one."""
    seen, late, unaware = router_of(8, FOREIGN), router_of(8, FOREIGN), router_of(8)
    for router in (seen, late, unaware):
        for _ in range(3):
            serve(router, ask(900, 901, 902))
    homes = {chat: serve(seen, turn_of(chat, 6)).endpoint.name for chat in range(8)}
    assert [late.pick(turn_of(chat, 9), 9.0).endpoint.name for chat in range(8)] == list(homes.values())
    pick = late.pick(turn_of(0, 9), 9.0)
    assert pick.candidate.hit_blocks == 0 and 0 < pick.candidate.hit_tokens < pick.view.num_prompt_tokens
    assert unaware.pick(turn_of(0, 9), 9.0).candidate.hit_tokens == 0


def turn_of(chat: int, length: int) -> RoutingRequest:
    return ask(*(10 * chat + block for block in range(length)))


@given(seed=st.integers(0, 10_000), first=st.integers(0, 30), replicas=st.integers(2, 40))
def test_routers_that_saw_prompts_begin_alike_agree_about_a_home(seed: int, first: int, replicas: int) -> None:
    asked = chats(seed, 40)
    one, other = (router_of(replicas, FOREIGN) for _ in range(2))
    for request in asked[:first]:  # each its own half of the turns, and the same shares
        serve(one, request)
        serve(other, request)
    for request in asked[first:]:
        assert one.pick(request, 5.0).endpoint.name == other.pick(request, 5.0).endpoint.name


@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), replicas=st.sampled_from([2, 5, 30]))
def test_a_router_alone_decides_as_if_there_were_no_homes(seed: int, count: int, replicas: int) -> None:
    router, policy = router_of(replicas), LeastCostPolicy()
    rng = Random(seed)
    for number, request in enumerate(chats(seed, count)):
        pick = router.pick(request, float(number))
        plain = policy.rank_by_scalars if replicas <= 24 else policy.rank_by_arrays
        assert pick.choice._replace(memo=None) == plain(pick.view)
        assert list(pick.choice.ranked.hit_tokens) == list(pick.view.candidates.hit_tokens)  # type: ignore[attr-defined]
        router.record_sent(pick, float(number))
        for one in rng.sample(sorted(router.endpoints), 2):  # as they are: all of them are ours
            load = router.endpoints[one].load
            router.endpoints[one].reported = ReplicaReport(
                float(number), load.num_awaiting_first_token, load.num_streams
            )
    assert share_of(router) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_router_alone_sees_no_other_and_one_of_several_does(seed: int) -> None:
    asked = requests(seed, 120, gap=0.5)
    options = FleetOptions(probe_interval=2.0)
    alone = fleet(3, profile(64, noise=0.1), seed=seed, options=options)
    alone.run(asked)
    check_conservation(alone, asked)
    assert share_of(alone.routers[0]) == 0.0
    several = SimulationConfig(profile(64, noise=0.1), 3, "cost", seed, routers=4, options=options).run_new_fleet(asked)
    check_conservation(several, asked)
    assert all(0.3 < share_of(router) < 1.0 for router in several.routers)


def test_four_routers_find_what_one_finds() -> None:
    rng, time, asked = Random(1), 0.0, list[SimRequest]()
    turns = dict.fromkeys(range(64), 10)
    for _ in range(400):
        time += rng.expovariate(1 / 8.0)
        chat = rng.choice(list(turns))
        turns[chat] += 3
        ids = (*range(6), *(1000 * (chat + 1) + turn for turn in range(turns[chat] - 6)))
        asked.append(SimRequest(time, len(ids) * BLOCK, 4, ids, BLOCK))
    cached = {}
    for name, routers, probes in (("one", 1, 2.0), ("four", 4, 2.0), ("four without reports", 4, 0.0)):
        options = FleetOptions(probe_interval=probes)
        found = SimulationConfig(profile(400), 8, "cost", 0, routers=routers, options=options).run_new_fleet(asked)
        cached[name] = sum(one.record.cached_tokens for one in found.records)
    assert cached["four"] >= 0.9 * cached["one"]
    assert cached["four without reports"] < 0.75 * cached["one"]


def test_answers_of_other_routers_slow_decodes_down_while_the_report_is_fresh() -> None:
    one = Endpoint("r0", ApproximateIndex(64), block_size=BLOCK, prior=StepRates(1.0, 1.0, 0.0, 1.0, 0.0))
    alone = one.prompt_cost(9, 0, 1.0)
    one.reported = ReplicaReport(at=1.0, running=1)
    assert one.prompt_cost(9, 0, 1.0) == alone, "one of seventeen is no router"
    one.reported = ReplicaReport(at=1.0, running=30)
    shared = one.prompt_cost(9, 0, 1.0)
    assert shared.prefill == alone.prefill + 30.0, "a step with 30 more streams"
    assert shared.decode > 30 * alone.decode
    assert one.prompt_cost(9, 0, 1.0 + MAX_AGE) == shared
    assert one.prompt_cost(9, 0, 1.1 + MAX_AGE) == alone


def test_an_index_of_events_is_believed() -> None:
    router = Router(LeastCostPolicy())
    for name in ("r0", "r1"):
        router.add(
            Endpoint(
                name,
                ReplicaKVEventIndex(BLOCK, lambda adapter, domain: ROOT, ApproximateIndex(64)),
                block_size=BLOCK,
                prior=RATES,
            )
        )
        router.endpoints[name].reported = FOREIGN
    for _ in range(3):  # believed to be cached until events are overdue
        serve(router, ask(900, 901, 902))
    assert router.pick(ask(900, 901, 902), 0.0).candidate.hit_tokens
    assert share_of(router) > 0.5
    for chat in range(8):
        assert not any(router.pick(turn_of(chat, 9), 0.0).choice.ranked[place].hit_tokens for place in range(2))


def test_the_beginning_that_counts_is_the_shortest_that_one_replica_can_serve() -> None:
    known = PromptBeginnings()
    for chat in range(40):
        known.count_prompt(PromptHitRecord(prompt(1, 2 + chat, tail=0).block_hashes(BLOCK), 8, 4))
    shared, longer = prompt(1, 2, tail=0).block_hashes(BLOCK)
    new = prompt(7, tail=0).block_hashes(BLOCK)[0]
    assert known.affinity_key([new, longer], 4) == new
    assert known.affinity_key([shared, longer], 4) == longer, (
        "a quarter of 40 requests, and one, is less than all of them"
    )
    assert known.affinity_key([shared, longer], 1) == shared
    assert known.affinity_key([shared], 4) == shared, "there is no longer one"


def test_a_busy_chat_has_one_home_however_long_it_becomes() -> None:
    known, keys = PromptBeginnings(), set[bytes]()
    for turn in range(2, 200):
        block_hashes = prompt(*range(turn), tail=0).block_hashes(BLOCK)
        hashes = [block_hashes[(1 << power) - 1] for power in range(turn.bit_length())]
        keys.add(known.affinity_key(hashes, 8))
        known.count_prompt(PromptHitRecord(hashes, BLOCK * turn, 0))
    assert keys == {prompt(0, tail=0).block_hashes(BLOCK)[0]}


@given(count=st.sampled_from([0, 1, COUNTED - 10, COUNTED - 9, 2 * COUNTED - 10, 2 * COUNTED - 9, 3 * COUNTED]))
def test_requests_of_long_ago_are_forgotten(count: int) -> None:
    known, (old, new) = PromptBeginnings(), (prompt(block, tail=0).block_hashes(BLOCK)[0] for block in (1, 2))
    for _ in range(10):
        known.count_prompt(PromptHitRecord([old], 4, 4))
    for _ in range(count):
        known.count_prompt(PromptHitRecord([new], 4, 0))
    assert (known.hit_token_share > 0) == (count <= 2 * COUNTED - 10)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=200))
def test_the_share_of_others_is_a_share_and_none_below_its_least(counts: list[tuple[int, int]]) -> None:
    others = OtherRoutersShare()
    for own, foreign in counts:
        others.add_replica_report(own, own + foreign)
        assert others.share == 0.0 or LEAST_SHARE <= others.share < 1.0
    if not any(foreign for _, foreign in counts):
        assert others.share == 0.0


def test_requests_on_their_way_and_a_single_client_are_no_router() -> None:
    late = OtherRoutersShare()
    for _ in range(500):  # a report is older than our count: too few and too many by turns
        late.add_replica_report(8, 12)
        late.add_replica_report(12, 8)
    assert late.share == 0.0
    client = OtherRoutersShare()
    for number in range(500):
        client.add_replica_report(10, 10 + (number % 2))
    assert client.share == 0.0
    for _ in range(500):
        client.add_replica_report(10, 20)
    assert client.share == pytest.approx(0.5, abs=0.01)
    for _ in range(500):
        client.add_replica_report(10, 10)
    assert client.share == 0.0, "the other one has ended"
