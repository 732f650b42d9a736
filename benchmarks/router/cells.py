"""Workloads and cells of the comparison of routing policies in simulated fleets (policies.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.sim.profile import REFERENCE, Profile
from headstart.sim.scenarios.scenario import Event, Scenario
from headstart.sim.sim_request import SimRequest
from headstart.sim.sim_store import Offload
from headstart.sim.sim_workload import read_requests, synthetic, window
from headstart.sim.step_cost import PaddedCost, RooflineCost, SumCost, SuperlinearCost

NUM_REQUESTS = 2000
CONVERSATION = "mooncake_conversation_trace.jsonl"

Make = Callable[[Path, int], Sequence[SimRequest]]


@dataclass(frozen=True)
class Workload:
    """A workload at 8 replicas, and the replica it runs on."""

    make: Make
    profile: Profile = REFERENCE


def conversation(speed: float, scale: float = 1.0) -> Make:
    """Return windows of the conversation trace; `scale`: at so many times the number of replicas."""

    def make(traces: Path, seed: int) -> Sequence[SimRequest]:
        requests = read_requests(traces / CONVERSATION, speed=speed * scale)
        return window(requests, (seed * NUM_REQUESTS) % 10_000, NUM_REQUESTS)

    return make


def agents(name: str, speed: float) -> Make:
    """Return the whole trace of an agent, a little faster or slower with each seed."""

    def make(traces: Path, seed: int) -> Sequence[SimRequest]:
        return read_requests(traces / name, speed=speed * (0.9 + 0.05 * seed))

    return make


def made(name: str, rate: float) -> Make:
    """Return a synthetic workload."""
    return lambda traces, seed: synthetic(name, rate, NUM_REQUESTS, seed)


SMALL_BLOCKS = replace(REFERENCE, num_blocks=2930 * 32, block_size=16)
WORKLOADS = {
    "conversation x 0.6": Workload(conversation(0.6)),
    "conversation x 1.0": Workload(conversation(1.0)),
    "conversation x 1.6": Workload(conversation(1.6)),
    "agent_miniswe": Workload(agents("agent_miniswe.jsonl", 30.0), SMALL_BLOCKS),
    "agent_taubench": Workload(agents("agent_taubench.jsonl", 20.0), SMALL_BLOCKS),
    "hot documents": Workload(made("hot-documents", 10.0)),
    "decode-heavy": Workload(made("decode-heavy", 14.0), replace(REFERENCE, num_blocks=800)),
}
BASE = "conversation x 1.0"
ROOFLINE = RooflineCost(overhead=2e-3, weights=6e-3, token=62.8e-6, pair=1.5e-9, resident=39e-9, stream=20e-6)


@dataclass(frozen=True)
class Factor:
    """One change of the base: 8 replicas, 10 % noise."""

    workload: str = BASE
    replicas: int = 8
    noise: float = 0.1
    scenario: Scenario = Scenario()  # noqa: RUF009
    cost: SumCost | RooflineCost | PaddedCost | SuperlinearCost | None = None
    believed: float = 1.0  # size of the index / that of the pool
    spacing: float = 0.0  # seconds between the token events of one step


SUM = SumCost(step=8e-3, stream=20e-6, resident=39e-9, token=62.8e-6, pair=1.5e-9)
FACTORS = {
    **{name: Factor(workload=name) for name in WORKLOADS},
    "4 replicas": Factor(replicas=4),
    "64 replicas": Factor(replicas=64),
    "noise 0": Factor(noise=0.0),
    "noise 20 %": Factor(noise=0.2),
    "one replica 3 times slower": Factor(scenario=Scenario((Event(0.0, "slow", ("r0",), factor=3.0),))),
    "two replicas jump between 1 and 2": Factor(
        scenario=Scenario((Event(0.0, "jump", ("r0", "r1"), factors=(1.0, 2.0), every=30.0),))
    ),
    "all replicas jump, half of them at a time": Factor(
        scenario=Scenario((Event(0.0, "jump", ("*",), factors=(1.0, 2.0), every=30.0),))
    ),
    "offload tier": Factor(scenario=Scenario(offload=Offload(num_blocks=8000, tokens_per_s=200_000.0, latency=0.005))),
    "index four times the pool": Factor(believed=4.0),
    "roofline": Factor(cost=ROOFLINE),
    "padded": Factor(cost=PaddedCost(SUM)),
    "superlinear": Factor(cost=SuperlinearCost(SUM)),
    "token events 0.05 ms apart": Factor(spacing=5e-5),
    "token events 0.2 ms apart": Factor(spacing=2e-4),
}
STAGES = {
    "base": (tuple(WORKLOADS), 5),
    "factors": (tuple(name for name in FACTORS if name not in WORKLOADS), 5),
    "ablations": (tuple(WORKLOADS), 5),
}
