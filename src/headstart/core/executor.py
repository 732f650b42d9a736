"""The seam between planning and computing: on torch, on paper (simulator) or on a checking table (tests)."""

from typing import Protocol

from headstart.core.batch import Batch, StepResult


class Executor(Protocol):
    """Computes batches over `num_blocks` KV blocks of `block_size` tokens; block 0 is never used by anybody.

    Contract: KV of every chunk's positions >= `write_from` is in its blocks when `execute` returns; a row whose final
    hidden states are not finite, or which fails in any other way of its own, comes back with `error` set while the
    other rows are as if it had not been there. An exception means that the whole executor is broken.
    """

    num_blocks: int
    block_size: int

    def execute(self, batch: Batch) -> StepResult: ...

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clears blocks whose content may not be finite: a masked slot still multiplies 0 x NaN."""
        ...
