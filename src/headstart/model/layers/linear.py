"""Linear: a matrix product with its norm, gate and residual. The weight is kept only in the fastest form available.

On a CPU, weights go to our kernels (kernels/chain.py), which do all of it in one call; in fp32 those that are quantised
or in blocks are unpacked before. Without the kernels, torch's operators run one after the other, with a bfloat16 weight
prepacked for oneDNN (`torch.ops.mkldnn`, a private API and therefore guarded) where that exists. The torch path is
slower, serves as the reference, and rounds to bfloat16 at the same places. The plain weight is dropped, so memory does
not double; only a tied embedding keeps its plain copy, for the lookup, if the packed form does not give its rows.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain
from headstart.model.kernels.library import KernelLibrary
from headstart.model.kernels.packed import PackedLinear, RotaryHeads
from headstart.model.layers.layer_ops import RMSNorm, concatenate_rows
from headstart.model.layers.quantise import can_quantise, quantise_weight
from headstart.model.weights.gguf.block_formats import PackedTensor, dequantise

BATCH_HINT = 16  # oneDNN packs for this many rows; measured to make no difference between 1 and 256
Weight = Tensor | PackedTensor
Embedding = Tensor | PackedLinear  # [vocab, hidden]


class WeightForm(NamedTuple):
    """The storage form of weights: packed for `kernels` or not, and the quantisation of those not in blocks already.

    int8: a scale per output. int4: blocks of Q4_1, with a scale and a minimum per 32 inputs of an output; int8 where
    the inputs are no whole blocks. `dtype` and `device` are those of rows, and of weights that are not quantised.
    `activation_bits`: see PackedLinear.
    """

    kernels: KernelLibrary | None = None
    quantization: str = "none"
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cpu")
    activation_bits: int = 16

    @property
    def keeps_quantised_blocks(self) -> bool:
        """Whether weights that a file stores in blocks stay so."""
        return self.kernels is not None and self.dtype == torch.bfloat16 and self.quantization == "none"

    @property
    def for_output_head(self) -> "WeightForm":
        """The form of the output head: int8 instead of int4, since its errors reach the logits directly."""
        return self._replace(quantization="int8") if self.quantization == "int4" else self


PLAIN = WeightForm()


class FusedLinear:
    """The product norm(x) @ W^T + b on rows [T, in_features], with an optional gate and residual. Immutable.

    `weight` may be several, whose rows follow each other. `gated`: W holds the gate rows, then the up rows, and y is
    silu(gate) * up. Owns the weights; do not reuse them.
    """

    __slots__ = (
        "_alone", "_onto", "_product", "bias", "gated", "norm", "out_features", "packed", "weight", "weight_bytes",
    )  # fmt: skip

    def __init__(
        self,
        weight: Weight | Sequence[Weight],
        bias: Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        form: WeightForm = PLAIN,
    ) -> None:
        parts = _parts([weight] if isinstance(weight, Tensor | PackedTensor) else weight, form, gated=gated)
        if form.kernels is not None and form.dtype == torch.float32:
            parts = [_unpacked(parts, form)]
        num_rows = sum(part.shape[0] for part in parts)
        self.out_features = num_rows // 2 if gated else num_rows
        self.norm, self.gated, self.bias = norm, gated, bias
        self.weight: Tensor | None = None  # the plain weight, if it is kept
        self.packed: tuple[PackedLinear, ...] = ()  # by our kernels; several if their formats differ
        self._product: Callable[[Tensor], Tensor] | None = None  # by torch
        if form.kernels is not None and all(_has_kernel(part, form) for part in parts):
            self.packed = _packed(form, parts, bias, norm, gated=gated)
            self.weight_bytes = sum(part.nbytes for part in self.packed)
            widths = (self.packed[0].in_features, self.out_features, self.out_features)
            self._alone = LinearChain(form.kernels, self.chain_links(0, 1), widths[:2])
            self._onto = LinearChain(form.kernels, self.chain_links(0, 1, residual=2), widths)
            return
        whole = concatenate_rows([_plain(part, form) for part in parts])
        if form.quantization != "none" and not any(isinstance(part, PackedTensor) for part in parts):
            self._product, self.weight_bytes = _int8_product(whole, bias)
            return
        self._product = _product(whole, bias)
        self.weight = None if can_pack_weight(whole) else whole
        self.weight_bytes = whole.nbytes + (0 if bias is None else bias.nbytes)

    def chain_links(
        self, source: int, target: int, *, residual: int | None = None, rotary: RotaryHeads | None = None
    ) -> list[ChainLink]:
        """Return the product as links of a chain, which rotates the heads after the last of them."""
        found: list[ChainLink] = []
        offset = 0
        for part in self.packed:
            found.append(ChainLink(part, source, target, residual, offset=offset))
            offset += part.out_features
        found[-1] = found[-1]._replace(rotary=rotary)
        return found

    @property
    def as_chain(self) -> LinearChain:
        """The product of packed weights alone, from buffer 0 to buffer 1."""
        return self._alone

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs [T, out_features] of rows [T, in_features]; `residual` has the shape of the outputs."""
        if self.packed:
            chain = self._alone if residual is None else self._onto
            buffers = ChainBuffers(len(rows), chain.widths, chain.dtype)
            buffers[0] = rows
            buffers.allocate(1)
            if residual is not None:
                buffers[2] = residual
            chain(buffers, chain.allocate_scratch(len(rows)))
            return buffers[1]
        assert self._product is not None
        out = self._product(rows if self.norm is None else self.norm(rows))
        if self.gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate).mul_(up)
        return out if residual is None else residual + out


