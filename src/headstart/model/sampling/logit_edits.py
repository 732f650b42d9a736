"""Edits of single logits: repetition, frequency and presence penalty, logit_bias, min_tokens, the mask of a grammar.

All edits but the mask are sparse, so their cost depends on the number of tokens in the request, not on the vocabulary.
Ids are checked on the host, row by row, before any write: on a GPU an invalid index would end the whole process. A
finite logit stays finite with any parameters: a result of the repetition penalty that is too large for float32 becomes
the largest float32 of its sign, and penalties and biases are too small to overflow (the largest float32 plus 1e31
rounds to itself).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.core.batch import Chunk

Ids = npt.NDArray[np.int64]
Amounts = npt.NDArray[np.float32]
Mask = npt.NDArray[np.int32]  # bit i % 32 of word i // 32 is set: token i is allowed
_FLOAT32 = torch.finfo(torch.float32)


class RowEdits(NamedTuple):
    """Edits of one row, applied in this order. Ids are in bounds and unique per list; arrays are contiguous."""

    repeated: Ids  # first divided (if below zero, multiplied) by `repetition`
    repetition: float
    penalised: Ids  # then lowered by `penalties`
    penalties: Amounts
    biased: Ids  # then raised by `biases`
    biases: Amounts
    banned: Ids  # then set to -inf, unless no other token is left
    allowed: Mask | None = None  # of a grammar: all other tokens are set to -inf


class LogitEdits:
    """Logit edits of many rows at once. Caches the distinct prompt tokens of requests with a repetition penalty."""

    def __init__(self, vocab_size: int, allowed: Callable[[Chunk], Mask | None] | None = None) -> None:
        """`allowed` returns the mask of a row that has a grammar, in this step."""
        self.vocab_size = vocab_size
        self._allowed = allowed
        self._prompt_ids: dict[str, Ids] = {}

    def row_needs_edits(self, chunk: Chunk) -> bool:
        """Return whether this row needs any edit. Changes nothing."""
        s = chunk.sampling
        penalised = s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
        return penalised or bool(s.logit_bias) or num_output_tokens(chunk) < s.min_tokens or s.grammar is not None

    def apply(self, logits: Tensor, chunks: Mapping[int, Chunk]) -> dict[int, str]:
        """Edit `logits` [R, V] (float32) in place at the rows in `chunks`; return the errors of rows not edited."""
        errors: dict[int, str] = {}
        edits: dict[int, RowEdits] = {}
        for row, chunk in chunks.items():
            try:
                edits[row] = self.row_edits(chunk)
            except ValueError as error:
                errors[row] = str(error)
        repeated = {row: (e.repeated, np.full(len(e.repeated), e.repetition, np.float32)) for row, e in edits.items()}
        for where, factor in _flat(repeated, logits):
            old = logits[where]
            new = torch.where(old > 0, old / factor, old * factor).clamp_(-_FLOAT32.max, _FLOAT32.max)
            logits[where] = torch.where(old.isinf(), old, new)  # an infinite logit of the model stays as it is
        for where, amount in _flat({row: (e.penalised, -e.penalties) for row, e in edits.items()}, logits):
            logits.index_put_(where, amount, accumulate=True)
        for where, amount in _flat({row: (e.biased, e.biases) for row, e in edits.items()}, logits):
            logits.index_put_(where, amount, accumulate=True)
        banned = {row: (e.banned, np.full(len(e.banned), -np.inf, np.float32)) for row, e in edits.items()}
        for where, amount in _flat(banned, logits):
            logits[where] = amount
        for row, e in edits.items():
            if e.allowed is not None:
                logits[row].masked_fill_(_forbidden(e.allowed, self.vocab_size).to(logits.device), -np.inf)
        return errors

    def row_edits(self, chunk: Chunk) -> RowEdits:
        """Return the edits of one row. Raises ValueError for an id outside the vocabulary."""
        s = chunk.sampling
        outputs, counts = np.unique(np.asarray(chunk.history[chunk.num_prompt_tokens :]), return_counts=True)
        repeated = _union(self._prompt(chunk), outputs) if s.repetition_penalty != 1 else outputs[:0]
        penalised = outputs if s.frequency_penalty != 0 or s.presence_penalty != 0 else outputs[:0]
        penalties = s.frequency_penalty * counts[: len(penalised)] + s.presence_penalty
        bias = dict(s.logit_bias)
        # A stop id beyond the vocabulary (some tokenizers have them) is never chosen, so it needs no ban.
        unfinished = num_output_tokens(chunk) < s.min_tokens
        banned = [i for i in s.stop_token_ids if unfinished and 0 <= i < self.vocab_size]
        edits = RowEdits(
            repeated.astype(np.int64),
            min(max(s.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max),  # 0 or inf after rounding would give NaN
            penalised.astype(np.int64),
            penalties.astype(np.float32),
            np.array(list(bias), np.int64),
            np.array(list(bias.values()), np.float32),
            np.array(banned, np.int64),
            None if self._allowed is None else self._allowed(chunk),
        )
        self._check("a token of the request", edits.repeated)
        self._check("a token of the request", edits.penalised)
        self._check("logit_bias", edits.biased)
        return edits

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the state of these requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._prompt_ids.pop(request_id, None)

    def _check(self, what: str, ids: Ids) -> None:
        for bad in ids[(ids < 0) | (ids >= self.vocab_size)][:1]:
            raise ValueError(f"{what} has id {bad}, but the model has ids 0 to {self.vocab_size - 1}")

    def _prompt(self, chunk: Chunk) -> Ids:
        known = self._prompt_ids.get(chunk.request_id)
        if known is None:
            known = np.unique(np.asarray(chunk.history[: chunk.num_prompt_tokens])).astype(np.int64)
            self._prompt_ids[chunk.request_id] = known
        return known


def num_output_tokens(chunk: Chunk) -> int:
    """Return the number of tokens generated so far, which is the index of the next one."""
    return len(chunk.history) + (chunk.from_previous is not None) - chunk.num_prompt_tokens


def first_allowed_token(allowed: Mask) -> int:
    """Return the first token that a mask allows; 0 if there is none."""
    return int(np.unpackbits(allowed.view(np.uint8), bitorder="little").argmax())


def _union(first: Ids, second: Ids) -> Ids:
    """Return the ids of two sorted lists without duplicates. np.union1d hashes, which takes ten times as long."""
    merged = np.sort(np.concatenate((first, second)), kind="stable")
    return merged[np.append(True, merged[1:] != merged[:-1])[: len(merged)]]


def _forbidden(allowed: Mask, vocab_size: int) -> Tensor:
    """Return a mask as bool [V], true where a token is not allowed."""
    bits = np.unpackbits(allowed.view(np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits == 0)


def _flat(per_row: Mapping[int, tuple[Ids, Amounts]], like: Tensor) -> Iterable[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Yield one ((rows, ids), amounts) for all rows, on the device of `like`; yield nothing if there are no ids."""
    if not any(len(ids) for ids, _ in per_row.values()):
        return
    rows = np.concatenate([np.full(len(ids), row, np.int64) for row, (ids, _) in per_row.items()])
    columns = np.concatenate([ids for ids, _ in per_row.values()])
    amounts = np.concatenate([amounts for _, amounts in per_row.values()])
    to = like.device
    yield (torch.from_numpy(rows).to(to), torch.from_numpy(columns).to(to)), torch.from_numpy(amounts).to(to)
