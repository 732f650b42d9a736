"""Endpoint: the router's state of one replica: prefix index, load, health."""

from dataclasses import dataclass

from headstart.router.health import ReplicaHealth
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.load import MAX_AGE, ReplicaLoad
from headstart.router.policies.rendezvous import key_digest
from headstart.router.pricing import PromptCost, cost_at_replica
from headstart.router.step_rates import StepRates


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A report of a replica: from a scrape or a response header."""

    at: float
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0  # share of blocks in use, 0..1
    adapters: frozenset[str] = frozenset()  # loaded
    waiting_adapters: frozenset[str] = frozenset()  # requested and not loaded yet
    max_adapters: int = 0


class Endpoint:
    """One replica. `name` is its address, the same for all routers; `models` empty: it serves any model."""

    __slots__ = (
        *("_reported", "block_size", "digest", "granule", "health", "index", "load", "miscounted", "models", "name"),
        *("tokenizer",),
    )

    def __init__(
        self,
        name: str,
        index: PrefixIndex,
        *,
        block_size: int = 16,
        models: frozenset[str] = frozenset(),
        prior: StepRates | None = None,
    ) -> None:
        self.name = name
        self.digest = key_digest(name.encode())  # for rendezvous hashing
        self.index = index
        self.block_size = block_size
        self.models = models
        self.tokenizer = ""  # digest of one whose token ids the replica takes beside a text; "": none
        self.health = ReplicaHealth()
        self.load = ReplicaLoad(prior, self.unclaimed_and_total_tokens)
        self._reported: ReplicaReport | None = None
        self.granule = 0  # greatest common divisor of the cached tokens it reported: converges to its real block size
        self.miscounted: set[str] = set()  # forms of prompts whose last report differed in the number of tokens

    @property
    def reported(self) -> ReplicaReport | None:
        """Its last report."""
        return self._reported

    @reported.setter
    def reported(self, reported: ReplicaReport) -> None:
        self._reported = reported
        self.load.record_report(reported.waiting, reported.running, reported.at)

    def reset_for_block_size(self, block_size: int, index: PrefixIndex) -> None:
        """Reset the state after a restart with another block size: the index and its corrections are void."""
        self.block_size, self.index, self.granule = block_size, index, 0
        self.miscounted.clear()

    def recent_report(self, now: float) -> ReplicaReport | None:
        """Return its last report, if it is recent."""
        reported = self.reported
        return reported if reported is not None and now - reported.at <= MAX_AGE else None

    def waiting(self, now: float) -> int:
        """Return the requests without a first token: our count, or the reported one if higher (other routers')."""
        reported = self.recent_report(now)
        return max(self.load.num_awaiting_first_token, reported.waiting if reported is not None else 0)

    def num_requests(self, now: float) -> int:
        """Return the requests in flight there."""
        reported = self.recent_report(now)
        return max(self.load.num_requests, reported.waiting + reported.running if reported is not None else 0)

    def backlog_ms(self, now: float) -> float:
        """Return the work queued before ours; requests of other routers count as the mean of our own."""
        return cost_at_replica(self, 1, 0, now).backlog

    def slowdown_versus_fleet(self, now: float) -> float:
        """Return how many times slower than its fleet it is at present: learned, or its oldest request is late."""
        return cost_at_replica(self, 1, 0, now).factor

    def unclaimed_and_total_tokens(self) -> tuple[float, float]:
        """Return the tokens of its cache that no prompt in flight claims (inf: not known), and those of all of it."""
        index = self.index
        return index.num_unreserved_blocks * self.block_size, index.cache_capacity_blocks * self.block_size

    def eviction_cost_ms(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Return the prefill of tokens evicted for a prompt that are likely to be requested again."""
        tokens = max(prompt_tokens - cached_tokens, 1)
        lost = self.index.expected_evicted_reusable_blocks(-(-tokens // self.block_size)) * self.block_size
        rates = self.load.rates
        return lost * (rates.token + rates.pair * prompt_tokens / 2)

    def prompt_cost(self, prompt_tokens: int, cached_tokens: int, now: float) -> PromptCost[float]:
        """Return the cost of a prompt of which `cached_tokens` are cached here, without evictions."""
        return cost_at_replica(self, prompt_tokens, cached_tokens, now)
