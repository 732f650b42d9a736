"""Draft lengths: how many draft tokens each sequence gets, by measured step times and observed acceptance.

A step of t tokens takes base + slope * t seconds. A draft token that is accepted with probability p is worth computing
if it adds output at a higher rate than the step has without it: p / slope > output tokens / seconds. Taken in
descending order of p, this maximises output tokens per second of the step.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heapreplace

MATCHES = (3, 7, 12)  # matched tokens from which the next of the classes below begins
PRIOR_ACCEPTED = (0.5, 0.65, 0.85, 0.93)  # share of a sequence without drafts so far (benchmarks/speculation)
PRIOR_TRIED = 2.0
MEMORY = 0.9  # weight of a sequence's earlier drafts against the latest one
DOMAIN_MEMORY = 0.98  # the same for all sequences of an isolation domain
LEAST_PAUSE, MOST_PAUSE = 16, 256  # drafts skipped between two probes
LEAST_SHARE, MOST_SHARE = 0.005, 0.995  # of accepted tokens: an estimate of 0 or 1 could not change any more
FIRST_SLOPE = 0.1  # of a step of one token, until measured
_RATE = 0.1  # step size of the measurement


class DecodeCost:
    """The duration of a decode step in seconds, linear in its tokens; normalised least mean squares."""

    def __init__(self) -> None:
        self.base, self.slope = 1.0, FIRST_SLOPE  # in unknown units until measured
        self.is_measured = False
        self._mean = 0.0  # of the tokens of a step
        self._variance = 1.0

    def seconds(self, num_tokens: float) -> float:
        """Return the expected duration of a step."""
        return self.base + self.slope * num_tokens

    def learn(self, num_tokens: int, elapsed: float) -> None:
        """Update from a decode step; an outlier counts as twice the expected duration."""
        if elapsed <= 0:
            return
        if not self.is_measured:
            self.is_measured = True
            self.slope = elapsed * FIRST_SLOPE / (1 + FIRST_SLOPE * num_tokens)
            self.base = elapsed - self.slope * num_tokens
            self._mean = float(num_tokens)
            return
        expected = self.seconds(num_tokens)
        error = min(elapsed, 2 * expected) - expected
        offset = num_tokens - self._mean
        self._mean += _RATE * offset
        self._variance += _RATE * (offset * offset - self._variance)
        turn = _RATE * error * offset / (self._variance + offset * offset + 1.0)
        total = self.seconds(self._mean) + _RATE * error
        self.slope = min(max(self.slope + turn, 0.0), total / max(self._mean, 1.0))
        self.base = max(total - self.slope * self._mean, 1e-9)


class Acceptance:
    """The observed acceptance of draft tokens, of a sequence or of a domain, by the length of the match before them."""

    __slots__ = ("_accepted", "_memory", "_pause", "_skipped", "_tried")

    def __init__(self, shares: Sequence[float] = PRIOR_ACCEPTED, memory: float = MEMORY) -> None:
        """`shares`: expected acceptance of each class of matches, until drafts were verified."""
        self._accepted = [PRIOR_TRIED * share for share in shares]
        self._tried = [PRIOR_TRIED] * len(shares)
        self._memory = memory
        self._skipped, self._pause = 0, LEAST_PAUSE

    def shares(self) -> list[float]:
        """Return the accepted share of each class of matches."""
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]

    def probability(self, match_length: int) -> float:
        """Return the probability that a draft token is accepted if those before it are."""
        at = bisect_right(MATCHES, match_length)
        return self._accepted[at] / self._tried[at]

    def learn(self, match_length: int, num_drafts: int, num_accepted: int) -> None:
        """Update from one verified draft."""
        if num_accepted:
            self._pause = LEAST_PAUSE
        at = bisect_right(MATCHES, match_length)
        tried = self._tried[at] * self._memory + num_accepted + (num_accepted < num_drafts)
        accepted = self._accepted[at] * self._memory + num_accepted
        self._tried[at] = tried
        self._accepted[at] = min(max(accepted, LEAST_SHARE * tried), MOST_SHARE * tried)

    def skip(self) -> bool:
        """Note that a draft does not pay by the estimate; return whether to probe with one token all the same.

        Probes that are rejected become rarer.
        """
        self._skipped += 1
        if self._skipped < self._pause:
            return False
        self._skipped = 0
        self._pause = min(2 * self._pause, MOST_PAUSE)
        return True


def draft_lengths(
    cost: DecodeCost, num_tokens: int, probabilities: Sequence[float], limits: Sequence[int], budget: int
) -> list[int]:
    """Return the length of each sequence's draft, at most its limit; `budget` in all.

    `num_tokens`: tokens of the step without drafts, each of which yields one output token.
    """
    lengths = [0] * len(limits)
    best = [(-p, index) for index, p in enumerate(probabilities) if limits[index]]
    heapify(best)
    yielded, seconds = float(num_tokens), cost.seconds(num_tokens)
    while best and budget:
        survival, index = -best[0][0], best[0][1]
        if survival * seconds <= cost.slope * yielded:
            break
        lengths[index] += 1
        budget -= 1
        yielded += survival
        seconds += cost.slope
        again = survival * probabilities[index] if lengths[index] < limits[index] else 0.0
        heapreplace(best, (-again, index))
    return lengths
