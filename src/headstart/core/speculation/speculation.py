"""Speculation: drafts for the sequences of a step, verified in the step itself.

A draft is a guess of the next output tokens: those that followed an earlier occurrence of the last tokens, in the
sequence itself (prompt lookup, as in vLLM's method ngram) or in earlier outputs of its isolation domain.
The executor computes it with the sequence's next token as one chunk, samples every position, and returns the tokens
sampled until one differs from the draft. Since a draw depends on its seed and position only, the output is the same as
without drafts. Draft tokens are never part of `Sequence.token_ids`, so they are neither hashed nor published.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from headstart.core.batch import Chunk
from headstart.core.cache.kv_cache import KVCache
from headstart.core.sequence import Sequence
from headstart.core.speculation.draft import Draft, draft_from_match, draft_of_longer_match
from headstart.core.speculation.draft_length import (
    DOMAIN_MEMORY,
    AcceptanceEstimate,
    DecodeCostModel,
    choose_draft_lengths,
)
from headstart.core.speculation.ngram_index import NgramIndex
from headstart.core.speculation.output_history import OutputHistory
from headstart.core.speculation.speculation_config import SpeculationConfig

ENTERED_PER_STEP = 2048  # tokens that are indexed in one step: about a millisecond
ENTERED_EACH = 64  # of each sequence, even if others have used that up
MAX_DOMAINS = 256
_MAX_CAPACITY = 1 << 16


class _Drafting:
    """The state of one sequence."""

    __slots__ = ("acceptance", "draft", "enabled", "index")

    def __init__(self, config: SpeculationConfig, seq: Sequence, acceptance: AcceptanceEstimate) -> None:
        capacity = min(len(seq.token_ids) + seq.request.sampling.max_tokens, _MAX_CAPACITY)
        self.index = NgramIndex(config.prompt_lookup_min, capacity)
        self.acceptance = acceptance
        self.enabled = True
        self.draft: Draft | None = None  # the latest one


class Speculator:
    """The drafts of one scheduler's sequences."""

    def __init__(
        self, config: SpeculationConfig, cache: KVCache, max_model_len: int, *, max_draft_tokens: int = 0
    ) -> None:
        """`max_draft_tokens` is the limit of one step, 0 for none."""
        self.cost = DecodeCostModel()
        self._config = config
        self._cache = cache
        self._max_model_len = max_model_len
        self._max_draft_tokens = max_draft_tokens
        self._num_enterable = 0  # tokens that may still be indexed in this step
        self._states: dict[str, _Drafting] = {}  # by request id
        self._domains: OrderedDict[tuple[bytes, str | None], AcceptanceEstimate] = (
            OrderedDict()
        )  # by domain and adapter
        self._history = OutputHistory(config.prompt_lookup_min, config.prompt_lookup_max)

    def propose_drafts(self, planned: Iterable[tuple[Sequence, int]], budget: int) -> "dict[str, array[int]]":
        """Return drafts by request id, of `budget` tokens at most, for the sequences of a step that decode."""
        num_decodes, self._num_enterable = 0, ENTERED_PER_STEP
        budget = min(budget, self._max_draft_tokens or budget)
        found: list[tuple[Sequence, _Drafting, Draft]] = []
        for seq, n in planned:
            if seq.num_computed_tokens + n < len(seq.token_ids) or len(seq.token_ids) == len(seq.request.prompt):
                continue
            num_decodes += 1
            draft = self._find(seq)
            if draft is not None:
                found.append((seq, self._states[seq.request_id], draft))
        if not found:
            return {}
        probabilities = [state.acceptance.acceptance_probabilities(draft) for _, state, draft in found]
        lengths = choose_draft_lengths(self.cost, num_decodes, probabilities, budget)
        chosen: dict[str, array[int]] = {}
        for (seq, state, draft), length in zip(found, lengths, strict=True):
            if not length and len(chosen) < budget and state.acceptance.decide_probe():
                length = 1
            if length:
                state.draft = draft.truncated(length)
                chosen[seq.request_id] = state.draft.tokens
        return chosen

    def learn_decode_cost(self, chunks: Iterable[Chunk], elapsed: float) -> None:
        """Update the cost of decodes from a step; steps with prompt tokens are ignored."""
        num_tokens = 0
        for chunk in chunks:
            if chunk.start < chunk.num_prompt_tokens or len(chunk.token_ids) != chunk.num_logits:
                return
            num_tokens += chunk.num_logits
        self.cost.learn(num_tokens, elapsed)

    def record_verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Update the acceptance of a sequence from one draft."""
        state = self._states[seq.request_id]
        assert state.draft is not None, "a sequence without a draft has none to verify"
        draft = state.draft.truncated(num_drafts)
        state.acceptance.learn(draft, num_accepted)
        if self._cache.may_publish(seq):
            self._domain(seq).learn(draft, num_accepted)

    def disable_for(self, seq: Sequence) -> None:
        """Give a sequence no more drafts."""
        self._states[seq.request_id].enabled = False

    def on_finished(self, seq: Sequence) -> None:
        """Drop the state of a sequence, and keep its output as a source of drafts if others may reuse its KV."""
        self._states.pop(seq.request_id, None)
        if self._cache.may_publish(seq):
            self._history.add_output(seq)

    def clear(self) -> None:
        """Forget earlier outputs and their acceptance."""
        self._history.clear()
        self._domains.clear()

    def _domain(self, seq: Sequence) -> AcceptanceEstimate:
        """Return the acceptance of all sequences of a domain and adapter; the least recently used one is dropped."""
        key = seq.request.domain, seq.request.adapter
        found = self._domains.get(key)
        if found is None:
            found = self._domains[key] = AcceptanceEstimate(memory=DOMAIN_MEMORY)
            if len(self._domains) > MAX_DOMAINS:
                self._domains.popitem(last=False)
        self._domains.move_to_end(key)
        return found

    def _first_acceptance(self, seq: Sequence) -> AcceptanceEstimate:
        """Return what is expected of a new sequence: the acceptance of its domain, unless it may not read from it."""
        if self._cache.may_read_cache(seq):
            return AcceptanceEstimate(self._domain(seq).accepted_shares_by_token_class())
        return AcceptanceEstimate()

    def _find(self, seq: Sequence) -> Draft | None:
        """Return the longest draft for a sequence that its limits permit, if any."""
        state = self._states.get(seq.request_id)
        if state is None:
            state = self._states[seq.request_id] = _Drafting(self._config, seq, self._first_acceptance(seq))
        tokens, sampling, config = seq.token_ids, seq.request.sampling, self._config
        index, num_known = state.index, len(seq.token_ids)
        num_new = min(num_known - index.num_entered, max(self._num_enterable, ENTERED_EACH))
        self._num_enterable -= num_new
        index.index_tokens(tokens, index.num_entered + num_new)
        left = min(sampling.max_tokens - seq.num_output_tokens, self._max_model_len - num_known)
        most = min(config.num_speculative_tokens, left - 1)
        if (
            most < 1
            or not state.enabled
            or seq.recompute is not None
            or seq.num_computed_tokens < seq.num_covered_tokens
        ):
            return None
        draft = self._lookup(seq, state.index, most)
        return None if draft is None else _until_stop(draft, sampling.stop_token_ids)

    def _lookup(self, seq: Sequence, index: NgramIndex, most: int) -> Draft | None:
        """Return the tokens behind the longest match, `most` of them at most."""
        tokens = seq.token_ids
        last = tokens[-self._config.prompt_lookup_max :]
        match = index.find_longest(tokens, last)
        draft = None if match is None else draft_from_match(tokens, match, most, repeats=True)
        return (
            draft_of_longer_match(draft, self._history.find_draft(seq, last, most))
            if self._cache.may_read_cache(seq)
            else draft
        )


def _until_stop(draft: Draft, stop_token_ids: tuple[int, ...]) -> Draft | None:
    """Return the draft up to its first stop token, behind which nothing is sampled; None if that is the first token."""
    ends = (draft.tokens.index(token) for token in stop_token_ids if token in draft.tokens)
    num = min(ends, default=len(draft.tokens))
    return draft.truncated(num) if num else None
