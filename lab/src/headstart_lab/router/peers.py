"""Policies of other routers and of papers on our index and load: `llm-d`, `dynamo`, `smg`, `ray`, `lmetric`, `dualmap`.

They repeat the decision of each project's default settings, as read in its source in August 2026 (see each class), not
its index, its tokenizer or its sources of load. Random choices are drawn from the prompt, so a run can be repeated.
"""

from math import sqrt

from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import Candidate, PolicyInput, RankedCandidates, rank_by_number
from headstart.router.policies.rendezvous import rendezvous_weight
from headstart.router.policies.scorers import MAX_INFLIGHT_TOKENS
from headstart.router.policies.simple import uncached_tokens


class LlmdPolicy:
    """llm-d's `optimized-baseline`, its default since July 2026 (llm-d-router, prefix-cache-affinity-filter).

    Replicas with at least `threshold` of the prompt cached, or all if there is none; of these, the one with the fewest
    tokens in flight (token-load-scorer): uncached prompt tokens, and an output of 1.5 times the prompt, or the
    request's limit if less. The filter is left if that saves more than `max_penalty` seconds at `rate` tokens/s.
    """

    name = "llm-d"

    def __init__(self, threshold: float = 0.8, max_penalty: float = 18.0, rate: float = 15_928.0) -> None:
        self.threshold = threshold
        self.max_penalty = max_penalty
        self.rate = rate

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by tokens in flight, replicas with the prefix first."""
        loads = [float(c.endpoint.load.inflight_tokens + uncached_tokens(view, c)) for c in view.candidates]
        enough = self.threshold * max(view.num_prompt_tokens, 1)
        sticky = [c.hit_tokens >= enough for c in view.candidates]
        inside = [c.endpoint.load.inflight_tokens for c, is_in in zip(view.candidates, sticky, strict=True) if is_in]
        outside = [
            c.endpoint.load.inflight_tokens for c, is_in in zip(view.candidates, sticky, strict=True) if not is_in
        ]
        if not inside or (outside and min(inside) - min(outside) > self.max_penalty * self.rate):
            return rank_by_number(view, loads, "fewest tokens in flight")
        ranks = [load + (0 if is_in else MAX_INFLIGHT_TOKENS) for load, is_in in zip(loads, sticky, strict=True)]
        return rank_by_number(view, ranks, "has the prefix, fewest tokens in flight")

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing."""


class DynamoPolicy:
    """NVIDIA Dynamo 1.6's KV router with its defaults (its docs/components/router): the fewest blocks.

    Blocks to prefill are those of requests without a first token and the request's own that are not cached. Blocks to
    decode are those that requests in flight hold, shared ones once, the request's own included.
    """

    name = "dynamo"

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by blocks."""

        def blocks(candidate: Candidate) -> float:
            endpoint = candidate.endpoint
            size = endpoint.block_size
            block_hashes = view.request.prompt.block_hashes(size)
            prefill = (endpoint.load.pending_tokens + uncached_tokens(view, candidate)) / size
            held, own = endpoint.index.count_in_use_and_prefix(block_hashes)
            return prefill + held + len(block_hashes) - own

        return rank_by_number(view, [blocks(candidate) for candidate in view.candidates], "fewest blocks")

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing."""


