"""Policies of one rule: `round-robin`, `least-load`, `work`, and SGLang's `prefix-threshold`."""

from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidate, Policy, PolicyInput, RankedCandidates, rank_by_number


class RoundRobinPolicy:
    """The least recently used replica."""

    name = "round-robin"

    def __init__(self) -> None:
        self._count = 0
        self._asked: dict[str, int] = {}

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by the last use of each replica."""
        ranked = sorted(view.candidates, key=lambda candidate: self._asked.get(candidate.name, 0))
        scores = tuple(float(self._asked.get(candidate.name, 0)) for candidate in ranked)
        return RankedCandidates(tuple(ranked), scores, "next in turn")

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Move the replica to the end of the order."""
        self._count += 1
        self._asked.pop(endpoint.name, None)
        self._asked[endpoint.name] = self._count
        names = {candidate.name for candidate in choice.ranked}
        if len(self._asked) > 2 * len(names) + 16:  # replicas that are gone
            self._asked = {name: count for name, count in self._asked.items() if name in names}


class LeastLoadPolicy(Policy):
    """The replica with the fewest requests in flight; ties go to the least recently used one."""

    name = "least-load"

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by the number of requests."""
        return _by_load(view, "fewest requests")


class PrefixThresholdPolicy(Policy):
    """SGLang's `cache_aware`: the longest match if it is long enough and the load is balanced, else least load.

    The default thresholds are those of its command line. Unbalanced: the requests at two replicas differ by more than
    `balance_abs` and by more than a factor of `balance_rel`.
    """

    name = "prefix-threshold"

    def __init__(self, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self.cache_threshold = cache_threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by match or by load."""
        loads = [candidate.endpoint.num_requests(view.now) for candidate in view.candidates]
        least, most = min(loads), max(loads)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return _by_load(view, "out of balance")
        longest = max(candidate.hit_tokens for candidate in view.candidates)
        if longest <= self.cache_threshold * view.num_prompt_tokens:
            return _by_load(view, "no match to speak of")
        by_load = _by_load(view, "longest match")
        ranked = sorted(by_load.ranked, key=lambda candidate: -candidate.hit_tokens)
        return RankedCandidates(
            tuple(ranked), tuple(-float(candidate.hit_tokens) for candidate in ranked), "longest match"
        )


class LeastUncachedTokensPolicy(Policy):
    """The least uncached tokens: those of requests without a first token, and the request's own."""

    name = "work"

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by tokens to compute."""
        numbers = [float(c.endpoint.load.pending_tokens + uncached_tokens(view, c)) for c in view.candidates]
        return rank_by_number(view, numbers, "least uncached tokens")


def uncached_tokens(view: PolicyInput, candidate: Candidate) -> int:
    """Return the prompt tokens that a replica would have to compute, one at least."""
    return max(view.num_prompt_tokens - candidate.hit_tokens, 1)


def _by_load(view: PolicyInput, reason: str) -> RankedCandidates:
    def load(candidate: Candidate) -> tuple[int, int]:
        return candidate.endpoint.num_requests(view.now), candidate.endpoint.load.last_sent

    ranked = sorted(view.candidates, key=load)
    return RankedCandidates(tuple(ranked), tuple(float(load(candidate)[0]) for candidate in ranked), reason)
