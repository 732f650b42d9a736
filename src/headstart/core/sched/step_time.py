"""Bounds steps in time: learns what steps take, and from that how many prompt tokens the next step may hold.

A step lasts as long as all of its tokens, so a chunk of 2,048 prompt tokens makes every answer under way wait for
seconds, and no message is read meanwhile. How long a token takes depends on the model and the machine, so it is
measured: steps of decodes alone by their number, and what a prompt token adds to one.
"""

from dataclasses import dataclass

DECODE_STEPS = 6.0  # a step with prompt tokens may last as long as so many without
LEAST_SECONDS = 0.03  # however short a decode step is: shorter gaps are not noticed
MOST_SECONDS = 0.3  # messages are read between steps: a request that is aborted ends within two
LEAST_TOKENS = 16
_UP, _DOWN = 0.25, 0.5  # weight of a step that took longer than expected, and of one that did not: delays only add
_TRUSTED = 2.0  # a step that took longer, or less long, than so many times what was expected counts as so many times


@dataclass(frozen=True, slots=True)
class StepBound:
    """Bound on the duration of a step with prompt tokens, in seconds.

    None: DECODE_STEPS times what its decodes would take alone, at least LEAST_SECONDS, and at most MOST_SECONDS. Where
    more prompts wait than decodes run, longer by the root of their ratio: short steps hold up the many for the few.
    """

    seconds: float | None = None
    least_tokens: int = LEAST_TOKENS  # of prompts in a step, however long they take; a bound is a multiple of it


class StepTimes:
    """Durations of the steps of an engine, in seconds, as measured."""

    def __init__(self, bound: StepBound | None) -> None:
        """`bound` None: any step may hold anything; durations are learnt all the same."""
        self.bound = bound
        self.seconds_per_token = 0.0  # that one more prompt token adds to a step; 0: not known yet
        self._decode_seconds: list[float] = []  # of 2**(i - 1) to 2**i - 1 decodes at index i; 0: not known yet

    def decode_seconds(self, num_decodes: int) -> float:
        """Of a step of so many decodes and nothing else: as measured for the closest number; 0 if never."""
        known = self._decode_seconds
        at = min(num_decodes.bit_length(), len(known) - 1)
        below = next((seconds for seconds in known[at::-1] if seconds), 0.0) if at >= 0 else 0.0
        return below or next((seconds for seconds in known if seconds), 0.0)

    def expected(self, num_prompt_tokens: int, num_decodes: int) -> float:
        """Of a step of so many; 0 while nothing is known."""
        decodes = self.decode_seconds(num_decodes) if num_decodes else 0.0
        return decodes + num_prompt_tokens * self.seconds_per_token

    def max_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int | None:
        """Return the number of prompt tokens that the next step has time for beside its decodes; None: no bound.

        `num_prompts`: prompts that are under way or wait.
        """
        if self.bound is None or not self.seconds_per_token:
            return None
        decodes = self.expected(0, num_decodes)
        seconds = self.bound.seconds
        if seconds is None:
            seconds = MOST_SECONDS
            if num_decodes:
                usual = max(DECODE_STEPS * decodes, LEAST_SECONDS)
                seconds = min(usual * max(num_prompts / num_decodes, 1.0) ** 0.5, MOST_SECONDS)
        num = int((seconds - decodes) / self.seconds_per_token)
        least = self.bound.least_tokens
        return max(num // least, 1) * least

    def learn(self, num_prompt_tokens: int, num_decodes: int, elapsed: float) -> None:
        """Takes in one step of so many of each, that took `elapsed`; 0 says nothing."""
        if elapsed <= 0:
            return
        if not num_prompt_tokens:
            self._learn_decodes(num_decodes.bit_length(), elapsed)
        elif num_prompt_tokens >= LEAST_TOKENS:
            if not self.seconds_per_token:
                left = elapsed - self.expected(0, num_decodes)
                self.seconds_per_token = (left if left > 0 else elapsed) / num_prompt_tokens
            # in proportion to the whole step: a difference would turn a little delay of a short chunk into a high rate
            seen = self.seconds_per_token * elapsed / self.expected(num_prompt_tokens, num_decodes)
            self.seconds_per_token = _moved(self.seconds_per_token, seen)

    def _learn_decodes(self, at: int, elapsed: float) -> None:
        known = self._decode_seconds
        known.extend([0.0] * (at + 1 - len(known)))
        known[at] = _moved(known[at], elapsed)


def _moved(old: float, seen: float) -> float:
    """`old` moved towards `seen`, by factors; one step on a machine that did something else does not move it far."""
    if not old:
        return seen
    factor = min(max(seen / old, 1 / _TRUSTED), _TRUSTED)
    return old * factor ** (_UP if factor > 1 else _DOWN)
