"""Router: filter, match, choose; then `record_sent`, `record_first_token`, `record_finished`. The same in every
deployment.

The caller calls `pick` for a routing decision and `record_sent` when the request leaves, and reports the progress of
what that returns: `record_failed` when the replica could not serve it (then it picks again), `record_first_token`, and
`record_finished` with the reported usage. Each call is short, none waits, and only one may run at a time. Time is the
caller's, in seconds.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import NoReplicaError
from headstart.router.decision_log import DecisionRecord, join_hashes
from headstart.router.endpoint import Endpoint
from headstart.router.filters import filter_endpoints_with_reasons
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.cached_tokens import count_reported_cached_blocks
from headstart.router.index.first_blocks import UNLISTED, FirstBlockTable
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.load import RequestFlight
from headstart.router.load_rows import Prices
from headstart.router.policies.cost import LeastCostPolicy
from headstart.router.policies.policy import Candidates, Policy, PolicyInput
from headstart.router.rate_learner import RateLearner
from headstart.router.routing_decision import RoutedInFlight, RoutingDecision, ShadowComparison
from headstart.router.routing_request import ReportedTokenUsage, RoutingRequest
from headstart.router.step_rates import PrefillWork

HIT_TOKENS = 16  # of the beginning that prompts must share to be placed together; the usual size of a block
OUTPUT_SHARE = 1.5  # of the prompt: estimate of an output's tokens

MatchAll = Callable[[Sequence[int], list[BlockHash]], Sequence[int]]
"""Map (handles of indexes in compiled code, block hashes) to the number of leading blocks that each has."""


@dataclass(slots=True)
class ShadowRegret:
    """The performance of a shadow policy, by our own cost estimates."""

    decisions: int = 0
    agreed: int = 0
    total_ms: float = 0.0  # above 0: it would have cost this much more


class Router:
    """The replicas and the policy that chooses among them. `shadow_policies` decide too, without effect.

    `log` is called with every decision when its request has ended. `match_all` is that of compiled pools; without it
    indexes are asked one by one. `prices`: the loop of pricing.py in compiled code, if there is any.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        shadow_policies: Iterable[Policy] = (),
        log: Callable[[DecisionRecord], None] | None = None,
        match_all: MatchAll | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.policy: Policy = policy or LeastCostPolicy()
        self.endpoints: dict[str, Endpoint] = {}
        self.shadow_policies = tuple(shadow_policies)
        self.regrets = {shadow.name: ShadowRegret() for shadow in self.shadow_policies}
        self.num_blind = 0  # replicas whose events are ignored, since none was usable
        self.prediction_error = 0  # total absolute error of predicted cached tokens, of all reported requests
        self.num_reported = 0
        self._learners: dict[frozenset[str], RateLearner] = {}  # by models
        self._first_blocks = FirstBlockTable()
        self._match_all = match_all
        self._prices = prices
        self._log = log
        self._count = 0

    def add(self, endpoint: Endpoint) -> None:
        """Add a replica, or replace the one of that name. Replicas of the same models learn their rates together."""
        self.endpoints[endpoint.name] = endpoint
        endpoint.load.learner = self._learners.setdefault(endpoint.models, endpoint.load.learner)
        endpoint.load.learner.prices = self._prices
        self._list(endpoint.index)

    def remove(self, name: str) -> None:
        """Remove a replica and its state; requests in flight there may still end."""
        self.endpoints.pop(name, None)

    # ------------------------------------------------------------------------------------------------------ deciding

    def pick(
        self,
        request: RoutingRequest,
        now: float,
        *,
        tried: frozenset[str] = frozenset(),
        before: RoutingDecision | None = None,
    ) -> RoutingDecision:
        """Choose the endpoint that serves the request. Changes nothing.

        `before` is the decision of an earlier attempt of the same request: shadow policies decide once per request.

        Raises:
            NoReplicaError: no replica may serve it.
        """
        endpoints, excluded = filter_endpoints_with_reasons(self.endpoints.values(), request, now, tried)
        if not endpoints:
            raise NoReplicaError(f"none of {len(self.endpoints)} replicas may serve this request", reasons=excluded)
        view = self._view(endpoints, request, now)
        decision = RoutingDecision(view, self.policy.rank(view), excluded, self.policy.name)
        if before is not None:
            decision.regrets = before.regrets
        else:
            decision.comparisons = [self._compare(shadow, decision) for shadow in self.shadow_policies]
        return decision

    def record_sent(self, decision: RoutingDecision, now: float, endpoint: str | None = None) -> RoutedInFlight:
        """Record that the request is sent, to the chosen replica or to the named fallback."""
        view = decision.view
        candidate = decision.candidate if endpoint is None else decision.candidate_of(endpoint)
        chosen = candidate.endpoint
        cost = chosen.prompt_cost(view.num_prompt_tokens, candidate.hit_tokens, view.now)
        work = PrefillWork.of(view.num_prompt_tokens, candidate.hit_tokens)
        flight = RequestFlight(work, cost.prefill, cost.backlog, view.num_prompt_tokens, _output_estimate(view.request))
        index = _index_for(chosen, view.request)
        flight.wait_ms = cost.wait * cost.factor
        flight.block_hashes = view.request.prompt.block_hashes(chosen.block_size)
        flight.hit_blocks = candidate.hit_blocks
        reservation = index.record_sent(flight.block_hashes, now)
        chosen.load.record_sent(flight, now, self._count)
        chosen.health.record_sent(now)
        self._count += 1
        self.policy.record_pick(decision.choice, chosen)
        self._book(decision)
        in_flight = RoutedInFlight(decision, chosen, flight, index, reservation, now)
        if self._log is not None:
            in_flight.logged_scores = decision.scores
        return in_flight

    # --------------------------------------------------------------------------------------------------- progress

    def record_first_token(
        self, in_flight: RoutedInFlight, now: float, usage: ReportedTokenUsage | None = None
    ) -> None:
        """Record the first token; some replicas report the cached tokens with it."""
        in_flight.first_token = now
        in_flight.endpoint.health.record_succeeded(now, sent_at=in_flight.sent_at)
        in_flight.endpoint.load.record_first_token(in_flight.flight, now)
        if usage is not None:
            self._reported(in_flight, usage, now)
        in_flight.index.record_prefilled(in_flight.reservation, now)
        in_flight.drop_alternatives()

    def record_later_token(self, in_flight: RoutedInFlight, now: float) -> None:
        """Record a token event of the answer after its first. A front that forwards streams calls it for each."""
        in_flight.endpoint.load.record_token(in_flight.flight, now)

    def assume_first_token(self, in_flight: RoutedInFlight, now: float) -> None:
        """Assume the first token of a response that comes as one piece and does not show it. Nothing is learned."""
        if in_flight.first_token is None and in_flight.finish is None:
            in_flight.endpoint.load.record_first_token(in_flight.flight, now, is_assumed=True)

    def record_finished(
        self,
        in_flight: RoutedInFlight,
        now: float,
        usage: ReportedTokenUsage | None = None,
        output: Sequence[int] = (),
        num_output: int = 0,
    ) -> None:
        """Record the complete response: the token ids of its `output` and their number, where the caller knows them.

        `num_output` is that of one answer; 0 if it is not known, or if there are several.
        """
        if in_flight.first_token is None:
            self.record_first_token(in_flight, now, usage)
        elif usage is not None:
            self._reported(in_flight, usage, now)
        load = in_flight.endpoint.load
        load.correct_prefill_work(in_flight.flight, in_flight.flight.work)
        load.record_finished(in_flight.flight, now, num_output or len(output))
        in_flight.num_output = num_output or len(output) or None
        block_hashes = (
            in_flight.view.request.prompt.block_hashes_with_output(output, in_flight.endpoint.block_size)
            if output
            else in_flight.reservation.block_hashes
        )
        in_flight.index.record_finished(in_flight.reservation, block_hashes, now)
        self._look_for_events(in_flight.endpoint)
        self._end(in_flight, now, ok=True)

    def record_failed(
        self, in_flight: RoutedInFlight, now: float, *, refused: bool = False, blame: bool = True
    ) -> bool:
        """Record that the request ended without a complete response; return whether that ejects the replica.

        `blame` False: it says nothing about the replica.
        """
        self._abort(in_flight, now, num_kept=0)
        ejected = blame and in_flight.endpoint.health.record_failed(now, refused=refused, sent_at=in_flight.sent_at)
        self._end(in_flight, now, ok=False)
        return ejected

    def record_client_disconnect(self, in_flight: RoutedInFlight, now: float) -> None:
        """Record that the client disconnected: the replica keeps what it has computed of the prompt.

        How much that is follows from the expected time, so that a retry goes to the same replica.
        """
        flight, reservation = in_flight.flight, in_flight.reservation
        elapsed_ms = (now - in_flight.sent_at) * 1e3 - flight.backlog_ms
        share = min(max(elapsed_ms / flight.prefill_ms, 0.0), 1.0) if flight.prefill_ms else 1.0
        num_computed = int(share * (len(reservation.block_hashes) - reservation.hit))
        self._abort(in_flight, now, num_kept=reservation.hit + num_computed)
        self._end(in_flight, now, ok=False)

    def _abort(self, in_flight: RoutedInFlight, now: float, num_kept: int) -> None:
        in_flight.endpoint.load.exclude_from_learning(in_flight.flight)
        in_flight.endpoint.load.record_finished(in_flight.flight, now)
        in_flight.index.record_failed(in_flight.reservation, num_kept)

    # ------------------------------------------------------------------------------------------------------------

    def _reported(self, in_flight: RoutedInFlight, usage: ReportedTokenUsage, now: float) -> None:
        """Correct index and rates by the reported cached tokens. Once per request."""
        if in_flight.cached_tokens is not None:
            return
        in_flight.cached_tokens, in_flight.reported_tokens = usage.cached_tokens, usage.prompt_tokens
        prompt = in_flight.view.request.prompt
        if prompt.exact and not in_flight.view.request.has_parts:
            _compare_counts(in_flight.endpoint, in_flight.view.request, usage)
        scaled = usage.cached_tokens * prompt.num_tokens // max(usage.prompt_tokens, 1)
        in_flight.endpoint.load.correct_prefill_work(in_flight.flight, PrefillWork.of(prompt.num_tokens, scaled))
        self.prediction_error += abs(in_flight.candidate.hit_tokens - scaled)
        self.num_reported += 1
        blocks = count_reported_cached_blocks(in_flight.endpoint, prompt, usage, in_flight.reservation.hit)
        in_flight.index.on_hit_reported(
            in_flight.reservation, min(blocks, len(in_flight.reservation.block_hashes)), now
        )

    def _look_for_events(self, endpoint: Endpoint) -> None:
        """Replace an event index without usable events by an approximate one."""
        index = endpoint.index
        if index.relies_on_unusable_events:
            endpoint.index = (
                ApproximateIndex() if index.prompt_based_index_or_self is index else index.prompt_based_index_or_self
            )
            self.num_blind += 1

    def _list(self, index: PrefixIndex) -> None:
        """List an index by its first blocks, and the one beside it, if they are new."""
        self._first_blocks.add_index(index)
        self._first_blocks.add_index(index.prompt_based_index_or_self)

    def _view(self, endpoints: list[Endpoint], request: RoutingRequest, now: float) -> PolicyInput:
        """Return the hit of each replica, and the hash of the first block that none of them has."""
        prompt, exact = request.prompt, request.prompt.exact
        limit = max(prompt.num_tokens - 1, 0)
        indexes = [one.index if exact and not one.miscounted else _index_for(one, request) for one in endpoints]
        numbers = [index.number for index in indexes]
        if UNLISTED in numbers:  # some have replaced others since they were added
            for index in indexes:
                self._list(index)
            numbers = [index.number for index in indexes]
        hit_blocks, hit_tokens = array("q", bytes(8 * len(endpoints))), array("q", bytes(8 * len(endpoints)))
        sizes = {one.block_size for one in endpoints}
        for size in sizes:
            block_hashes, unit = prompt.block_hashes(size), _hit_unit(size, sizes)
            holders = self._first_blocks.possible_holders(block_hashes)
            if not holders:
                continue
            places = [place for place, number in enumerate(numbers) if number in holders]
            if len(sizes) > 1:
                places = [place for place in places if endpoints[place].block_size == size]
            hits = self._match([indexes[place] for place in places], block_hashes, now)
            for place, blocks in zip(places, hits, strict=True):
                blocks -= blocks % unit
                hit_blocks[place], hit_tokens[place] = blocks, min(blocks * size, limit)
        best = hit_tokens.index(max(hit_tokens))
        size = endpoints[best].block_size
        block_hashes, new = prompt.block_hashes(size), hit_blocks[best] + max(HIT_TOKENS // size, 1)
        key = block_hashes[min(new, len(block_hashes)) - 1] if block_hashes else prompt.short_prompt_key()
        return PolicyInput(request, Candidates(endpoints, hit_blocks, hit_tokens), key, now)

    def _match(self, indexes: list[PrefixIndex], block_hashes: list[BlockHash], now: float) -> Sequence[int]:
        """Return how many leading blocks each index has."""
        handles = [index.handle for index in indexes]
        if self._match_all is not None and all(handles):
            return self._match_all(handles, block_hashes)
        hits, near = list[int](), 0
        for index in indexes:
            near = index.num_cached_prefix_blocks(block_hashes, now, near)
            hits.append(near)
        return hits

    def _compare(self, shadow: Policy, decision: RoutingDecision) -> ShadowComparison:
        """Return the decision of a shadow policy. Changes only the regrets of this decision."""
        choice = shadow.rank(decision.view)
        first = choice.ranked[0]
        theirs, ours = (
            one.endpoint.prompt_cost(
                decision.view.num_prompt_tokens, one.hit_tokens, decision.view.now
            ).expected_ttft_ms
            for one in (decision.candidate_of(first.name), decision.candidate)
        )
        regret = theirs - ours
        decision.regrets[shadow.name] = (first.name, regret)
        return ShadowComparison(shadow, choice, regret, first.name == decision.endpoint.name)

    def _book(self, decision: RoutingDecision) -> None:
        """Count the decisions of shadow policies about a request that is sent. Once per request."""
        for shadow, choice, regret, agrees in decision.comparisons:
            shadow.record_pick(choice, choice.ranked[0].endpoint)
            known = self.regrets[shadow.name]
            known.decisions += 1
            known.agreed += agrees
            known.total_ms += regret
        decision.comparisons = []

    def _end(self, in_flight: RoutedInFlight, now: float, *, ok: bool) -> None:
        in_flight.finish = now
        if self._log is None:
            return
        choice, request = in_flight.choice, in_flight.view.request
        record = DecisionRecord(
            at=in_flight.sent_at,
            endpoint=in_flight.endpoint.name,
            reason=choice.reason,
            scores=in_flight.logged_scores,
            excluded=in_flight.excluded,
            prompt_tokens=request.prompt.num_tokens,
            block_size=in_flight.endpoint.block_size,
            names=join_hashes(in_flight.block_hashes),
            output_tokens=request.max_tokens,
            num_output=in_flight.num_output,
            predicted_tokens=in_flight.candidate.hit_tokens,
            expected_ms=in_flight.flight.expected_ttft_ms,
            cached_tokens=in_flight.cached_tokens,
            first_token=in_flight.first_token,
            finish=now,
            ok=ok,
            session=request.session,
            adapter=request.adapter,
        )
        self._log(record)


def _hit_unit(block_size: int, sizes: set[int]) -> int:
    """Return the multiple of blocks in which hits of this size count.

    Prompts often begin alike for a few tokens. Only replicas of small blocks could have these, or claim to, and the
    smallest hit decides between replicas that are equal otherwise. So hits count in blocks of the largest size that
    any replica has, up to HIT_TOKENS.
    """
    if block_size >= HIT_TOKENS:
        return 1
    return max(min(max(sizes), HIT_TOKENS) // block_size, 1)


def _output_estimate(request: RoutingRequest) -> int:
    """Return llm-d's estimate of the tokens that a request generates (its in-flight load producer)."""
    tokens = round(OUTPUT_SHARE * request.prompt.num_tokens)
    return min(tokens, request.max_tokens) if request.max_tokens else tokens


def _index_for(endpoint: Endpoint, request: RoutingRequest) -> PrefixIndex:
    """Return the prefix index of a replica in which the blocks of this request can be found.

    Events identify blocks by the engine's own tokens. A prompt counted in text, or in tokens that the replica counts
    otherwise, has other hashes: for such prompts only the approximate index applies.
    """
    if not request.prompt.exact or request.form in endpoint.miscounted:
        return endpoint.index.prompt_based_index_or_self
    return endpoint.index


def _compare_counts(endpoint: Endpoint, request: RoutingRequest, usage: ReportedTokenUsage) -> None:
    """Record whether a replica counts the tokens of an exact prompt as the router does."""
    if usage.prompt_tokens == request.prompt.num_tokens:
        endpoint.miscounted.discard(request.form)
    else:
        endpoint.miscounted.add(request.form)
