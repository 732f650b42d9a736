"""Small simulated fleets for tests."""

from collections.abc import Sequence
from random import Random

from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router
from headstart.sim.profile import ReplicaProfile
from headstart.sim.sim_fleet import DEFAULTS, FleetOptions, VirtualFleet, make_endpoint
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_request import SimRequest
from headstart.sim.step_cost import AdditiveCost

COST = AdditiveCost(step=1.0, stream=0.125, token=0.25)  # exact in binary
BLOCK = 4


def profile(num_blocks: int = 32, *, budget: int = 16, seqs: int = 8, noise: float = 0.0) -> ReplicaProfile:
    return ReplicaProfile(
        "small",
        "made up",
        COST,
        num_blocks,
        block_size=BLOCK,
        max_batched_tokens=budget,
        max_seqs=seqs,
        noise=noise,
    )


def fleet(
    num: int,
    kind: ReplicaProfile,
    *,
    policy: str = "cost",
    seed: int = 0,
    options: FleetOptions = DEFAULTS,
) -> VirtualFleet:
    router = Router(make_policy(policy))
    replicas = [SimReplica(f"r{index}", kind, seed=seed) for index in range(num)]
    for replica in replicas:
        router.add(make_endpoint(replica))
    return VirtualFleet(replicas, [router], options)


def requests(seed: int, count: int, *, longest: int = 12, output: int = 9, gap: float = 2.0) -> list[SimRequest]:
    """Return random requests whose prompts share blocks of BLOCK tokens."""
    rng, time, found = Random(seed), 0.0, list[SimRequest]()
    for _ in range(count):
        time += rng.expovariate(1 / gap)
        length = rng.randint(1, longest * BLOCK)
        ids, number = list[int](), 0
        for _ in range(-(-length // BLOCK)):
            number = number * 2 + rng.randint(1, 2)
            ids.append(number)
        found.append(SimRequest(time, length, rng.randint(1, output), tuple(ids), BLOCK))
    return found


def replica_of(found: VirtualFleet, number: int = 0) -> SimReplica:
    return found.replicas[f"r{number}"]


def check_conservation(found: VirtualFleet, asked: Sequence[SimRequest]) -> None:
    """Assert that every request ended once, prompt tokens are accounted for, and no block is lost."""
    assert sorted(int(one.record.request_id) for one in found.records) == list(range(len(asked)))
    for one in found.records:
        assert one.record.prompt_tokens == asked[int(one.record.request_id)].prompt_tokens
        if one.record.ok:
            assert sum(one.breakdown) == one.record.prompt_tokens
            assert one.breakdown.num_cached == one.record.cached_tokens < one.record.prompt_tokens
            assert one.record.output_tokens == asked[int(one.record.request_id)].output_tokens
            assert one.record.first_token is not None and one.record.finish is not None
            assert one.record.arrival < one.record.first_token <= one.record.finish
    for replica in found.replicas.values():
        replica.pool.check_invariants()
        if not replica.scheduler.has_work:
            assert replica.pool.num_free == replica.pool.usable_capacity, "a block is neither held nor free"
    for router in found.routers:
        assert all(endpoint.load.num_requests == 0 for endpoint in router.endpoints.values())
