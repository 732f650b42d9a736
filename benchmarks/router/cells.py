"""Workloads and cells of the comparison of routing policies in simulated fleets (policies.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from headstart.sim.profile import REFERENCE, ReplicaProfile
from headstart.sim.profile_file import datasheet_profile
from headstart.sim.scenario import FleetScenario, ScenarioEvent
from headstart.sim.sim_request import SimRequest
from headstart.sim.sim_store import OffloadTier
from headstart.sim.sim_workload import read_trace_requests, slice_and_rebase_requests, synthetic_requests
from headstart.sim.step_cost import AdditiveCost, PaddedCost, RooflineCost, SuperlinearCost

NUM_REQUESTS = 2000
CONVERSATION = "mooncake_conversation_trace.jsonl"

Make = Callable[[Path, int, int], Sequence[SimRequest]]
"""Map (folder of traces, seed, number of requests) to a workload."""


@dataclass(frozen=True)
class Workload:
    """A workload at 8 replicas, and the replica it runs on."""

    make: Make
    profile: ReplicaProfile = REFERENCE


def conversation(speed: float, scale: float = 1.0) -> Make:
    """Return windows of the conversation trace; `scale`: at so many times the number of replicas."""

    def make(traces: Path, seed: int, count: int) -> Sequence[SimRequest]:
        requests = read_trace_requests(traces / CONVERSATION, speed=speed * scale)
        return slice_and_rebase_requests(requests, (seed * count) % 10_000, count)

    return make


def agents(name: str, speed: float) -> Make:
    """Return the whole trace of an agent, a little faster or slower with each seed."""

    def make(traces: Path, seed: int, count: int) -> Sequence[SimRequest]:
        return read_trace_requests(traces / name, speed=speed * (0.9 + 0.05 * seed))

    return make


def made(name: str, rate: float) -> Make:
    """Return a synthetic workload."""
    return lambda traces, seed, count: synthetic_requests(name, rate, count, seed)


def best_of(num: int, rate: float) -> Make:
    """Return decode-heavy prompts, each sent `num` times at one moment; `rate` is that of all requests."""

    def make(traces: Path, seed: int, count: int) -> Sequence[SimRequest]:
        return [one for one in synthetic_requests("decode-heavy", rate / num, count // num, seed) for _ in range(num)]

    return make


def short_chats(rate: float, long_share: float = 0.0) -> Make:
    """Return prompts of 1,024 tokens, half of them shared, and answers of up to 256; a share has 2,048."""

    def make(traces: Path, seed: int, count: int) -> Sequence[SimRequest]:
        rng = Random(f"short chats/{seed}")
        return [
            replace(
                one,
                prompt_tokens=1024,
                block_ids=(one.block_ids[0], one.block_ids[-1]),
                output_tokens=2048 if rng.random() < long_share else min(one.output_tokens, 256),
            )
            for one in synthetic_requests("decode-heavy", rate, count, seed)
        ]

    return make


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
BASE_ROWS = tuple(WORKLOADS)
ROOFLINE = RooflineCost(overhead=2e-3, weights=6e-3, token=62.8e-6, pair=1.5e-9, resident=39e-9, stream=20e-6)


@dataclass(frozen=True)
class Factor:
    """One change of the base: 8 replicas, 10 % noise."""

    workload: str = BASE
    replicas: int = 8
    noise: float = 0.1
    scenario: FleetScenario = FleetScenario()  # noqa: RUF009
    cost: AdditiveCost | RooflineCost | PaddedCost | SuperlinearCost | None = None
    believed: float = 1.0  # size of the index / that of the pool
    spacing: float = 0.0  # seconds between the token events of one step
    routers: int = 1
    probe_interval: float = 2.0  # seconds; 0: routers read no metrics
    tells_output: bool = False  # requests state the length of their answers
    reserves: bool = False  # a request is admitted when its longest answer fits beside those of all running ones


SUM = AdditiveCost(step=8e-3, stream=20e-6, resident=39e-9, token=62.8e-6, pair=1.5e-9)
FACTORS = {
    **{name: Factor(workload=name) for name in WORKLOADS},
    "4 replicas": Factor(replicas=4),
    "64 replicas": Factor(replicas=64),
    "noise 0": Factor(noise=0.0),
    "noise 20 %": Factor(noise=0.2),
    "one replica 3 times slower": Factor(scenario=FleetScenario((ScenarioEvent(0.0, "slow", ("r0",), factor=3.0),))),
    "two replicas jump between 1 and 2": Factor(
        scenario=FleetScenario((ScenarioEvent(0.0, "jump", ("r0", "r1"), factors=(1.0, 2.0), every=30.0),))
    ),
    "all replicas jump, half of them at a time": Factor(
        scenario=FleetScenario((ScenarioEvent(0.0, "jump", ("*",), factors=(1.0, 2.0), every=30.0),))
    ),
    "offload tier": Factor(
        scenario=FleetScenario(offload=OffloadTier(num_blocks=8000, tokens_per_s=200_000.0, latency=0.005))
    ),
    "index four times the pool": Factor(believed=4.0),
    "roofline": Factor(cost=ROOFLINE),
    "padded": Factor(cost=PaddedCost(SUM)),
    "superlinear": Factor(cost=SuperlinearCost(SUM)),
    "token events 0.05 ms apart": Factor(spacing=5e-5),
    "token events 0.2 ms apart": Factor(spacing=2e-4),
}
ENGINE_WORKLOADS = {
    "qwen3-32b@2xh100, conversation x 0.9": Workload(conversation(0.9), datasheet_profile("qwen3-32b@2xh100")),
    "qwen3-32b@2xh100, 2,048 tokens a step, x 0.9": Workload(
        conversation(0.9), replace(datasheet_profile("qwen3-32b@2xh100"), max_batched_tokens=2048)
    ),
    "llama-3.3-70b@4xh100, conversation x 0.8": Workload(conversation(0.8), datasheet_profile("llama-3.3-70b@4xh100")),
    "llama-3.1-8b@l4, decode-heavy": Workload(made("decode-heavy", 2.5), datasheet_profile("llama-3.1-8b@l4")),
    "flat steps (qwen3-30b-a3b@2xh100), hot documents": Workload(
        made("hot-documents", 40.0), datasheet_profile("qwen3-30b-a3b@2xh100")
    ),
    "flat steps (qwen3-30b-a3b@2xh100), decode-heavy": Workload(
        made("decode-heavy", 40.0), datasheet_profile("qwen3-30b-a3b@2xh100")
    ),
    "8,192 tokens a step": Workload(conversation(0.9), SMALL_BLOCKS),
    "2,048 tokens a step": Workload(conversation(0.9), replace(SMALL_BLOCKS, max_batched_tokens=2048)),
    "512 tokens a step": Workload(conversation(0.7), replace(SMALL_BLOCKS, max_batched_tokens=512)),
    "decode-heavy, 512 tokens a step": Workload(
        made("decode-heavy", 14.0), replace(REFERENCE, num_blocks=800, max_batched_tokens=512)
    ),
    "llama-3.1-8b@l4, pool of 300 blocks": Workload(
        short_chats(1.5), replace(datasheet_profile("llama-3.1-8b@l4"), num_blocks=300)
    ),
    "a quarter long answers, pool of 1,500 blocks": Workload(
        short_chats(22.0, 0.25), replace(SMALL_BLOCKS, num_blocks=1500)
    ),
    "best of 8": Workload(best_of(8, 30.0), replace(REFERENCE, num_blocks=800)),
    "best of 8, busy": Workload(best_of(8, 60.0), replace(REFERENCE, num_blocks=800)),
}
WORKLOADS |= ENGINE_WORKLOADS
FACTORS |= {name: Factor(workload=name, tells_output=True) for name in ENGINE_WORKLOADS}
FACTORS["four routers without metrics"] = Factor(routers=4, probe_interval=0.0, tells_output=True)
RESERVING_WORKLOADS = {
    "answers reserved, conversation x 1.0, pool of 600 blocks": Workload(
        conversation(1.0), replace(REFERENCE, num_blocks=600)
    ),
    "answers reserved, a quarter of them long, pool of 2,000 blocks": Workload(
        short_chats(22.0, 0.25), replace(SMALL_BLOCKS, num_blocks=2000)
    ),
    **{
        f"answers reserved, llama-3.1-8b@l4, pool of {num} blocks": Workload(
            short_chats(1.5), replace(datasheet_profile("llama-3.1-8b@l4"), num_blocks=num)
        )
        for num in (400, 300)
    },
    **{
        f"answers reserved, best of 8, pool of {num} blocks": Workload(
            best_of(8, 30.0), replace(REFERENCE, num_blocks=num)
        )
        for num in (100, 60)
    },
}
WORKLOADS |= RESERVING_WORKLOADS
FACTORS |= {name: Factor(workload=name, tells_output=True, reserves=True) for name in RESERVING_WORKLOADS}
ENGINES = (*ENGINE_WORKLOADS, "four routers without metrics", *RESERVING_WORKLOADS)
SHARED = ("conversation x 1.0", "hot documents", "decode-heavy", "agent_miniswe")
FACTORS |= {f"{name}, four routers": Factor(workload=name, routers=4, tells_output=True) for name in SHARED}
FACTORS["conversation x 1.0, two routers"] = Factor(routers=2, tells_output=True)
ROUTERS = (*(f"{name}, four routers" for name in SHARED), "conversation x 1.0, two routers")

STAGES = {
    "base": (BASE_ROWS, 5),
    "factors": (tuple(name for name in FACTORS if name not in (*BASE_ROWS, *ENGINES, *ROUTERS)), 5),
    "ablations": (BASE_ROWS, 5),
    "engines": (ENGINES, 5),
    "routers": (ROUTERS, 5),
}
