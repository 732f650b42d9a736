"""The forward pass of the compact decoder by Triton kernels, over a step whose array is on the device.

Every launch takes its work from that array and has a fixed grid, so a pass can be captured as a graph and replayed for
any step with as many tokens. Launches of a layer: 10 for decodes, 11 where they share prefixes, 10 or (if results are
merged) 11 where prompts are computed, 5 for a step of one token.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.cuda import triton_attention, triton_layers
from headstart.model.cuda.cuda_kv import CudaKV
from headstart.model.cuda.step_plan import StepArrayLayout, keys_per_partial_result
from headstart.model.cuda.triton_attention import (
    KV,
    LayerScoring,
    allocate_partial_results,
    max_partial_results,
    tile_shapes,
)
from headstart.model.cuda.triton_rotary import rotate_and_append_kv
from headstart.model.layers.decoder import Decoder, LayerWeights
from headstart.model.layers.linear import FusedLinear
from headstart.model.layers.rotary import inverse_frequencies_and_scale

DECODES, GROUPS, MIXED = "decodes", "groups", "mixed"  # kinds of pass: what it launches for attention
TILES = (4, 2048, 4)  # of products of one row: outputs and inputs at once, warps; measured on an H100
LARGE_TILES = (2, 2048, 8)  # the same where there are as many outputs as LARGE
LARGE = 12_288
MOST_LOGITS = 256  # rows whose logits have memory that all steps share
SINGLES = 32  # programs of a processor for decodes: those that have read their keys make room for others
MANY = 4  # programs of a processor from which on tiles of prompts have fewer warps


class PassResult(NamedTuple):
    """The results of a pass, on the device. Padding rows hold anything."""

    hidden: Tensor  # [T, hidden] behind the final norm
    logits: Tensor | None  # [n, V] of the selected rows
    answer: Tensor | None  # [2 n] int32: the best token of each row, then its logit, as bits: see DeviceSampler
    finite: Tensor | None  # [T] int32: whether the hidden states of a token are finite; None: the logits say it


class CudaDecoder:
    """The weights of a Decoder, and the launches that compute a step of it."""

    def __init__(self, decoder: Decoder, kv: CudaKV, *, max_positions: int, exact: bool) -> None:
        """`exact`: the bits of a row do not depend on the other rows of a step, nor on how it was cut into chunks."""
        config = decoder.config
        assert isinstance(decoder.embedding, Tensor)
        self.decoder, self.config, self.kv, self.exact = decoder, config, kv, exact
        self.embedding, self.device = decoder.embedding, kv.device
        self.on_gpu = self.device.type == "cuda"
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        self.processors = 2 if properties is None else properties.multi_processor_count
        shared = 0 if properties is None else properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]
        self.pdl = self.on_gpu and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._side = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.split = keys_per_partial_result(config.num_kv_heads)
        own = -(-max_positions // self.split)  # of the longest row
        self.max_parts = max(max_partial_results(config.num_heads, config.head_dim), own)
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._logits = torch.empty(MOST_LOGITS, config.vocab_size, dtype=kv.dtype, device=self.device)
        self.parts = allocate_partial_results(self.max_parts, *shape, self.device)
        frequencies, factor = inverse_frequencies_and_scale(config.rope)
        angles = torch.arange(max_positions)[:, None].float() * frequencies
        self.angles = (angles.cos() * factor).to(self.device), (angles.sin() * factor).to(self.device)
        self._norms = [_head_norms(layer) for layer in decoder.layers]
        self._scorings = [LayerScoring(config.head_dim**-0.5, layer.window) for layer in decoder.layers]
        single, many = tile_shapes(config.head_dim, kv.dtype, shared)
        # In exact mode all kinds have one form, so that a row has one order of sums.
        self.group_tile = many._replace(tile_rows=min(64, many.tile_rows), stages=single.stages)
        self.single = self.group_tile if exact else single
        # Of prompts: more warps where there are few tiles, fewer where there are many.
        few = many._replace(warps=max(4, many.tile_rows // 16))
        self.tile, self.tile_of_many = (self.group_tile, self.group_tile) if exact else (few, many)

    def run(self, meta: Tensor, sampled: Tensor, layout: StepArrayLayout, kind: str) -> PassResult:
        """Launch the step in `meta`; `sampled` are the tokens of the step before, for tokens not known yet.

        `layout.total` is 0 while a graph is captured: then the number of its items is not known.
        """
        if kind == DECODES and layout.rows == 1 and not self.exact:
            stream, logits = self._one(meta, sampled, layout)
            return PassResult(stream, logits, _best(logits), None)
        hidden = self._forward(meta, sampled, layout, kind)
        if kind != MIXED:
            logits = self._step_logits(hidden)
            return PassResult(hidden, logits, _best(logits), None)
        finite = torch.isfinite(hidden.sum(-1, dtype=torch.float32)).int()
        if layout.outputs == 0:
            return PassResult(hidden, None, None, finite)
        logits = self._step_logits(hidden.index_select(0, meta[layout.selected_offset :][: layout.outputs]))
        return PassResult(hidden, logits, _best(logits), finite)

    def logits_from_hidden(self, rows: Tensor) -> Tensor:
        """Return the logits [n, V] of normalised rows."""
        return self._product(rows, self.decoder.head)

    def _step_logits(self, rows: Tensor) -> Tensor:
        """Return the same in memory that all steps share: they would be most of what graphs hold."""
        return self._product(rows, self.decoder.head, self._logits[: len(rows)] if len(rows) <= MOST_LOGITS else None)

    def _product(self, rows: Tensor, linear: FusedLinear, out: Tensor | None = None) -> Tensor:
        weight, bias = linear.weight, linear.bias
        assert weight is not None
        if self.exact:
            return triton_layers.batch_invariant_matmul(rows, weight, bias, out=out)
        if out is None:
            return F.linear(rows, weight, bias)
        return torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)

    def _forward(self, meta: Tensor, sampled: Tensor, layout: StepArrayLayout, kind: str) -> Tensor:
        config, pdl, count = self.config, self.pdl, layout.rows
        eps = config.rms_norm_eps
        positions, slots = meta[layout.positions_offset :][:count], meta[layout.slots_offset :][:count]
        tokens, previous = meta[layout.tokens_offset :][:count], meta[layout.previous_rows_offset :][:count]
        stream = triton_layers.embed_tokens(tokens, previous, sampled, self.embedding, pdl=pdl)
        layers = self.decoder.layers
        rows = triton_layers.add_rms_norm(stream, _norm(layers[0].qkv), eps, pdl=pdl)
        following = [_norm(layer.qkv) for layer in layers[1:]] + [_norm(self.decoder.head)]
        out, queries = (rows.new_empty(count, config.num_heads, config.head_dim) for _ in range(2))
        for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
            qkv = self._product(rows, layer.qkv)
            kv = self.kv.layers[index]
            rotate_and_append_kv(
                qkv, queries, positions, slots, self.angles, self._norms[index], kv, eps, pdl=pdl
            )  # fmt: skip
            self.launch_attention(queries, kv, out, meta, layout, kind, self._scorings[index])
            delta = self._product(out.view(count, -1), layer.out)
            rows = triton_layers.add_rms_norm(stream, _norm(layer.gate_up), eps, delta, pdl=pdl)
            gated = triton_layers.silu_mul(self._product(rows, layer.gate_up), pdl=pdl)
            rows = triton_layers.add_rms_norm(stream, norm, eps, self._product(gated, layer.down), pdl=pdl)
        return rows

    def _one(self, meta: Tensor, sampled: Tensor, layout: StepArrayLayout) -> tuple[Tensor, Tensor]:
        """Return the stream [1, hidden] behind the last layer and the logits, for a step of one token."""
        config, pdl, eps = self.config, self.pdl, self.config.rms_norm_eps
        step = (meta[layout.positions_offset :], meta[layout.slots_offset :], meta[layout.singles_offset :])
        tokens, previous = meta[layout.tokens_offset :][:1], meta[layout.previous_rows_offset :][:1]
        stream = triton_layers.embed_tokens(tokens, previous, sampled, self.embedding, pdl=pdl)
        out = stream.new_empty(1, config.num_heads, config.head_dim)

        def product(row: Tensor, linear: FusedLinear, onto: Tensor | None = None) -> Tensor:
            weight = linear.weight
            assert weight is not None
            norm = None if linear.norm is None else (linear.norm.weight, eps)
            return triton_layers.matvec(
                row, weight, linear.bias, norm=norm, onto=onto, gated=linear.gated,
                tiles=LARGE_TILES if min(weight.shape) > 2048 and len(weight) >= LARGE else TILES, pdl=pdl,
            )  # fmt: skip

        for index, layer in enumerate(self.decoder.layers):
            triton_attention.launch_single_token_step(
                product(stream, layer.qkv), self.kv.layers[index], out, self.parts, meta, step, self.angles,
                self._norms[index], eps, self._scorings[index], self.single, programs=2 * self.processors, pdl=pdl,
            )  # fmt: skip
            product(out, layer.out, stream)
            product(product(stream, layer.gate_up), layer.down, stream)
        return stream, product(stream, self.decoder.head)

    def launch_attention(
        self,
        queries: Tensor,
        kv: KV,
        out: Tensor,
        meta: Tensor,
        layout: StepArrayLayout,
        kind: str,
        scoring: LayerScoring,
    ) -> None:
        """Fill `out` [T, Hq, D]. In a graph a launch without items ends at once."""
        positions, singles = meta[layout.positions_offset :], meta[layout.singles_offset :]
        common = (queries, kv, out, self.parts, meta, positions, singles, scoring)
        # Tiles and singles of decodes are short of work: they run side by side. Elsewhere one launch follows the other,
        # and may begin before the other has ended; such launches do not cross streams.
        side, main = (
            (self._side, torch.cuda.current_stream(self.device)) if kind == GROUPS and self._side else (None, None)
        )
        pdl = self.pdl and side is None
        split = self.split if self.exact else 0
        if kind != DECODES:
            shape, kvs = self.group_tile if kind == GROUPS else self.tile, kv[0].shape[1]
            # A graph's launch may find more items than programs: each takes several.
            programs = (2 if kind == MIXED else 1) * self.processors
            if layout.total:
                programs = max(1, layout.num_tiles * kvs)
            elif kind == MIXED:  # as if all tokens were of one prompt
                programs = max(programs, -(-layout.rows * out.shape[1] // (kvs * shape.tile_rows)) * kvs)
            if kind == MIXED and programs > MANY * self.processors:
                shape = self.tile_of_many
            if side is not None and main is not None:
                side.wait_stream(main)
            with nullcontext() if side is None else torch.cuda.stream(side):
                triton_attention.launch_attention(*common, shape, single=False, programs=programs, split=split, pdl=pdl)
        programs = SINGLES * self.processors
        triton_attention.launch_attention(*common, self.single, single=True, programs=programs, split=split, pdl=pdl)
        if side is not None and main is not None:
            main.wait_stream(side)
        if layout.merged:
            tokens, firsts = (
                meta[layout.merged_tokens_offset :][: layout.merged],
                meta[layout.first_part_indices_offset :],
            )
            triton_attention.merge_partial_results(self.parts, out, tokens, firsts, scoring.sinks, pdl=pdl)


def _norm(linear: FusedLinear) -> Tensor:
    assert linear.norm is not None
    return linear.norm.weight


def _head_norms(layer: LayerWeights) -> Tensor | None:
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return torch.stack((layer.query_norm.weight, layer.key_norm.weight))


def _best(logits: Tensor) -> Tensor:
    """Return what DeviceSampler answers where all rows take their best token."""
    values, ids = logits.max(-1)  # NaN propagates
    return torch.cat((ids.int(), values.float().view(torch.int32)))
