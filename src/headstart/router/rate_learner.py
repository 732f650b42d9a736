"""RateLearner: the step rates of a fleet. Pace: how much slower than the fleet one replica is.

One replica's first tokens cannot tell five rates apart, and their luck must not look like a slow machine. So the shape
of a step is learned once, from all replicas of a model, with a long memory; and a replica has one factor, which is 1
unless there is strong evidence for another.

A sample is an interval of one replica: its duration, the number of its steps, and the work done in them. The fit is a
non-negative least-squares of relative errors, pulled to the proportions of the prior where samples do not tell.
"""

from math import exp, inf, log, sqrt
from statistics import median
from typing import NamedTuple
from weakref import WeakSet

from headstart.router.load_rows import LoadRowCache, Prices
from headstart.router.step_rates import StepRates

DECAY = 0.998  # weight of a sample relative to the next one: half after 350
PRIOR_WEIGHT = 2.0  # of the proportions of the prior, in samples
SWEEPS = 6  # of coordinate descent per sample; it starts from the last result
SMALLEST = StepRates(0.01, 1e-3, 1e-7, 1e-4, 1e-9)  # least scale of each rate
YOUNG = 8  # samples before which rates are not used for decisions; their median sets the level of the prior
MAX_SURPRISE = 4.0  # a sample counts as at most this multiple of its expectation, and at least as its inverse
USUAL = 0.2  # error of a sample's logarithm up to which it has full weight; beyond, weight decreases (Huber's loss)
MIN_MS = 0.05
RESIDUAL_DECAY = 0.95
FOLLOWER_DECAY = 0.2
DOUBTFUL = 0.7  # mean absolute logarithm of measured / expected above which rates are not used: a factor of two
MEAN_OUTPUT = 128.0  # tokens, until known

PACE_DECAY = 0.5  # half after a sample
EVIDENCE = 3.0  # standard errors
LEAST = log(1.3)  # a smaller deviation is not used
KEPT = log(1.15)  # a factor in use is dropped below this
NOISE = 0.1  # least standard deviation of the logarithm of a sample
FORGOTTEN = 60.0  # seconds without samples after which half of a deviation is left
USUAL_AGE = 0.25  # seconds after which the usual pace of a fleet is computed again

ASSUMED = 16.0  # own requests in flight, before the first report
REMEMBERED = 1024.0  # requests in flight, after which older reports count half
LEAST_SHARE = 0.1  # of other routers' requests, below which there are none


class RateSample(NamedTuple):
    """A sample: what one replica did in `ms`. Streams and resident tokens are sums over the steps."""

    ms: float
    steps: float
    streams: float
    resident: float
    tokens: float
    pairs: float

    def expected_ms(self, rates: StepRates) -> float:
        """Return the duration by `rates`."""
        decodes = rates.step * self.steps + rates.stream * self.streams + rates.resident * self.resident
        return max(decodes + rates.prefill_extra_ms(self.tokens, self.pairs), MIN_MS)


