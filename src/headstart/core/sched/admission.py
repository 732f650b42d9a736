"""Admission: whether a sequence fits into the pool, and which sequence is preempted when one does not.

Admission reserves blocks for running sequences to grow: every output is expected to be as long as the running mean of
finished ones, and at most max_tokens. A sequence that was preempted MAX_PREEMPTIONS times is admitted again only when
the pool can hold it to its end beside all other such sequences, and is then never preempted again.
"""

from headstart.core.cache.kv_cache import KVCache, PrefixHit
from headstart.core.errors import RequestTooLargeError, context_overflow_message
from headstart.core.sched.waiting_queue import OrderedSequences
from headstart.core.sequence import Sequence

MAX_PREEMPTIONS = 3
FIRST_GUESS = 64  # output tokens, until a sequence has finished
MEMORY = 64  # finished sequences over which the mean decays
MAX_CANDIDATES = 8  # number of preemption candidates that are compared


class AdmissionControl:
    """Admission to one pool. Changes nothing but its own mean."""

    def __init__(self, cache: KVCache, max_model_len: int) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._mean = float(FIRST_GUESS)
        self._num_finished = 0

    def record_output_length(self, num_output_tokens: int) -> None:
        """Update the mean output length from one finished sequence."""
        self._num_finished = min(self._num_finished + 1, MEMORY)
        self._mean += (num_output_tokens - self._mean) / (self._num_finished + 1)

    def can_admit(self, seq: Sequence, hit: PrefixHit, running: OrderedSequences, reserved: int) -> bool:
        """Return whether the whole prompt, less its hit, fits; beside running ones also all expected growth.

        `reserved` is the growth of the running sequences: the sum of their `blocks_reserved_for_sequence`.
        """
        cache = self._cache
        if not running:
            new = cache.num_new_blocks(seq, hit, len(seq.token_ids))
            return new <= cache.pool.num_scratch or new <= cache.num_available_after_hit(seq, hit, last_resort=True)
        if is_non_preemptible(seq) and not self._fits_to_end(seq, hit, running):
            return False
        needed = self._final_blocks(seq) - len(hit.block_ids) + reserved
        return needed <= cache.pool.num_scratch or needed <= cache.num_available_after_hit(seq, hit)

    def max_blocks(self, seq: Sequence) -> int:
        """Return the length of its block table if its output becomes as long as allowed."""
        return self._blocks_at(self._longest(seq))

    def blocks_reserved_for_sequence(self, seq: Sequence) -> int:
        """Return the blocks a running sequence is expected to take yet, or may take if it must not be preempted."""
        return max(self._final_blocks(seq) - len(seq.block_ids), 0)

    def choose_victim(self, seq: Sequence, hit: PrefixHit, num_tokens: int, candidates: list[Sequence]) -> Sequence:
        """Return the sequence to preempt so that `seq` can cover `num_tokens`: the candidate that loses least.

        None of the `candidates` is planned in this step yet or non-preemptible. If there are none, it is `seq` itself.
        """
        if not candidates:
            assert not is_non_preemptible(seq), f"{seq.request_id} is non-preemptible and does not fit"
            return seq
        cache = self._cache
        missing = cache.num_new_blocks(seq, hit, num_tokens) - cache.num_available_after_hit(seq, hit)
        freed = [(self._num_exclusive_blocks(other), -other.order, other) for other in candidates]
        enough = [entry for entry in freed if entry[0] >= missing]
        return min(enough, key=lambda entry: entry[:2])[2] if enough else candidates[0]

    def check_fits_alone(self, seq: Sequence) -> None:
        """Raise RequestTooLargeError if it would not fit even alone, beside the blocks pinned for others."""
        cache, pool = self._cache, self._cache.pool
        blocks, pinned = self._blocks_at(self._longest(seq)), pool.num_pinned_hashes
        own = cache.num_leading_pinned(seq.block_hashes) if pinned and cache.may_read_cache(seq) else 0
        usable = pool.usable_capacity - pinned + own
        if blocks > usable:
            kept = f" beside {pinned - own} pinned ones" if pinned > own else ""
            wanted = f"prompt and output of {self._longest(seq)} tokens need {blocks} KV blocks"
            excess = f"{wanted} but the pool has {usable}{kept}"
            room = usable * cache.block_size
            raise RequestTooLargeError(
                f"{context_overflow_message(excess, room)}: lower max_tokens, shorten the prompt, or serve with a "
                "larger --kv-cache-memory",
                param="max_tokens",
            )

    def fits_beside_pinned_blocks(self, seq: Sequence) -> bool:
        """Return whether the pool can hold all its tokens so far beside all pinned blocks, its own included.

        A sequence that does not write to the cache keeps its copy to its end, so that must fit too.
        """
        num_tokens = len(seq.token_ids) + 1 if self._cache.may_publish(seq) else self._longest(seq)
        return self._blocks_at(num_tokens) <= self._cache.pool.usable_capacity - self._cache.pool.num_pinned_hashes

    def _fits_to_end(self, seq: Sequence, hit: PrefixHit, running: OrderedSequences) -> bool:
        """Return whether the pool can hold it to its end beside all other non-preemptible sequences."""
        others = [other for other in running if is_non_preemptible(other)]
        held = set(hit.block_ids).union(*(other.block_ids for other in others))  # blocks that they share count once
        growth = sum(map(self.blocks_reserved_for_sequence, (seq, *others))) - len(hit.block_ids)
        return not others or len(held) + growth <= self._cache.pool.usable_capacity - self._cache.pool.num_pinned_hashes

    def _final_blocks(self, seq: Sequence) -> int:
        """Return the length of its block table at its end: as expected, or the maximum if it is non-preemptible."""
        longest = self._longest(seq)
        expected = longest if is_non_preemptible(seq) else min(longest, len(seq.request.prompt) + int(self._mean))
        return self._blocks_at(max(expected, seq.num_tokens_with_pending + 1))

    def _longest(self, seq: Sequence) -> int:
        """Return its longest length; without output the KV of its last token is computed too, as before a token."""
        return min(len(seq.request.prompt) + max(seq.request.sampling.max_tokens, 1), self._max_model_len)

    def _blocks_at(self, num_tokens: int) -> int:
        """Return the blocks needed for `num_tokens`; the KV of the last token is never needed."""
        return -(-(num_tokens - 1) // self._cache.block_size)

    def _num_exclusive_blocks(self, seq: Sequence) -> int:
        """Return the number of its blocks that no other sequence holds: those that preemption frees, and loses."""
        return sum(1 for block in seq.block_ids if self._cache.pool.ref_count(block) == 1)


def is_non_preemptible(seq: Sequence) -> bool:
    """Return whether the sequence is non-preemptible, having been preempted MAX_PREEMPTIONS times."""
    return seq.num_preemptions >= MAX_PREEMPTIONS
