"""DeviceSampler: samples all rows of a step on the device, from parameters that are copied there with the step.

The host is not waited for between the logits and the tokens: `stage` writes parameters, edits and masks into the step's
array before the launch, `launch` reads nothing but tensors, and `rows` is called when its answer is back on the host.
Order, filters, random numbers and log-probabilities are those of `Sampler`, which is the oracle and the slow path.

A step that needs nothing but the best token of each row is one maximum and two copies. In all others edited and drawn
rows are gathered into one matrix, in an order that makes every stage a slice of it. Instead of a sort of the vocabulary
the best 1,024 probabilities are taken. What cannot be decided so is sampled again by `Sampler` when it is collected: a
row whose top_p set is wider (the next steps of that request sort), a row in which edits forbid every token, a row that
cannot be edited or constrained, drafts behind a grammar, and all rows of a step whose parameters do not fit.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.core.batch import Chunk, RowResult
from headstart.model.cuda.staged_sampling import (
    LOW_BITS,
    NOTHING,
    NeededFilters,
    RowToSample,
    StagedParamsLayout,
    pack_params,
)
from headstart.model.grammar.grammar_rows import MASK_BITS, GrammarRows
from headstart.model.sampling.sampler import (
    NOT_FINITE,
    Sampler,
    advance_row_grammar,
    compute_logprobs,
    is_greedy,
    make_logprob_entries,
)
from headstart.model.sampling.verification import VerifiedChunk

_NUCLEUS_WIDTH = 1024
_ROWS = 64
_NO_TOKEN, _TOO_WIDE = 1, 2  # flags of a row that is sampled again
_LARGEST = torch.finfo(torch.float32).max


class DeviceSampler:
    """Sampler of the rows of one executor. Its state is that of `sampler`, and the requests with wide top_p sets."""

    def __init__(self, vocab_size: int, *, seed: int = 0, grammars: GrammarRows | None = None) -> None:
        self.sampler = Sampler(vocab_size, seed=seed, grammars=grammars)
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._wide: set[str] = set()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the state of finished requests; unknown ids are ignored."""
        request_ids = tuple(request_ids)
        self.sampler.drop(request_ids)
        self._wide.difference_update(request_ids)

    def stage(self, chunks: Sequence[Chunk], room: npt.NDArray[np.int32]) -> StagedParamsLayout:
        """Write what the device needs for these chunks, each with at least one logit, into `room` from its beginning.

        If that does not fit, nothing is written, and `rows` samples all of them on the host.
        """
        num_rows = sum(chunk.num_logits for chunk in chunks)
        if not any(map(self.sampler.needs_more_than_argmax, chunks)):
            return StagedParamsLayout(num_rows)
        rows, redo = self._sampled_rows(chunks)
        width = _NUCLEUS_WIDTH if self._wide.isdisjoint(c.request_id for c in chunks) else self._vocab_size
        staged, arrays = pack_params(rows, self._vocab_size, width)
        if staged.used > len(room):
            return StagedParamsLayout(num_rows, redo=frozenset(range(len(chunks))))
        if arrays:
            np.concatenate(arrays, out=room[: staged.used])
        return staged._replace(num_rows=num_rows, redo=frozenset(redo))

    def launch(self, logits: Tensor, params: Tensor, staged: StagedParamsLayout) -> Tensor:
        """Return the int32 answer on the device: first the tokens [R], each a valid id, even of rows that fail.

        `logits` [R, V] may have rows behind those that are staged, and are not modified; `params` is a copy of
        `room[:used]`. Waits for nothing and copies nothing from or to the host.
        """
        count = len(logits)
        values, best = logits.max(dim=-1)  # NaN propagates
        end = staged.num_answer_planes * count
        answer = torch.empty(end + staged.num_logprob_values, dtype=torch.int32, device=logits.device)
        tokens = answer[:count]
        tokens.copy_(best)
        answer[count : 2 * count].view(torch.float32).copy_(values)
        if staged.order != NOTHING:
            order = params[staged.order].long()
            chosen, flags = _choose(logits.index_select(0, order).float(), params, staged)
            tokens.index_copy_(0, order, chosen.int())
            answer[2 * count : 3 * count].zero_().index_copy_(0, order, flags)
        if staged.num_tops:
            own, tops, ids = _entry_parts(answer[end:], staged)
            for part in _slices(len(staged.num_tops)):
                asked = params[staged.asked][part]
                chosen = tokens.index_select(0, asked).long()
                found = compute_logprobs(logits.index_select(0, asked), chosen, staged.num_top)
                for to, values in zip((own.view(torch.float32), ids, tops.view(torch.float32)), found, strict=True):
                    to[part] = values
        return answer

    def finish_sampling(
        self, answer: npt.NDArray[np.int32], staged: StagedParamsLayout, chunks: Sequence[Chunk], logits: Tensor
    ) -> list[RowResult]:
        """Return the row of each chunk from the answer of `launch`. `logits` are read only for rows to sample again.

        The tokens of such rows, and those of chunks with drafts or grammars, may differ from the answer's. Histories
        may have grown since the step was staged, but no request of the step may have been dropped.
        """
        found, flags = self._found(answer, staged)
        redo = set(staged.redo)
        rows: list[RowResult] = []
        firsts: list[int] = []
        first = 0
        for at, chunk in enumerate(chunks):
            own = found[first : first + chunk.num_logits]
            if flags is not None and any(flags[first : first + chunk.num_logits]):
                redo.add(at)
                if _TOO_WIDE in flags[first : first + chunk.num_logits]:
                    self._wide.add(chunk.request_id)
            row = own[0] if len(own) == 1 else _accepted(chunk, own)
            if self._grammars is not None and chunk.sampling.grammar is not None and at not in redo:
                row = advance_row_grammar(self._grammars, chunk, row)
            rows.append(row)
            firsts.append(first)
            first += chunk.num_logits
        if redo:
            again = sorted(redo)
            at = [row for i in again for row in range(firsts[i], firsts[i] + chunks[i].num_logits)]
            some = logits.index_select(0, torch.tensor(at, device=logits.device))
            for i, row in zip(again, self.sampler.sample(some, [_as_staged(chunks[i]) for i in again]), strict=True):
                rows[i] = row
        return rows

    def _found(
        self, answer: npt.NDArray[np.int32], staged: StagedParamsLayout
    ) -> tuple[list[RowResult], list[int] | None]:
        """Return the row of each row of logits, and the flags if there are any."""
        end = len(answer) - staged.num_logprob_values
        planes = answer[:end].reshape(staged.num_answer_planes, -1)[:, : staged.num_rows]
        tokens = planes[0].tolist()
        found = [RowResult((token,)) for token in tokens]
        if staged.num_tops:
            own, tops, ids = _entry_parts(torch.from_numpy(answer[end:]), staged)
            entries = make_logprob_entries(
                [tokens[row] for row, _ in staged.num_tops],
                own.view(torch.float32).tolist(),
                ids.tolist(),
                tops.view(torch.float32).tolist(),
                [num for _, num in staged.num_tops],
            )
            for (row, _), entry in zip(staged.num_tops, entries, strict=True):
                found[row] = RowResult((entry.token_id,), (entry,))
        for row in np.flatnonzero(~np.isfinite(planes[1].view(np.float32))).tolist():
            found[row] = RowResult(error=NOT_FINITE)
        return found, planes[2].tolist() if len(planes) > 2 and planes[2].any() else None

    def _sampled_rows(self, chunks: Sequence[Chunk]) -> tuple[list[RowToSample], set[int]]:
        """Return the rows that need more than their best token, and the chunks that cannot be sampled here."""
        redo: set[int] = set()
        constrained = [at for at, chunk in enumerate(chunks) if chunk.sampling.grammar is not None]
        if self._grammars is not None and constrained:
            redo |= {at for at in constrained if chunks[at].num_logits > 1}
            constrained = [at for at in constrained if at not in redo]
            redo |= {constrained[at] for at in self._grammars.update_row_masks([chunks[at] for at in constrained])}
        rows: list[RowToSample] = []
        first = 0
        for at, chunk in enumerate(chunks):
            try:
                if at not in redo and self.sampler.needs_more_than_argmax(chunk):
                    rows += self._rows_of(chunk, first)
            except ValueError:  # an id that cannot be edited
                redo.add(at)
            first += chunk.num_logits
        return rows, redo

    def _rows_of(self, chunk: Chunk, first: int) -> list[RowToSample]:
        """Return the rows of one chunk: behind each draft as if the drafts before it had come one by one."""
        edits, s = self.sampler.edits, chunk.sampling
        rows: list[RowToSample] = []
        for ahead in range(chunk.num_logits):
            one, edited = chunk, edits.row_needs_edits(chunk)
            if edited and ahead:
                one = chunk._replace(history=chunk.history + VerifiedChunk(chunk, first).drafts[:ahead])
                edited = edits.row_needs_edits(one)
            uniform = None if is_greedy(s) else self.sampler.uniform(chunk, ahead)
            rows.append(RowToSample(first + ahead, s, edits.row_edits(one) if edited else None, uniform))
        return rows


