"""RunningStep: the step that a replica computes at present, as far as its token events show.

Every step of a replica with streams ends with one event of each. So the first event of a step tells when the next one
begins, and that a chunk of the pending prefills, first come, first served, is computed. The events of one step may be
spread over milliseconds: a step has ended when a stream that had its event since the step began has another one, or
when a prefill is answered that only the running step computes. Without events nothing is known.
"""

from collections.abc import Collection
from math import inf

from headstart.router.flight import RequestFlight
from headstart.router.step_rates import STEP_TOKENS

LEAST_STEP_TOKENS = 128  # fewer new tokens in each of several steps are no limit of the engine


class RunningStep:
    """The running step of one replica. `tokens` and `pairs` of its prefills; `began_at` -inf: no event was seen.

    `step_tokens` is the most new tokens of a step: as many as the replica states, until a prefill takes more steps than
    that allows; then the largest number seen.
    """

    __slots__ = (
        *("_chunks", "_last_turn", "_rest_pairs", "_rest_tokens", "_turn", "began_at", "number", "pairs", "resident"),
        *("_is_reached", "_max_step_tokens", "step_tokens", "streams", "tokens"),
    )

    def __init__(self) -> None:
        self.began_at = -inf
        self.number = 0  # of steps that began
        self.streams, self.resident = 0, 0.0
        self.tokens, self.pairs = 0, 0.0
        self._rest_tokens, self._rest_pairs = 0, 0.0  # pending, not computed by steps that ended
        self._chunks: list[tuple[RequestFlight, int, float]] = []  # with their tokens and pairs
        self.step_tokens, self._max_step_tokens = STEP_TOKENS, 0  # 0: the replica states none
        self._is_reached = False  # a prefill was seen to need more than one step
        self._turn = self._last_turn = 0  # number of the step, with those not seen; that of the last follower

    @property
    def was_observed(self) -> bool:
        return self.began_at > -inf

    @property
    def pricing_row(self) -> tuple[float, ...]:
        """The state that a price depends on: when it began, its prefills, and all that is not computed before it.

        The last values are the most tokens of a step, and the number of steps after it that followers need, one after
        the other.
        """
        chain = max(self._last_turn - self._turn, 0)
        return self.began_at, self.tokens, self.pairs, self._rest_tokens, self._rest_pairs, self.step_tokens, chain

    def set_max_step_tokens(self, step_tokens: int) -> None:
        """Set the most new tokens of a step, as the replica states it; with bounded times they may have fewer."""
        self.step_tokens = self._max_step_tokens = step_tokens
        self._is_reached = False

    def learn_step_tokens(self, tokens: int, num_steps: int) -> None:
        """Learn the tokens of a step from a prefill that was alone in the queue, and whose steps were all seen.

        One that should have taken fewer steps proves that the number was too large: it begins anew. A prefill in very
        small steps waited for something else, such as blocks.
        """
        found = tokens // num_steps
        if num_steps > 1 and found < LEAST_STEP_TOKENS:
            return
        if num_steps > 1 and (not self._is_reached or self.step_tokens * (num_steps - 1) >= tokens):
            self.step_tokens, self._is_reached = found, True
        self.step_tokens = max(self.step_tokens, min(found, self._max_step_tokens or found))

    def record_sent(self, flight: RequestFlight) -> None:
        """Record a request sent there. It joins the next step, or the one after its leader's."""
        flight.turn = self._turn + 1
        if flight.leader is not None and flight.awaited:
            num_steps = -(-flight.awaited // self.step_tokens)
            flight.turn = max(flight.turn, flight.leader.turn + num_steps)
            self._last_turn = max(self._last_turn, flight.turn)
        self._rest_tokens += flight.work.tokens
        self._rest_pairs += flight.work.pairs

    def begin(self, now: float, pending: Collection[RequestFlight], streams: int, resident: float) -> None:
        """Begin a step with the pending prefills, as far as they fit."""
        self.began_at, self.streams, self.resident = now, streams, resident
        self.number += 1
        self._schedule(pending)
        self._last_turn = min(self._last_turn, self._turn + len(pending))

    def end(self) -> None:
        """End the step: its prefills are computed."""
        for flight, tokens, _ in self._chunks:
            flight.num_computed += tokens
        self._rest_tokens -= self.tokens
        self._rest_pairs -= self.pairs
        self._chunks, self.tokens, self.pairs = [], 0, 0.0

    def end_steps_until_computed(self, flight: RequestFlight, pending: Collection[RequestFlight]) -> None:
        """End steps until the first pending request is computed: without streams they were not seen."""
        while flight.num_computed < flight.work.tokens:
            self.end()
            self._schedule(pending)

    def record_left(self, flight: RequestFlight) -> None:
        """Record that a request is not pending any more."""
        rest = flight.work.tokens - flight.num_computed
        self._rest_tokens -= rest
        self._rest_pairs = self._rest_pairs - rest * (flight.prompt_tokens - rest / 2) if self._rest_tokens else 0.0
        if any(one is flight for one, _, _ in self._chunks):
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not flight]
            self._sum()

    def _schedule(self, pending: Collection[RequestFlight]) -> None:
        budget, self._chunks = self.step_tokens, []
        self._turn += 1
        for flight in pending:
            tokens = min(flight.work.tokens - flight.num_computed, budget)
            if tokens > 0 and not _is_blocked(flight, pending):
                done = flight.prompt_tokens - flight.work.tokens + flight.num_computed
                self._chunks.append((flight, tokens, tokens * (done + tokens / 2)))
                budget -= tokens
            if not budget:
                break
        self._sum()

    def _sum(self) -> None:
        self.tokens = sum(tokens for _, tokens, _ in self._chunks)
        self.pairs = sum(pairs for _, _, pairs in self._chunks)


def _is_blocked(flight: RequestFlight, pending: Collection[RequestFlight]) -> bool:
    """Return whether a prefill waits for a prefix that another one has yet to compute."""
    leader = flight.leader
    return leader is not None and leader in pending and leader.num_computed < flight.awaited
