"""Routers in front of replicas that behave like engines: what must never happen, whatever the policy."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random

import pytest
from sim.serial_fleet import Arrival, VirtualFleet, VirtualReplica

from headstart.core.cache.hashing import BlockHash
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy import Candidate, PolicyInput, RankedCandidates
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.router.router import Router
from headstart.router.routing_request import RoutingPrompt, RoutingRequest
from headstart.router.step_rates import StepRates
from headstart.workload.request_record import RequestRecord, summarize_records

BLOCK = 16
RATES = StepRates(2.0, 0.0, 0.0, 0.1, 0.0)


def names(*path: int) -> list[BlockHash]:
    """A chain of blocks; chains that begin alike share names."""
    return [BlockHash(repr(path[: end + 1]).encode()) for end in range(len(path))]


def arrival(at: float, *path: int, output: int = 4) -> Arrival:
    """A prompt of whole blocks and one token more."""
    prompt = RoutingPrompt.from_block_hashes(names(*path), len(path) * BLOCK + 1, BLOCK)
    return Arrival(at, RoutingRequest(prompt, session=str(path[:1]), max_tokens=output), output)


NAMES = [f"{one}{more}" for one in "abcdefgh" for more in ("", "x", "yy")]
"""Of replicas. Rendezvous hashing places prefixes by them: one placement may be lucky, their mean is not."""


def replicas(count: int, num_blocks: int, name: str = "r") -> list[VirtualReplica]:
    return [VirtualReplica(f"{name}{index}", num_blocks, BLOCK, RATES, 1.0) for index in range(count)]


def router(count: int, num_blocks: int, policy: str = "cost", *, corrects: bool = True, name: str = "r") -> Router:
    found = Router(make_policy(policy))
    for index in range(count):
        found.add(Endpoint(f"{name}{index}", ApproximateIndex(num_blocks, corrects=corrects), block_size=BLOCK))
    return found


@cache  # a hundred fleets are asked the same, which nothing changes
def trap(count: int) -> tuple[Arrival, ...]:
    """Chat traffic as in Mooncake's trace: all share the first block, sessions grow, arrivals come close together."""
    rng, now, sessions = Random(0), 0.0, list[list[int]]()
    found: list[Arrival] = []
    for _ in range(count):
        now += rng.expovariate(40.0)
        if sessions and rng.random() < 0.4:
            path = rng.choice(sessions)
        else:
            path = [0, rng.randrange(10**9)]
            sessions.append(path)
        path += [rng.randrange(10**9) for _ in range(rng.randrange(2, 24))]
        found.append(arrival(now, *path))
    return tuple(found)


def served(fleet: VirtualFleet) -> list[int]:
    return [replica.num_served for replica in fleet.replicas.values()]


class LongestPrefix:
    """The trap itself: no load term."""

    name = "longest-prefix"

    def rank(self, view: PolicyInput) -> RankedCandidates:
        ranked: list[Candidate] = sorted(view.candidates, key=lambda candidate: -candidate.hit_tokens)
        return RankedCandidates(tuple(ranked), tuple(float(c.hit_tokens) for c in ranked), "longest")

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        pass


@pytest.mark.parametrize("policy", policy_names())
def test_a_first_block_that_all_share_does_not_send_all_to_one_replica(policy: str) -> None:
    fleet = VirtualFleet(replicas(4, 2048))
    fleet.run(trap(600), [router(4, 2048, policy)])
    assert sum(served(fleet)) == 600
    assert max(served(fleet)) <= 300
    assert min(served(fleet)) >= 75 or policy == "dualmap"  # it knows two replicas for each beginning, and no others


def test_without_a_load_term_the_trap_is_one() -> None:
    fleet, caught = VirtualFleet(replicas(4, 2048)), router(4, 2048)
    caught.policy = LongestPrefix()
    fleet.run(trap(600), [caught])
    assert max(served(fleet)) == 600


