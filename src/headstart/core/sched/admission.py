"""Room: whether the pool has room for a sequence, and who gives way when it has not.

Admission leaves running sequences room to grow: every output is expected to become as long as the running mean of those
that finished, and no longer than it may. A sequence that had to give way MAX_PREEMPTIONS times comes back only when the
pool can hold it to its very end beside all others that were promised so, and then never gives way again.
"""

from headstart.core.cache.kv_cache import Hit, KVCache
from headstart.core.errors import RequestTooLargeError
from headstart.core.request import Sequence
from headstart.core.sched.waiting_queue import OrderedSequences

MAX_PREEMPTIONS = 3
FIRST_GUESS = 64  # output tokens, until something has finished
MEMORY = 64  # finished sequences over which the mean fades
VICTIMS = 8  # so many of the last in order are compared when one has to give way


class Admission:
    """What fits into one pool. Changes nothing but its own mean."""

    def __init__(self, cache: KVCache, max_model_len: int) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._mean = float(FIRST_GUESS)
        self._num_finished = 0

    def finished(self, num_output_tokens: int) -> None:
        """Learns from one finished sequence."""
        self._num_finished = min(self._num_finished + 1, MEMORY)
        self._mean += (num_output_tokens - self._mean) / (self._num_finished + 1)

    def fits(self, seq: Sequence, hit: Hit, running: OrderedSequences, owed: int) -> bool:
        """Whether the whole prompt, less its hit, fits; beside others also what it and they are expected to need.

        `owed` is what the running ones need: the sum of their `blocks_owed`.
        """
        cache = self._cache
        if not running:
            new = cache.num_new_blocks(seq, hit, len(seq.token_ids))
            return new <= cache.pool.num_scratch or new <= cache.num_available(seq, hit, last_resort=True)
        if stays(seq) and not self._can_stay(seq, running):
            return False
        needed = self._final_blocks(seq) - len(hit.block_ids) + owed
        return needed <= cache.pool.num_scratch or needed <= cache.num_available(seq, hit)

    def most_blocks(self, seq: Sequence) -> int:
        """Blocks of its table if its output becomes as long as it may."""
        return self._blocks_at(self._longest(seq))

    def blocks_owed(self, seq: Sequence) -> int:
        """Blocks that a running sequence is expected to take yet, or may take if it was promised to stay."""
        return max(self._final_blocks(seq) - len(seq.block_ids), 0)

    def victim(self, seq: Sequence, hit: Hit, num_tokens: int, behind: list[Sequence]) -> Sequence:
        """Who gives way so that `seq` can cover `num_tokens`: of those `behind` it the one that loses least by it.

        None of them is planned in this step yet, and none was promised to stay. Without any it is `seq` itself.
        """
        if not behind:
            assert not stays(seq), f"{seq.request_id} was promised room to its end"
            return seq
        cache = self._cache
        missing = cache.num_new_blocks(seq, hit, num_tokens) - cache.num_available(seq, hit)
        freed = [(self._num_exclusive_blocks(other), -other.order, other) for other in behind]
        enough = [entry for entry in freed if entry[0] >= missing]
        return min(enough, key=lambda entry: entry[:2])[2] if enough else behind[0]

    def check(self, seq: Sequence) -> None:
        """Raises RequestTooLargeError for what would not fit even alone, beside the blocks pinned for others."""
        cache, pool = self._cache, self._cache.pool
        blocks, pinned = self._blocks_at(self._longest(seq)), pool.num_pinned_names
        own = cache.num_pinned_blocks(seq.block_hashes) if pinned and cache.reads(seq) else 0
        usable = pool.num_usable - pinned + own
        if blocks > usable:
            kept = f" beside {pinned - own} pinned ones" if pinned > own else ""
            raise RequestTooLargeError(
                f"prompt and output of {self._longest(seq)} tokens need {blocks} KV blocks but the pool has {usable}"
                f"{kept}; lower max_tokens, shorten the prompt, or serve with a larger --kv-cache-memory",
                param="max_tokens",
            )

    def holds_copy(self, seq: Sequence) -> bool:
        """Whether the pool can hold all its tokens so far beside everything pinned, its own pinned blocks included.

        One that leaves nothing in the cache keeps its copy to its end, so that must fit too.
        """
        num_tokens = len(seq.token_ids) + 1 if self._cache.writes(seq) else self._longest(seq)
        return self._blocks_at(num_tokens) <= self._cache.pool.num_usable - self._cache.pool.num_pinned_names

    def _can_stay(self, seq: Sequence, running: OrderedSequences) -> bool:
        """Whether the pool can hold it to its end beside all those that were promised the same."""
        staying = [other for other in running if stays(other)]
        blocks = sum(self._final_blocks(other) for other in (seq, *staying))
        return not staying or blocks <= self._cache.pool.num_usable - self._cache.pool.num_pinned_names

    def _final_blocks(self, seq: Sequence) -> int:
        """Blocks of its table at its end: as expected, or at most if it stays whatever happens."""
        longest = self._longest(seq)
        expected = longest if stays(seq) else min(longest, len(seq.request.prompt) + int(self._mean))
        return self._blocks_at(max(expected, len(seq.token_ids) + 1))

    def _longest(self, seq: Sequence) -> int:
        return min(len(seq.request.prompt) + seq.request.sampling.max_tokens, self._max_model_len)

    def _blocks_at(self, num_tokens: int) -> int:
        """Blocks behind so many tokens; the KV of the last one is never needed."""
        return -(-(num_tokens - 1) // self._cache.block_size)

    def _num_exclusive_blocks(self, seq: Sequence) -> int:
        """Blocks that nobody else holds: what giving way frees, and what it loses."""
        return sum(1 for block in seq.block_ids if self._cache.pool.refs(block) == 1)


def stays(seq: Sequence) -> bool:
    """Whether it has given way so often that it will not again."""
    return seq.num_preemptions >= MAX_PREEMPTIONS
