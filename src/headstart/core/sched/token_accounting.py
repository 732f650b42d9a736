"""Accounts: where every token of every prompt came from, and what a perfect cache would have computed.

Per request `prompt = pinned + shared + store + followed + computed`, always (core/batch.py, PromptTokenBreakdown). What
a prompt takes over when it is first admitted counts as cached if it was there when its turn came first; else as store
or as followed, by where it came from; so does what it takes over later. Replays after a preemption are kept apart.
Nothing here decides anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.batch import Chunk, PromptTokenBreakdown
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import Hit, KVCache
from headstart.core.cache.transfers import Transfers
from headstart.core.request import Sequence
from headstart.core.sched.ideal_cache import IdealCache, max_names


@dataclass(slots=True)
class Counters:
    """Running totals since start, in tokens unless the name says otherwise; see engine.EngineStats."""

    prompt_tokens: int = 0  # of requests whose first token is out; the next six are theirs
    cached_tokens: int = 0  # pinned + shared + store + followed
    pinned_tokens: int = 0
    shared_tokens: int = 0
    store_tokens: int = 0
    followed_tokens: int = 0
    prompt_computed_tokens: int = 0
    computed_tokens: int = 0  # in chunks: prompts, replays and decodes
    prefill_tokens: int = 0  # of those all but decodes
    replayed_tokens: int = 0  # of those what had been computed before and was lost to a preemption
    ideal_tokens: int = 0  # what a perfect, infinite, shared cache would have computed of all prompts that came
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_promise_skips: int = 0  # times that a sequence, or a group of waiting ones, left a step out for a promise
    num_adoptions: int = 0  # times that a running sequence took over blocks
    num_row_errors: int = 0  # requests that failed alone
    num_recomputes: int = 0  # second runs of requests of which a row was not finite


class TokenAccounting:
    """The books of one scheduler. `is_internal` tells ids of requests that nobody sent: no prompts, but computed."""

    def __init__(
        self, cache: KVCache, transfers: Transfers, is_internal: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.counters = Counters()
        self._cache = cache
        self._transfers = transfers
        self._is_internal = is_internal
        self._ideal = IdealCache(max_names(cache.pool.num_blocks))

    def arrived(self, seq: Sequence) -> None:
        """Notes what a perfect cache would compute of it, which is at least one token."""
        names = seq.block_hashes
        known = self._num_ideal(names) if self._cache.reads(seq) else 0
        self.counters.ideal_tokens += max(len(seq.token_ids) - known * self._cache.block_size, 1)
        self._ideal.learn(names if self._cache.writes(seq) else names[:known])

    def finished(self, seq: Sequence) -> None:
        """From now on a perfect cache knows its output too."""
        if self._cache.writes(seq):
            self._ideal.learn(seq.block_hashes)

    def admitted(self, seq: Sequence, hit: Hit, now: float) -> None:
        """Notes what a sequence takes over with its admission, the first or a later one."""
        self._transfers.used(seq, hit)
        if seq.admitted:
            self._followed(seq, hit, 0)
            return
        seq.admitted = True
        seq.scheduled_at = now
        cached = hit.num_tokens if seq.num_hit_tokens is None else min(seq.num_hit_tokens, hit.num_tokens)
        seq.num_cached_tokens = cached
        self._late(seq, cached, hit.num_tokens)
        if self._cache.pool.num_pinned_names:
            pinned = self._cache.num_pinned_blocks(seq.block_hashes[: len(hit.block_ids)])
            seq.num_pinned_tokens = min(pinned * self._cache.block_size, cached)
        if not self._is_internal(seq.request_id):
            self.counters.prefix_queries += len(seq.token_ids)
            self.counters.prefix_hits += hit.num_tokens

    def adopted(self, seq: Sequence, hit: Hit, computed: int) -> None:
        """Notes what a running sequence takes over that had `computed` tokens before."""
        self.counters.num_adoptions += 1
        self._transfers.used(seq, hit)
        self._followed(seq, hit, computed)

    def computed(self, seq: Sequence, chunk: Chunk) -> None:
        """Notes what one chunk cost."""
        start, n, counters = chunk.start, len(chunk.token_ids), self.counters
        counters.computed_tokens += n
        if start < chunk.num_prompt_tokens or start < seq.num_covered_tokens:  # no decode
            known = max(chunk.num_prompt_tokens, seq.num_covered_tokens)
            counters.prefill_tokens += min(start + n, known) - start
            counters.replayed_tokens += max(min(start + n, seq.num_covered_tokens) - start, 0)

    def recomputes(self, seq: Sequence) -> None:
        """Note that a sequence is computed again from its first token: a prompt not answered yet reuses nothing."""
        self.counters.num_recomputes += 1
        if seq.num_output_tokens:
            seq.num_covered_tokens = max(seq.num_covered_tokens, seq.num_computed_tokens)
            return
        seq.num_pinned_tokens = seq.num_cached_tokens = seq.num_store_tokens = seq.num_followed_tokens = 0
        seq.num_covered_tokens = 0

    def close(self, seq: Sequence) -> PromptTokenBreakdown:
        """The account of a prompt whose last token has just been computed."""
        length = len(seq.request.prompt)
        pinned, cached, store = seq.num_pinned_tokens, seq.num_cached_tokens, seq.num_store_tokens
        followed = seq.num_followed_tokens
        ledger = PromptTokenBreakdown(pinned, cached - pinned, store, followed, length - cached - store - followed)
        assert min(ledger) >= 0, f"{seq.request_id}: {ledger} of {length} prompt tokens"
        counters = self.counters
        if self._is_internal(seq.request_id):
            return ledger
        counters.prompt_tokens += length
        counters.cached_tokens += ledger.cached
        counters.pinned_tokens += ledger.pinned
        counters.shared_tokens += ledger.shared
        counters.store_tokens += ledger.store
        counters.followed_tokens += ledger.followed
        counters.prompt_computed_tokens += ledger.computed
        return ledger

    def _num_ideal(self, names: list[BlockHash]) -> int:
        """Return how many leading `names` a perfect cache holds: those it remembers, and what the real one has."""
        known = self._ideal.num_known(names)
        while known < len(names) and self._transfers.holds(names[known]):
            known += 1
        return known

    def _followed(self, seq: Sequence, hit: Hit, computed: int) -> None:
        """What it takes over now, had not computed before, and is still owed to its prompt."""
        if len(seq.token_ids) == len(seq.request.prompt):
            self._late(seq, max(computed, seq.num_covered_tokens), hit.num_tokens)

    def _late(self, seq: Sequence, start: int, end: int) -> None:
        """Its tokens `[start, end)` were not there when its turn came first; now they are."""
        loaded = self._transfers.num_loaded_tokens(seq, start, end)
        seq.num_store_tokens += loaded
        seq.num_followed_tokens += max(end - start, 0) - loaded