@pytest.mark.parametrize(
    "policies",
    [
        ("cost", "prefix-threshold", "least-load", "round-robin"),  # with the best of the others
        pytest.param(policy_names(), marks=pytest.mark.long, id="all"),
    ],
)
def test_least_cost_answers_sooner_than_policies_that_do_not_know_prefixes(policies: Sequence[str]) -> None:
    mean = Counter[str]()
    for policy, name in product(policies, NAMES[:6]):
        fleet = VirtualFleet(replicas(4, 512, name))
        summary = summarize_records(fleet.run(trap(600), [router(4, 512, policy, name=name)]))
        assert summary.ttft is not None and summary.errors == 0
        mean[policy] += summary.ttft.mean / 6
    assert mean["cost"] < 0.8 * mean["round-robin"]
    assert mean["cost"] < 0.95 * mean["least-load"]
    assert mean["cost"] <= 1.02 * min(mean.values())


def steady(count: int, groups: int, *, start: float = 0.0, gap: float = 0.1) -> list[Arrival]:
    """One request after the other, of groups that share eight blocks each."""
    return [
        arrival(start + gap * index, *(index % groups, *range(7)), 1000 + index, output=1) for index in range(count)
    ]


def cached(records: list[RequestRecord]) -> list[int]:
    return [record.cached_tokens for record in sorted(records, key=lambda record: record.arrival)]


def errors(fleet: VirtualFleet) -> list[int]:
    """Return how far off each prediction was, in tokens, in the order of arrival."""
    return [abs(pick.candidate.hit_tokens - (pick.cached_tokens or 0)) for pick in fleet.picks]


def test_a_replica_that_is_flushed_is_learned_anew_within_one_request_per_prefix() -> None:
    fleet, one = VirtualFleet(replicas(2, 512)), router(2, 512)
    fleet.at(5.05, lambda now: fleet.replicas["r0"].flush())
    fleet.run(steady(120, 6), [one])
    wrong = [index for index, error in enumerate(errors(fleet)) if error]
    assert wrong and wrong[0] >= 51
    assert len(wrong) == len({index % 6 for index in wrong})  # each prefix is wrong once at most
    shadow = one.endpoints["r0"].index
    assert isinstance(shadow, ApproximateIndex) and shadow.num_flushes == 1
    assert len(wrong) == 1  # and here the first one said it all


def test_a_slow_replica_is_left_to_those_that_are_not() -> None:
    fleet = VirtualFleet(replicas(3, 512))
    fleet.at(5.0, lambda now: setattr(fleet.replicas["r0"], "slow_down", 20.0))
    fleet.run(steady(300, 300, gap=0.03), [router(3, 512)])
    late = [pick.endpoint.name for pick in fleet.picks if (pick.sent_at or 0.0) > 6.0]
    early = [pick.endpoint.name for pick in fleet.picks if (pick.sent_at or 0.0) < 5.0]
    assert early.count("r0") > 0.2 * len(early)
    assert late.count("r0") < 0.1 * len(late)


@pytest.mark.parametrize("believed", [4 * 96, 0])
def test_an_index_larger_than_the_cache_shrinks_and_predicts_better_than_one_that_is_not_corrected(
    believed: int,
) -> None:
    error: list[float] = []
    for corrects in (True, False):
        fleet, one = VirtualFleet(replicas(2, 96)), router(2, believed, corrects=corrects)
        rng = Random(1)
        arrivals = [
            arrival(0.1 * index, *(rng.randrange(30), *range(7)), 1000 + index, output=1) for index in range(600)
        ]
        fleet.run(arrivals, [one])
        error.append(one.prediction_error / one.num_reported)
        shadow = one.endpoints["r0"].index
        assert isinstance(shadow, ApproximateIndex)
        assert (shadow.estimated_capacity < 192) == corrects
    assert error[0] < 0.5 * error[1]


