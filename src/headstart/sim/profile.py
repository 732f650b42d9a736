"""Profile: one kind of simulated replica: its step cost, its scheduler's limits, and its KV blocks."""

from dataclasses import dataclass

from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.sim.sim_store import Offload
from headstart.sim.step_cost import StepCost, SumCost


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings of a replica. `source` states where its figures come from, and whether they were measured."""

    name: str
    source: str
    cost: StepCost
    num_blocks: int  # usable
    block_size: int = 512  # tokens
    max_batched_tokens: int = 8192
    max_seqs: int = 256
    noise: float = 0.0  # of a step's duration: standard deviation of its logarithm
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "2q"
    offload: Offload | None = None  # a second, larger cache

    @property
    def capacity(self) -> int:
        """KV tokens of one replica."""
        return self.num_blocks * self.block_size

    def scheduler_config(self) -> SchedulerConfig:
        """Return the settings of its scheduler; the context is as long as the pool."""
        return SchedulerConfig(
            num_blocks=self.num_blocks + 1,
            block_size=self.block_size,
            limits=Limits(
                max_batched_tokens=self.max_batched_tokens, max_seqs=self.max_seqs, max_model_len=self.capacity
            ),
            policy=self.scheduling_policy,
            eviction_policy=self.eviction_policy,
        )


REFERENCE_COST = SumCost(step=8e-3, stream=20e-6, resident=39e-9, token=62.8e-6, pair=1.5e-9)
REFERENCE = Profile(
    "reference",
    "constants of a 32B model on two GPUs, from an independent simulator; not measured here",
    REFERENCE_COST,
    num_blocks=2930,
    noise=0.1,
    eviction_policy="lru",
)
"""The setting that results of issue 16 are stated for."""
