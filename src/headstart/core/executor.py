"""Executor: the seam between planning and computing; implemented on torch, by the simulator and by tests."""

from typing import Protocol, TypeGuard

from headstart.core.batch import Batch, StepResult
from headstart.core.cache.block_store import Data


class Executor(Protocol):
    """Computes batches over `num_blocks` KV blocks of `block_size` tokens; block 0 is never used.

    Contract: KV of every chunk's positions >= `write_from` is in its blocks when `execute` returns. With recurrent
    layers it keeps the state of each running request; a chunk begins with zeros at position 0, with the state in the
    blocks `state` if there are any, else with that of the chunk before, without the drafts that were rejected, and
    leaves states in the blocks of `saves`. A
    row whose final hidden states are not finite, or which fails in any other way of its own, is returned with `error`
    set, and the other rows are the same as without it. The kind of an error is NON_FINITE only if its cause may be the
    KV or the state that the row used. An exception means that the whole executor is broken.
    """

    num_blocks: int
    block_size: int
    block_bytes: int  # of one block in canonical form; 0: this executor keeps no KV that could be copied out

    def execute(self, batch: Batch) -> StepResult:
        """Compute a batch. Its arrays (block tables, histories) change afterwards: keep copies, not views."""
        ...

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


class AsyncExecutor(Executor, Protocol):
    """An executor that returns before a step is computed, so that the next one is planned meanwhile.

    Steps run on the device one after the other, in the order of `submit`, and are collected in that order. At most two
    are submitted and not collected; only the later of the two has chunks with `from_previous`, and the row that such a
    chunk continues is one of the earlier. `execute` is `collect(submit(batch))` and is called while nothing else runs.

    Contract: a step reads what the step before it wrote, so the KV of a block is readable by the next step from
    `submit` on, and by the host (`read_block`) from `collect` on. `write_block` and `zero_blocks` may be called while
    steps run: for blocks that none of them names, and before the next `submit`, whose step sees the result. A row that
    continues a failed row, or reads what it wrote, may hold anything: its result is discarded. It fails alone, too:
    a device must not stop at a token id that a failed row left. `finished` may name a request that has a row in the
    step before, whose result is discarded too.
    """

    def submit(self, batch: Batch) -> object:
        """Begin a step and return its handle, which means nothing to others. The batch is valid until it returns."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for a submitted step, the oldest that is not collected, and return its result."""
        ...


def is_async(executor: Executor) -> TypeGuard[AsyncExecutor]:
    """Return whether steps of this executor can be planned while another one runs."""
    return hasattr(executor, "submit")
