"""Endpoint: the router's view of one replica: what is in its cache, what it has to do, whether it is well."""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.router.health import Health
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.load import Load
from headstart.router.prefill_model import PrefillModel, Work

LATER = 0.5  # of a prefill: so much others will wait because of it; 0.25 to 2 were tried (docs/routing.md)
EVICTED = 0.75  # of what has to go: so much others will compute again; 0.25 to 1.5 were tried
MAX_AGE = 5.0  # seconds after which what a replica said of itself is not true any more


@dataclass(frozen=True, slots=True)
class Reported:
    """What a replica said of itself: a scrape, a header, or nothing for a while."""

    at: float
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0  # share of its blocks in use, 0..1
    adapters: frozenset[str] = frozenset()  # loaded
    waiting_adapters: frozenset[str] = frozenset()  # asked for and not loaded yet
    max_adapters: int = 0


class Cost(NamedTuple):
    """Milliseconds to a first token at one replica, and what they are made of."""

    backlog: float
    prefill: float
    slowness: float = 1.0
    eviction: float = 0.0  # prefill of what has to go for it and others should want again

    @property
    def total(self) -> float:
        return (self.backlog + self.prefill) * self.slowness

    @property
    def price(self) -> float:
        """The same, and what it costs those who come after: they wait for its prefill, and compute what it evicts."""
        return (self.backlog + (1.0 + LATER) * self.prefill + EVICTED * self.eviction) * self.slowness


class Endpoint:
    """One replica. `name` is its address, the same for all routers; `models` empty: it serves any."""

    __slots__ = ("block_size", "contents", "granule", "health", "load", "miscounted", "models", "name", "reported")

    def __init__(
        self,
        name: str,
        contents: PrefixIndex,
        *,
        block_size: int = 16,
        models: frozenset[str] = frozenset(),
        prior: PrefillModel | None = None,
    ) -> None:
        self.name = name
        self.contents = contents
        self.block_size = block_size
        self.models = models
        self.health = Health()
        self.load = Load(prior)
        self.reported: Reported | None = None
        self.granule = 0  # greatest common divisor of the cached tokens it reported: its real block size, soon
        self.miscounted: set[str] = set()  # forms of prompts whose last report had another number of tokens than ours

    def reconfigured(self, block_size: int, contents: PrefixIndex) -> None:
        """It was started again with other blocks: nothing that was believed of its cache is so any more."""
        self.block_size, self.contents, self.granule = block_size, contents, 0
        self.miscounted.clear()

    def fresh(self, now: float) -> Reported | None:
        """What it said of itself, if that is recent."""
        reported = self.reported
        return reported if reported is not None and now - reported.at <= MAX_AGE else None

    def waiting(self, now: float) -> int:
        """Requests without a first token: by our own books, or by its own if it knows of more (other routers')."""
        reported = self.fresh(now)
        return max(self.load.num_pending, reported.waiting if reported is not None else 0)

    def num_requests(self, now: float) -> int:
        """Requests under way there."""
        reported = self.fresh(now)
        return max(self.load.num_requests, reported.waiting + reported.running if reported is not None else 0)

    def backlog_ms(self, now: float) -> float:
        """Work before ours: what we sent, and what others sent, each of which is taken for one of ours."""
        foreign = self.waiting(now) - self.load.num_pending
        return self.load.backlog_ms(now) + foreign * self.load.mean_prefill_ms

    def cost(self, prompt_tokens: int, cached_tokens: int, now: float) -> Cost:
        """What a prompt would cost here of which so much is cached."""
        work = Work.of(prompt_tokens, cached_tokens, self.load.num_streams)
        rates = self.load.rates
        lost = self.contents.loss(-(-work.tokens // self.block_size)) * self.block_size
        eviction = lost * (rates.token + rates.pair * prompt_tokens / 2)
        return Cost(self.backlog_ms(now), rates.prefill_ms(work), self.load.slowness(now), eviction)
