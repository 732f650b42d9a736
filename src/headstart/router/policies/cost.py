"""The policy `cost`: the replica with the earliest first token, in milliseconds. The default.

The cost is the backlog there and the prefill of the uncached tokens, in steps that decodes make longer (pricing.py).
The rates are learned (rate_learner.py), and while they do not explain what is measured, the order is that of uncached
tokens. Prefix affinity follows from that, and so does leaving an overloaded replica: there is no threshold to tune.
The cost to others is added: later requests compute again what it evicts (approximate_index.py), decodes slow each other
down, answers stand still while its prefill is computed, and a copy of a prompt that another request has in flight is
work for nothing. Among replicas of about equal cost, rendezvous hashing decides, bounded by load (Mirrokni et al.,
2018), so that independent routers place the same new prefix at the same replica.

Where replicas report requests of other routers, prompts that begin alike have a *home*, a replica that all routers find
by the same hash. It is expected to have more of a prompt than this router has sent there.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.core.cache.hashing import BlockHash
from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidates, PolicyInput, RankedCandidates
from headstart.router.policies.rendezvous import rendezvous_weights
from headstart.router.pricing import EVICTED, cost_at_each, cost_at_replica

FEW = 24  # candidates; for more, arrays are cheaper than plain numbers
SLACK = 0.05  # of the prefill for the wait, of the price of decodes for these: accepted for agreement between routers
DECODE_SLACK = 0.1  # of the slack for the wait, which is accepted for decodes too: their price may be almost nothing
SAME_RATE = 1.25  # smaller differences may be noise: rates are learned from noisy times
COUNTED = 1024  # requests whose prompts are counted, and as many before them


class _Evictions:
    """The price of evictions at each replica, computed where it matters."""

    def __init__(self, view: PolicyInput) -> None:
        self._candidates, self._prompt_tokens = view.candidates, view.num_prompt_tokens
        self._known: dict[int, float] = {}

    def of(self, index: int) -> float:
        """Return the milliseconds."""
        found = self._known.get(index)
        if found is None:
            endpoint, hit_tokens = self._candidates.endpoints[index], self._candidates.hit_tokens[index]
            found = self._known[index] = endpoint.eviction_cost_ms(self._prompt_tokens, hit_tokens)
        return found


class PromptHitRecord(NamedTuple):
    """One prompt: the hashes of its beginnings, its tokens, and those cached at the replica that has most of it."""

    hashes: list[BlockHash]
    tokens: int
    hit_tokens: int


class RecentPromptCounts:
    """Requests: their tokens, those cached somewhere, how many have a beginning, and how many of these are longer."""

    def __init__(self) -> None:
        self.requests = self.tokens = self.hit_tokens = 0
        self.begun: dict[BlockHash, int] = {}
        self.continued: dict[BlockHash, int] = {}


class PromptBeginnings:
    """Prompts that begin alike among the last requests, by the hashes of their first 1, 2, 4, 8, ... blocks."""

    def __init__(self) -> None:
        self._now, self._before = RecentPromptCounts(), RecentPromptCounts()

    def count_prompt(self, prompt: PromptHitRecord) -> None:
        """Count one request."""
        if self._now.requests == COUNTED:
            self._now, self._before = RecentPromptCounts(), self._now
        now = self._now
        now.requests += 1
        now.tokens += prompt.tokens
        now.hit_tokens += prompt.hit_tokens
        for one in prompt.hashes:
            now.begun[one] = now.begun.get(one, 0) + 1
        for one in prompt.hashes[:-1]:
            now.continued[one] = now.continued.get(one, 0) + 1

    @property
    def hit_token_share(self) -> float:
        """Share of the tokens that were cached at the replica with most of a prompt, 0..1."""
        now, before = self._now, self._before
        return (now.hit_tokens + before.hit_tokens) / max(now.tokens + before.tokens, 1)

    def affinity_key(self, hashes: list[BlockHash], num_replicas: int) -> BlockHash:
        """Return the beginning by which a prompt has a home. Each of several routers counts about the same.

        The shortest one, unless more requests begin like that than one replica's share, and one: then the next one
        behind which most of these continue otherwise. A single chat, however long and busy, has one home.
        """
        now, before = self._now, self._before
        share = (now.requests + before.requests) / num_replicas + 1.0
        found = hashes[0]
        for shorter, longer in pairwise(hashes):
            if now.begun.get(found, 0) + before.begun.get(found, 0) <= share:
                break
            continued = now.continued.get(shorter, 0) + before.continued.get(shorter, 0)
            if 2 * (now.begun.get(longer, 0) + before.begun.get(longer, 0)) < continued:
                found = longer
        return found


class LeastCostPolicy:
    """Least milliseconds to the first token. `slack` 0: always the least cost."""

    name = "cost"

    def __init__(self, slack: float = SLACK) -> None:
        self.slack = slack
        self._beginnings = PromptBeginnings()

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by cost; of the replicas about as good as the best, the one with the highest key weight is first."""
        choose = self.rank_by_scalars if len(view.candidates) <= FEW else self.rank_by_arrays
        if not view.candidates.endpoints[0].load.learner.others.share:
            return choose(view)
        begun = PromptHitRecord(_beginnings_of(view), view.num_prompt_tokens, max(view.candidates.hit_tokens))
        return choose(self._with_others(view, begun.hashes))._replace(memo=begun)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Count how the prompt begins, if there are other routers."""
        if isinstance(choice.memo, PromptHitRecord):
            self._beginnings.count_prompt(choice.memo)

    def _with_others(self, view: PolicyInput, hashes: list[BlockHash]) -> PolicyInput:
        """Return the view with the hit that is expected at the prompt's home, if there are other routers.

        Of what we have not sent there, they have sent as large a share as we find of prompts anywhere. KV events show
        what others sent: an index that is made of them is believed.
        """
        endpoints, hits = view.candidates.endpoints, view.candidates.hit_tokens
        if not hashes:
            return view
        key = self._beginnings.affinity_key(hashes, len(endpoints))
        home = int(rendezvous_weights(key, [endpoint.digest for endpoint in endpoints]).argmax())
        index = endpoints[home].index
        if index.prompt_based_index_or_self is not index:
            return view
        more = int(self._beginnings.hit_token_share * (view.num_prompt_tokens - 1 - hits[home]))
        expected = [*hits[:home], hits[home] + more, *hits[home + 1 :]]
        return view._replace(candidates=Candidates(endpoints, view.candidates.hit_blocks, expected))

    def rank_by_scalars(self, view: PolicyInput) -> RankedCandidates:
        """Choose by plain numbers, which are cheaper than arrays for few candidates."""
        tokens, now, hit_tokens = view.num_prompt_tokens, view.now, view.candidates.hit_tokens
        pairs = zip(view.candidates.endpoints, hit_tokens, strict=True)
        costs = [cost_at_replica(endpoint, tokens, hit, now) for endpoint, hit in pairs]
        fewest = min([cost.requests for cost in costs])
        stalls = [cost.extra_stall_cost(fewest) for cost in costs]
        prices = [cost.cost_without_evictions + stall for cost, stall in zip(costs, stalls, strict=True)]
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
            and stalls[index] <= stalls[best] + DECODE_SLACK * slack
            and cost.factor <= least.factor
        ]
        first = _placed(view, equals, best, slack, evictions)
        return _choice(view, _order(prices), prices, first, best)

    def rank_by_arrays(self, view: PolicyInput) -> RankedCandidates:
        """Choose by arrays, which are cheaper for many candidates. The choice is the same."""
        hits = np.array(view.candidates.hit_tokens, dtype=np.float64)
        costs = cost_at_each(view.candidates.endpoints, view.num_prompt_tokens, hits, view.now)
        stalls = costs.extra_stall_cost(costs.requests.min())
        prices, copies = costs.cost_without_evictions + stalls, _copies(view, int(hits.argmax()))
        if copies is not None:
            prices += np.array(copies)
        evictions = _Evictions(view)
        best = _best(prices, _ascending(prices), costs.factor, evictions)
        slack = self.slack * costs.prefill[best]
        mask = (hits >= hits[best]) & (costs.prefill <= SAME_RATE * costs.prefill[best])
        mask &= costs.backlog <= costs.backlog[best] + slack
        mask &= costs.decode <= costs.decode[best] * (1.0 + self.slack) + DECODE_SLACK * slack
        mask &= stalls <= stalls[best] + DECODE_SLACK * slack
        mask &= costs.factor <= costs.factor[best]
        first = _placed(view, np.flatnonzero(mask).tolist(), best, slack, evictions)
        return _choice(view, prices.argsort(kind="stable").tolist(), prices.tolist(), first, best)


def _beginnings_of(view: PolicyInput) -> list[BlockHash]:
    """Return the hashes of the prompt's first 1, 2, 4, 8, ... blocks."""
    block_hashes = view.request.prompt.block_hashes(min([one.block_size for one in view.candidates.endpoints]))
    return [block_hashes[(1 << power) - 1] for power in range(len(block_hashes).bit_length())]


