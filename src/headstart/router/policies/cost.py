"""The policy `cost`: the replica with the earliest first token, in milliseconds. The default.

The cost is the backlog there, the prefill of the uncached tokens, and the slowdown by responses generated there; its
rates are learned (prefill_model.py). Prefix affinity follows from that, and so does leaving an overloaded replica:
there is no threshold to tune. The cost to later requests is added: they wait for this prefill, and recompute what it
evicts (approximate_index.py), so that prefixes spread over the caches that have space for them. Among replicas of about
equal cost, rendezvous hashing decides, bounded by load (Mirrokni et al., 2018), so that independent routers place the
same new prefix at the same replica.
"""

from headstart.router.endpoint import Cost, Endpoint
from headstart.router.policies.policy import Choice, View, by_number
from headstart.router.policies.rendezvous import weight

SLACK = 0.1  # of the prefill: the additional wait accepted for agreement between routers
SAME_RATE = 1.25  # smaller differences may be noise: rates are learned from noisy times


class CostPolicy:
    """Least milliseconds to the first token. `slack` 0: always the least cost."""

    name = "cost"
    lower_is_better = True

    def __init__(self, slack: float = SLACK) -> None:
        self.slack = slack

    def choose(self, view: View) -> Choice:
        """Rank by cost; of the replicas about as good as the best, the one with the highest key weight is first."""
        costs = [c.endpoint.cost(view.prompt_tokens, c.hit_tokens, view.now) for c in view.candidates]
        choice = by_number(view, [cost.price for cost in costs], "least cost", tuple(costs))
        best = costs[view.candidates.index(choice.ranked[0])]
        hit = choice.ranked[0].hit_tokens
        equals = [
            candidate
            for candidate, cost in zip(view.candidates, costs, strict=True)
            if candidate.hit_tokens >= hit
            and cost.prefill <= SAME_RATE * best.prefill
            and cost.backlog <= best.backlog + self.slack * best.prefill
            and cost.eviction <= best.eviction + self.slack * best.prefill
            and cost.slowness <= best.slowness
        ]
        if len(equals) < 2:
            return choice
        first = max(equals, key=lambda candidate: weight(view.key, candidate.name))
        if first is choice.ranked[0]:
            return choice._replace(reason="placed by its first new block")
        at = choice.ranked.index(first)
        ranked = (first, *choice.ranked[:at], *choice.ranked[at + 1 :])
        scores = (choice.scores[at], *choice.scores[:at], *choice.scores[at + 1 :])
        return Choice(ranked, scores, "placed by its first new block", choice.memo)

    def picked(self, choice: Choice, endpoint: Endpoint) -> None:
        """Do nothing."""


def cost_of(view: View, name: str) -> Cost:
    """Return the cost of one candidate, whichever policy chose it."""
    candidate = next(candidate for candidate in view.candidates if candidate.name == name)
    return candidate.endpoint.cost(view.prompt_tokens, candidate.hit_tokens, view.now)
