"""Executor: the seam between planning and computing; implemented on torch, by the simulator and by tests."""

from typing import Protocol

from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data


class Executor(Protocol):
    """Computes batches over `num_blocks` KV blocks of `block_size` tokens; block 0 is never used.

    Contract: KV of every chunk's positions >= `write_from` is in its blocks when `execute` returns. A row whose final
    hidden states are not finite, or which fails in any other way of its own, is returned with `error` set, and the
    other rows are the same as without it. The kind of an error is NON_FINITE only if its cause may be the KV that the
    row used. An exception means that the whole executor is broken.
    """

    num_blocks: int
    block_size: int
    block_bytes: int  # of one block in canonical form; 0: this executor keeps no KV that could be copied out

    def execute(self, batch: Batch) -> StepResult: ...

    def read_block(self, block_id: int) -> Data:
        """Return a copy of one block in canonical form: per layer keys, then values, [block_size, kv heads, head_dim].

        Callable from any thread, also while `execute` runs: the copy of a block that is written meanwhile is torn,
        which the caller detects by the block's version.
        """
        ...

    def write_block(self, block_id: int, data: Data) -> None:
        """Overwrite a block with data in canonical form, between two steps. Raises ValueError for a wrong length."""
        ...

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clear blocks whose content may not be finite: a masked slot still multiplies 0 x NaN."""
        ...
