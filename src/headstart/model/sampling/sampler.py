"""Sampler: chooses the next token of every row of a batch. It is vectorised over rows; rows do not affect each other.

The order is that of vLLM's documentation: penalties, logit_bias, min_tokens, the mask of a grammar; greedy rows take
the best token; the other rows continue with temperature, min_p, top_k, top_p and one draw. Log-probabilities are those
of the model's unedited logits.

A row's tokens depend only on its logits, parameters, history and key, never on other rows: the random number of output
i is a hash of (key, i), filters cut at a *value* (ties with the last kept token are kept too, so the order of a sort
does not matter), and sums run in token order, row by row.

With compiled kernels, one call does all of this (kernels/sampling.py); without them, and on a GPU, torch does it. Both
give the same tokens unless a draw or a filter depends on a difference below 1e-6.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor

from headstart.core.batch import Chunk, RowError, RowErrorKind, RowResult, TokenLogprob
from headstart.core.request import SamplingParams
from headstart.model.grammar.grammar_rows import GrammarRows
from headstart.model.kernels.library import KernelLibrary
from headstart.model.kernels.rows import row_argmax_and_max
from headstart.model.kernels.sampling import RowSampler, RowSamplingParams
from headstart.model.sampling.draw import draw_tokens, select_rows
from headstart.model.sampling.logit_edits import LogitEdits, first_allowed_token, num_output_tokens
from headstart.model.sampling.verification import verify_drafts

_GREEDY_BELOW = 1e-5  # lower temperatures count as 0
_LEAST_LOGPROB = -9999.0  # JSON has no -inf
NOT_FINITE = RowError(RowErrorKind.NON_FINITE, "the model computed no finite logits")
_SLICE_BYTES = 64 * 2**20  # maximum bytes of float32 logits or log-probabilities of a prompt in memory at once


class Sampler:
    """Sampler from logits to rows. Its only state per request is the distinct prompt tokens, if they are penalised."""

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        kernels: KernelLibrary | None = None,
        grammars: GrammarRows | None = None,
    ) -> None:
        """`grammars` constrains rows that have a grammar; without it there may be none."""
        self.vocab_size = vocab_size
        self._kernels = kernels
        self._seed = seed
        self._grammars = grammars
        self.edits = LogitEdits(vocab_size, None if grammars is None else grammars.mask_of_row)
        self._rows = RowSampler(kernels, vocab_size) if kernels is not None else None

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        """Return one row per chunk, from logits [R, V] of any float type, which are not modified.

        A chunk has `num_logits` adjacent rows of the logits, at least one. With drafts its tokens are those sampled up
        to the first that differs from the draft.

        A row with NaN or +inf, or with only -inf, returns an error of kind NON_FINITE; a row with a token id that
        cannot be edited returns an error of kind REQUEST. Other rows are not affected. No valid sampling parameter
        makes a row fail: edited logits stay finite, and min_tokens is ignored where it forbids all tokens.
        """
        num_logits = sum(chunk.num_logits for chunk in chunks)
        if logits.shape != (num_logits, self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)} for {num_logits} rows x {self.vocab_size} tokens")
        if num_logits > len(chunks):
            return verify_drafts(self._sample_chunks, logits, chunks, lambda c: not self.needs_more_than_argmax(c))
        return self._sample_chunks(logits, chunks)

    def _sample_chunks(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        """Return one row per chunk, from logits [R, V], one row of them per chunk."""
        if self._grammars is not None and any(chunk.sampling.grammar is not None for chunk in chunks):
            return self._sample_constrained(self._grammars, logits, chunks)
        return self._sample(logits, chunks)

    def _sample_constrained(self, grammars: GrammarRows, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        """Sample rows of which some have a grammar. A grammar that exceeds its limits fails its own row."""
        errors = grammars.update_row_masks(chunks)
        rows = self._sample(logits, chunks)
        for index, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            if chunk.sampling.grammar is not None:
                rows[index] = advance_row_grammar(grammars, chunk, row, errors.get(index))
        return rows

    def _sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        if self._rows is not None and self._rows.can_read(logits) and any(map(self.needs_more_than_argmax, chunks)):
            return self._sample_fused(self._rows, logits, chunks)
        chosen, best = row_argmax_and_max(
            self._kernels, logits
        )  # NaN propagates, so `best` is enough to find invalid rows
        errors = [None if isfinite(value) else NOT_FINITE for value in best]
        edited = [i for i, chunk in enumerate(chunks) if not errors[i] and self.edits.row_needs_edits(chunk)]
        drawn = [i for i, chunk in enumerate(chunks) if not errors[i] and not is_greedy(chunk.sampling)]
        if edited or drawn:
            self._choose(logits, chunks, edited, drawn, chosen, errors)
        logprobs = _logprobs(logits, chosen, chunks, errors)
        return [
            RowResult(error=error) if error else RowResult((token,), logprobs.get(i, ()))
            for i, (token, error) in enumerate(zip(chosen, errors, strict=True))
        ]

    def prompt_logprobs_of_chunk(
        self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, chunk: Chunk
    ) -> RowResult:
        """Return a row with the entry for the next prompt token at each position of a chunk, or with an error.

        `logits_of` returns the logits [n, V] of rows [n, hidden]; it is called for a piece of `hidden` at a time.
        """
        wanted = min(len(hidden), chunk.num_prompt_tokens - 1 - chunk.start)
        piece = max(1, _SLICE_BYTES // (4 * self.vocab_size))
        entries: list[TokenLogprob] = []
        try:
            for begin in range(0, wanted, piece):
                logits = logits_of(hidden[begin : min(begin + piece, wanted)])
                entries += self.prompt_logprobs(logits, chunk, offset=begin)
        except FloatingPointError as error:
            return RowResult(error=RowError(RowErrorKind.NON_FINITE, str(error)))
        return RowResult(prompt_logprobs=tuple(entries))

    def prompt_logprobs(self, logits: Tensor, chunk: Chunk, *, offset: int = 0) -> tuple[TokenLogprob, ...]:
        """Return the entries for the next prompt token at the chunk's positions `[offset, offset + n)`; logits [n, V].

        Positions whose next token is not a prompt token give no entry. `offset` allows a long chunk to be passed in
        pieces. Raises FloatingPointError if a logit is not finite; the caller must fail only this row.
        """
        first = chunk.start + offset + 1
        after = chunk.history[first : min(first + len(logits), chunk.num_prompt_tokens)].tolist()
        num_top = chunk.sampling.prompt_logprobs or 0
        step = max(_SLICE_BYTES // (4 * self.vocab_size), 1)
        entries: list[TokenLogprob] = []
        for at in range(0, len(after), step):
            tokens = after[at : at + step]
            rows = logits[at : at + len(tokens)]
            if not rows.amax(dim=-1).isfinite().all():
                raise FloatingPointError("the model computed no finite logits for a prompt token")
            entries += self._entries(rows, tokens, num_top)
        return tuple(entries)

    def _entries(self, logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
        """Return the log-probability of one token per row of logits [n, V], with `num_top` alternatives."""
        if self._rows is None or not self._rows.can_read(logits):
            return _entries(logits, tokens, [num_top] * len(tokens))
        found = self._rows(logits, [RowSamplingParams(token=token, num_top=num_top) for token in tokens]).logprobs
        return [entry for entry in found if entry is not None]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the state of finished requests; unknown ids are ignored."""
        request_ids = tuple(request_ids)
        self.edits.drop(request_ids)
        if self._grammars is not None:
            self._grammars.drop(request_ids)

    def needs_more_than_argmax(self, chunk: Chunk) -> bool:
        """Return whether a row needs more than its greatest logit."""
        s = chunk.sampling
        return not is_greedy(s) or s.logprobs is not None or self.edits.row_needs_edits(chunk)

    def _sample_fused(self, sampler: RowSampler, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        """Do the same as `sample` in one kernel call."""
        errors: dict[int, RowError] = {}
        tasks: list[RowSamplingParams] = []
        for index, chunk in enumerate(chunks):
            try:
                tasks.append(self._task(chunk))
            except ValueError as error:
                errors[index] = RowError(RowErrorKind.REQUEST, str(error))
                tasks.append(RowSamplingParams())
        sampled = sampler(logits, tasks)
        errors |= {index: NOT_FINITE for index, best in enumerate(sampled.best) if not isfinite(best)}
        return [
            RowResult(error=errors[index])
            if index in errors
            else RowResult((token,), () if entry is None else (entry,))
            for index, (token, entry) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True))
        ]

    def _task(self, chunk: Chunk) -> RowSamplingParams:
        """Return the kernel's parameters for one row. Raises ValueError for an id that cannot be edited."""
        s = chunk.sampling
        task = RowSamplingParams(
            num_top=s.logprobs, edits=self.edits.row_edits(chunk) if self.edits.row_needs_edits(chunk) else None
        )
        if not is_greedy(s):
            task.temperature, task.top_k, task.top_p, task.min_p = s.temperature, s.top_k, s.top_p, s.min_p
            task.uniform = self.uniform(chunk)
        return task

    def _choose(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        edited: list[int],
        drawn: list[int],
        chosen: list[int],
        errors: list[RowError | None],
    ) -> None:
        """Replace the tokens in `chosen` (the unedited best) for edited and drawn rows. Fills in `errors`."""
        rows = sorted({*edited, *drawn})
        work = select_rows(logits, rows).float()
        if work.data_ptr() == logits.data_ptr():
            work = work.clone()  # the caller's logits must not change
        where = {row: at for at, row in enumerate(rows)}
        if edited:
            failed = self.edits.apply(work, {where[i]: chunks[i] for i in edited})
            for at, message in failed.items():
                errors[rows[at]] = RowError(RowErrorKind.REQUEST, message)
            tokens, values = row_argmax_and_max(self._kernels, work)
            for row, token in zip(rows, tokens, strict=True):
                chosen[row] = token
            for row in [row for row, value in zip(rows, values, strict=True) if value == -inf and not errors[row]]:
                chosen[row] = self._choose_unbanned(logits[row], work[where[row]], chunks[row])
        drawn = [i for i in drawn if not errors[i]]
        if drawn:
            subset = select_rows(work, [where[i] for i in drawn])
            uniform = [self.uniform(chunks[i]) for i in drawn]
            tokens = draw_tokens(subset, [chunks[i].sampling for i in drawn], uniform)
            for i, token in zip(drawn, tokens.tolist(), strict=True):
                chosen[i] = token

    def _choose_unbanned(self, logits: Tensor, work: Tensor, chunk: Chunk) -> int:
        """Redo the edits of a row in which min_tokens forbids every token, without min_tokens; return the best token.

        Overwrites `work`.
        """
        work.copy_(logits)
        unbanned = chunk._replace(sampling=replace(chunk.sampling, min_tokens=0))
        self.edits.apply(work[None], {0: unbanned})
        tokens, values = row_argmax_and_max(self._kernels, work[None])
        allowed = None if self._grammars is None else self._grammars.mask_of_row(chunk)
        if values[0] == -inf and allowed is not None:  # the model's own logits are -inf wherever a token is allowed
            work[first_allowed_token(allowed)] = 0.0
            return first_allowed_token(allowed)
        return tokens[0]

    def uniform(self, chunk: Chunk, ahead: int = 0) -> float:
        """Return the random number in [0, 1) of the next output, or of one `ahead` of it: 53 bits of a hash."""
        seed = chunk.sampling.seed
        key = f"seed {seed}" if seed is not None else f"engine {self._seed} request {chunk.request_id}"
        text = f"{key} output {num_output_tokens(chunk) + ahead}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def advance_row_grammar(grammars: GrammarRows, chunk: Chunk, row: RowResult, problem: str | None = None) -> RowResult:
    """Advance the grammar of a sampled row; return the row with the tokens that the grammar forces after it.

    `problem` is what computing the mask has reported.
    """
    if row.error is not None:
        return row
    try:
        if problem is not None:
            raise ValueError(problem)
        return row._replace(token_ids=grammars.accept_with_forced_tokens(chunk, row.token_ids[0]))
    except ValueError as error:
        message = f"the output cannot be constrained any further: {str(error).strip()[:300]}"
        return RowResult(error=RowError(RowErrorKind.GRAMMAR, message))


