"""The policy `cost`: the replica with the earliest first token, in milliseconds. The default.

The cost is the backlog there and the prefill of the uncached tokens, in steps that decodes make longer (pricing.py).
The rates are learned (rate_learner.py), and while they do not explain what is measured, the order is that of uncached
tokens. Prefix affinity follows from that, and so does leaving an overloaded replica: there is no threshold to tune.
The cost to others is added: later requests compute again what it evicts (approximate_index.py), decodes slow each other
down, and a copy of a prompt that another request has in flight is work for nothing. Among replicas of about equal cost,
rendezvous hashing decides, bounded by load (Mirrokni et al., 2018), so that independent routers place the same new
prefix at the same replica.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from headstart.router.endpoint import Cost, Endpoint
from headstart.router.policies.policy import Candidate, Choice, View
from headstart.router.policies.rendezvous import weights
from headstart.router.pricing import EVICTED, Price, price_all, price_one

FEW = 24  # candidates; for more, arrays are cheaper than plain numbers
SLACK = 0.05  # of the prefill for the wait, of the price of decodes for these: accepted for agreement between routers
DECODE_SLACK = 0.1  # of the slack for the wait, which is accepted for decodes too: their price may be almost nothing
SAME_RATE = 1.25  # smaller differences may be noise: rates are learned from noisy times


class _Evictions:
    """The price of evictions at each replica, computed where it matters."""

    def __init__(self, view: View) -> None:
        self._candidates, self._prompt_tokens = view.candidates, view.prompt_tokens
        self._known: dict[int, float] = {}

    def of(self, index: int) -> float:
        """Return the milliseconds."""
        found = self._known.get(index)
        if found is None:
            endpoint, hit_tokens = self._candidates.endpoints[index], self._candidates.hit_tokens[index]
            found = self._known[index] = endpoint.eviction_ms(self._prompt_tokens, hit_tokens)
        return found


class CostPolicy:
    """Least milliseconds to the first token. `slack` 0: always the least cost."""

    name = "cost"
    lower_is_better = True

    def __init__(self, slack: float = SLACK) -> None:
        self.slack = slack

    def choose(self, view: View) -> Choice:
        """Rank by cost; of the replicas about as good as the best, the one with the highest key weight is first."""
        return self.choose_among_few(view) if len(view.candidates) <= FEW else self.choose_among_many(view)

    def picked(self, choice: Choice, endpoint: Endpoint) -> None:
        """Do nothing."""

    def choose_among_few(self, view: View) -> Choice:
        """Choose by plain numbers, which are cheaper than arrays for few candidates."""
        tokens, now, hit_tokens = view.prompt_tokens, view.now, view.candidates.hit_tokens
        pairs = zip(view.candidates.endpoints, hit_tokens, strict=True)
        costs = [price_one(endpoint, tokens, hit, now) for endpoint, hit in pairs]
        prices = [cost.price for cost in costs]
        copies = _copies(view, hit_tokens.index(max(hit_tokens)))
        if copies is not None:
            prices = [price + copy for price, copy in zip(prices, copies, strict=True)]
        evictions = _Evictions(view)
        best = _best(prices, _order(prices), [cost.factor for cost in costs], evictions)
        least, hits = costs[best], hit_tokens[best]
        slack = self.slack * least.prefill
        equals = [
            index
            for index, (cost, hit) in enumerate(zip(costs, hit_tokens, strict=True))
            if hit >= hits
            and cost.prefill <= SAME_RATE * least.prefill
            and cost.backlog <= least.backlog + slack
            and cost.decode <= least.decode * (1.0 + self.slack) + DECODE_SLACK * slack
            and cost.factor <= least.factor
        ]
        first = _placed(view, equals, best, slack, evictions)
        return _choice(view, _order(prices), prices, first, best)

    def choose_among_many(self, view: View) -> Choice:
        """Choose by arrays, which are cheaper for many candidates. The choice is the same."""
        hits = np.array(view.candidates.hit_tokens, dtype=np.float64)
        costs = price_all(view.candidates.endpoints, view.prompt_tokens, hits, view.now)
        prices, copies = costs.price, _copies(view, int(hits.argmax()))
        if copies is not None:
            prices += np.array(copies)
        evictions = _Evictions(view)
        best = _best(prices, _ascending(prices), costs.factor, evictions)
        slack = self.slack * costs.prefill[best]
        mask = (hits >= hits[best]) & (costs.prefill <= SAME_RATE * costs.prefill[best])
        mask &= costs.backlog <= costs.backlog[best] + slack
        mask &= costs.decode <= costs.decode[best] * (1.0 + self.slack) + DECODE_SLACK * slack
        mask &= costs.factor <= costs.factor[best]
        first = _placed(view, np.flatnonzero(mask).tolist(), best, slack, evictions)
        return _choice(view, prices.argsort(kind="stable").tolist(), prices.tolist(), first, best)


def _copies(view: View, longest: int) -> list[float] | None:
    """Return the price at each replica of computing a prompt that is in flight once more; None: it is not in flight.

    `longest`: index of the longest hit. Samples of one prompt are sent at the same moment, and it does not come back: a
    copy delays others by as much as replicas have prefills to compute. A prefix of different prompts is worth a copy.
    """
    candidate = view.candidates[longest]
    endpoint, hit = candidate.endpoint, candidate.hit_blocks
    block_hashes = view.request.prompt.block_hashes(endpoint.block_size)
    leader = endpoint.load.leader_of(block_hashes, hit) if hit == len(block_hashes) else None
    if leader is None:
        return None
    busy = sum(one.load.num_pending > 0 for one in view.candidates.endpoints) / len(view.candidates)
    ms, cached = busy * endpoint.load.rates.token, leader.cached_tokens
    return [ms * max(candidate.hit_tokens - max(other, cached), 0) for other in view.candidates.hit_tokens]


def _ascending(prices: NDArray[np.float64]) -> Iterator[int]:
    """Iterate over the indices from the lowest price on; few are asked for. Equal prices are in their order."""
    rest = prices.copy()
    for _ in range(len(rest)):
        index = int(rest.argmin())
        yield index
        rest[index] = np.inf


def _order(prices: list[float]) -> list[int]:
    return sorted(range(len(prices)), key=prices.__getitem__)


def _best(
    prices: "list[float] | NDArray[np.float64]",
    order: Iterable[int],
    factors: "list[float] | NDArray[np.float64]",
    evictions: _Evictions,
) -> int:
    """Return the replica with the lowest price, evictions included; adds them to `prices` where they were computed."""
    best, least = -1, float("inf")
    for index in order:
        if prices[index] >= least:
            break
        prices[index] += EVICTED * evictions.of(index) * factors[index]
        if prices[index] < least:
            best, least = index, prices[index]
    return best


def _placed(view: View, equals: list[int], best: int, slack: float, evictions: _Evictions) -> int:
    """Return the replica of `equals`, about as good as the best, that the request's first new block is placed at."""
    if len(equals) < 2:
        return best
    limit = evictions.of(best) + slack
    ranks = weights(view.key, [view.candidates.endpoints[i].digest for i in equals])
    while evictions.of(first := equals[ranks.argmax()]) > limit:  # `best` at the latest
        ranks[ranks.argmax()] = 0
    return first


def _choice(view: View, order: list[int], prices: list[float], first: int, best: int) -> Choice:
    order.remove(first)
    order.insert(0, first)
    reason = "least cost" if first == best else "placed by its first new block"
    return Choice(view.candidates.in_order(order), tuple(map(prices.__getitem__, order)), reason)


def cost_of(view: View, name: str) -> Cost:
    """Return the cost of one candidate, whichever policy chose it."""
    candidate = _candidate(view, name)
    return candidate.endpoint.cost(view.prompt_tokens, candidate.hit_tokens, view.now)


def price_of(view: View, name: str) -> Price:
    """Return the same without evictions, which are slow to estimate."""
    candidate = _candidate(view, name)
    return candidate.endpoint.price(view.prompt_tokens, candidate.hit_tokens, view.now)


def _candidate(view: View, name: str) -> Candidate:
    return next(candidate for candidate in view.candidates if candidate.name == name)