def _accepted(chunk: Chunk, own: list[RowResult]) -> RowResult:
    """Return the rows of one chunk up to the first token that differs from its draft."""
    verified = VerifiedChunk(chunk, 0)
    for row in own:
        if not verified.add_sampled_row(row):
            break
    return verified.result()


def _as_staged(chunk: Chunk) -> Chunk:
    """Return a chunk whose history ends before the token to sample: it may have grown since the step began."""
    num_known = chunk.start + len(chunk.token_ids) + 1 - chunk.num_logits
    if len(chunk.history) < num_known:
        return chunk
    return chunk._replace(history=chunk.history[:num_known], from_previous=None)


def _choose(work: Tensor, params: Tensor, staged: StagedParamsLayout) -> tuple[Tensor, Tensor]:
    """Return the tokens and flags of the gathered rows [W, V] (float32), which are overwritten."""
    tokens = torch.zeros(len(work), dtype=torch.int64, device=work.device)
    flags = torch.zeros(len(work), dtype=torch.int32, device=work.device)
    if staged.num_edited:
        _edit(work, params, staged)
        values, best = work[: staged.num_edited].max(dim=-1)
        tokens[: staged.num_edited] = best
        flags[: staged.num_edited] = (values == -inf) * _NO_TOKEN
    if staged.num_drawn:
        first = len(work) - staged.num_drawn
        columns = params[staged.draws].view(6, -1, 1)
        for part in _slices(staged.num_drawn):
            at = slice(first + part.start, first + part.stop)
            tokens[at], too_wide = _draw(work[at], columns[:, part], staged.filters)
            if too_wide is not None:
                flags[at] |= too_wide * _TOO_WIDE
    return tokens, flags


