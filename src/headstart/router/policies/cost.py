"""The policy `cost`: the replica with the earliest first token, in milliseconds. The default.

The cost is the backlog there and the prefill of the uncached tokens, in steps that decodes make longer (pricing.py).
The rates are learned (rate_learner.py), and while they do not explain what is measured, the order is that of uncached
tokens. Prefix affinity follows from that, and so does leaving an overloaded replica: there is no threshold to tune.
The cost to others is added: later requests compute again what it evicts (approximate_index.py), and decodes slow each
other down. Among replicas of about equal cost, rendezvous hashing decides, bounded by load (Mirrokni
et al., 2018), so that independent routers place the same new prefix at the same replica.
"""

import numpy as np
from numpy.typing import NDArray

from headstart.router.endpoint import Cost, Endpoint
from headstart.router.policies.policy import Choice, View
from headstart.router.policies.rendezvous import weights
from headstart.router.pricing import EVICTED, Costs, price_all

SLACK = 0.05  # of the prefill: the additional wait accepted for agreement between routers
SAME_RATE = 1.25  # smaller differences may be noise: rates are learned from noisy times


class _Evictions:
    """The price of evictions at each replica, computed where it matters."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._known: dict[int, float] = {}

    def of(self, index: int) -> float:
        """Return the milliseconds."""
        found = self._known.get(index)
        if found is None:
            candidate = self._view.candidates[index]
            found = self._known[index] = candidate.endpoint.eviction_ms(self._view.prompt_tokens, candidate.hit_tokens)
        return found


class CostPolicy:
    """Least milliseconds to the first token. `slack` 0: always the least cost."""

    name = "cost"
    lower_is_better = True

    def __init__(self, slack: float = SLACK) -> None:
        self.slack = slack

    def choose(self, view: View) -> Choice:
        """Rank by cost; of the replicas about as good as the best, the one with the highest key weight is first."""
        candidates = view.candidates
        hits = [candidate.hit_tokens for candidate in candidates]
        costs = price_all([c.endpoint for c in candidates], view.prompt_tokens, hits, view.now)
        prices = costs.price
        evictions = _Evictions(view)
        best = _best(prices, costs.factor, evictions)
        first = self._placed(view, costs, best, evictions)
        order: list[int] = prices.argsort(kind="stable").tolist()
        order.remove(first)
        order.insert(0, first)
        reason = "least cost" if first == best else "placed by its first new block"
        return Choice(tuple(candidates[i] for i in order), tuple(prices[order].tolist()), reason)

    def picked(self, choice: Choice, endpoint: Endpoint) -> None:
        """Do nothing."""

    def _placed(self, view: View, costs: Costs, best: int, evictions: _Evictions) -> int:
        """Return the replica about as good as the best that the request's first new block is placed at."""
        hits = np.array([candidate.hit_tokens for candidate in view.candidates])
        slack = self.slack * costs.prefill[best]
        mask = (hits >= hits[best]) & (costs.prefill <= SAME_RATE * costs.prefill[best])
        mask &= (costs.backlog <= costs.backlog[best] + slack) & (costs.decode <= costs.decode[best] + slack)
        mask &= costs.factor <= costs.factor[best]
        equals: list[int] = np.flatnonzero(mask).tolist()
        if len(equals) < 2:
            return best
        limit = evictions.of(best) + slack
        ranks = dict(zip(equals, weights(view.key, [view.candidates[i].name for i in equals]), strict=True))
        while True:
            first = max(ranks, key=ranks.__getitem__)
            if evictions.of(first) <= limit:  # as `best` at the latest
                return first
            del ranks[first]


def _best(prices: NDArray[np.float64], factors: NDArray[np.float64], evictions: _Evictions) -> int:
    """Return the replica with the lowest price, evictions included; adds them to `prices` where they were computed."""
    best, least = -1, float("inf")
    for index in prices.argsort(kind="stable").tolist():
        if prices[index] >= least:
            break
        prices[index] += EVICTED * evictions.of(index) * factors[index]
        if prices[index] < least:
            best, least = index, prices[index]
    return best


def cost_of(view: View, name: str) -> Cost:
    """Return the cost of one candidate, whichever policy chose it."""
    candidate = next(candidate for candidate in view.candidates if candidate.name == name)
    return candidate.endpoint.cost(view.prompt_tokens, candidate.hit_tokens, view.now)
