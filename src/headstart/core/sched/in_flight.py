"""StepsInFlight: the steps that are planned and not applied yet, and what the plan of the next step may assume of them.

Without an asynchronous executor there is at most one, and nothing is planned meanwhile. With one, step n + 1 is planned
while step n runs, as if no row of n would fail or sample a stop token:

    Blocks that n fills are published ahead: n + 1 may read them, store and KV events see them when n has ended. If the
    row that fills them fails, they are withdrawn, and the sequences of n + 1 that read them are computed again.
    A block table that a step in flight names is released when that step has ended, however its sequence ends.
    A row whose sequence has ended or was queued again meanwhile is discarded.
    A sequence whose next step needs its last token on the host is not planned ahead. It would wait two steps for each
    token if others were, so then nothing is: the next step is planned when the one in flight has ended.
"""

from array import array
from collections.abc import Sequence as Items

from headstart.core.batch import Chunk, RowResult
from headstart.core.cache.kv_cache import KVCache
from headstart.core.request import RetentionHint, SamplingParams
from headstart.core.sequence import Sequence


class StepInFlight:
    """One step in flight."""

    __slots__ = ("ahead", "entries", "lengths", "released")

    def __init__(self, entries: list[tuple[Sequence, Chunk]]) -> None:
        self.entries = entries
        self.lengths = [  # tokens of each chunk before its drafts
            len(chunk.token_ids) if chunk.num_logits < 2 else chunk.num_non_draft_tokens for _, chunk in entries
        ]
        self.ahead: list[tuple[int, list[int]]] = []  # row, and its blocks that are published ahead
        self.released: list[tuple[array[int], RetentionHint]] = []  # block tables to release at its end


class StepsInFlight:
    """The steps in flight of one scheduler, oldest first: two at most, and one while a step is planned."""

    def __init__(self, cache: KVCache, max_model_len: int) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._steps: list[StepInFlight] = []

    def __len__(self) -> int:
        return len(self._steps)

    def begin_step(self, entries: list[tuple[Sequence, Chunk]]) -> None:
        """Begin a step."""
        step = StepInFlight(entries)
        self._steps.append(step)
        for row, ((seq, chunk), num_known) in enumerate(zip(entries, step.lengths, strict=True)):
            seq.num_scheduled_tokens += num_known
            seq.pending_row = row if chunk.num_logits else None

    def can_plan_next(self) -> bool:
        """Return whether the next step may be planned before the last one has ended. Changes nothing."""
        return not any(
            ((seq.needs_host and chunk.num_logits) or seq.recompute is not None)
            and is_current_chunk(seq, chunk)
            and not self.is_last_step_of(seq)
            for seq, chunk in self._steps[-1].entries
        )

    def is_last_step_of(self, seq: Sequence) -> bool:
        """Return whether nothing is left to plan of a running sequence, because the step in flight is its last."""
        if seq.pending_row is None:
            return seq.next_start == len(seq.token_ids)  # max_tokens is 0
        num_tokens, request = len(seq.token_ids) + 1, seq.request
        return num_tokens >= self._max_model_len or num_tokens - len(request.prompt) >= request.sampling.max_tokens

    def publish_ahead(self) -> None:
        """Publish the blocks that the last step fills, for the next step to read."""
        step, size = self._steps[-1], self._cache.block_size
        for row, (seq, chunk) in enumerate(step.entries):
            if (chunk.start + len(chunk.token_ids)) // size > seq.num_published_blocks and is_current_chunk(seq, chunk):
                step.ahead.append((row, self._cache.publish_ahead(seq)))

    def end_oldest(self) -> StepInFlight:
        """End the oldest step."""
        step = self._steps.pop(0)
        for (seq, chunk), num_known in zip(step.entries, step.lengths, strict=True):
            if chunk.block_ids is seq.block_ids:
                seq.num_scheduled_tokens -= num_known
                if not seq.num_scheduled_tokens:
                    seq.pending_row = None  # else it is a row of the step behind this one
        return step

    def confirm_or_withdraw_published(self, step: StepInFlight, rows: Items[RowResult]) -> set[int]:
        """Confirm what a step published ahead; withdraw, and return, the blocks of rows that have failed."""
        withdrawn: set[int] = set()
        for row, blocks in step.ahead:
            if rows[row].error is None:
                self._cache.confirm_published(step.entries[row][0], blocks)
            else:
                self._cache.pool.unpublish_failed(blocks)
                withdrawn.update(blocks)
        return withdrawn

    def release_table(self, seq: Sequence) -> None:
        """Release the block table of a sequence, at once or when the last step in flight has ended that names it."""
        if not seq.num_scheduled_tokens:
            self._cache.release_table(seq)
            return
        seq.num_scheduled_tokens, seq.pending_row = 0, None
        self._steps[-1].released.append((self._cache.detach_table(seq), seq.request.retention))

    def free_left_tables(self, step: StepInFlight) -> None:
        """Release the block tables of sequences that left while the ended `step` named them."""
        for table, retention in step.released:
            self._cache.pool.release(table, retention)


def is_current_chunk(seq: Sequence, chunk: Chunk) -> bool:
    """Return whether the sequence still has the blocks of the chunk; it loses its table when it ends or is queued."""
    return chunk.block_ids is seq.block_ids


def needs_token_on_host(sampling: SamplingParams) -> bool:
    """Return whether each decode needs the token before it on the host: for a grammar or a penalty."""
    return (
        sampling.grammar is not None
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )
