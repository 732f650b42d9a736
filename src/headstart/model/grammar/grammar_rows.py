"""GrammarRows: the state of the rows that a grammar constrains: masks of allowed tokens, and forced tokens.

A matcher has consumed exactly the output tokens of its request. Where the grammar allows one continuation only, its
tokens are forced: they follow the sampled token at once, so the next step computes them all as one chunk. If the
request wants log-probabilities, which need the logits before each token, forced tokens are returned one per step
instead. The tokens are the same.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from headstart.core.batch import Chunk
from headstart.model.grammar.grammar_compiler import CachingGrammarCompiler
from headstart.model.sampling.logit_edits import Mask, num_output_tokens

MASK_BITS = 32


@dataclass(slots=True, eq=False)
class _Row:
    """The state of one request."""

    matcher: LLMatcher
    num_consumed: int = 0  # output tokens
    forced: deque[int] = field(default_factory=deque[int])  # consumed, but not returned yet
    allowed: Mask | None = None  # of this step


class GrammarRows:
    """The rows of one executor that a grammar constrains."""

    def __init__(self, grammars: CachingGrammarCompiler, threads: int) -> None:
        self._grammars = grammars
        self._rows: dict[str, _Row] = {}
        self._words = -(-grammars.vocab_size // MASK_BITS)
        self._executor = LLExecutor(num_threads=threads) if threads > 1 else None

    def update_row_masks(self, chunks: Sequence[Chunk]) -> dict[int, str]:
        """Compute the masks of the rows that have a grammar; return the errors of rows without one, by index."""
        errors: dict[int, str] = {}
        masks = np.full((len(chunks), self._words), -1, np.int32)
        wanted: list[tuple[LLMatcher, int]] = []
        for index, chunk in enumerate(chunks):
            if chunk.sampling.grammar is None:
                continue
            row = self._row(chunk)
            row.allowed = mask = masks[index]
            if row.forced:
                mask[:] = 0
                mask[row.forced[0] // MASK_BITS] = _bit(row.forced[0])
            elif row.matcher.is_error():
                errors[index] = row.matcher.get_error()
            else:
                wanted.append((row.matcher, index))
        if self._executor is not None and len(wanted) > 1:
            fill_next_token_bitmask_par(self._executor, wanted, masks)
        else:
            for matcher, index in wanted:
                fill_next_token_bitmask(matcher, masks, index)
        for matcher, index in wanted:
            if matcher.is_error():
                errors[index] = matcher.get_error()
        return errors

    def mask_of_row(self, chunk: Chunk) -> Mask | None:
        """Return the mask of a row in this step; None: all tokens are allowed."""
        row = self._rows.get(chunk.request_id)
        return None if row is None else row.allowed

    def accept_with_forced_tokens(self, chunk: Chunk, token: int) -> tuple[int, ...]:
        """Advance a row by its sampled token; return that and the tokens that the grammar forces after it.

        Raises ValueError if the grammar has exceeded its limits.
        """
        row = self._rows[chunk.request_id]
        row.allowed = None
        if row.forced:
            row.forced.popleft()
            return (token,)
        row.num_consumed += 1
        if token in self._grammars.eos_token_ids:
            return (token,)
        if not row.matcher.consume_token(token):
            raise ValueError(row.matcher.get_error())
        forced = self._forced(row.matcher)
        row.num_consumed += len(forced)
        if chunk.sampling.logprobs is not None:
            row.forced.extend(forced)
            return (token,)
        return (token, *forced, *self._end(row.matcher, chunk))

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the state of these requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def _end(self, matcher: LLMatcher, chunk: Chunk) -> list[int]:
        """Return the end-of-sequence token if nothing else may follow and it is a stop token of the request."""
        if not matcher.is_stopped() or matcher.is_error():
            return []
        stops = chunk.sampling.stop_token_ids
        return [token for token in self._grammars.eos_token_ids if token in stops][:1]

    def _forced(self, matcher: LLMatcher) -> list[int]:
        """Consume and return the tokens that are the only continuation, without the end of the answer."""
        forced = matcher.compute_ff_tokens() if not matcher.is_stopped() else []
        if forced and not matcher.consume_tokens(forced):
            raise ValueError(matcher.get_error())
        return forced

    def _row(self, chunk: Chunk) -> _Row:
        """Return the state of a row, synchronised with its output tokens."""
        grammar = chunk.sampling.grammar
        assert grammar is not None
        row = self._rows.get(chunk.request_id)
        num_known = num_output_tokens(chunk)
        if row is None:
            row = self._rows[chunk.request_id] = _Row(self._grammars.matcher(grammar))
        if row.num_consumed - len(row.forced) != num_known:  # tokens that this executor has not returned itself
            row.matcher.reset()
            row.forced.clear()
            outputs: list[int] = chunk.history[chunk.num_prompt_tokens :].tolist()
            row.matcher.consume_tokens([token for token in outputs if token not in self._grammars.eos_token_ids])
            row.num_consumed = num_known
        return row


def _bit(token: int) -> np.int32:
    """Return the word of a mask in which this token alone is allowed."""
    return np.array([1 << (token % MASK_BITS)], np.uint32).view(np.int32)[0]
