"""The bound `oracle` reads exact state: what it expects is what happens when nothing else comes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.fleets import BLOCK, profile, requests

from headstart.sim.oracle_policy import OraclePolicy
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_request import SimRequest
from headstart.sim.sweep import SimulationConfig


def run(asked: list[SimRequest], *, replicas: int = 2, blocks: int = 64) -> tuple[VirtualFleet, dict[str, float]]:
    """Run requests; return the fleet and, by request id, the expected time of the first token at each choice."""
    expected: dict[str, float] = {}
    fleet = SimulationConfig(profile(blocks), replicas, "oracle").build_fleet()
    router = fleet.routers[0]
    pick = router.pick

    def noted(request, now, **options):  # type: ignore[no-untyped-def]
        decision = pick(request, now, **options)
        expected[str(len(expected))] = now + decision.choice.scores[0] / 1e3
        return decision

    router.pick = noted  # type: ignore[method-assign]
    fleet.run(asked)
    return fleet, expected


def test_it_is_the_policy_of_that_name_in_simulations_only() -> None:
    assert isinstance(SimulationConfig(profile(), 2, "oracle").build_fleet().routers[0].policy, OraclePolicy)


def test_a_request_behind_a_running_step_has_the_expected_first_token() -> None:
    """Steps of 1 s and 0.25 s per new token: 2 tokens until 1.5 s; then 3 tokens beside one stream, 1.875 s."""
    asked = [SimRequest(0.0, 2, 5, (1,), BLOCK), SimRequest(0.5, 3, 1, (2,), BLOCK)]
    fleet, expected = run(asked, replicas=1)
    firsts = {one.record.request_id: one.record.first_token for one in fleet.records}
    assert expected == {"0": 1.5, "1": 3.375}
    assert firsts == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_an_expectation_is_kept_if_nothing_else_comes(seed: int) -> None:
    """Law: first come, first served, so only later requests can delay it; waiting for blocks may move a step."""
    asked = [replace(one, output_tokens=1) for one in requests(seed, 30, longest=3, gap=4.0)]
    fleet, expected = run(asked)
    arrivals, num_checked = [one.at for one in asked], 0
    for one in fleet.records:
        start, first = one.record.arrival, one.record.first_token
        assert first is not None
        if not any(start < at < first for at in arrivals):
            num_checked += 1
            assert abs(first - expected[one.record.request_id]) <= 1.0 + 1e-9
    assert num_checked > 3


def test_it_goes_where_the_exact_cache_says_and_not_where_the_index_does() -> None:
    fleet = SimulationConfig(profile(), 2, "oracle").build_fleet()
    prompt = SimRequest(0.0, 12, 1, (1, 2, 3), BLOCK)
    for replica in fleet.replicas.values():
        fleet.at(20.0, lambda now, replica=replica: replica.flush())
    fleet.run([prompt, replace(prompt, at=10.0), replace(prompt, at=30.0)])
    hits = [one.record.cached_tokens for one in sorted(fleet.records, key=lambda one: one.record.arrival)]
    assert hits == [0, 11, 0] or hits == [0, 8, 0]


def test_a_slow_replica_is_avoided_at_once() -> None:
    fleet = SimulationConfig(profile(), 2, "oracle").build_fleet()
    fleet.replicas["r0"].speed.factor = 5.0
    fleet.run([SimRequest(10.0 * index, 4, 1, (index,), BLOCK) for index in range(10)])
    assert {one.replica for one in fleet.records} == {"r1"}


def test_a_full_pool_costs_the_time_until_blocks_are_free() -> None:
    fleet = SimulationConfig(replace(profile(8), max_seqs=8), 2, "oracle").build_fleet()
    asked = [SimRequest(0.0, 20, 8, (1, 2, 3, 4, 5), BLOCK), SimRequest(0.5, 4, 1, (9,), BLOCK)]
    fleet.run(asked)
    assert pytest.approx(2) == len({one.replica for one in fleet.records})
