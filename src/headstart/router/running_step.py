"""RunningStep: the step that a replica computes at present, as far as its token events show.

Every step of a replica with streams ends with one event of each. So the first event of a step tells when the next one
begins, and that a chunk of the pending prefills, first come, first served, is computed. The events of one step may be
spread over milliseconds: a step has ended when a stream that had its event since the step began has another one, or
when a prefill is answered that only the running step computes. Without events nothing is known.
"""

from collections.abc import Iterable
from math import inf

from headstart.router.flight import Flight
from headstart.router.step_rates import STEP_TOKENS


class RunningStep:
    """The running step of one replica. `tokens` and `pairs` of its prefills; `began_at` -inf: no event was seen."""

    __slots__ = (
        *("_chunks", "_rest_pairs", "_rest_tokens", "began_at", "number", "pairs", "resident", "streams", "tokens"),
    )

    def __init__(self) -> None:
        self.began_at = -inf
        self.number = 0  # of steps that began
        self.streams, self.resident = 0, 0.0
        self.tokens, self.pairs = 0, 0.0
        self._rest_tokens, self._rest_pairs = 0, 0.0  # pending, not computed by steps that ended
        self._chunks: list[tuple[Flight, int]] = []

    @property
    def is_seen(self) -> bool:
        return self.began_at > -inf

    @property
    def row(self) -> tuple[float, ...]:
        """The state that a price depends on: when it began, its prefills, and all that is not computed before it."""
        return self.began_at, self.tokens, self.pairs, self._rest_tokens, self._rest_pairs

    def sent(self, flight: Flight) -> None:
        """Record a request sent there. It joins the next step."""
        self._rest_tokens += flight.work.tokens
        self._rest_pairs += flight.work.pairs

    def begin(self, now: float, pending: Iterable[Flight], streams: int, resident: float) -> None:
        """Begin a step with the pending prefills, as far as they fit."""
        self.began_at, self.streams, self.resident = now, streams, resident
        self.number += 1
        self._schedule(pending)

    def end(self) -> None:
        """End the step: its prefills are computed."""
        for flight, tokens in self._chunks:
            flight.num_computed += tokens
        self._rest_tokens -= self.tokens
        self._rest_pairs -= self.pairs
        self._chunks, self.tokens, self.pairs = [], 0, 0.0

    def catch_up(self, flight: Flight, pending: Iterable[Flight]) -> None:
        """End steps until the first pending request is computed: without streams they were not seen."""
        while flight.num_computed < flight.work.tokens:
            self.end()
            self._schedule(pending)

    def left(self, flight: Flight) -> None:
        """Record that a request is not pending any more."""
        rest = flight.work.tokens - flight.num_computed
        self._rest_tokens -= rest
        self._rest_pairs = self._rest_pairs - rest * (flight.prompt_tokens - rest / 2) if self._rest_tokens else 0.0
        if any(one is flight for one, _ in self._chunks):
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not flight]
            kept = sum(tokens for _, tokens in self._chunks)
            self.tokens, self.pairs = kept, self.pairs * (kept / self.tokens)

    def _schedule(self, pending: Iterable[Flight]) -> None:
        budget, self.pairs, self._chunks = STEP_TOKENS, 0.0, []
        for flight in pending:
            tokens = min(flight.work.tokens - flight.num_computed, budget)
            if tokens > 0:
                self._chunks.append((flight, tokens))
                budget -= tokens
                done = flight.prompt_tokens - flight.work.tokens + flight.num_computed
                self.pairs += tokens * (done + tokens / 2)
            if not budget:
                break
        self.tokens = STEP_TOKENS - budget
