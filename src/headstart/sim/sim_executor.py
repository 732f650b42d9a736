"""SimExecutor: an executor in virtual time. It computes nothing, and a step takes as long as its cost model says.

Sampled tokens are fake: one token id per request, below 0, so that no output equals a prompt or another output.
"""

from dataclasses import dataclass, field
from random import Random

from headstart.core.batch import Batch, Row, StepResult
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
    """An executor over `num_blocks` blocks without content. `elapsed` of its results is the modelled duration."""

    block_bytes = 0

    def __init__(self, num_blocks: int, block_size: int, cost: StepCost, speed: Speed | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cost = cost
        self.speed = speed or Speed()
        self.work = StepWork()  # of the last step
        self._rows: dict[str, Row] = {}  # by request id
        self._num_requests = 0

    def execute(self, batch: Batch) -> StepResult:
        for request_id in batch.finished:
            self._rows.pop(request_id, None)
        known = self._rows
        rows = tuple(
            (known.get(chunk.request_id) or self._row(chunk.request_id)) if chunk.num_logits else _NOT_SAMPLED
            for chunk in batch.chunks
        )
        self.work = StepWork.of(batch)
        return StepResult(rows, self.cost.seconds(self.work) * self.speed.draw())

    def read_block(self, block_id: int) -> Data:
        """Raise ValueError: there is no KV in virtual time."""
        raise ValueError("this executor keeps no KV")

    def write_block(self, block_id: int, data: Data) -> None:
        """Accept the empty content of a block of an offload tier. Raises ValueError for anything else."""
        if len(data):
            raise ValueError(f"a block of this executor has 0 bytes, got {len(data)}")

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Do nothing: there is no content to clear."""

    def _row(self, request_id: str) -> Row:
        self._num_requests += 1
        row = self._rows[request_id] = Row((-self._num_requests,))
        return row
