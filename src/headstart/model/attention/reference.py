"""Attention in plain ATen: a gather of pages, two batched matmuls and a softmax. Tests compare other backends with it.

It is written for any device, but has run on CPUs only. Queries of one kv head are folded into the rows of its matmul,
so grouped heads read KV once. No full mask is built: decode rows mask their last page, and a prefill is computed in
tiles of queries. On CPU this is faster than the fused flash operator (bf16, 12 heads of 64, no gather: prefill of 1000
tokens 13 against 22 ms, 48 decodes at 1040 tokens 4 against 8 ms).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.model.attention.attention_plan import (
    AttentionPlan,
    DecodeBucket,
    PrefillChunkReads,
    plan_attention_reads,
)
from headstart.model.paged_kv import PagedKV, TokenKVShape
from headstart.model.step_inputs import StepInputs

TILE_SCORES = 2 << 20  # maximum number of scores in memory at a time in a prefill
MIN_TILE = 16  # query rows
MAX_TILE = 128  # fewer scores above the diagonal: attention of 4 x 512 tokens 24 ms, with tiles of 341 rows 35 ms


class ScoreParams(NamedTuple):
    """Parameters of the attention scores and their softmax; see Attend."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [Hkv, G] in fp32


class ReferenceAttention:
    """The reference attention backend, which owns the KV of one model; see `AttentionBackend`."""

    def __init__(
        self, shape: TokenKVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv = PagedKV(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self._scratch = torch.empty(0, dtype=dtype, device=device)  # reused: new memory costs more than the copy
        # Added to the scores: an addition is much cheaper than a masked fill.
        self.above_diagonal = torch.full((MAX_TILE, MAX_TILE), float("-inf"), dtype=dtype, device=device).triu_(1)

    def begin_step(self, step: StepInputs) -> "ReferenceAttentionStep":
        return ReferenceAttentionStep(self, step)

    def gather(self, layer: int, pages: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of `pages`, [Hkv * batch, S, D] each; valid until the next gather."""
        shape, block_size = self.kv.shape, self.kv.block_size
        width = block_size * shape.head_dim
        if self._scratch.numel() < pages.numel() * width:
            self._scratch = self._scratch.new_empty(pages.numel() * width)
        gathered = self._scratch[: pages.numel() * width].view(-1, width)
        torch.index_select(self.kv.layers[layer].view(-1, width), 0, pages, out=gathered)
        keys, values = gathered.view(2, shape.num_kv_heads * batch, -1, shape.head_dim).unbind(0)
        return keys, values


class ReferenceAttentionStep:
    """The attention of one step. The plan for a window is made when a layer first uses that window."""

    def __init__(self, backend: ReferenceAttention, step: StepInputs) -> None:
        self._backend, self._step = backend, step
        self._plans: dict[int | None, AttentionPlan] = {}

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads = self._backend.kv.shape.num_kv_heads
        scoring = ScoreParams(scale, softcap, None if sinks is None else sinks.float().view(heads, -1))
        self._backend.kv.write_layer(layer, keys, values, self._step.writes)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = plan_attention_reads(self._step, self._backend.kv, window)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if plan.tokens is not None:
            out[plan.tokens] = self._decode(layer, queries[plan.tokens], plan, scoring)
        for prefill in plan.prefills:
            rows = slice(prefill.begin, prefill.end)
            self._prefill(layer, queries[rows], out[rows], prefill, window, scoring)
        return out

    def _decode(self, layer: int, queries: Tensor, plan: AttentionPlan, scoring: ScoreParams) -> Tensor:
        """Return the outputs [Rd, Hq, D] of queries [Rd, Hq, D], both in the order of the plan."""
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = self._backend.kv.shape.num_kv_heads
        folded = queries.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, Rd, G, D]
        grouped = bool(plan.groups)
        parts = [self._bucket(layer, folded[:, b.begin : b.end], b, scoring, grouped) for b in plan.buckets]
        out = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts], dim=1)
        if grouped:
            own = torch.cat([part[1] for part in parts if part[1] is not None], dim=1)
            for group in plan.groups:
                rows = folded[:, group.rows].reshape(num_kv_heads, -1, head_dim)
                keys, values = self._backend.gather(layer, group.pages, 1)
                scores = _scores(rows, keys, scoring)
                lse = torch.logsumexp(scores.float(), -1, keepdim=True)
                shape = (num_kv_heads, len(group.rows), -1)
                prefix = _weighted(scores, values).view(*shape, head_dim)
                weight = torch.sigmoid(own[:, group.rows] - lse.view(*shape, 1))
                out[:, group.rows] = torch.lerp(prefix.float(), out[:, group.rows].float(), weight).to(out.dtype)
        return out.transpose(0, 1).reshape(num_rows, num_heads, head_dim)

    def _bucket(
        self, layer: int, folded: Tensor, bucket: DecodeBucket, scoring: ScoreParams, want_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of folded queries [Hkv, rows, G, D] and their log-sum-exp [Hkv, rows, G, 1] in fp32.

        The outputs have the shape of the queries. Sinks are added here, in the unshared part of each row, so that they
        count once.
        """
        heads, rows, group, head_dim = folded.shape
        keys, values = self._backend.gather(layer, bucket.pages, rows)
        scores = _scores(folded.reshape(heads * rows, group, head_dim), keys, scoring)
        if bucket.masked is not None:
            scores.view(heads, rows, group, -1).masked_fill_(bucket.masked, float("-inf"))
        out = _weighted(scores, values).view(heads, rows, group, head_dim)
        if not want_lse and scoring.sinks is None:
            return out, None
        lse = torch.logsumexp(scores.float(), -1).view(heads, rows, group, 1)
        if scoring.sinks is None:
            return out, lse
        sinks = scoring.sinks.view(heads, 1, group, 1)
        return _with_sinks(out, lse, sinks), torch.logaddexp(lse, sinks)

    def _prefill(
        self,
        layer: int,
        queries: Tensor,
        out: Tensor,
        prefill: PrefillChunkReads,
        window: int | None,
        scoring: ScoreParams,
    ) -> None:
        """Fill `out` [n, Hq, D] for one chunk, one tile of queries at a time."""
        num_rows, num_heads, head_dim = queries.shape
        heads = self._backend.kv.shape.num_kv_heads
        group = num_heads // heads
        keys, values = self._backend.gather(layer, prefill.pages, 1)
        folded = queries.view(num_rows, heads, group, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        folded_out = out.view(num_rows, heads, group, head_dim).permute(1, 2, 0, 3)
        span = prefill.start + num_rows - prefill.first_key if window is None else window + MIN_TILE
        tile = max(MIN_TILE, min(MAX_TILE, TILE_SCORES // (num_heads * span)))
        for begin in range(0, num_rows, tile):
            end = min(begin + tile, num_rows)
            first = prefill.start + begin - prefill.first_key  # index of the tile's first own key
            low = 0 if window is None else max(0, first - window + 1)
            high = first + end - begin
            rows = folded[:, :, begin:end].reshape(heads, -1, head_dim)
            scores = _scores(rows, keys[:, low:high], scoring)
            self._mask_tile(scores.view(heads * group, end - begin, high - low), window)
            weighted = _weighted(scores, values[:, low:high]).view(heads, group, end - begin, head_dim)
            if scoring.sinks is not None:
                lse = torch.logsumexp(scores.float(), -1).view(heads, group, end - begin, 1)
                weighted = _with_sinks(weighted, lse, scoring.sinks.view(heads, group, 1, 1))
            folded_out[:, :, begin:end] = weighted

    def _mask_tile(self, scores: Tensor, window: int | None) -> None:
        """Mask, in row i of `scores` [B, m, S], the keys after its own key S - m + i and the keys before its window."""
        rows, keys = scores.shape[-2:]
        scores[..., keys - rows :] += self._backend.above_diagonal[:rows, :rows]
        if window is not None and keys > window:
            own = torch.arange(keys - rows, keys, device=scores.device)[:, None]
            gone = torch.arange(keys, device=scores.device) <= own - window
            scores.masked_fill_(gone, float("-inf"))


def _scores(queries: Tensor, keys: Tensor, scoring: ScoreParams) -> Tensor:
    """Return the scaled scores [B, M, S] of queries [B, M, D] and keys [B, S, D]."""
    scores = torch.baddbmm(queries.new_empty(1, 1, 1), queries, keys.transpose(1, 2), beta=0, alpha=scoring.scale)
    return scores if scoring.softcap is None else torch.tanh_(scores.div_(scoring.softcap)).mul_(scoring.softcap)


def _weighted(scores: Tensor, values: Tensor) -> Tensor:
    """Weight the values [B, S, D] by the softmax of scores [B, M, S], which is computed in fp32 inside."""
    return torch.bmm(torch.softmax(scores, -1), values)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale `out` as if the softmax had one more score, without a value; `lse` is that of the other scores."""
    return (out.float() * torch.sigmoid(lse - sinks)).to(out.dtype)