class RateLearner:
    """Fits `rates` to intervals of many replicas. A `prior` is believed until then; `is_fixed`: and for ever."""

    def __init__(self, prior: StepRates | None = None, *, is_fixed: bool = False) -> None:
        self.rates = self._prior = prior or StepRates()
        self.is_fixed = is_fixed
        self._is_young = prior is None
        self.rows = LoadRowCache()  # of the loads that share this learner
        self.prices: Prices | None = None  # compiled (pricing.py)
        self.num_samples = 0
        self.residual = 0.0  # decaying mean of |log(measured / expected)|
        self.mean_output = MEAN_OUTPUT  # decaying mean of the tokens of an answer
        self._num_outputs = 0
        self.others = OtherRoutersShare()
        self._paces = WeakSet[ReplicaSlowdown]()  # of the replicas with samples
        self._usual, self._usual_at = 0.0, -inf  # lower quartile of their deviations, and when it was computed
        self._deferred = 1.0  # decaying share of followers that were answered later than their leaders
        self._gram = [[0.0] * 5 for _ in range(5)]
        self._target = [0.0] * 5
        self._first: list[RateSample] = []
        self._level = 1.0  # measured / expected by the prior, of the first samples

    @property
    def is_unreliable(self) -> bool:
        """Whether nothing should be measured by the rates: few samples, or the rates do not explain them."""
        return self._is_young or self.is_contradicted_by_samples

    @property
    def is_contradicted_by_samples(self) -> bool:
        """Whether the rates should not be used for decisions: they do not explain the samples.

        The prior is used before there are any: it may be wrong by a factor, but that is the same for all replicas.
        """
        return self.residual > DOUBTFUL

    @property
    def knows_requests_in_flight(self) -> bool:
        """Whether requests in flight are known: other routers' only from reports, which are seconds old."""
        return not self.is_contradicted_by_samples and not self.others.share

    @property
    def replicas_wait_for_prefix_leader(self) -> bool:
        """Whether replicas let a request wait for a step in which another one computes its prefix.

        Headstart and SGLang do; in vLLM both are computed in one step. Assumed until the opposite is seen.
        """
        return self._deferred > 0.5

    def record_pace_sample(self, pace: "ReplicaSlowdown", ratio: float, now: float) -> None:
        """Add a sample to the pace of one replica: measured / expected by the rates."""
        pace.learn(ratio, now)
        self._paces.add(pace)

    def slowdown_versus_fleet(self, pace: "ReplicaSlowdown", now: float) -> float:
        """Return how many times slower than the fleet a replica is, at least 1.

        The fleet's own pace is the lower quartile, if that is slow too: then the rates are wrong. Otherwise samples,
        which are divided by their factors, would make the rates lower still.
        """
        if not pace.is_used:
            return 1.0
        if not 0.0 <= now - self._usual_at < USUAL_AGE:
            found = sorted(max(pace.mean_log_slowdown(now), 0.0) for pace in self._paces)
            self._usual, self._usual_at = found[len(found) // 4] if found else 0.0, now
        return max(exp(pace.mean_log_slowdown(now) - self._usual), 1.0)

    def record_follower_deferral(self, *, is_later: bool) -> None:
        """Record whether a request whose prefix another one computed had its first token in a later step."""
        self._deferred += FOLLOWER_DECAY * (is_later - self._deferred)

    def record_output_length(self, num_output: int) -> None:
        """Record the number of tokens of an answer."""
        self._num_outputs += 1
        self.mean_output += (num_output - self.mean_output) * max(1.0 / self._num_outputs, 1.0 - DECAY)

    def learn(self, interval: RateSample) -> None:
        """Add a sample, with its duration divided by the pace of its replica.

        The first samples only tell how fast the machine is: the prior, at this level, is where the fit begins.
        """
        self.num_samples += 1
        if self.is_fixed:
            return
        if self.num_samples > YOUNG:
            self._add(interval)
            return
        self._first.append(interval)
        if self.num_samples == YOUNG:
            self._is_young = False
            self._level = median(max(one.ms, MIN_MS) / one.expected_ms(self._prior) for one in self._first)
            self.rates = StepRates(*(self._level * one for one in self._prior))
            for one in self._first:
                self._add(one)
            self._first = []

    def _add(self, interval: RateSample) -> None:
        """Fit the rates to one more sample. Errors are relative to the expectation, not to times, which have luck."""
        expected, ms = interval.expected_ms(self.rates), max(interval.ms, MIN_MS)
        error = abs(log(ms / expected))
        self.residual += (1.0 - RESIDUAL_DECAY) * (error - self.residual)
        ms = min(max(ms, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        usual = max(USUAL, 2 * self.residual)
        trust = min(usual / max(error, usual), 1.0)
        row = [one / expected for one in interval[1:]]
        for i, x in enumerate(row):
            gram, weighted = self._gram[i], trust * x
            self._target[i] = DECAY * self._target[i] + weighted * ms / expected
            for j, y in enumerate(row):
                gram[j] = DECAY * gram[j] + weighted * y
        self._fit()
        # Weigh older samples by the present expectation, like new ones: else a fleet that slows down looks fast.
        level = (expected / interval.expected_ms(self.rates)) ** 2
        self._gram = [[level * value for value in gram] for gram in self._gram]
        self._target = [level * value for value in self._target]

    def _fit(self) -> None:
        values, level = list(self.rates), self._level
        rows: list[tuple[list[float], float, float]] = []
        for i, (prior, least) in enumerate(zip(self._prior, SMALLEST, strict=True)):
            ridge = PRIOR_WEIGHT / (level * max(prior, least)) ** 2
            rows.append((self._gram[i], self._target[i] + ridge * level * prior, ridge))
        for _ in range(SWEEPS):
            for i, (gram, pull, ridge) in enumerate(rows):
                a, b, c, d, e = values
                others = gram[0] * a + gram[1] * b + gram[2] * c + gram[3] * d + gram[4] * e - gram[i] * values[i]
                value = (pull - others) / (gram[i] + ridge)
                values[i] = value if value > 0.0 else 0.0
        self.rates = StepRates(*values)


class ReplicaSlowdown:
    """The slowness of one replica by the rates of its fleet. Used only if there is strong evidence.

    `RateLearner.slowdown` compares it with the fleet. A factor is never below 1: a replica that was asked first would
    look fast, and the others would not be asked.
    """

    __slots__ = ("__weakref__", "_at", "_mean", "_square", "_weight", "is_used")

    def __init__(self) -> None:
        self.is_used = False
        self._weight = self._mean = self._square = 0.0  # decaying count, and sums of logarithms and of their squares
        self._at = 0.0

    def learn(self, ratio: float, now: float) -> None:
        """Add a sample: measured / expected by the fleet's rates."""
        value = min(max(log(max(ratio, 1e-6)), -2.0), 2.0)
        keep = PACE_DECAY * 0.5 ** (max(now - self._at, 0.0) / FORGOTTEN)
        self._weight = keep * self._weight + 1.0
        self._mean = keep * self._mean + value
        self._square = keep * self._square + value * value
        self._at = now
        mean = self._mean / self._weight
        variance = max(self._square / self._weight - mean * mean, 0.0) + NOISE * NOISE
        error = sqrt(variance / self._weight)
        if self.is_used:
            self.is_used = mean > KEPT
        else:
            self.is_used = mean > LEAST and mean > EVIDENCE * error

    def mean_log_slowdown(self, now: float) -> float:
        """Return the mean logarithm of the samples; without new ones it returns to 0."""
        if not self._weight:
            return 0.0
        return self._mean / self._weight * 0.5 ** (max(now - self._at, 0.0) / FORGOTTEN)


class OtherRoutersShare:
    """The share of a fleet's requests in flight that this router has not sent.

    Counts are added up over reports: what is on its way at the moment of a report is too few as often as too many.
    """

    __slots__ = ("_all", "_own")

    def __init__(self) -> None:
        self._own = self._all = ASSUMED

    def add_replica_report(self, own: int, reported: int) -> None:
        """Add the requests in flight at one replica: our own, and all that it reports."""
        self._own += own
        self._all += reported
        if self._all > REMEMBERED:
            self._own, self._all = self._own / 2, self._all / 2

    @property
    def share(self) -> float:
        """The share, 0..1; 0 while it may be a single client that uses no router."""
        share = 1.0 - self._own / self._all
        return share if share >= LEAST_SHARE else 0.0