def test_a_replica_that_comes_back_with_other_blocks_is_told_or_found_out() -> None:
    for told in (True, False):
        fleet, one = VirtualFleet(replicas(1, 512)), router(1, 512)

        def restart(now: float, fleet: VirtualFleet = fleet, one: Router = one, told: bool = told) -> None:
            fleet.replicas["r0"].restart(64, 2 * BLOCK)
            if told:
                one.endpoints["r0"].reset_for_block_size(2 * BLOCK, ApproximateIndex(64))

        fleet.at(5.05, restart)
        tokens = [[group * 1000 + index for index in range(8 * BLOCK)] for group in range(5)]
        root = BlockHash(b"root")
        arrivals = [
            Arrival(0.1 * index, RoutingRequest(RoutingPrompt([*tokens[index % 5], index, index, index], root)), 1)
            for index in range(100)
        ]
        fleet.run(arrivals, [one])
        after = errors(fleet)[51:]
        assert sum(1 for error in after if error > 2 * BLOCK) == (0 if told else 1)
        assert after[-10:] == [0] * 10


def test_two_routers_without_contact_send_the_same_cold_prefix_to_the_same_replica() -> None:
    """Each sees half of the traffic; prefixes new to both are asked of both."""
    fleet = VirtualFleet(replicas(4, 512))
    routers = [router(4, 512), router(4, 512)]
    fleet.run(steady(200, 50, gap=0.5), routers)
    same = 0
    for number in range(200):
        one, two = (r.pick(arrival(1e3, *(10_000 + number, *range(7))).request, 1e3).endpoint.name for r in routers)
        same += one == two
    assert same >= 190


def test_learning_at_the_response_scatters_a_burst_and_learning_at_the_pick_does_not() -> None:
    """gateway-api-inference-extension #768: eight samples of one prompt at once, and an answer that takes a while."""
    computed: list[int] = []
    for at_pick in (True, False):
        one = Router()
        for index in range(4):
            one.add(Endpoint(f"r{index}", ApproximateIndex(512, at_pick=at_pick), block_size=BLOCK))
        fleet = VirtualFleet(replicas(4, 512))
        fleet.run([arrival(burst * 2.0, burst, *range(63)) for burst in range(20) for _ in range(8)], [one])
        computed.append(sum(record.prompt_tokens - record.cached_tokens for record in fleet.records))
    assert computed[0] < 0.6 * computed[1]


def test_a_prompt_of_whole_blocks_that_is_all_cached_computes_one_token() -> None:
    prompt = RoutingPrompt.from_block_hashes(names(1, 2), 2 * BLOCK, BLOCK)
    fleet = VirtualFleet(replicas(1, 8))
    fleet.run([Arrival(float(at), RoutingRequest(prompt), 1) for at in range(3)], [router(1, 8)])
    assert cached(fleet.records) == [0, 2 * BLOCK - 1, 2 * BLOCK - 1]
    assert errors(fleet) == [0, 0, 0]


def test_every_request_is_served_and_the_books_are_even_at_the_end() -> None:
    fleet, one = VirtualFleet(replicas(3, 256)), router(3, 256)
    records = fleet.run(trap(300), [one])
    assert len(records) == 300 and all(record.ok for record in records)
    for endpoint in one.endpoints.values():
        assert endpoint.load.num_requests == endpoint.load.inflight_tokens == 0
        shadow = endpoint.index
        assert isinstance(shadow, ApproximateIndex)
        shadow.check()


def grouped(groups: int, prompts: int, gap: float) -> list[Arrival]:
    """generated-shared-prefix, high hit: questions of two blocks behind system prompts of 24, in random order."""
    rng = Random(3)
    order = [group for group in range(groups) for _ in range(prompts)]
    rng.shuffle(order)
    return [
        arrival(gap * index, group, *range(23), 10_000 + index, 20_000 + index) for index, group in enumerate(order)
    ]


def test_prefixes_spread_over_the_caches_even_while_no_request_waits() -> None:
    """Four caches of a third of 24 prefixes: only if each gets about six of them they all stay."""
    hits = Counter[str]()
    for policy, name in product(("cost", "prefix-threshold", "round-robin"), NAMES):
        fleet = VirtualFleet(replicas(4, 24 * 24 // 3, name))
        records = fleet.run(grouped(24, 12, 0.5), [router(4, 24 * 24 // 3, policy, name=name)])
        hits[policy] += summarize_records(records).cached_share / len(NAMES)
    assert hits["cost"] > 0.8
    assert hits["cost"] > 0.99 * hits["prefix-threshold"]
    assert hits["cost"] > 2 * hits["round-robin"]