def embedding_rows(embedding: Embedding, token_ids: Tensor) -> Tensor:
    """Return rows `token_ids` [T] of an embedding, [T, hidden]."""
    return (
        embedding.look_up_rows(token_ids) if isinstance(embedding, PackedLinear) else F.embedding(token_ids, embedding)
    )


def _parts(weights: Sequence[Weight], form: WeightForm, *, gated: bool) -> list[Weight]:
    """Return the weights as they are stored, adjacent ones of one format joined; a gated weight is in one part."""
    if form.quantization == "int4":
        weights = [
            quantise_weight(weight, form.kernels) if isinstance(weight, Tensor) and can_quantise(weight) else weight
            for weight in weights
        ]
    parts = [_joined(list(group)) for _, group in groupby(weights, _kind)]
    if gated and len(parts) > 1:
        return [concatenate_rows([_plain(part, form) for part in parts])]
    return parts


def _plain(weight: Weight, form: WeightForm) -> Tensor:
    """Return a weight outside blocks."""
    return dequantise(weight, form.dtype).to(form.device) if isinstance(weight, PackedTensor) else weight


def _kind(weight: Weight) -> str:
    return weight.kind if isinstance(weight, PackedTensor) else ""


def _joined(weights: list[Weight]) -> Weight:
    """Return several weights of one format as one, rows concatenated."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if plain:
        assert len(plain) == len(weights), "a group has one format"
        return concatenate_rows(plain)
    packed = [weight for weight in weights if isinstance(weight, PackedTensor)]
    if len(packed) == 1:
        return packed[0]
    first, rows = packed[0], sum(weight.shape[0] for weight in packed)
    data = np.concatenate([weight.data for weight in packed])
    return PackedTensor(first.name, first.kind, (rows, *first.shape[1:]), data)


def _has_kernel(weight: Weight, form: WeightForm) -> bool:
    if isinstance(weight, PackedTensor):
        return form.dtype == torch.bfloat16
    return weight.device.type == "cpu" and weight.dtype == form.dtype


def _unpacked(parts: Sequence[Weight], form: WeightForm) -> Tensor:
    """Return weights in fp32 as their quantisation rounds them: products in fp32 take no other form."""
    whole = concatenate_rows([_plain(part, form) for part in parts])
    if form.quantization == "none" or any(isinstance(part, PackedTensor) for part in parts):
        return whole
    rounded, scales = _rounded(whole)
    return rounded * scales[:, None]


def _packed(
    form: WeightForm, parts: Sequence[Weight], bias: Tensor | None, norm: RMSNorm | None, *, gated: bool
) -> tuple[PackedLinear, ...]:
    assert form.kernels is not None
    biases = [None] * len(parts) if bias is None else list(bias.split([part.shape[0] for part in parts]))
    inner = None if norm is None else norm.packed
    int8 = form.quantization != "none" and form.dtype == torch.bfloat16
    return tuple(
        PackedLinear(
            form.kernels,
            part,
            own,
            norm=inner,
            gated=gated,
            int8=int8 and not isinstance(part, PackedTensor),
            activation_bits=form.activation_bits,
        )
        for part, own in zip(parts, biases, strict=True)
    )


def can_pack_weight(weight: Tensor) -> bool:
    """Return whether oneDNN's packed form is available for this weight."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and bool(getattr(ops, "_is_mkldnn_bf16_supported", lambda: False)())
    )


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that computes x @ W^T + b with torch."""
    if not can_pack_weight(weight):
        return lambda rows: F.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _int8_product(weight: Tensor, bias: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the same with W rounded to int8 times a scale per output, and its bytes. Slow: each call widens W."""
    wide, scales = _rounded(weight)
    rounded = wide.to(torch.int8)
    offset = 0 if bias is None else bias.float()

    def product(rows: Tensor) -> Tensor:
        return (F.linear(rows.float(), rounded.float()) * scales + offset).to(rows.dtype)

    return product, rounded.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] as whole numbers up to 127, in fp32, and the scale of each output."""
    largest = weight.float().abs().amax(1)
    # One division, as in the kernel: `127 / largest` would be a reciprocal and a product.
    inverse = torch.where(largest > 0, torch.tensor(127.0).to(largest) / largest, 0)
    return (weight.float() * inverse[:, None]).round_(), largest / 127
