"""Staged: the sampling parameters of a step as one int32 array, which is copied to the device with the step.

Numbers of other types are stored by their bits. Arrays are ordered so that each stage of the sampling is a slice.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headstart.core.request import SamplingParams
from headstart.model.sampling.logit_edits import RowEdits

LOW_BITS = 27  # of the 53 bits of a random number, which is stored as two integers
NOTHING = slice(0, 0)


class NeededFilters(NamedTuple):
    """The filters that any drawn row of a step needs."""

    min_p: bool
    top_k: int  # the largest
    top_p: bool
    rescaled: bool  # a row with top_p has other filters before it
    width: int  # number of best probabilities to take, for top_k and top_p


class StagedParamsLayout(NamedTuple):
    """Where the parameters of a step are in `room[:used]`, and what its rows need."""

    num_rows: int  # of logits
    used: int = 0
    redo: frozenset[int] = frozenset()  # indexes of chunks that are sampled on the host
    order: slice = NOTHING  # rows of the logits: edited ones, then drawn ones; those that are both are between
    num_edited: int = 0
    num_drawn: int = 0
    repeated: slice = NOTHING  # rows, ids and factors
    added: tuple[slice, ...] = ()  # rows, ids and amounts of penalties, biases and bans
    masked: slice = NOTHING  # of the gathered rows
    masks: slice = NOTHING
    draws: slice = NOTHING  # [6, drawn rows]
    filters: NeededFilters = NeededFilters(False, 0, False, False, 0)
    asked: slice = NOTHING  # rows of the logits
    num_tops: tuple[tuple[int, int], ...] = ()  # (row, number of alternatives) of rows with log-probabilities
    num_top: int = 0  # the greatest number, V at most

    @property
    def num_answer_planes(self) -> int:
        """Of the answer [planes, R]: tokens, best logits and, if rows are gathered, flags."""
        return 2 if self.order == NOTHING else 3

    @property
    def num_logprob_values(self) -> int:
        """Numbers behind the planes: log-probabilities of tokens and alternatives, ids of alternatives."""
        return len(self.num_tops) * (1 + 2 * self.num_top)

    @property
    def needs_logits_kept(self) -> bool:
        """Whether `DeviceSampler.finish_sampling` may read the logits, which must not change until then."""
        return bool(self.redo) or self.num_edited > 0 or self.filters.top_p


class RowToSample(NamedTuple):
    """One row of the logits that needs more than its best token."""

    row: int
    sampling: SamplingParams
    edits: RowEdits | None
    uniform: float | None  # None: the best token is taken


def pack_params(
    rows: list[RowToSample], vocab_size: int, width: int
) -> tuple[StagedParamsLayout, list[npt.NDArray[np.int32]]]:
    """Return where the parameters of these rows are, and the parameters. `width` is that of top_p sets.

    Of the result `num_rows` and `redo` are left to the caller.
    """
    parts = _Parts()
    asked = {row.row: row.sampling.logprobs for row in rows if row.sampling.logprobs is not None}
    gathered = sorted((row for row in rows if row.edits is not None or row.uniform is not None), key=_place)
    order = parts.add(np.array([row.row for row in gathered], np.int32)) if gathered else NOTHING
    edits = [row.edits for row in gathered if row.edits is not None]
    masks = [(at, e.allowed) for at, e in enumerate(edits) if e.allowed is not None]
    drawn = [row for row in gathered if row.uniform is not None]
    params = [row.sampling for row in drawn]
    top_ks = [_top_k(s, vocab_size) for s in params]
    filters = NeededFilters(
        min_p=any(s.min_p > 0 for s in params),
        top_k=max([0, *top_ks]),
        top_p=any(s.top_p < 1 for s in params),
        rescaled=any(s.top_p < 1 and top_k for s, top_k in zip(params, top_ks, strict=True)),
        width=0,
    )
    filters = filters._replace(width=min(max(filters.top_k, width if filters.top_p else 0), vocab_size))
    high_low = [divmod(int(row.uniform * 2**53), 2**LOW_BITS) for row in drawn if row.uniform is not None]
    floats = np.array([(s.temperature, s.top_p, s.min_p) for s in params], np.float32).T.ravel()
    ints = np.array([(k, *pair) for k, pair in zip(top_ks, high_low, strict=True)], np.int32).T.ravel()
    staged = StagedParamsLayout(
        num_rows=0,
        order=order,
        num_edited=len(edits),
        num_drawn=len(drawn),
        repeated=parts.add_edits([(e.repeated, np.full(len(e.repeated), e.repetition, np.float32)) for e in edits]),
        added=(
            parts.add_edits([(e.penalised, -e.penalties) for e in edits]),
            parts.add_edits([(e.biased, e.biases) for e in edits]),
            parts.add_edits([(e.banned, np.full(len(e.banned), -np.inf, np.float32)) for e in edits]),
        ),
        masked=slice(masks[0][0], masks[-1][0] + 1) if masks else NOTHING,
        masks=parts.add(*(mask for _, mask in masks)) if masks else NOTHING,
        draws=parts.add(floats, ints) if drawn else NOTHING,
        filters=filters,
        asked=parts.add(np.array(list(asked), np.int32)) if asked else NOTHING,
        num_tops=tuple(asked.items()),
        num_top=min(max(asked.values(), default=0), vocab_size),
        used=parts.used,
    )
    return staged, parts.arrays


def _place(row: RowToSample) -> tuple[bool, bool, bool]:
    """Return the sort key that puts edited rows first, drawn rows last, and rows with a mask side by side."""
    masked = row.edits is not None and row.edits.allowed is not None
    drawn = row.uniform is not None
    return drawn, masked != drawn, row.edits is None


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    """Return top_k, or -1 if it keeps all tokens but there is a filter before top_p, or 0."""
    if 0 < sampling.top_k < vocab_size:
        return sampling.top_k
    return -1 if sampling.top_k > 0 or sampling.min_p > 0 else 0


class _Parts:
    """Arrays of 4-byte numbers that are put one behind the other."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[np.int32]] = []
        self.used = 0

    def add(self, *arrays: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> slice:
        begin = self.used
        self.arrays += [array.view(np.int32) for array in arrays]
        self.used += sum(len(array) for array in arrays)
        return slice(begin, self.used)

    def add_edits(self, edits: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]) -> slice:
        """Add the rows, ids and amounts of edits, given row by row."""
        if not any(len(ids) for ids, _ in edits):
            return NOTHING
        rows = np.repeat(np.arange(len(edits), dtype=np.int32), [len(ids) for ids, _ in edits])
        ids = np.concatenate([ids for ids, _ in edits]).astype(np.int32)
        return self.add(rows, ids, np.concatenate([amounts for _, amounts in edits]))
