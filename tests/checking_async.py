"""The checking executor with one step of lag: steps wait in a queue, as on a device, and run late or at once.

It fills in the tokens that the host did not know, and catches a plan that reuses or touches what a step in flight
names, also where the order of the steps would hide it.
"""

from array import array
from dataclasses import dataclass, field

from checking import CheckingExecutor

from headstart.core.batch import UNKNOWN_TOKEN, Batch, Chunk, RowResult, StepResult
from headstart.core.cache.block_store import Data


@dataclass(eq=False)
class Pending:
    """A step that was submitted and is not collected."""

    batch: Batch
    before: "Pending | None"  # the step before it, if that was not collected when this one was submitted
    named: set[int]
    written: dict[int, str] = field(default_factory=dict)  # blocks and who writes them
    result: StepResult | None = None


class AsyncCheckingExecutor(CheckingExecutor):
    """Runs a step when it is collected, or with `eager` when it is submitted: a plan must not depend on either."""

    eager = False
    checks_reads = False  # of blocks that a step in flight writes: an engine's store reads none, other threads may
    _pending: tuple[Pending, ...] = ()
    num_ahead = 0  # steps submitted while one was in flight
    num_unknown = 0  # chunks whose token the host did not know
    max_pending = 0

    def submit(self, batch: Batch) -> object:
        before = self._pending[-1] if self._pending else None
        copies = tuple(
            chunk._replace(token_ids=chunk.token_ids[:], block_ids=tuple(chunk.block_ids), history=chunk.history[:])
            for chunk in batch.chunks
        )
        step = Pending(Batch(copies, batch.finished), before, {b for chunk in copies for b in chunk.block_ids})
        for chunk in copies:
            self._check_unknown(chunk, before)
            first = max(chunk.start, chunk.write_from)
            written = chunk.block_ids[first // self.block_size : -(-_end(chunk) // self.block_size)]
            step.written.update(dict.fromkeys(written, chunk.request_id))
            for ahead in (one for other in self._pending for one in other.batch.chunks):
                goes_on = ahead.request_id == chunk.request_id and first >= _end(ahead)  # in blocks that are its own
                assert goes_on or set(written).isdisjoint(ahead.block_ids), (
                    f"{chunk.request_id} writes {written}, of which a step in flight names {ahead.block_ids}"
                )
        self._pending += (step,)
        self.max_pending = max(self.max_pending, len(self._pending))
        self.num_ahead += before is not None
        assert self.max_pending <= 2
        if self.eager:
            self._run(step)
        return step

    def collect(self, handle: object) -> StepResult:
        step, *rest = self._pending
        assert handle is step, "collected out of order"
        result = self._run(step)
        self._pending = tuple(rest)
        return result

    def execute(self, batch: Batch) -> StepResult:
        return self.collect(self.submit(batch))

    def zero_blocks(self, block_ids: list[int]) -> None:
        self._check_free(block_ids)
        super().zero_blocks(block_ids)

    def write_block(self, block_id: int, data: Data) -> None:
        self._check_free([block_id])
        super().write_block(block_id, data)
        if "NaN" in self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]:
            self.corrupted.add(block_id)  # the store has read a block that a test corrupted

    def read_block(self, block_id: int) -> bytes:
        if self.checks_reads:
            assert not self.is_written(block_id), f"the host reads block {block_id} before its step is collected"
        return super().read_block(block_id)

    def is_written(self, block: int) -> bool:
        """Return whether a step in flight writes the block."""
        return any(block in step.written for step in self._pending)

    def _check_free(self, block_ids: list[int]) -> None:
        for step in self._pending:
            assert step.named.isdisjoint(block_ids), f"{block_ids} are named by a step in flight"

    def _check_unknown(self, chunk: Chunk, before: Pending | None) -> None:
        if chunk.from_previous is None:
            assert UNKNOWN_TOKEN not in chunk.token_ids
            return
        self.num_unknown += 1
        assert before is not None, "the host knows all tokens of steps that are collected"
        row = before.batch.chunks[chunk.from_previous]
        assert chunk.token_ids.tolist() == [UNKNOWN_TOKEN] and chunk.num_logits == 1
        assert (row.request_id, row.num_logits) == (chunk.request_id, 1)
        assert chunk.start == len(chunk.history) == row.start + len(row.token_ids)
        sampling = chunk.sampling
        assert sampling.grammar is None and sampling.presence_penalty == 0

    def _run(self, step: Pending) -> StepResult:
        if step.result is None:
            if step.before is not None:
                self._run(step.before)
            chunks = tuple(self._filled(chunk, step.before) for chunk in step.batch.chunks)
            step.before = None
            step.result = super().execute(Batch(chunks, step.batch.finished))
        return step.result

    def _filled(self, chunk: Chunk, before: Pending | None) -> Chunk:
        if chunk.from_previous is None:
            return chunk
        assert before is not None and before.result is not None
        row: RowResult = before.result.rows[chunk.from_previous]
        token = array("i", row.token_ids or (0,))  # a failed row leaves anything
        return chunk._replace(token_ids=token, history=chunk.history + token)


def _end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids)
