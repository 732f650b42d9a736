"""An executor without a model: for measuring the engine's own cost, and for tests."""

import time
from array import array

from headstart.core.batch import Batch, RowResult, StepResult
from headstart.core.cache.block_store import Data


class NullExecutor:
    """An executor whose samples depend on the whole history, so that a mix-up of requests shows. Computes no KV.

    With `block_bytes` a block holds the last data of `write_block`, zeros before; steps never change it.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, block_bytes: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.vocab_size = vocab_size
        self._written: dict[int, bytes] = {}

    def execute(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        rows = tuple(RowResult((self._sample(chunk.history),) * chunk.num_logits) for chunk in batch.chunks)
        return StepResult(rows, time.perf_counter() - start)

    def read_block(self, block_id: int) -> Data:
        """Return the data written to the block, else zeros. Raises ValueError if blocks have no content here."""
        if not self.block_bytes:
            raise ValueError("this executor keeps no KV; make it with block_bytes to read and write blocks")
        return self._written.get(block_id) or bytes(self.block_bytes)

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a copy of `data`. Raises ValueError for a wrong length, or if blocks have no content here."""
        if not self.block_bytes or len(data) != self.block_bytes:
            raise ValueError(f"a block of this executor has {self.block_bytes} bytes, got {len(data)}")
        self._written[block_id] = bytes(data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clear the data written to the blocks."""
        for block_id in block_ids:
            self._written.pop(block_id, None)

    def _sample(self, history: "array[int]") -> int:
        return (sum(history[-4:]) + len(history)) % self.vocab_size
