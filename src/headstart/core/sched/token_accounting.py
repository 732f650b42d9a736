"""Token accounting: the source of every prompt token, and what a perfect cache would have computed.

Per request `prompt = pinned + shared + store + followed + computed`, always (core/batch.py, PromptTokenBreakdown).
Tokens reused at first admission count as cached if they were cached at the request's first turn; otherwise as store or
followed, by their source, like tokens taken over later. Tokens recomputed after a preemption are counted apart. Nothing
here affects scheduling.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.batch import Chunk, PromptTokenBreakdown
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import KVCache, PrefixHit
from headstart.core.cache.transfers import StoreTransfers
from headstart.core.sched.ideal_cache import IdealCache, max_remembered_hashes
from headstart.core.sequence import Sequence


@dataclass(slots=True)
class TokenCounters:
    """Counters since start, in tokens unless the name says otherwise; see engine_info.EngineStats."""

    prompt_tokens: int = 0  # of requests whose first token is out; the next six fields are of the same requests
    cached_tokens: int = 0  # pinned + shared + store + followed
    pinned_tokens: int = 0
    shared_tokens: int = 0
    store_tokens: int = 0
    followed_tokens: int = 0
    prompt_computed_tokens: int = 0
    evicted_tokens: int = 0  # of those computed, in blocks that had been cached and evicted
    computed_tokens: int = 0  # in chunks: prompts, replays and decodes
    prefill_tokens: int = 0  # of those, all but decodes
    replayed_tokens: int = 0  # of those, computed before and lost to a preemption
    ideal_tokens: int = 0  # computed by a perfect, infinite, shared cache, of all prompts that arrived
    generation_tokens: int = 0
    forced_tokens: int = 0  # of those, the ones that a grammar forced: not sampled one by one
    num_drafts: int = 0  # verified by speculation
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_promise_skips: int = 0  # times that a sequence, or a group of waiting ones, skipped a step for promised blocks
    num_adoptions: int = 0  # times that a running sequence took over blocks
    num_row_errors: int = 0  # requests that failed alone
    num_recomputes: int = 0  # second runs of requests with a row that was not finite


class TokenAccounting:
    """The token counters of one scheduler. `is_internal` marks requests that do not count as prompts."""

    def __init__(
        self, cache: KVCache, transfers: StoreTransfers, is_internal: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.counters = TokenCounters()
        self._cache = cache
        self._transfers = transfers
        self._is_internal = is_internal
        self._ideal = IdealCache(max_remembered_hashes(cache.pool.num_blocks))

    def on_arrived(self, seq: Sequence) -> None:
        """Count what a perfect cache would compute of its prompt: at least one token."""
        block_hashes = seq.block_hashes
        known = self._num_ideal(block_hashes) if self._cache.may_read_cache(seq) else 0
        self.counters.ideal_tokens += max(len(seq.token_ids) - known * self._cache.block_size, 1)
        self._ideal.record_use(block_hashes if self._cache.may_publish(seq) else block_hashes[:known])

    def add_to_perfect_cache(self, seq: Sequence) -> None:
        """Add its output to the perfect cache."""
        if self._cache.may_publish(seq):
            self._ideal.record_use(seq.block_hashes)

    def on_admitted(self, seq: Sequence, hit: PrefixHit, now: float) -> None:
        """Record the blocks reused at an admission, the first or a later one."""
        self._transfers.mark_used(seq, hit)
        if seq.admitted:
            self._followed(seq, hit, 0)
            return
        seq.admitted = True
        seq.scheduled_at = now
        cached = hit.num_tokens if seq.num_hit_tokens is None else min(seq.num_hit_tokens, hit.num_tokens)
        seq.num_cached_tokens = cached
        self._find_evicted(seq, len(hit.block_ids))
        self._late(seq, cached, hit.num_tokens)
        if self._cache.pool.num_pinned_hashes:
            pinned = self._cache.num_leading_pinned(seq.block_hashes[: len(hit.block_ids)])
            seq.num_pinned_tokens = min(pinned * self._cache.block_size, cached)
        if not self._is_internal(seq.request_id):
            self.counters.prefix_queries += len(seq.token_ids)
            self.counters.prefix_hits += hit.num_tokens

    def on_blocks_adopted(self, seq: Sequence, hit: PrefixHit, computed: int) -> None:
        """Record the blocks taken over by a running sequence that had `computed` tokens before."""
        self.counters.num_adoptions += 1
        self._transfers.mark_used(seq, hit)
        self._followed(seq, hit, computed)

    def on_chunk_computed(self, seq: Sequence, chunk: Chunk) -> None:
        """Count one computed chunk."""
        start, n, counters = chunk.start, len(chunk.token_ids), self.counters
        counters.computed_tokens += n
        if start < chunk.num_prompt_tokens or start < seq.num_covered_tokens:  # not a decode
            known = max(chunk.num_prompt_tokens, seq.num_covered_tokens)
            counters.prefill_tokens += min(start + n, known) - start
            counters.replayed_tokens += max(min(start + n, seq.num_covered_tokens) - start, 0)

    def record_full_recompute(self, seq: Sequence) -> None:
        """Note that a sequence is computed again from its first token, in its second run."""
        self.counters.num_recomputes += 1
        self.forget_reuse(seq)

    def forget_reuse(self, seq: Sequence) -> None:
        """Forget what a sequence reused, since it does not count: a prompt without output yet has reused nothing."""
        if seq.num_output_tokens:
            seq.num_covered_tokens = max(seq.num_covered_tokens, seq.num_computed_tokens)
            return
        seq.num_pinned_tokens = seq.num_cached_tokens = seq.num_store_tokens = seq.num_followed_tokens = 0
        seq.num_covered_tokens = 0

    def finish_prompt(self, seq: Sequence) -> PromptTokenBreakdown:
        """Return the breakdown of a prompt whose last token has just been computed, and add it to the counters."""
        length = len(seq.request.prompt)
        pinned, cached, store = seq.num_pinned_tokens, seq.num_cached_tokens, seq.num_store_tokens
        followed = seq.num_followed_tokens
        breakdown = PromptTokenBreakdown(pinned, cached - pinned, store, followed, length - cached - store - followed)
        assert min(breakdown) >= 0, f"{seq.request_id}: {breakdown} of {length} prompt tokens"
        counters = self.counters
        if self._is_internal(seq.request_id):
            return breakdown
        counters.prompt_tokens += length
        counters.cached_tokens += breakdown.num_cached
        counters.pinned_tokens += breakdown.pinned
        counters.shared_tokens += breakdown.shared
        counters.store_tokens += breakdown.store
        counters.followed_tokens += breakdown.followed
        counters.prompt_computed_tokens += breakdown.computed
        counters.evicted_tokens += self.num_evicted_tokens(seq, breakdown)
        return breakdown

    def num_evicted_tokens(self, seq: Sequence, breakdown: PromptTokenBreakdown) -> int:
        """Return how many of the computed prompt tokens were in blocks that had been evicted."""
        return min(seq.num_evicted_tokens, breakdown.computed)

    def _find_evicted(self, seq: Sequence, start: int) -> None:
        """Set the tokens of the blocks from `start` on that follow each other and were evicted, and by which tenant."""
        pool, block_hashes, index = self._cache.pool, seq.block_hashes, start
        if not self._cache.may_read_cache(seq) or start >= len(block_hashes):
            return
        first = pool.find_eviction_record(block_hashes[start])
        seq.evicted_by = first.tenant if first is not None and first.by else None
        while index < len(block_hashes) and pool.find_eviction_record(block_hashes[index]) is not None:
            index += 1
        seq.num_evicted_tokens = (index - start) * self._cache.block_size

    def _num_ideal(self, block_hashes: list[BlockHash]) -> int:
        """Return the number of leading `block_hashes` that a perfect cache or the real one holds."""
        known = self._ideal.num_cached_prefix_blocks(block_hashes)
        while known < len(block_hashes) and self._transfers.in_pool_or_store(block_hashes[known]):
            known += 1
        return known

    def _followed(self, seq: Sequence, hit: PrefixHit, computed: int) -> None:
        """Record prompt tokens that are reused now and were not computed before."""
        if len(seq.token_ids) == len(seq.request.prompt):
            self._late(seq, max(computed, seq.num_covered_tokens), hit.num_tokens)

    def _late(self, seq: Sequence, start: int, end: int) -> None:
        """Record its tokens `[start, end)` as cached only after its first turn."""
        loaded = self._transfers.num_loaded_tokens_in_range(seq, start, end)
        seq.num_store_tokens += loaded
        seq.num_followed_tokens += max(end - start, 0) - loaded
