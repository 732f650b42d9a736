"""Profile: one kind of simulated replica: its step cost, its scheduler's limits, and its KV blocks."""

from dataclasses import dataclass

from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.sched.step_time import MaxStepTime
from headstart.sim.sim_store import OffloadTier
from headstart.sim.step_cost import AdditiveCost, StepCost


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """The settings of a replica. `source` states where its figures come from, and whether they were measured."""

    name: str
    source: str
    cost: StepCost
    num_blocks: int  # usable
    block_size: int = 512  # tokens
    max_batched_tokens: int = 8192
    max_seqs: int = 256
    max_model_len: int = 0  # prompt and output tokens of a request; 0: as many as the pool holds
    noise: float = 0.0  # of a step's duration: standard deviation of its logarithm
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "2q"
    step_bound: MaxStepTime | None = None  # of steps with prompt tokens, as on a CPU; None: unbounded
    offload: OffloadTier | None = None  # a second, larger cache
    state_tokens: int = 0  # of KV, whose bytes a recurrent state takes; 0: all layers have attention

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens of one replica."""
        return self.num_blocks * self.block_size

    def scheduler_config(self) -> SchedulerConfig:
        """Return the settings of its scheduler. Raises ConfigError for limits that could stall."""
        return SchedulerConfig(
            num_blocks=self.num_blocks + 1,
            block_size=self.block_size,
            limits=Limits(
                max_batched_tokens=self.max_batched_tokens,
                max_seqs=self.max_seqs,
                max_model_len=self.max_model_len or self.num_kv_tokens,
                max_step_time=self.step_bound,
            ),
            policy=self.scheduling_policy,
            eviction_policy=self.eviction_policy,
            tenant_floor=0.0,
            state_pages=-(-self.state_tokens // self.block_size),
        )


REFERENCE_COST = AdditiveCost(step=8e-3, stream=20e-6, resident=39e-9, token=62.8e-6, pair=1.5e-9)
REFERENCE = ReplicaProfile(
    "reference",
    "constants of a 32B model on two GPUs, from an independent simulator; not measured here",
    REFERENCE_COST,
    num_blocks=2930,
    noise=0.1,
    eviction_policy="lru",
)
"""The setting that results of issue 16 are stated for."""
SERIAL = ReplicaProfile(
    "serial",
    "one prefill after the other at 15,928 tokens per second, decodes free: gateway-api-inference-extension's figure",
    AdditiveCost(token=1 / 15_928),
    num_blocks=2930,
    max_batched_tokens=1 << 20,
    max_seqs=1,
    eviction_policy="lru",
)
"""The special case of `headstart bench lab route`: no step is shared by two requests."""
