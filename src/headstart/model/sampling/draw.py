"""The draw of one token per row: temperature, min_p, top_k, top_p, then the inverse of the cumulative distribution.

A filter cuts at a value and also keeps ties with the last kept value. The result therefore does not depend on the
order in which a sort leaves equal values, nor on how many values were sorted because of other rows. Sums that affect
the result are cumulative sums along one row, which do not depend on the number of rows (a plain sum of a single row
may be split among threads).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.core.request import SamplingParams

_NUCLEUS_WIDTHS = (128, 4096)  # the top_p set of a real model nearly always fits the first; the last resort is a sort


def draw_tokens(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> Tensor:
    """Draw token ids [R] from float32 logits [R, V], which are overwritten, with one number in [0, 1) per row."""
    probs = unnormalised_filtered_probabilities(logits, params)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    share = torch.tensor(uniform, dtype=torch.float64).to(logits.device)
    target = (total[:, 0].double() * share).to(total.dtype)[:, None]
    token = torch.searchsorted(cumulative, target, right=True)  # never a token of probability 0
    # Rounding can raise the target to the total; then the last token with a probability above 0 is correct.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(token, last)[:, 0]


def unnormalised_filtered_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities [R, V] after temperature, with excluded tokens at 0; they are not normalised again.

    Overwrites `logits`. Temperatures must be above 0.
    """
    # The best logit becomes 0 first, so that no temperature can change it (or make it overflow).
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(_column([p.temperature for p in params], logits))
    probs = logits.softmax(dim=-1)
    vocab_size = probs.shape[-1]
    if any(p.min_p > 0 for p in params):
        least = _column([p.min_p for p in params], probs) * probs.amax(dim=-1, keepdim=True)
        probs.masked_fill_(probs < least, 0)
    if rows := [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        _cut(probs, rows, _top_k_floor(select_rows(probs, rows), [params[i].top_k for i in rows]))
    if rows := [i for i, p in enumerate(params) if p.top_p < 1]:
        _cut(probs, rows, _top_p_floor(select_rows(probs, rows), [params[i] for i in rows]))
    return probs


def select_rows(matrix: Tensor, rows: list[int]) -> Tensor:
    """Return these rows, given in ascending order: `matrix` itself if they are all rows, else a copy."""
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, torch.tensor(rows, device=matrix.device))


def _column(values: list[float], like: Tensor) -> Tensor:
    """Return `values` as [R, 1] with the dtype and device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _cut(probs: Tensor, rows: list[int], floor: Tensor) -> None:
    """Set to zero the values below their row's `floor` [len(rows), 1]. Other rows do not change."""
    floors = torch.zeros_like(probs[:, :1])
    floors[rows] = floor
    probs.masked_fill_(probs < floors, 0)


def _top_k_floor(probs: Tensor, top_k: list[int]) -> Tensor:
    """Return the k-th largest value of each row, [R, 1]."""
    best = probs.topk(max(top_k), dim=-1).values
    return best.gather(1, torch.tensor([[k - 1] for k in top_k], device=probs.device))


def _top_p_floor(probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the smallest value of each row that is in its top_p set, after the other filters, [R, 1]."""
    needed = _column([p.top_p for p in params], probs)
    # The total may only depend on the row itself: 1 for an unfiltered row, the exact sum for a filtered row.
    if cut := [i for i, p in enumerate(params) if p.min_p > 0 or p.top_k > 0]:
        needed[cut] *= select_rows(probs, cut).cumsum(dim=-1)[:, -1:]
    floor = torch.zeros_like(needed)
    open_rows = torch.arange(len(params), device=probs.device)
    for width in (*_NUCLEUS_WIDTHS, probs.shape[-1]):
        width = min(width, probs.shape[-1])
        best = probs.topk(width, dim=-1).values
        at = (best.cumsum(dim=-1) < needed[open_rows]).sum(dim=-1, keepdim=True)
        floor[open_rows] = best.gather(1, at.clamp(max=width - 1))
        too_wide = at[:, 0] == width
        if width == probs.shape[-1] or not too_wide.any():
            break
        probs, open_rows = probs[too_wide], open_rows[too_wide]
    return floor