def _edit(work: Tensor, params: Tensor, staged: StagedParamsLayout) -> None:
    """Do the same as LogitEdits.apply."""
    flat, width = work.view(-1), work.shape[-1]

    def listed(part: slice) -> tuple[Tensor, Tensor]:
        rows, ids, amounts = params[part].view(3, -1).unbind(0)
        return rows.long() * width + ids, amounts.view(torch.float32)

    if staged.repeated != NOTHING:
        at, factor = listed(staged.repeated)
        old = flat.index_select(0, at)
        new = torch.where(old > 0, old / factor, old * factor).clamp_(-_LARGEST, _LARGEST)
        flat.index_copy_(0, at, torch.where(old.isinf(), old, new))
    for part in staged.added:
        if part != NOTHING:
            at, amount = listed(part)
            flat.index_copy_(0, at, flat.index_select(0, at) + amount)
    if staged.masks != NOTHING:
        rows = work[staged.masked]
        words = params[staged.masks].view(len(rows), -1, 1)
        allowed = (words >> torch.arange(MASK_BITS, dtype=torch.int32, device=work.device)) & 1
        rows.masked_fill_(allowed.view(len(rows), -1)[:, :width] == 0, -inf)


def _draw(logits: Tensor, columns: Tensor, filters: NeededFilters) -> tuple[Tensor, Tensor | None]:
    """Do the same as draw.draw; return the tokens and, with top_p, whether a row's set is wider than was looked at.

    Overwrites `logits` [D, V]; `columns` [6, D, 1] are the parameters.
    """
    temperature, top_p, min_p = columns[:3].view(torch.float32).unbind(0)
    top_k, high, low = columns[3:].unbind(0)
    probs = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature).softmax(dim=-1)
    if filters.min_p:
        probs.masked_fill_(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
    best = probs.topk(filters.width, dim=-1).values if filters.width else probs
    if filters.top_k:
        floor = best.gather(1, (top_k.long() - 1).clamp_(min=0)).masked_fill_(top_k <= 0, 0)
        probs.masked_fill_(probs < floor, 0)
        best = best.masked_fill(best < floor, 0)
    too_wide = None
    if filters.top_p:
        needed = top_p
        if filters.rescaled:
            total = _cumsum(probs)[:, -1:]
            needed = top_p * total.masked_fill(top_k == 0, 1)
        at = (_cumsum(best) < needed).sum(dim=-1, keepdim=True)
        floor = best.gather(1, at.clamp(max=filters.width - 1)).masked_fill_(top_p >= 1, 0)
        probs.masked_fill_(probs < floor, 0)
        if filters.width < probs.shape[-1]:
            too_wide = ((at == filters.width) & (top_p < 1) & (best[:, -1:] > 0))[:, 0]
    cumulative = _cumsum(probs)
    total = cumulative[:, -1:].contiguous()
    share = (high.double() * 2.0**LOW_BITS + low.double()) * 2.0**-53
    token = torch.searchsorted(cumulative, (total.double() * share).to(total.dtype), right=True)
    token = torch.minimum(token, torch.searchsorted(cumulative, total))[:, 0]
    return token.clamp_(max=probs.shape[-1] - 1), too_wide  # beyond it if the row is not finite


def _cumsum(rows: Tensor) -> Tensor:
    """Return the cumulative sums of each row. A GPU adds up a row that is alone in another order, so none is."""
    return rows.cumsum(dim=-1) if len(rows) > 1 else rows.expand(2, -1).cumsum(dim=-1)[:1]


def _entry_parts(entries: Tensor, staged: StagedParamsLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of an answer behind its planes: [asked] of tokens, values and ids [asked, num_top]."""
    asked, top = len(staged.num_tops), staged.num_top
    own, tops, ids = entries.split([asked, asked * top, asked * top])
    return own, tops.view(asked, top), ids.view(asked, top)


def _slices(count: int) -> Iterator[slice]:
    """Yield slices of at most so many rows as may be in memory several times."""
    return (slice(at, min(at + _ROWS, count)) for at in range(0, count, _ROWS))
