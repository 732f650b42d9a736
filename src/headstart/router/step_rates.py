"""Step rates: the milliseconds of an engine's step, and of the work that a request brings.

A step takes `step + stream * streams + resident * resident + token * new + pair * pairs`: a fixed part (weights are
read once, kernels are launched), a part for each decoding stream, one for each token that these attend to, one for each
new prompt token, and one for each pair of a new token and one before it. A prefill of u tokens after c cached ones has
u (c + u / 2) pairs.
"""

from typing import NamedTuple

STEP_TOKENS = 8192  # new tokens of a step, until reported or learned; a longer prefill takes several


class PrefillWork(NamedTuple):
    """The work of a prefill, and the load of the steps it is part of."""

    tokens: int  # to compute
    pairs: float  # of a computed token and one before it
    streams: int = 0  # responses generated meanwhile
    resident: float = 0.0  # tokens that these attend to

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, streams: int = 0, resident: float = 0.0) -> "PrefillWork":
        """Return the work of a prompt of which `cached_tokens` are cached; its last token is always computed."""
        tokens = max(prompt_tokens - cached_tokens, 1)
        return cls(tokens, tokens * (prompt_tokens - tokens / 2), streams, resident)


class StepRates(NamedTuple):
    """Milliseconds: per step, per stream, per resident token, per new token, per pair."""

    step: float = 5.0
    stream: float = 0.05
    resident: float = 4e-5
    token: float = 0.06  # 16,000 tokens per second, until measured
    pair: float = 1e-6

    def decode_steps_ms(self, num: float, streams: float, resident: float) -> float:
        """Return the duration of `num` steps without new tokens."""
        return num * (self.step + self.stream * streams + self.resident * resident)

    def prefill_extra_ms(self, tokens: float, pairs: float) -> float:
        """Return how much longer new tokens make their steps."""
        return self.token * tokens + self.pair * pairs

    def prefill_ms(self, work: PrefillWork, step_tokens: int = STEP_TOKENS) -> float:
        """Return the duration of a prefill, with all steps of `step_tokens` new tokens it needs."""
        num = -(-work.tokens // step_tokens)
        return self.decode_steps_ms(num, work.streams, work.resident) + self.prefill_extra_ms(work.tokens, work.pairs)
