"""Draft lengths: how many draft tokens each sequence gets, by measured step times and observed acceptance.

A step of t tokens takes base + slope * w(t) seconds. The curve w is measured once, since the first tokens may cost
next to nothing: they are multiplied while the weights are read. Base and slope follow the steps. Draft tokens are taken
in descending order of the probability that they are accepted, as many as maximise the output tokens per second of the
step.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from headstart.core.speculation.draft import Draft

MATCHES = (3, 7, 12)  # matched tokens from which the next of the classes below begins
PRIOR_ACCEPTED = (0.5, 0.65, 0.85, 0.93) * 2  # share of a sequence without drafts so far (benchmarks/speculation)
PRIOR_TRIED = 2.0
MEMORY = 0.9  # weight of a sequence's earlier drafts against the latest one
DOMAIN_MEMORY = 0.98  # the same for all sequences of an isolation domain
LEAST_PAUSE, MOST_PAUSE = 16, 256  # drafts skipped between two probes
LEAST_SHARE, MOST_SHARE = 0.005, 0.995  # of accepted tokens: an estimate of 0 or 1 could not change any more
FIRST_SLOPE = 0.1  # of a step of one token, until measured
_RATE = 0.1  # step size of the measurement


class DecodeCostModel:
    """The duration of a decode step in seconds by its tokens; normalised least mean squares over a measured curve."""

    def __init__(self) -> None:
        self.base, self.slope = 1.0, FIRST_SLOPE  # in unknown units until measured
        self.is_measured = False
        self._tokens = [0, 1]  # the points of the curve, and behind the last one its last gradient
        self._weights = [0.0, 1.0]
        self._least = [1.0, 1.0]  # the least gradient from each point on
        self._mean = 0.0  # of the weights of steps
        self._variance = 1.0

    def expected_seconds(self, num_tokens: int) -> float:
        """Return the expected duration of a step."""
        return self.base + self.slope * self._weight(num_tokens)

    def min_extra_token_seconds(self, num_tokens: int) -> float:
        """Return the least time that a further token costs in a step of at least so many."""
        return self.slope * self._least[min(bisect_right(self._tokens, num_tokens), len(self._least)) - 1]

    def calibrate(self, seconds: Mapping[int, float]) -> None:
        """Set the curve from the durations of steps by their tokens, at least of 1 and one more.

        A step is taken to last no less than one of fewer tokens. The weight of the largest one is its number of tokens.
        """
        tokens = sorted(seconds)
        times = [max(seconds[n] for n in tokens if n <= num) for num in tokens]
        slope = (times[-1] - times[0]) / (tokens[-1] - tokens[0])
        if slope <= 0:
            tokens, times, slope = [tokens[0]], [times[0]], 0.0
        self.is_measured = True
        self.slope, self.base = slope, times[0] - slope
        self._tokens = [0, *tokens]
        self._weights = [0.0, *(1.0 + (time - times[0]) / (slope or 1.0) for time in times)]
        gradients = [
            (self._weights[at + 1] - self._weights[at]) / (self._tokens[at + 1] - self._tokens[at])
            for at in range(len(tokens))
        ]
        self._least = [min(gradients[min(at, len(gradients) - 1) :]) for at in range(len(self._tokens))]
        self._mean = 1.0

    def learn(self, num_tokens: int, elapsed: float) -> None:
        """Update from a decode step; an outlier counts as twice the expected duration."""
        if elapsed <= 0:
            return
        weight = self._weight(num_tokens)
        if not self.is_measured:
            self.is_measured = True
            self.slope = elapsed * FIRST_SLOPE / (1 + FIRST_SLOPE * weight)
            self.base = elapsed - self.slope * weight
            self._mean = weight
            return
        expected = self.base + self.slope * weight
        error = min(elapsed, 2 * expected) - expected
        offset = weight - self._mean
        self._mean += _RATE * offset
        self._variance += _RATE * (offset * offset - self._variance)
        turn = _RATE * error * offset / (self._variance + offset * offset + 1.0)
        total = self.base + self.slope * self._mean + _RATE * error
        self.slope = min(max(self.slope + turn, 0.0), total / max(self._mean, 1.0))
        self.base = max(total - self.slope * self._mean, 1e-9)

    def _weight(self, num_tokens: int) -> float:
        """Return the curve at a number of tokens, between and behind its points by straight lines."""
        at = min(max(bisect_left(self._tokens, num_tokens), 1), len(self._tokens) - 1)
        first, last = self._tokens[at - 1], self._tokens[at]
        low, high = self._weights[at - 1], self._weights[at]
        return low + (high - low) * (num_tokens - first) / (last - first)


class AcceptanceEstimate:
    """The observed acceptance of draft tokens, of a sequence or of a domain.

    It is estimated by the length of the match before the draft, separately for the first tokens, which followed all
    matches of that length, and for the others.
    """

    __slots__ = ("_accepted", "_memory", "_pause", "_skipped", "_tried")

    def __init__(self, shares: Sequence[float] = PRIOR_ACCEPTED, memory: float = MEMORY) -> None:
        """`shares`: expected acceptance of each class of tokens, until drafts were verified."""
        self._accepted = [PRIOR_TRIED * share for share in shares]
        self._tried = [PRIOR_TRIED] * len(shares)
        self._memory = memory
        self._skipped, self._pause = 0, LEAST_PAUSE

    def accepted_shares_by_token_class(self) -> list[float]:
        """Return the accepted share of each class of tokens."""
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]

    def acceptance_probabilities(self, draft: Draft) -> list[float]:
        """Return the probability of each token of a draft that it is accepted if those before it are."""
        agreed, disputed = _classes(draft)
        num = draft.num_agreed
        return [self._share(agreed)] * num + [self._share(disputed)] * (len(draft.tokens) - num)

    def learn(self, draft: Draft, num_accepted: int) -> None:
        """Update from a verified draft."""
        if num_accepted:
            self._pause = LEAST_PAUSE
        agreed, disputed = _classes(draft)
        num_tried = min(num_accepted + 1, len(draft.tokens))
        num = min(draft.num_agreed, num_tried)
        self._update(agreed, num, min(num, num_accepted))
        self._update(disputed, num_tried - num, max(num_accepted - num, 0))

    def _share(self, at: int) -> float:
        return self._accepted[at] / self._tried[at]

    def _update(self, at: int, num_tried: int, num_accepted: int) -> None:
        if not num_tried:
            return
        tried = self._tried[at] * self._memory + num_tried
        accepted = self._accepted[at] * self._memory + num_accepted
        self._tried[at] = tried
        self._accepted[at] = min(max(accepted, LEAST_SHARE * tried), MOST_SHARE * tried)

    def decide_probe(self) -> bool:
        """Note that a draft does not pay by the estimate; return whether to probe with one token all the same.

        Probes that are rejected become rarer.
        """
        self._skipped += 1
        if self._skipped < self._pause:
            return False
        self._skipped = 0
        self._pause = min(2 * self._pause, MOST_PAUSE)
        return True


def _classes(draft: Draft) -> tuple[int, int]:
    """Return the classes of the tokens that all matches agree on, and of the others."""
    agreed = bisect_right(MATCHES, draft.match_length)
    return agreed, len(MATCHES) + 1 + agreed


def choose_draft_lengths(
    cost: DecodeCostModel, num_tokens: int, probabilities: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """Return the length of each sequence's draft; `budget` in all.

    `num_tokens`: tokens of the step without drafts, each of which yields one output token. `probabilities`: of each
    sequence, for each token of its draft, that it is accepted if those before it are.
    """
    lengths, taken, num_best = [0] * len(probabilities), list[int](), 0
    candidates = [(-each[0], index) for index, each in enumerate(probabilities) if each]
    heapify(candidates)
    yielded, seconds = float(num_tokens), cost.expected_seconds(num_tokens)
    best_yielded, best_seconds = yielded, seconds
    while candidates and len(taken) < budget:
        survival, index = -candidates[0][0], candidates[0][1]
        if survival * best_seconds <= cost.min_extra_token_seconds(num_tokens + len(taken)) * best_yielded:
            break  # no number of further tokens raises the rate
        lengths[index] += 1
        taken.append(index)
        yielded += survival
        seconds = cost.expected_seconds(num_tokens + len(taken))
        if yielded * best_seconds > best_yielded * seconds:
            num_best, best_yielded, best_seconds = len(taken), yielded, seconds
        following = probabilities[index][lengths[index] : lengths[index] + 1]
        heapreplace(candidates, (-survival * following[0] if following else 0.0, index))
    for index in taken[num_best:]:
        lengths[index] -= 1
    return lengths
