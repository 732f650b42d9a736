"""SimExecutor: an executor in virtual time. It computes nothing, and a step takes as long as its cost model says.

Sampled tokens are fake: all tokens of a request are one id, made from its prompt and below 0, so that an output equals
no prompt, and equals another output only after the same prompt, as in greedy sampling.
"""

from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from headstart.core.batch import Batch, Chunk, Row, StepResult
from headstart.core.cache.block_store import Data
from headstart.sim.step_cost import StepCost, StepWork

_NOT_SAMPLED = Row()


@dataclass(slots=True, eq=False)
class Speed:
    """The speed of one simulated machine: `factor` times the modelled duration, and noise of each step.

    `noise` is the standard deviation of the logarithm of a factor with mean 1: 0.1 is 10 %. 0 draws nothing.
    """

    noise: float = 0.0
    rng: Random = field(default_factory=lambda: Random(0))
    factor: float = 1.0

    def draw(self) -> float:
        """Return the factor of the next step."""
        if not self.noise:
            return self.factor
        return self.factor * self.rng.lognormvariate(-self.noise * self.noise / 2, self.noise)


class SimExecutor:
    """An executor over `num_blocks` blocks. `elapsed` of its results is the modelled duration.

    With `block_bytes` a block can be read and written, for an offload tier; its content is always zeros.
    """

    def __init__(
        self, num_blocks: int, block_size: int, cost: StepCost, speed: Speed | None = None, block_bytes: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.cost = cost
        self.speed = speed or Speed()
        self.work = StepWork()  # of the last step
        self._rows: dict[str, Row] = {}  # by request id

    def execute(self, batch: Batch) -> StepResult:
        for request_id in batch.finished:
            self._rows.pop(request_id, None)
        known = self._rows
        rows = tuple(
            (known.get(chunk.request_id) or self._row(chunk)) if chunk.num_logits else _NOT_SAMPLED
            for chunk in batch.chunks
        )
        self.work = StepWork.of(batch)
        return StepResult(rows, self.cost.seconds(self.work) * self.speed.draw())

    def read_block(self, block_id: int) -> Data:
        """Return zeros. Raises ValueError if blocks have no content here."""
        if not self.block_bytes:
            raise ValueError("this executor keeps no KV")
        return bytes(self.block_bytes)

    def write_block(self, block_id: int, data: Data) -> None:
        """Do nothing. Raises ValueError for a wrong length, or if blocks have no content here."""
        if not self.block_bytes or len(data) != self.block_bytes:
            raise ValueError(f"a block of this executor has {self.block_bytes} bytes, got {len(data)}")

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Do nothing: there is no content to clear."""

    def _row(self, chunk: Chunk) -> Row:
        prompt = chunk.history[: chunk.num_prompt_tokens].tobytes()
        row = self._rows[chunk.request_id] = Row((-1 - (crc32(prompt) >> 1),))
        return row