class SmgPolicy:
    """SMG 1.13's `cache_aware` with its defaults (smg/router_args.py): the longest match, unless it is loaded.

    Replicas with 8 waiting requests or 80 % of their KV in use are left out while others are not. The longest match
    above `threshold` of the prompt wins, ties by load; it is skipped for the fewest requests if its load exceeds the
    mean by two standard deviations of a count (4 to `balance_abs` requests) and by `balance_rel` times.
    """

    name = "smg"
    MAX_WAITING = 8
    MAX_KV_USAGE = 0.8
    MIN_MARGIN = 4.0

    def __init__(self, threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self.threshold = threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by overload, by match where it counts, and by load."""
        loads = [candidate.endpoint.num_requests(view.now) for candidate in view.candidates]
        mean = sum(loads) / len(loads)
        margin = min(float(self.balance_abs), max(2 * sqrt(mean), self.MIN_MARGIN))
        enough = self.threshold * view.num_prompt_tokens

        def rank(item: tuple[Candidate, int]) -> tuple[bool, int, int, int, int]:
            candidate, load = item
            is_spilled = load > mean + margin and load > self.balance_rel * mean
            match = candidate.hit_tokens if candidate.hit_tokens > enough and not is_spilled else 0
            tie = rendezvous_weight(view.key, candidate.name)
            return self._is_overloaded(candidate.endpoint, view.now), -match, load, len(candidate.endpoint.index), tie

        ranked = sorted(zip(view.candidates, loads, strict=True), key=rank)
        reason = "longest match" if rank(ranked[0])[1] else "fewest requests"
        return RankedCandidates(tuple(c for c, _ in ranked), tuple(map(float, range(len(ranked)))), reason)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing."""

    def _is_overloaded(self, endpoint: Endpoint, now: float) -> bool:
        report = endpoint.recent_report(now)
        return report is not None and (report.waiting >= self.MAX_WAITING or report.kv_usage >= self.MAX_KV_USAGE)


class RayPolicy:
    """Ray Serve 2.60's PrefixCacheAffinityRouter with its defaults: power of two choices among the longest matches.

    If less than `threshold` of the prompt is matched, among the replicas with the least in the index instead. Its
    threshold of imbalance is infinite (ray #59390), so a loaded replica is not left.
    """

    name = "ray"

    def __init__(self, threshold: float = 0.1) -> None:
        self.threshold = threshold
        self._count = 0

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank two random replicas of the group by load, then the rest of it, then all others."""
        longest = max(candidate.hit_tokens for candidate in view.candidates)
        if longest >= self.threshold * max(view.num_prompt_tokens, 1):
            group, reason = {c.name for c in view.candidates if c.hit_tokens == longest}, "longest match"
        else:
            least = min(len(candidate.endpoint.index) for candidate in view.candidates)
            group, reason = {c.name for c in view.candidates if len(c.endpoint.index) == least}, "smallest index"
        key = view.key + self._count.to_bytes(8, "little")
        drawn = sorted(view.candidates, key=lambda c: (c.name not in group, rendezvous_weight(key, c.name)))
        pair = [candidate for candidate in drawn[:2] if candidate.name in group]
        pair.sort(key=lambda candidate: candidate.endpoint.num_requests(view.now))
        ranked = (*pair, *drawn[len(pair) :])
        return RankedCandidates(ranked, tuple(map(float, range(len(ranked)))), reason)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Count the decision: the next one draws again."""
        self._count += 1


class LmetricPolicy:
    """LMetric (arXiv 2603.15202): uncached tokens x (requests in flight + 1). It has no parameter."""

    name = "lmetric"

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by the product."""
        numbers = [float(uncached_tokens(view, c) * (c.endpoint.num_requests(view.now) + 1)) for c in view.candidates]
        return rank_by_number(view, numbers, "least uncached tokens x requests")

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing."""


class DualMapPolicy:
    """DualMap (arXiv 2602.06502): two replicas by two hashes of the prompt's beginning, the better of which is used.

    The better one has more of the prompt cached, unless its first token is expected later than `slo` seconds: then it
    is the one with less to compute. The beginning are `prefix_tokens`, the same for all prompts: the paper adapts it to
    hot prefixes, and moves waiting requests between the two, which no router can do that has sent them.
    """

    name = "dualmap"

    def __init__(self, prefix_tokens: int = 2048, slo: float = 5.0, rate: float = 15_928.0) -> None:
        self.prefix_tokens = prefix_tokens
        self.slo = slo
        self.rate = rate

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank the two by hit or by work, then all others by work."""
        prompt, size = view.request.prompt, view.candidates[0].endpoint.block_size
        block_hashes = prompt.block_hashes(size)
        depth = min(max(self.prefix_tokens // size, 1), len(block_hashes))
        key = block_hashes[depth - 1] if depth else prompt.short_prompt_key()
        first = max(view.candidates, key=lambda c: rendezvous_weight(b"1" + key, c.name)).name
        others = (c.name for c in view.candidates if c.name != first)
        pair = {first, max(others, key=lambda name: rendezvous_weight(b"2" + key, name), default=first)}
        work = {c.name: c.endpoint.load.pending_tokens + uncached_tokens(view, c) for c in view.candidates}
        longest = max((c for c in view.candidates if c.name in pair), key=lambda c: (c.hit_tokens, -work[c.name]))
        is_late = work[longest.name] > self.slo * self.rate

        def rank(candidate: Candidate) -> tuple[bool, bool, int]:
            name = candidate.name
            return name not in pair, not is_late and name != longest.name, work[name]

        ranked = tuple(sorted(view.candidates, key=rank))
        reason = "less work of two" if is_late else "longer match of two"
        return RankedCandidates(ranked, tuple(map(float, range(len(ranked)))), reason)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Do nothing."""
