"""Virtual time: an executor that computes nothing and returns a modelled duration, and the clock it advances.

A step cost linear in tokens is the simplest model in which batching helps (the fixed part is shared) and long prompts
hurt (the part per token is not). It is deterministic: one seed gives one result on any machine, in a fraction of the
time.
"""

from dataclasses import dataclass
from math import inf, nextafter

from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data
from headstart_lab.runners.null_executor import NullExecutor


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step that computes n tokens: `step + token * n`."""

    step: float
    token: float

    def seconds(self, num_tokens: int) -> float:
        return self.step + self.token * num_tokens


class VirtualClock:
    """Seconds since 0.0; advances only by steps and waits. The virtual counterpart of `inprocess.RealClock`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance the time, at least to the next float, so that a wait always reaches its target."""
        assert seconds >= 0, f"{seconds} s: time does not go back"
        if seconds:
            self._now = max(self._now + seconds, nextafter(self._now, inf))


class VirtualExecutor:
    """An executor that samples like the null executor and advances `clock` by the `cost` of each step.

    `first_chunks` maps each request to the start of the first step it was planned in, in admission order: a scheduler
    plans newly admitted requests after running ones.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, cost: StepCost, clock: VirtualClock) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = 0
        self.cost = cost
        self.clock = clock
        self.first_chunks: dict[str, float] = {}
        self._null = NullExecutor(num_blocks, block_size, vocab_size)

    def execute(self, batch: Batch) -> StepResult:
        start = self.clock.now()
        for chunk in batch.chunks:
            self.first_chunks.setdefault(chunk.request_id, start)
        elapsed = self.cost.seconds(sum(len(chunk.token_ids) for chunk in batch.chunks))
        self.clock.sleep(elapsed)
        return StepResult(self._null.execute(batch).rows, elapsed)

    def read_block(self, block_id: int) -> Data:
        """Raise ValueError: there is no KV in virtual time."""
        return self._null.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        """Raise ValueError: there is no KV in virtual time."""
        self._null.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Do nothing: there is no content to clear."""
