"""Scenarios applied to a fleet: speeds, failures, scaling, offload tiers; and conservation whatever happens."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.fleets import BLOCK, check_conservation, profile, requests

from headstart.core.errors import ConfigError
from headstart.sim.scenario import KINDS, FleetScenario, parse_scenario
from headstart.sim.sim_fleet import VirtualFleet
from headstart.sim.sim_request import SimRequest
from headstart.sim.sweep import SimulationConfig


def scenario(*events: dict[str, Any], **tables: Any) -> FleetScenario:
    return parse_scenario({"event": list(events), **tables})


def one_by_one(count: int, gap: float) -> list[SimRequest]:
    """Equal requests that share nothing: 12 prompt tokens, one output token, 4.0 seconds each."""
    return [SimRequest(gap * i, 12, 1, (3 * i, 3 * i + 1, 3 * i + 2), BLOCK) for i in range(count)]


def e2e(fleet: VirtualFleet) -> list[float | None]:
    return [one.record.e2e for one in sorted(fleet.records, key=lambda one: one.record.arrival)]


def test_a_slow_replica_is_slow_from_then_on() -> None:
    happens = scenario({"at": 15.0, "kind": "slow", "replica": "r0", "factor": 2.0})
    fleet = SimulationConfig(profile(), 1, scenario=happens).run_new_fleet(one_by_one(4, 10.0))
    assert e2e(fleet) == [4.0, 4.0, 8.0, 8.0]


def test_jumping_speeds_change_again_and_again() -> None:
    happens = scenario({"at": 9.0, "kind": "jump", "factors": [3.0, 1.0], "every": 20.0})
    fleet = SimulationConfig(profile(), 1, scenario=happens).run_new_fleet(one_by_one(4, 20.0))
    assert e2e(fleet) == [4.0, 12.0, 4.0, 12.0]


def test_a_flushed_replica_computes_its_prefixes_again() -> None:
    asked = [SimRequest(at, 13, 1, (1, 2, 3, 4), BLOCK) for at in (0.0, 10.0, 30.0)]
    happens = scenario({"at": 20.0, "kind": "flush"})
    fleet = SimulationConfig(profile(), 1, scenario=happens).run_new_fleet(asked)
    assert [one.record.cached_tokens for one in fleet.records] == [0, 12, 0]


def test_a_restarted_replica_serves_again() -> None:
    happens = scenario({"at": 15.0, "kind": "stop"}, {"at": 35.0, "kind": "restart"})
    fleet = SimulationConfig(profile(), 1, scenario=happens).run_new_fleet(one_by_one(6, 10.0))
    assert [one.record.ok for one in fleet.records] == [True, True, False, False, True, True]


def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    happens = scenario({"at": 1.0, "kind": "drain", "replica": "r0"})
    asked = one_by_one(12, 1.5)
    fleet = SimulationConfig(profile(), 2, "round-robin", scenario=happens).run_new_fleet(asked)
    assert all(one.record.ok for one in fleet.records)
    assert sum(one.replica == "r0" for one in fleet.records) <= 1
    check_conservation(fleet, asked)


def test_an_added_replica_takes_a_share() -> None:
    happens = scenario({"at": 20.0, "kind": "add"})
    fleet = SimulationConfig(profile(), 1, "least-load", scenario=happens).run_new_fleet(one_by_one(60, 1.0))
    assert list(fleet.replicas) == ["r0", "r1"]
    assert sum(one.replica == "r1" for one in fleet.records) > 10
    assert fleet.replicas["r1"].up_seconds(fleet.now) == fleet.now - 20.0


def test_a_fleet_grows_under_load_and_shrinks_after_it() -> None:
    tables = {"min": 1, "max": 4, "high": 6.0, "low": 1.0, "interval": 5.0, "startup": 5.0}
    asked = one_by_one(200, 0.5) + [SimRequest(300.0 + 20 * i, 4, 1, (9000 + i,), BLOCK) for i in range(20)]
    fleet = SimulationConfig(profile(seqs=4), 1, "least-load", scenario=scenario(autoscale=tables)).run_new_fleet(asked)
    assert len(fleet.replicas) == 4
    assert sum(replica.is_up and not replica.is_draining for replica in fleet.replicas.values()) == 1
    assert len(fleet.routers[0].endpoints) == 1
    check_conservation(fleet, asked)


def test_an_offload_tier_returns_what_the_pool_has_evicted() -> None:
    """A pool of 16 blocks and two prompts of 12, in turn: without the tier neither stays."""
    asked = [SimRequest(50.0 * i, 49, 1, tuple(range(100 * (i % 2), 100 * (i % 2) + 13)), BLOCK) for i in range(8)]
    bare = SimulationConfig(profile(16), 1).run_new_fleet(asked)
    tier = {"blocks": 64, "tokens_per_s": 48.0, "latency": 0.5}
    tiered = SimulationConfig(profile(16), 1, scenario=scenario(offload=tier)).run_new_fleet(asked)
    assert sum(one.breakdown.store for one in bare.records) == 0
    assert [one.breakdown.store for one in tiered.records[2:]] > [0] * 6
    assert all(one.breakdown.store + one.breakdown.shared == 48 for one in tiered.records[2:])
    again = tiered.records[-1]
    missing = again.breakdown.store
    # the load, then one step of one token
    assert again.record.ttft == pytest.approx(0.5 + missing / 48.0 + 1.25)
    check_conservation(tiered, asked)


def test_a_replica_that_cannot_exist_is_refused() -> None:
    happens = scenario({"at": 1.0, "kind": "stop", "replica": "r5"})
    with pytest.raises(ConfigError, match=r"event 1: there is no replica 'r5'; they are r0 to r1"):
        SimulationConfig(profile(), 2, scenario=happens).build_fleet()


def random_events(rng: Random, num: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _ in range(num):
        kind = rng.choice(KINDS)
        event: dict[str, Any] = {"at": rng.uniform(0.0, 80.0), "kind": kind}
        if kind != "add":
            event["replica"] = rng.choice(["*", "r0", "r1", ["r0", "r2"]])
        if kind == "slow":
            event["factor"] = rng.choice([0.5, 4.0])
        if kind == "jump":
            event |= {"factors": [1.0, 2.0, 0.5], "every": rng.uniform(1.0, 20.0)}
        found.append(event)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from(["cost", "least-load", "round-robin"]), st.booleans(), st.booleans())
def test_every_request_ends_once_whatever_happens(seed: int, policy: str, scales: bool, offloads: bool) -> None:
    rng = Random(seed)
    tables: dict[str, Any] = {}
    if scales:
        tables["autoscale"] = {"min": 1, "max": 5, "high": 4.0, "low": 1.0, "interval": 3.0, "startup": 2.0}
    if offloads:
        tables["offload"] = {"blocks": 40, "tokens_per_s": rng.choice([2.0, 100.0]), "latency": 0.25}
    happens = scenario(*random_events(rng, rng.randint(0, 8)), **tables)
    asked = requests(seed, 40)
    found = SimulationConfig(profile(rng.randint(16, 48), noise=0.2), 3, policy, seed=seed, scenario=happens)
    fleet = found.run_new_fleet(asked)
    check_conservation(fleet, asked)
    assert found.run_new_fleet(asked).records == fleet.records
