"""RoutingDecision: where one request is sent, and why. RoutedInFlight: the same request once it was sent, and its
progress.

The owner of an RoutedInFlight passes it back with every later event, so the router needs no table of requests, no
lock and no cleanup of requests that never return.
"""

from typing import Any, NamedTuple

from headstart.core.cache.hashing import BlockHash
from headstart.router.endpoint import Endpoint
from headstart.router.index.prefix_index import PrefixIndex, Reservation
from headstart.router.load import RequestFlight
from headstart.router.policies.policy import Candidate, Candidates, Policy, PolicyInput, RankedCandidates


class ShadowComparison(NamedTuple):
    """The decision of a shadow policy: `regret` is its estimated cost less ours, in milliseconds."""

    policy: Policy
    choice: RankedCandidates
    regret: float
    agrees: bool


class RoutingDecision:
    """The chosen replica, its alternatives and the expectations."""

    __slots__ = ("candidate", "choice", "comparisons", "endpoint", "excluded", "policy", "regrets", "view")

    def __init__(self, view: PolicyInput, choice: RankedCandidates, excluded: dict[str, str], policy: str) -> None:
        self.view = view
        self.choice = choice
        self.excluded = excluded
        self.policy = policy
        self.candidate: Candidate = choice.ranked[0]  # of the chosen replica
        self.endpoint = self.candidate.endpoint
        self.regrets: dict[str, tuple[str, float]] = {}  # shadow policy -> (its choice, milliseconds)
        self.comparisons: list[ShadowComparison] = []  # of shadow policies, not counted yet

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the other replicas, next best first."""
        return tuple(candidate.name for candidate in self.choice.ranked[1:])

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Block hashes of the prompt, in the block size of the chosen replica."""
        return self.view.request.prompt.block_hashes(self.endpoint.block_size)

    @property
    def scores(self) -> dict[str, float]:
        """The policy's scores by replica."""
        return {c.name: score for c, score in zip(self.choice.ranked, self.choice.scores, strict=True)}

    def candidate_of(self, name: str) -> Candidate:
        """Return a candidate by name. Raises KeyError if there is none."""
        for candidate in self.choice.ranked:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def explain(self) -> dict[str, Any]:
        """Return the costs and scores of all candidates. Call before the request is sent, while they are current."""
        scores, tokens, now = self.scores, self.view.num_prompt_tokens, self.view.now
        prices = [one.endpoint.prompt_cost(tokens, one.hit_tokens, now) for one in self.choice.ranked]
        fewest = min(price.requests for price in prices)
        rows = [
            {
                "endpoint": one.name,
                "cached_tokens": one.hit_tokens,
                "backlog_ms": round(price.backlog, 3),
                "prefill_ms": round(price.prefill, 3),
                "eviction_ms": round(one.endpoint.eviction_cost_ms(tokens, one.hit_tokens), 3),
                "decode_ms": round(price.decode, 3),
                "stall_ms": round(price.extra_stall_cost(fewest), 3),
                "slowness": round(price.factor, 3),
                "cost_ms": round(price.expected_ttft_ms, 3),
                "score": scores[one.name],
                "requests": one.endpoint.num_requests(now),
            }
            for one, price in zip(self.choice.ranked, prices, strict=True)
        ]
        return {
            "policy": self.policy,
            "endpoint": self.endpoint.name,
            "reason": self.choice.reason,
            "prompt_tokens": self.view.num_prompt_tokens,
            "candidates": rows,
            "excluded": self.excluded,
            "shadow_policies": {
                name: {"endpoint": other, "regret_ms": round(regret, 3)}
                for name, (other, regret) in self.regrets.items()
            },
        }


class RoutedInFlight(RoutingDecision):
    """A request that was sent by a decision: what was expected of it when it left, and what has happened since."""

    __slots__ = (
        *("cached_tokens", "finish", "first_token", "flight", "index", "logged_scores", "num_output"),
        *("reported_tokens", "reservation", "sent_at"),
    )

    def __init__(
        self,
        decision: RoutingDecision,
        endpoint: Endpoint,
        flight: RequestFlight,
        index: PrefixIndex,
        reservation: Reservation,
        sent_at: float,
    ) -> None:
        super().__init__(decision.view, decision.choice, decision.excluded, decision.policy)
        if endpoint is not self.endpoint:  # a fallback
            self.endpoint, self.candidate = endpoint, self.candidate_of(endpoint.name)
        self.regrets = decision.regrets
        self.flight = flight
        self.index = index
        self.reservation = reservation
        self.sent_at = sent_at
        self.first_token: float | None = None
        self.finish: float | None = None
        self.cached_tokens: int | None = None  # as reported by the replica
        self.reported_tokens = 0  # of the prompt, by the replica's count
        self.num_output: int | None = None  # tokens of the answer, as reported
        self.logged_scores: dict[str, float] = {}  # of all candidates; only for a decision log

    def drop_alternatives(self) -> None:
        """Forget the other candidates, of which there may be 1,000: an answered request is sent nowhere else."""
        if len(self.choice.ranked) == 1:
            return
        candidate = self.candidate
        score = self.choice.scores[self.choice.ranked.index(candidate)]
        alone = Candidates((candidate.endpoint,), (candidate.hit_blocks,), (candidate.hit_tokens,))
        self.view = self.view._replace(candidates=alone)
        self.choice = RankedCandidates(alone, (score,), self.choice.reason)
