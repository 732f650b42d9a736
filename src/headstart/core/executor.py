"""The seam between planning and computing: on torch, on paper (simulator) or on a checking table (tests)."""

from typing import Protocol

from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data


class Executor(Protocol):
    """Computes batches over `num_blocks` KV blocks of `block_size` tokens; block 0 is never used by anybody.

    Contract: KV of every chunk's positions >= `write_from` is in its blocks when `execute` returns; a row whose final
    hidden states are not finite, or which fails in any other way of its own, comes back with `error` set while the
    other rows are as if it had not been there. Only an error whose cause may be the KV that the row used is of kind
    NON_FINITE. An exception means that the whole executor is broken.
    """

    num_blocks: int
    block_size: int
    block_bytes: int  # of one block in canonical form; 0: this executor keeps no KV that could leave it

    def execute(self, batch: Batch) -> StepResult: ...

    def read_block(self, block_id: int) -> Data:
        """A copy of one block in canonical form: for each layer keys, then values, [block_size, kv heads, head_dim].

        May be called from any thread, also while `execute` runs: a block that is written meanwhile comes out torn, and
        the caller finds that out by the block's version.
        """
        ...

    def write_block(self, block_id: int, data: Data) -> None:
        """Takes a block in canonical form, between two steps. Raises ValueError for a wrong length."""
        ...

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clears blocks whose content may not be finite: a masked slot still multiplies 0 x NaN."""
        ...
