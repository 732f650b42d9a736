"""Step cost: the modelled duration of one step, a pure function of its work. Noise is the executor's.

All shapes price the same five quantities of a step: its fixed part, its decoding streams, the KV tokens that these
read, its new prompt tokens, and the pairs of a new token and one before it. They differ in how the parts combine.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headstart.core.batch import Batch


class StepWork(NamedTuple):
    """The work of one step. A chunk of `n` prompt tokens after `done` ones has n x (done + n / 2) pairs."""

    streams: int = 0  # decoding sequences
    resident: int = 0  # tokens whose KV the streams read
    new: int = 0  # prompt tokens, and tokens computed again after a preemption
    pairs: float = 0.0

    @classmethod
    def of(cls, batch: Batch) -> "StepWork":
        """Return the work of a batch."""
        streams = resident = new = 0
        pairs = 0.0
        for chunk in batch.chunks:
            n, start = len(chunk.token_ids), chunk.start
            if n == 1 and start >= chunk.num_prompt_tokens:
                streams += 1
                resident += start + 1
            else:
                new += n
                pairs += n * (start + n / 2)
        return cls(streams, resident, new, pairs)


class StepCost(Protocol):
    """The duration of a step."""

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that a step with this work takes. Changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class AdditiveCost:
    """Parts that add up: every kernel waits for the one before it. All in seconds."""

    step: float = 0.0
    stream: float = 0.0
    resident: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return (
            self.step
            + self.stream * work.streams
            + self.resident * work.resident
            + self.token * work.new
            + self.pair * work.pairs
        )


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The slower of computing and reading memory, after a fixed overhead: both overlap perfectly. All in seconds.

    Computing costs `token` for every row of the matrices, prompt or decode, and `pair`; reading costs `weights` once
    a step and `resident` for each KV token that a decode reads. A prompt chunk reads its KV while it computes.
    """

    overhead: float
    weights: float
    token: float
    pair: float
    resident: float
    stream: float = 0.0  # on top, not overlapped: sampling, launches, detokenization

    def seconds(self, work: StepWork) -> float:
        computing = self.token * (work.new + work.streams) + self.pair * (work.pairs + work.resident)
        reading = self.weights + self.resident * work.resident
        return self.overhead + self.stream * work.streams + max(computing, reading)


@dataclass(frozen=True, slots=True)
class PaddedCost:
    """Another shape on padded sizes: streams and new tokens are rounded up to multiples, as recorded graphs are."""

    inner: AdditiveCost | RooflineCost
    streams: int = 8
    tokens: int = 256

    def seconds(self, work: StepWork) -> float:
        streams = -(-work.streams // self.streams) * self.streams
        new = -(-work.new // self.tokens) * self.tokens
        return self.inner.seconds(StepWork(streams, work.resident, new, work.pairs))


@dataclass(frozen=True, slots=True)
class SuperlinearCost:
    """Another shape with decodes that cost more the more there are: factor (1 + streams / knee) ** (power - 1)."""

    inner: AdditiveCost | RooflineCost
    power: float = 1.5
    knee: float = 64.0

    def seconds(self, work: StepWork) -> float:
        factor = (1.0 + work.streams / self.knee) ** (self.power - 1.0)
        decodes = self.inner.seconds(StepWork(work.streams, work.resident)) - self.inner.seconds(StepWork())
        return self.inner.seconds(work) + (factor - 1.0) * decodes
