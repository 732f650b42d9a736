"""Load: the work in flight at one replica, from the requests sent there and their responses; without scraping.

Prefills are modelled as one queue, first come, first served, computed in steps that several requests may share. Two
kinds of interval are samples for the rates: a *busy period*, from the first pending request to the last first token of
a step, with all prefills that ended in it; and the *decode* of one answer, whose tokens are as many steps.
"""

from collections.abc import Callable, Sequence
from math import inf

from headstart.core.cache.hashing import BlockHash
from headstart.router.flight import BusyPeriod, RequestFlight, find_request_computing_prefix
from headstart.router.rate_learner import RateLearner, RateSample, ReplicaSlowdown
from headstart.router.running_step import RunningStep
from headstart.router.step_rates import STEP_TOKENS, PrefillWork, StepRates

GRACE_MS = 50.0  # a shorter delay is not late
LATENESS = 1.5  # nor is one below this multiple of the expected time
SAME_STEP = 1e-3  # seconds between first tokens of one step
MIN_STEP = 0.3  # two events of one stream that are closer than this share of a step without prefills are one
PERIOD_TOKENS = 4 * STEP_TOKENS  # after which a busy period is a sample, and the next one begins
MAX_MISMATCH = 0.1  # mean error of expected work, above which the pace is learned only when the work is known
MISMATCH_DECAY = 0.2
MAX_DECODE_MS = 5e3  # of a decode that says something about the present pace
MAX_AGE = 5.0  # seconds after which a replica's report is stale
MIN_DECODE = 8  # steps of a decode that is a sample
WATCHED_STEPS = 8  # steps seen by token events that are a sample of the pace, or
WATCHED_MS = 100.0  # so many milliseconds of them
MAX_SURPRISE = 4.0  # a step that takes longer than this multiple computed something that is not known
NO_ROOM = (inf, 1.0)  # where nothing is known about it
NOTHING = RateSample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class ReplicaLoad:
    """The requests in flight at one replica. `learner` is shared with all replicas of its kind (`Router.add`).

    `room` returns the tokens of the cache that no prompt in flight claims, and those of all of it
    (`Endpoint.unclaimed_and_total_tokens`).
    """

    def __init__(
        self, prior: StepRates | None = None, room: Callable[[], tuple[float, float]] = lambda: NO_ROOM
    ) -> None:
        self._room = room
        self.learner = RateLearner(prior)
        self.pace = ReplicaSlowdown()
        self.last_sent = -1  # sequence number of the last request, over all replicas; -1: none
        self.mean_prefill_ms = 0.0
        self._mean_prompt = 0.0  # tokens
        self.num_streams = 0  # responses being generated
        self.stream_tokens = 0  # of their prompts
        self.inflight_tokens = 0  # to prefill, and to generate
        self.pending_tokens = 0  # to prefill
        self.pending_pairs = 0.0
        self.pending_prompts = 0  # tokens of the prompts, cached or not
        self._pending: dict[RequestFlight, None] = {}  # without a first token, in sending order
        self._since = 0.0  # start of work on the first pending request
        self._period = BusyPeriod(0.0, 0.0, 0.0)
        self._at = 0.0  # of the integrals
        self._stream_ms = self._resident_ms = 0.0  # integrals over time
        self._row: tuple[float, ...] | None = None  # None: to be computed
        self._foreign = 0  # requests of other routers without a first token, when the replica last reported
        self._foreign_streams, self._foreign_at = 0, -inf  # with a first token, while there are other routers
        self._done_tokens, self._done_pairs = 0, 0.0  # prefills that ended
        self._step = RunningStep()
        self._watched = NOTHING  # steps that were seen since the last sample of them
        self._mismatch = 1.0  # decaying mean of the relative error of expected work

    @property
    def rates(self) -> StepRates:
        return self.learner.rates

    @property
    def num_awaiting_first_token(self) -> int:
        return len(self._pending)

    @property
    def num_requests(self) -> int:
        """In flight, with and without a first token."""
        return len(self._pending) + self.num_streams

    @property
    def num_observed_steps(self) -> int:
        """Steps of the replica that token events showed to begin."""
        return self._step.number

    @property
    def max_step_tokens(self) -> int:
        """The most new tokens of a step, as reported or learned."""
        return self._step.step_tokens

    @property
    def pricing_row(self) -> tuple[float, ...]:
        """The state that a price depends on, in the order of pricing.py."""
        if self._row is None:
            self._row = self._new_row()
        return self._row

    def _new_row(self) -> tuple[float, ...]:
        head = next(iter(self._pending), None)
        foreign = (self._foreign, self._foreign_at, self.mean_prefill_ms)
        rest = (
            self.pace.is_used,
            *foreign,
            *self._room(),
            *self._step.pricing_row,
            self._foreign_streams,
            self._foreign_streams * self._mean_prompt,
        )
        if head is None:
            return (0, 0.0, 0, self.num_streams, self.stream_tokens, 0, 0, 0.0, 0.0, 0.0, *rest)
        work, since = head.work, self._since
        started = max(head.sent_at + head.wait_ms / 1e3, since)
        counts = (self.pending_tokens, self.pending_pairs, len(self._pending), self.num_streams, self.stream_tokens)
        return (*counts, self.pending_prompts, work.tokens, work.pairs, since, started, *rest)

    def _changed(self) -> None:
        """Record that the row has changed."""
        self._row = None
        self.learner.rows.mark_changed(self)

    def set_max_step_tokens(self, tokens: int) -> None:
        """Set the most new tokens of a step, as the replica states it."""
        self._step.set_max_step_tokens(tokens)
        self._changed()

    def record_report(self, waiting: int, running: int, at: float) -> None:
        """Record the requests without and with a first token that the replica reports, of other routers too."""
        self.learner.others.add_replica_report(self.num_requests, waiting + running)
        self._foreign, self._foreign_at = max(waiting - len(self._pending), 0), at
        is_shared = self.learner.others.share > 0.0
        self._foreign_streams = max(running - self.num_streams, 0) if is_shared else 0
        self._changed()

    def record_sent(self, flight: RequestFlight, now: float, order: int) -> None:
        """Record a request sent there."""
        self._advance(now)
        flight.sent_at = now
        if not self._pending:
            self._since = now
            self._begin(now)
        leader = flight.leader = self.find_request_computing_prefix(flight.block_hashes, flight.hit_blocks)
        if leader is not None and self.learner.replicas_wait_for_prefix_leader:
            flight.awaited = max(flight.cached_tokens - leader.cached_tokens, 0)
        self._pending[flight] = None
        self._step.record_sent(flight)
        if self._step.was_observed and not self.num_streams and len(self._pending) == 1:
            self._begin_step(now)  # it was idle
        self.pending_tokens += flight.work.tokens
        self.pending_pairs += flight.work.pairs
        self.pending_prompts += flight.prompt_tokens
        self.inflight_tokens += flight.work.tokens + flight.output_tokens
        if self._step.was_observed and self.num_streams and len(self._pending) == 1 and not flight.wait_ms:
            flight.entered = self._step.number
        self.last_sent = order
        weight = 0.1 if self.mean_prefill_ms else 1.0
        self.mean_prefill_ms += weight * (flight.prefill_ms - self.mean_prefill_ms)
        self._mean_prompt += weight * (flight.prompt_tokens - self._mean_prompt)

    def find_request_computing_prefix(self, block_hashes: Sequence[BlockHash], hit_blocks: int) -> RequestFlight | None:
        """Return the pending request that computes the last of these blocks that are expected to be cached, if any."""
        return find_request_computing_prefix(block_hashes, hit_blocks, self._pending)

    def record_token(self, flight: RequestFlight, now: float) -> None:
        """Record a token event of a stream: a step has ended if the stream had its event since the step began."""
        step = self._step
        if not step.was_observed:
            self._begin_step(now)
            flight.first_step = step.number
        elif flight.step == step.number:
            if now - flight.token_at < self._least_step():
                return  # of the same step: an event for its role, its usage, or the rest of a split token
            self._end_step(now)
        flight.step, flight.token_at = step.number, now
        flight.num_events += 1

    def record_first_token(self, flight: RequestFlight, now: float, *, is_assumed: bool = False) -> None:
        """Record its first token. `is_assumed`: it was not seen, so nothing is learned."""
        if flight not in self._pending:
            return
        self._advance(now)
        if self._step.was_observed and not is_assumed:
            self._prefilled(flight, now)
        period = self._period
        if now > period.end + SAME_STEP:
            if period.tokens >= PERIOD_TOKENS:
                self._close(now)
                period = self._begin(period.end)
            period.num_steps += 1
        self._left(flight, now)
        flight.is_assumed = is_assumed
        period.is_void = period.is_void or is_assumed
        period.end = now
        period.tokens += flight.work.tokens
        period.pairs += flight.work.pairs
        period.num_open += 1
        flight.period = period
        flight.answered_at = now
        self._done_tokens += flight.work.tokens
        self._done_pairs += flight.work.pairs
        flight.done_before, flight.pairs_before = self._done_tokens, self._done_pairs
        flight.streams_before, flight.resident_before = self._stream_ms, self._resident_ms
        self.num_streams += 1
        self.stream_tokens += flight.prompt_tokens
        self.inflight_tokens -= flight.work.tokens
        if not self._pending:
            self._close(now)

    def correct_prefill_work(self, flight: RequestFlight, work: PrefillWork) -> None:
        """Correct the work of its busy period, now that it is known; that is a sample when all of it is. Once."""
        period, flight.period = flight.period, None
        if period is None:
            return
        if flight.num_steps:
            self._step.learn_step_tokens(work.tokens, flight.num_steps)
            self._changed()
        period.tokens += work.tokens - flight.work.tokens
        period.pairs += work.pairs - flight.work.pairs
        period.num_open -= 1
        error = abs(work.tokens - flight.work.tokens) / work.tokens
        self._mismatch += MISMATCH_DECAY * (error - self._mismatch)
        self._finish(period)

    def record_finished(self, flight: RequestFlight, now: float, num_output: int = 0) -> None:
        """Record its end, successful or not. `num_output`: tokens of a complete answer; 0: not known."""
        self._advance(now)
        if flight in self._pending:
            self._period.is_void = True
            self._left(flight, now)
            self.inflight_tokens -= flight.work.tokens + flight.output_tokens
        elif flight.answered_at is not None:
            if num_output and not flight.is_assumed:
                self._decoded(flight, flight.answered_at, now, num_output)
            flight.answered_at = None
            self.num_streams -= 1
            self.stream_tokens -= flight.prompt_tokens
            self.inflight_tokens -= flight.output_tokens

    def exclude_from_learning(self, flight: RequestFlight) -> None:
        """Let nothing be learned from a request that failed."""
        if flight.period is not None:
            flight.period.is_void, flight.period = True, None

    # ------------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Update the integrals of streams and of the tokens that they attend to. Called before every change."""
        elapsed = 1e3 * (now - self._at)
        self._at = now
        self._changed()
        if elapsed > 0.0 and self.num_streams:
            self._stream_ms += elapsed * self.num_streams
            grown = self.num_streams * self.learner.mean_output / 2
            self._resident_ms += elapsed * (self.stream_tokens + grown)

    def _left(self, flight: RequestFlight, now: float) -> None:
        flight.leader, flight.block_hashes = None, []
        del self._pending[flight]
        self._step.record_left(flight)
        self.pending_tokens -= flight.work.tokens
        self.pending_pairs = self.pending_pairs - flight.work.pairs if self._pending else 0.0
        self.pending_prompts -= flight.prompt_tokens
        self._since = now

    def _begin(self, now: float) -> BusyPeriod:
        self._period = BusyPeriod(now, self._stream_ms, self._resident_ms)
        return self._period

    def _close(self, now: float) -> None:
        """End the busy period. Its integrals become those of its own time."""
        period = self._period
        period.is_closed = True
        period.streams = self._stream_ms - period.streams
        period.resident = self._resident_ms - period.resident
        if self._mismatch < MAX_MISMATCH:
            self._judge(period, now)
        self._finish(period)

    def _judge(self, period: BusyPeriod, now: float) -> None:
        """Learn the pace from a period that has ended. Once."""
        interval = _interval_of(period, self._step.step_tokens)
        if not period.is_void and not period.is_judged and interval.ms > 0.0:
            period.is_judged = True
            self._pace(interval, now)
            period.factor = self.learner.slowdown_versus_fleet(self.pace, now)

    def _begin_step(self, now: float) -> None:
        resident = self.stream_tokens + self.num_streams * self.learner.mean_output / 2
        self._step.begin(now, self._pending, self.num_streams, resident)
        self._changed()

    def _end_step(self, now: float) -> None:
        """End the running step, and begin the next one."""
        self._watch(1e3 * (now - self._step.began_at), now)
        self._step.end()
        self._begin_step(now)

    def _least_step(self) -> float:
        """Return the seconds that are at least between two steps."""
        if self.learner.is_unreliable:
            return SAME_STEP
        step = self._step
        ms = RateSample(0.0, 1, step.streams, step.resident, 0, 0.0).expected_ms(self.rates)
        return max(MIN_STEP * ms * self.learner.slowdown_versus_fleet(self.pace, step.began_at) / 1e3, SAME_STEP)

    def _prefilled(self, flight: RequestFlight, now: float) -> None:
        """Record that a prefill is computed: a step has ended with it, unless one that ended before computed it."""
        step = self._step
        if flight.num_computed < flight.work.tokens:
            if now - step.began_at > self._least_step():
                self._end_step(now)
            if next(iter(self._pending)) is flight:
                step.end_steps_until_computed(flight, self._pending)
        flight.step = flight.first_step = step.number
        flight.token_at = now
        if flight.entered and self.num_streams:  # there was a stream all the time, which showed every step
            is_ending = now - step.began_at > self._least_step()  # none of its other events has come yet
            flight.num_steps = max(step.number + is_ending - flight.entered - 1, 1)
        leader = flight.leader
        if leader is not None:
            is_later = leader not in self._pending and leader.first_step < step.number
            if leader.first_step or not is_later:  # a leader without a first step failed
                self.learner.record_follower_deferral(is_later=is_later)

    def _watch(self, ms: float, now: float) -> None:
        """Learn the pace from the step that ends, together with those before it."""
        step = self._step
        if not step.streams or (step.tokens and self._mismatch >= MAX_MISMATCH):
            return  # steps without streams are not seen; the work of this one is uncertain
        one = RateSample(ms, 1, step.streams, step.resident, step.tokens, step.pairs)
        if ms > min(
            MAX_SURPRISE * one.expected_ms(self.rates) * self.learner.slowdown_versus_fleet(self.pace, now),
            MAX_DECODE_MS,
        ):
            return
        watched = self._watched = RateSample(*(a + b for a, b in zip(self._watched, one, strict=True)))
        if watched.steps >= WATCHED_STEPS or watched.ms >= WATCHED_MS:
            self._pace(watched, now)
            self._watched = NOTHING

    def _pace(self, interval: RateSample, now: float) -> None:
        """Learn the pace from an interval, as far as the fleet's rates are known."""
        if not self.learner.is_unreliable:
            self.learner.record_pace_sample(self.pace, interval.ms / interval.expected_ms(self.rates), now)
            self._changed()

    def _finish(self, period: BusyPeriod) -> None:
        """Learn a period that is over and fully known."""
        if period.is_closed and not period.num_open and not period.is_void:
            self._judge(period, period.end)
            interval = _interval_of(period, self._step.step_tokens)
            if interval.ms > 0.0:
                self.learner.learn(interval._replace(ms=interval.ms / period.factor))

    def _decoded(self, flight: RequestFlight, start: float, now: float, num_output: int) -> None:
        """Learn the decode of an answer, and its length.

        Its steps are those that were seen, if it had events: a step of speculation or of a replica that reports every
        few tokens yields several tokens. If it had few, its text was withheld, and its steps are not known.
        """
        self.learner.record_output_length(num_output)
        ms = 1e3 * (now - start)
        num_steps = self._step.number - flight.first_step if flight.num_events else num_output - 1
        is_withheld = 0 < flight.num_events < num_steps / 2
        if num_steps < MIN_DECODE or ms <= 0.0 or is_withheld:
            return
        streams = (self._stream_ms - flight.streams_before) / ms
        resident = (self._resident_ms - flight.resident_before) / ms
        tokens, pairs = self._done_tokens - flight.done_before, self._done_pairs - flight.pairs_before
        interval = RateSample(ms, num_steps, num_steps * streams, num_steps * resident, tokens, pairs)
        if ms < MAX_DECODE_MS:
            self._pace(interval, now)
        self.learner.learn(interval._replace(ms=ms / self.learner.slowdown_versus_fleet(self.pace, now)))


def _interval_of(period: BusyPeriod, step_tokens: int) -> RateSample:
    """Return a closed period as a sample, of steps of at most so many new tokens.

    It began in the middle of a step, if there were streams.
    """
    ms = 1e3 * (period.end - period.start)
    if ms <= 0.0:
        return NOTHING
    streams, resident = period.streams / ms, period.resident / ms
    steps = max(period.num_steps, -(-period.tokens // step_tokens)) + (0.5 if streams else 0.0)
    return RateSample(ms, steps, steps * streams, steps * resident, period.tokens, period.pairs)