def _copies(view: PolicyInput, longest: int) -> list[float] | None:
    """Return the price at each replica of computing a prompt that is in flight once more; None: it is not in flight.

    `longest`: index of the longest hit. Samples of one prompt are sent at the same moment, and it does not come back: a
    copy delays others by as much as replicas have prefills to compute. A prefix of different prompts is worth a copy.
    """
    candidate = view.candidates[longest]
    endpoint, hit = candidate.endpoint, candidate.hit_blocks
    block_hashes = view.request.prompt.block_hashes(endpoint.block_size)
    leader = endpoint.load.find_request_computing_prefix(block_hashes, hit) if hit == len(block_hashes) else None
    if leader is None:
        return None
    busy = sum(one.load.num_awaiting_first_token > 0 for one in view.candidates.endpoints) / len(view.candidates)
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


def _placed(view: PolicyInput, equals: list[int], best: int, slack: float, evictions: _Evictions) -> int:
    """Return the replica of `equals`, about as good as the best, that the request's first new block is placed at."""
    if len(equals) < 2:
        return best
    limit = evictions.of(best) + slack
    ranks = rendezvous_weights(view.key, [view.candidates.endpoints[i].digest for i in equals])
    while evictions.of(first := equals[ranks.argmax()]) > limit:  # `best` at the latest
        ranks[ranks.argmax()] = 0
    return first


def _choice(view: PolicyInput, order: list[int], prices: list[float], first: int, best: int) -> RankedCandidates:
    order.remove(first)
    order.insert(0, first)
    reason = "least cost" if first == best else "placed by its first new block"
    return RankedCandidates(view.candidates.reordered(order), tuple(map(prices.__getitem__, order)), reason)
