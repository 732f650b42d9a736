"""Prefill model: the milliseconds a replica needs for a prompt, learned from its own times to first token.

A prefill of u tokens after c cached ones takes `base + token * u + pair * u * (c + u / 2) + stream * streams`: a part
for the step, one for the weights, one for attention (every new token attends to all before it), and one for the
responses generated in the same steps. The four coefficients are a non-negative least-squares fit of the samples; older
samples weigh less, and a prior dominates while there are few.
"""

from typing import NamedTuple

DECAY = 0.96  # weight of a sample relative to the next one: half after 17
PRIOR_WEIGHT = 2.0  # weight of the prior, in samples
PRIOR_FADES = 0.9  # per sample
SWEEPS = 6  # of coordinate descent per sample; it starts from the last result
MAX_SURPRISE = 8.0  # a sample counts as at most this multiple of the expected time; a pause is not a rate
SURPRISE = 3.0  # a sample above this multiple of the expected time makes older ones doubtful
DOUBTED = 0.7  # the weight of older samples then
SCALES = (0.1, 1e-4, 1e-9, 1e-3)  # lower bounds of the prior's scale
YOUNG = 4  # own samples below which samples of other replicas are used too
MIN_MS = 0.05


class PrefillModel(NamedTuple):
    """Milliseconds: per prefill, per computed token, per pair of attending tokens, per response being generated."""

    base: float = 5.0
    token: float = 0.06  # 16,000 tokens per second, until measured
    pair: float = 1e-7
    stream: float = 0.05

    def prefill_ms(self, work: "Work") -> float:
        """Return the expected duration of `work`."""
        return self.base + self.token * work.tokens + self.pair * work.pairs + self.stream * work.streams


class Work(NamedTuple):
    """The work of a prefill."""

    tokens: int  # to compute
    pairs: float  # of a computed token and one before it
    streams: int  # responses generated meanwhile

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, streams: int = 0) -> "Work":
        """Return the work of a prompt of which `cached_tokens` are cached; its last token is always computed."""
        tokens = max(prompt_tokens - cached_tokens, 1)
        return cls(tokens, tokens * (prompt_tokens - tokens / 2), streams)


class RateLearner:
    """Fits `rates` to samples (work, milliseconds), each weighted by its relative error."""

    __slots__ = ("_gram", "_prior", "_target", "num_own", "num_samples", "rates")

    def __init__(self, prior: PrefillModel | None = None) -> None:
        self._prior = self.rates = prior or PrefillModel()
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._target = [0.0] * 4
        self.num_samples = 0
        self.num_own = 0

    @property
    def is_young(self) -> bool:
        """Whether it has too few samples of its own replica, and uses those of others too."""
        return self.num_own < YOUNG

    def learn(self, work: Work, ms: float, *, own: bool = True) -> None:
        """Add the sample that `work` took `ms`; `own` False: at another replica."""
        expected = self.rates.prefill_ms(work)
        ms = max(ms, MIN_MS)
        if self.num_samples >= PRIOR_WEIGHT:
            ms = min(ms, MAX_SURPRISE * expected)
        decay = DOUBTED if ms > SURPRISE * expected else DECAY
        features = (1.0, float(work.tokens), work.pairs, float(work.streams))
        scale = (
            1.0 / max(self._prior.prefill_ms(work), MIN_MS) ** 2
        )  # never by the measured time: that would favour fast samples
        self.num_samples += 1
        self.num_own += own
        for i, x in enumerate(features):
            row, weighted = self._gram[i], scale * x
            self._target[i] = decay * self._target[i] + weighted * ms
            for j, y in enumerate(features):
                row[j] = decay * row[j] + weighted * y
        self.rates = self._fit()
        # Reweight older samples by the present expectation, like new ones: else a replica that slows down looks fast.
        level = (max(expected, MIN_MS) / max(self.rates.prefill_ms(work), MIN_MS)) ** 2
        self._gram = [[level * value for value in row] for row in self._gram]
        self._target = [level * value for value in self._target]

    def _fit(self) -> PrefillModel:
        """Fit by non-negative least squares with coordinate descent, each coefficient regularized to its prior."""
        weight = PRIOR_WEIGHT * PRIOR_FADES ** min(self.num_samples, 200)
        ridges = [weight / max(prior, scale) ** 2 for prior, scale in zip(self._prior, SCALES, strict=True)]
        pulls = [target + ridge * prior for target, ridge, prior in zip(self._target, ridges, self._prior, strict=True)]
        values = list(self.rates)
        rows = [
            (i, pull, 1.0 / (row[i] + ridge), row[i], *row)
            for i, (pull, ridge, row) in enumerate(zip(pulls, ridges, self._gram, strict=True))
        ]
        for _ in range(SWEEPS):
            for i, pull, inverse, own, a, b, c, d in rows:
                base, token, pair, stream = values
                value = (pull - (a * base + b * token + c * pair + d * stream - own * values[i])) * inverse
                values[i] = value if value > 0.0 else 0.0
        return PrefillModel(*values)
