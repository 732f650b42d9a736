"""Load: what one replica has to do, from what was sent there and what came back; no scraping in the way.

Prefills are thought of as one line, first come, first served: the backlog is the work of those without a first token,
less what was done of the one at the head since. A replica that is late is as many times slower as it is late.
"""

from headstart.router.prefill_model import PrefillModel, RateLearner, Work

GRACE_MS = 50.0  # late by less is not late
LATENESS = 2.0  # nor by less than so many times what was expected


class Flight:
    """One request on its way through a replica."""

    __slots__ = ("answered_at", "backlog_ms", "output_tokens", "prefill_ms", "sent_at", "took_ms", "work")

    def __init__(self, work: Work, prefill_ms: float, backlog_ms: float, output_tokens: int) -> None:
        self.work = work
        self.prefill_ms = prefill_ms
        self.backlog_ms = backlog_ms
        self.output_tokens = output_tokens  # expected at most; 0: not known
        self.sent_at = 0.0
        self.answered_at: float | None = None
        self.took_ms: float | None = None  # the prefill alone, once it is done and until it was learned from

    @property
    def expected_ms(self) -> float:
        """Time to its first token, as expected when it was sent."""
        return self.backlog_ms + self.prefill_ms


class Load:
    """The requests under way at one replica."""

    def __init__(self, prior: PrefillModel | None = None) -> None:
        self.learner = RateLearner(prior)
        self.last_sent = -1  # in the order of all requests; -1: none was
        self.mean_prefill_ms = 0.0
        self.num_streams = 0  # answers that are being generated
        self.inflight_tokens = 0  # to prefill, and to generate
        self._pending: dict[Flight, None] = {}  # without a first token, in the order in which they were sent
        self._pending_ms = 0.0
        self._since = 0.0  # the head of the line has been worked on since

    @property
    def rates(self) -> PrefillModel:
        return self.learner.rates

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_requests(self) -> int:
        """Under way, with and without a first token."""
        return len(self._pending) + self.num_streams

    def backlog_ms(self, now: float) -> float:
        """Time until all that are pending should have their first token."""
        head = next(iter(self._pending), None)
        if head is None:
            return 0.0
        done = min(max(now - self._since, 0.0) * 1e3, head.prefill_ms)
        return max(self._pending_ms - done, 0.0)

    def slowness(self, now: float) -> float:
        """How many times slower it is than expected, by the one that waits longest; 1.0 if that is in time."""
        head = next(iter(self._pending), None)
        if head is None:
            return 1.0
        waited = (now - max(head.sent_at, self._since)) * 1e3
        return max(waited / (LATENESS * head.prefill_ms + GRACE_MS), 1.0)

    def sent(self, flight: Flight, now: float, order: int) -> None:
        """A request is on its way there."""
        flight.sent_at = now
        if not self._pending:
            self._since, self._pending_ms = now, 0.0
        self._pending[flight] = None
        self._pending_ms += flight.prefill_ms
        self.inflight_tokens += flight.work.tokens + flight.output_tokens
        self.last_sent = order
        weight = 0.1 if self.mean_prefill_ms else 1.0
        self.mean_prefill_ms += weight * (flight.prefill_ms - self.mean_prefill_ms)

    def answered(self, flight: Flight, now: float) -> None:
        """Its first token is there."""
        if flight not in self._pending:
            return
        flight.took_ms = (now - max(flight.sent_at, self._since)) * 1e3
        self._left(flight, now)
        flight.answered_at = now
        self.num_streams += 1
        self.inflight_tokens -= flight.work.tokens

    def learn(self, flight: Flight, work: Work) -> None:
        """Takes the time to its first token as a sample, now that it is known what there was to do. Once."""
        if flight.took_ms is not None:
            self.learner.learn(work, flight.took_ms)
            flight.took_ms = None

    def finished(self, flight: Flight, now: float) -> None:
        """It is over, well or not."""
        if flight in self._pending:
            self._left(flight, now)
            self.inflight_tokens -= flight.work.tokens + flight.output_tokens
        elif flight.answered_at is not None:
            flight.answered_at = None
            self.num_streams -= 1
            self.inflight_tokens -= flight.output_tokens

    def _left(self, flight: Flight, now: float) -> None:
        del self._pending[flight]
        self._pending_ms = max(self._pending_ms - flight.prefill_ms, 0.0)
        self._since = now