def is_greedy(sampling: SamplingParams) -> bool:
    """Return whether the best token is taken, without a draw."""
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def _logprobs(
    logits: Tensor, chosen: list[int], chunks: Sequence[Chunk], errors: list[RowError | None]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return the entry of each row that requests log-probabilities, by row."""
    asked = {i: n for i, c in enumerate(chunks) if (n := c.sampling.logprobs) is not None and not errors[i]}
    if not asked:
        return {}
    rows = select_rows(logits, list(asked))
    entries = _entries(rows, [chosen[i] for i in asked], list(asked.values()))
    return {i: (entry,) for i, entry in zip(asked, entries, strict=True)}


def _entries(logits: Tensor, tokens: list[int], num_tops: list[int]) -> list[TokenLogprob]:
    """Return the log-probability of one token per row of logits [n, V], with the row's number of alternatives."""
    found = compute_logprobs(logits, torch.tensor(tokens, device=logits.device), max(num_tops))
    own, ids, values = (part.tolist() for part in found)
    return make_logprob_entries(tokens, own, ids, values, num_tops)


def compute_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of one token per row [n], and the ids and log-probabilities of the best [n, num_top].

    There are no more than V alternatives, most likely first, of equal ones those with the lowest ids. Changes nothing,
    and does not wait for a device.
    """
    logprobs = logits.float().log_softmax(dim=-1).clamp_(min=_LEAST_LOGPROB)
    # Order by (value, -id) in one integer: the bits of a number that is not above 0 ascend with its distance from 0.
    distances = (logprobs.view(torch.int32) & 0x7FFFFFFF).long()
    order = (distances << 32) + torch.arange(logits.shape[-1], device=logits.device)
    ids = order.topk(min(num_top, logits.shape[-1]), dim=-1, largest=False).values & 0xFFFFFFFF
    return logprobs.gather(1, tokens[:, None])[:, 0], ids, logprobs.gather(1, ids)


def make_logprob_entries(
    tokens: Sequence[int],
    own: Sequence[float],
    top_ids: Sequence[list[int]],
    top_values: Sequence[list[float]],
    num_tops: Sequence[int],
) -> list[TokenLogprob]:
    """Return one entry per row from the results of `compute_logprobs`, with the row's number of alternatives."""
    return [
        TokenLogprob(token, value, tuple(zip(ids[:num], values[:num], strict=True)))
        for token, value, ids, values, num in zip(tokens, own, top_ids, top_values, num_tops, strict=True)
    ]
