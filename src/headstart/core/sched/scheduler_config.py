"""SchedulerConfig: the settings of one scheduler and its pool of KV blocks."""

from dataclasses import dataclass

from headstart.core.sched.limits import Limits
from headstart.core.speculation.speculation_config import SpeculationConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of a scheduler. Its defaults are the product's: `config/options.py` refers to them and explains them."""

    num_blocks: int  # of the pool, with the null block
    block_size: int  # tokens
    limits: Limits
    model: bytes = b""  # fingerprint of the weights: part of every block hash
    enable_prefix_caching: bool = True
    policy: str = "lpm"  # order of the waiting queue: lpm, fcfs or priority
    lpm_k: int = 8
    eviction_policy: str = "2q"  # or lru, lhd
    tenant_floor: float = 0.5  # share of the pool that is divided among tenants
    max_pinned_share: float = 0.5  # of the pool
    speculation: SpeculationConfig | None = None
    state_pages: int = 0  # blocks that a recurrent state takes; 0: the model has none
    charge_cached: bool = False  # cached tokens and blocks count as new, as before vLLM #3402 was mended: to compare
    max_draft_tokens: int = 0  # of all sequences in one step; 0: no limit but the step's
