"""Plan: the chunks of one step so far, its remaining budget, and the blocks it promises."""

from collections.abc import Mapping

from headstart.core.cache.hashing import BlockHash
from headstart.core.sched.limits import Limits, budget_cost, chunk_len
from headstart.core.sched.tenant_shares import RemainingStepShare
from headstart.core.sequence import Sequence

NO_SHARES: Mapping[str, RemainingStepShare] = {}


class StepPlan:
    """The chunks of one step while it is being planned.

    A block is *promised* if a planned chunk touches it and its sequence will publish it. A sequence whose first missing
    block is promised waits a step and takes it over instead of computing it too: leader and followers, without a
    registry. If the leader fails, is aborted or is preempted, the promise is not repeated in the next step.
    """

    def __init__(
        self,
        limits: Limits,
        block_size: int,
        *,
        num_decodes: int,
        max_prompt_tokens: int | None = None,
        shares: Mapping[str, RemainingStepShare] = NO_SHARES,
    ) -> None:
        """Begin a plan. `max_prompt_tokens`: limit set by the step's time bound; None: no limit.

        `shares`: of tenants, if there are several.
        """
        self.limits = limits
        self.budget = limits.max_batched_tokens
        self.entries: list[tuple[Sequence, int]] = []
        self._block_size = block_size
        self._prompt_tokens_left = max_prompt_tokens
        self._num_decodes = num_decodes  # running decodes that are not planned yet
        self._promised: set[BlockHash] = set()
        self._shares = shares

    def chunk_len_within_budget(self, seq: Sequence, start: int, want: int, *, alone: bool) -> int:
        """Return how many of the last `want` tokens of `seq`, from `start` on, to compute.

        Prefills leave one token for each unplanned decode. A decode with forced tokens gets one token at least, and
        more of them like a prefill.
        """
        share = self._share(seq) if self._shares else None
        has_row = share is None or share.num_rows > 0
        if want == 1:  # usually a decode: there is nothing to cut
            return int(self.budget > 0 and has_row)
        cap = self._prompt_tokens_left
        if share is not None:
            cap = share.num_prompt_tokens if cap is None else min(cap, share.num_prompt_tokens)
        n = chunk_len(want, start, self.budget - self._num_decodes, self.limits, alone=alone, cap=cap)
        return n or int(self.budget > 0 and has_row and is_decoding(seq))

    def exceeds_tenant_share(self, seq: Sequence, start: int) -> bool:
        """Return whether its tenant has used up its share of the step for a chunk from `start` on."""
        share = self._share(seq)
        if share is None:
            return False
        return (share.num_rows if seq.num_tokens_with_pending - start == 1 else share.num_prompt_tokens) <= 0

    def add_chunk(self, seq: Sequence, start: int, n: int, want: int, *, writes: bool, extra: int = 0) -> None:
        """Plan `n` of the last `want` tokens of `seq`, from `start` on.

        `writes`: it publishes what it computes. `extra` is charged on top.
        """
        decode = want == 1
        self.budget -= (n if decode else budget_cost(start, n, self.limits, decode=False)) + extra
        self.entries.append((seq, n))
        one = decode or is_decoding(seq)
        if self._num_decodes and one:
            self._num_decodes -= 1
        share = self._share(seq) if self._shares else None
        if share is not None:
            share.num_rows -= one
            share.num_prompt_tokens -= 0 if decode else n
        if not decode and self._prompt_tokens_left is not None:
            self._prompt_tokens_left = max(self._prompt_tokens_left - n, 0)
        first = start // self._block_size
        if writes and first < len(seq.block_hashes):  # a block of output tokens has no hash before it is full
            self._promised.update(seq.block_hashes[first : (start + n - 1) // self._block_size + 1])

    def will_compute_block(self, seq: Sequence, index: int) -> bool:
        """Return whether block `index` of `seq` is promised."""
        return index < len(seq.block_hashes) and seq.block_hashes[index] in self._promised

    def _share(self, seq: Sequence) -> RemainingStepShare | None:
        return self._shares.get(seq.request.tenant)


def is_decoding(seq: Sequence) -> bool:
    """Return whether a running sequence computes output: one token, or forced tokens too."""
    start = seq.num_computed_tokens + seq.num_scheduled_tokens
    return len(seq.token_ids) + (seq.pending_row is not None) - start == 1 or start >= len(seq.request.prompt)
