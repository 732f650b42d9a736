"""EngineInfo, reported by an engine at its start, and EngineStats, at any time; both cross processes as msgpack."""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.cache.block_store import StoreStats
from headstart.core.request import NO_DEFAULTS, SamplingDefaults
from headstart.core.sched.token_accounting import TokenCounters


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine that runs in another process; crosses the process border as msgpack."""

    model: str  # model folder: the front end reads the tokenizer from it
    served_name: str
    vocab_size: int  # rows of the logits: token ids must lie in [0, vocab_size)
    max_model_len: int  # tokens
    block_size: int  # tokens
    num_blocks: int  # usable KV blocks (block 0 not counted)
    kv_bytes: int
    dtype: str
    device: str
    threads: int
    attention_backend: str
    eos_token_ids: tuple[int, ...]
    scheduling_policy: str = "lpm"  # decides whether a request may have a priority
    quantization: str = "none"
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    exceptions: tuple[str, ...] = ()  # from exact reuse, by name; see invariant 15 in docs/invariants.md
    max_num_batched_tokens: int = 0  # of a step; 0: not stated
    checkpoint_tokens: int = 0  # whose KV takes the memory of one recurrent state; 0: the model has none

    @property
    def max_sequence_len(self) -> int:
        """The tokens of the longest sequence: a pool may be smaller than `max_model_len`. The last needs no KV."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class PoolStats(NamedTuple):
    """A snapshot of the block pool, in blocks."""

    num_blocks: int = 0  # usable
    num_free: int = 0  # allocatable: scratch + idle
    num_scratch: int = 0  # free and not in the block index; the other free ones are idle until they are evicted
    num_pinned_idle: int = 0  # pinned, not in use now
    num_pinned: int = 0  # pinned hashes, in use or not, computed or not
    num_published: int = 0
    num_loading: int = 0  # in flight from the store
    # Published blocks evicted or discarded since start, by cause:
    evictions_capacity: int = 0  # the space was needed
    evictions_failed: int = 0  # written or shared by a request whose hidden states were not finite: trust.py
    evictions_reset: int = 0  # the cache was reset

    @property
    def num_idle(self) -> int:
        """Free blocks that are in the block index until they are evicted."""
        return self.num_free - self.num_scratch

    @property
    def evictions_by_cause(self) -> dict[str, int]:
        """Published blocks evicted or discarded since start, by cause."""
        return {"capacity": self.evictions_capacity, "failed": self.evictions_failed, "reset": self.evictions_reset}

    @property
    def total_evictions(self) -> int:
        """Published blocks evicted or discarded since start, for any cause."""
        return sum(self.evictions_by_cause.values())


class EngineStats(NamedTuple):
    """A snapshot of an engine."""

    counters: TokenCounters = TokenCounters()  # since start; a copy
    pool: PoolStats = PoolStats()
    store: StoreStats | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0  # since start
    step_seconds: float = 0.0  # in the executor, since start
    last_batch_tokens: int = 0
    compute_tokens_per_s: float = 0.0  # of steps that mostly prefill; 0: not measured yet
