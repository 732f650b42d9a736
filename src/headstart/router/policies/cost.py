"""The policy `cost`: the replica with the earliest first token, in milliseconds. The default.

A cost is the backlog there, the prefill of what is not cached there, and what the answers under way there take of it;
its rates are learned (prefill_model.py). Being where the prefix is follows from that, and so does leaving when too many
are there: there is no threshold to tune. Added is what it costs those who come later: they wait for this prefill, and
they compute again what has to go for it (approximate_index.py), so that prefixes spread over the caches that have room
for them. Among replicas that cost about the same, rendezvous hashing decides, bounded by load (Mirrokni et al., 2018),
so that routers that never talk place the same new prefix at the same replica.
"""

from headstart.router.endpoint import Cost, Endpoint
from headstart.router.policies.policy import Choice, View, by_number
from headstart.router.policies.rendezvous import weight

SLACK = 0.1  # of the prefill: so much longer a wait is taken for the sake of agreement
SAME_RATE = 1.25  # replicas that differ by less may only seem to: rates are learned from noisy times


class CostPolicy:
    """Least milliseconds to the first token. `slack` 0: never anything but the least cost."""

    name = "cost"
    lower_is_better = True

    def __init__(self, slack: float = SLACK) -> None:
        self.slack = slack

    def choose(self, view: View) -> Choice:
        """By cost, but first of those that are as good as the best the one that goes best with the key."""
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
        """Nothing to remember."""


def cost_of(view: View, name: str) -> Cost:
    """What one candidate would cost, whichever policy chose it."""
    candidate = next(candidate for candidate in view.candidates if candidate.name == name)
    return candidate.endpoint.cost(view.prompt_tokens, candidate.hit_tokens, view.now)
