"""Load: the work in flight at one replica, from the requests sent there and their responses; without scraping.

Prefills are modelled as one queue, first come, first served: the backlog is the work of requests without a first token,
less the part already done of the first one. A late replica is as many times slower as it is late.
"""

from headstart.router.prefill_model import PrefillModel, RateLearner, Work

GRACE_MS = 50.0  # a shorter delay is not late
LATENESS = 2.0  # nor is one below this multiple of the expected time


class Flight:
    """One request in flight at a replica."""

    __slots__ = ("answered_at", "backlog_ms", "output_tokens", "prefill_ms", "sent_at", "took_ms", "work")

    def __init__(self, work: Work, prefill_ms: float, backlog_ms: float, output_tokens: int) -> None:
        self.work = work
        self.prefill_ms = prefill_ms
        self.backlog_ms = backlog_ms
        self.output_tokens = output_tokens  # estimate
        self.sent_at = 0.0
        self.answered_at: float | None = None
        self.took_ms: float | None = None  # duration of the prefill alone, from its end until it is learned

    @property
    def expected_ms(self) -> float:
        """Time to its first token, as expected when it was sent."""
        return self.backlog_ms + self.prefill_ms


class Load:
    """The requests in flight at one replica."""

    def __init__(self, prior: PrefillModel | None = None) -> None:
        self.learner = RateLearner(prior)
        self.last_sent = -1  # sequence number of the last request, over all replicas; -1: none
        self.mean_prefill_ms = 0.0
        self.num_streams = 0  # responses being generated
        self.inflight_tokens = 0  # to prefill, and to generate
        self.pending_tokens = 0  # to prefill
        self._pending: dict[Flight, None] = {}  # without a first token, in sending order
        self._pending_ms = 0.0
        self._since = 0.0  # start of work on the first pending request

    @property
    def rates(self) -> PrefillModel:
        return self.learner.rates

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_requests(self) -> int:
        """In flight, with and without a first token."""
        return len(self._pending) + self.num_streams

    def backlog_ms(self, now: float) -> float:
        """Return the time until all pending requests should have their first token."""
        head = next(iter(self._pending), None)
        if head is None:
            return 0.0
        done = min(max(now - self._since, 0.0) * 1e3, head.prefill_ms)
        return max(self._pending_ms - done, 0.0)

    def slowness(self, now: float) -> float:
        """Return how many times slower it is than expected, by its oldest pending request; 1.0 if in time."""
        head = next(iter(self._pending), None)
        if head is None:
            return 1.0
        waited = (now - max(head.sent_at, self._since)) * 1e3
        return max(waited / (LATENESS * head.prefill_ms + GRACE_MS), 1.0)

    def sent(self, flight: Flight, now: float, order: int) -> None:
        """Record a request sent there."""
        flight.sent_at = now
        if not self._pending:
            self._since, self._pending_ms = now, 0.0
        self._pending[flight] = None
        self._pending_ms += flight.prefill_ms
        self.pending_tokens += flight.work.tokens
        self.inflight_tokens += flight.work.tokens + flight.output_tokens
        self.last_sent = order
        weight = 0.1 if self.mean_prefill_ms else 1.0
        self.mean_prefill_ms += weight * (flight.prefill_ms - self.mean_prefill_ms)

    def answered(self, flight: Flight, now: float) -> None:
        """Record its first token."""
        if flight not in self._pending:
            return
        flight.took_ms = (now - max(flight.sent_at, self._since)) * 1e3
        self._left(flight, now)
        flight.answered_at = now
        self.num_streams += 1
        self.inflight_tokens -= flight.work.tokens

    def learn(self, flight: Flight, work: Work) -> None:
        """Use the time to its first token as a sample, now that the work is known. Once."""
        if flight.took_ms is not None:
            self.learner.learn(work, flight.took_ms)
            flight.took_ms = None

    def finished(self, flight: Flight, now: float) -> None:
        """Record its end, successful or not."""
        if flight in self._pending:
            self._left(flight, now)
            self.inflight_tokens -= flight.work.tokens + flight.output_tokens
        elif flight.answered_at is not None:
            flight.answered_at = None
            self.num_streams -= 1
            self.inflight_tokens -= flight.output_tokens

    def _left(self, flight: Flight, now: float) -> None:
        del self._pending[flight]
        self.pending_tokens -= flight.work.tokens
        self._pending_ms = max(self._pending_ms - flight.prefill_ms, 0.0)
        self._since = now
