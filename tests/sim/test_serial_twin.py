"""The simulator with serial prefills against its twin, a queue of prefills over a bare block pool."""

from dataclasses import replace
from random import Random

import pytest
from sim.serial_fleet import Arrival
from sim.serial_fleet import VirtualFleet as SerialFleet
from sim.serial_fleet import VirtualReplica as SerialReplica

from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.policies.policy_table import make_policy, policy_names
from headstart.router.router import Router
from headstart.router.routing_request import RoutingRequest
from headstart.router.step_rates import StepRates
from headstart.sim.profile import SERIAL, ReplicaProfile
from headstart.sim.sim_fleet import FleetOptions, VirtualFleet
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_request import SimRequest
from headstart.sim.step_cost import AdditiveCost
from headstart.workload.request_record import RequestRecord, summarize_records

BLOCK = 16
BASE, TOKEN = 2e-3, 1e-4  # seconds


def sessions(count: int) -> list[SimRequest]:
    """Chat traffic: all share the first block, sessions grow, arrivals come close together."""
    rng, now, known, fresh = Random(0), 0.0, list[list[int]](), iter(range(1, 10**9))
    found: list[SimRequest] = []
    for _ in range(count):
        now += rng.expovariate(40.0)
        if known and rng.random() < 0.4:
            path = rng.choice(known)
        else:
            path = [0, next(fresh)]
            known.append(path)
        path += [next(fresh) for _ in range(rng.randrange(2, 24))]
        found.append(SimRequest(now, len(path) * BLOCK - rng.randrange(BLOCK), 1, tuple(path), BLOCK))
    return found


def router(num: int, num_blocks: int, policy: str) -> Router:
    found = Router(make_policy(policy))
    for index in range(num):
        found.add(Endpoint(f"r{index}", ApproximateIndex(num_blocks), block_size=BLOCK))
    return found


def simulated(asked: list[SimRequest], num: int, num_blocks: int, policy: str) -> list[RequestRecord]:
    profile: ReplicaProfile = replace(
        SERIAL, cost=AdditiveCost(step=BASE, token=TOKEN), num_blocks=num_blocks, block_size=BLOCK
    )
    replicas = [SimReplica(f"r{index}", profile) for index in range(num)]
    fleet = VirtualFleet(replicas, [router(num, num_blocks, policy)], FleetOptions(probe_interval=0.0))
    return sorted((one.record for one in fleet.run(asked)), key=lambda record: int(record.request_id))


def serial(asked: list[SimRequest], num: int, num_blocks: int, policy: str) -> list[RequestRecord]:
    rates = StepRates(1e3 * BASE, 0.0, 0.0, 1e3 * TOKEN, 0.0)
    fleet = SerialFleet([SerialReplica(f"r{index}", num_blocks, BLOCK, rates, 0.0) for index in range(num)])
    arrivals = [
        Arrival(one.at, RoutingRequest(one.routing_prompt(one.prompt_token_ids(), (BLOCK,)), session=one.session), 1)
        for one in asked
    ]
    records = fleet.run(arrivals, [router(num, num_blocks, policy)])
    return sorted(records, key=lambda record: int(record.request_id))


@pytest.mark.parametrize("policy", policy_names())
def test_without_evictions_every_request_has_the_same_times_and_hits(policy: str) -> None:
    asked = sessions(300)
    for one, other in zip(simulated(asked, 4, 8192, policy), serial(asked, 4, 8192, policy), strict=True):
        assert one.cached_tokens == other.cached_tokens
        assert one.first_token == pytest.approx(other.first_token, abs=1e-9)
        assert one.finish == pytest.approx(other.finish, abs=1e-9)


@pytest.mark.parametrize("policy", ["least-load", "round-robin", "prefix-threshold"])
def test_with_evictions_the_means_agree(policy: str) -> None:
    asked = sessions(600)
    one = summarize_records(simulated(asked, 4, 384, policy))
    other = summarize_records(serial(asked, 4, 384, policy))
    assert one.cached_share == pytest.approx(other.cached_share, rel=0.05)
    assert one.ttft is not None and other.ttft is not None
    assert one.ttft.mean == pytest.approx(other.ttft.mean, rel=0.05)
