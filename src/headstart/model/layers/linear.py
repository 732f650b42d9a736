"""Linear: a matrix product with its norm, gate and residual. The weight is kept only in the fastest form available.

On a CPU, bfloat16 weights go to our kernels (kernels/chain.py), which do all of it in one call. Without the kernels,
torch's operators run one after the other, with the weight prepacked for oneDNN (`torch.ops.mkldnn`, a private API and
therefore guarded) where that exists. The torch path is slower, serves as the reference, and rounds to bfloat16 at the
same places. The plain weight is dropped, so memory does not double; only a tied embedding keeps its plain copy, for
the lookup.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.kernels.chain import Buffers, Chain, Link
from headstart.model.kernels.library import Kernels
from headstart.model.kernels.packed import PackedLinear
from headstart.model.layers.layer_ops import RMSNorm

BATCH_HINT = 16  # oneDNN packs for this many rows; measured to make no difference between 1 and 256


class Form(NamedTuple):
    """The storage form of weights: packed for `kernels` or not; in int8 with a scale per output, or in their dtype."""

    kernels: Kernels | None = None
    int8: bool = False


PLAIN = Form()


class Linear:
    """The product norm(x) @ W^T + b on rows [T, in_features], with an optional gate and residual. Immutable.

    `gated`: W holds the gate rows, then the up rows, and y is silu(gate) * up. Owns the weight; do not reuse it.
    """

    __slots__ = ("_alone", "_onto", "_product", "gated", "norm", "out_features", "packed", "weight", "weight_bytes")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        form: Form = PLAIN,
    ) -> None:
        self.out_features = weight.shape[0] // 2 if gated else weight.shape[0]
        self.norm, self.gated = norm, gated
        self.weight: Tensor | None = None  # the plain weight, if it is kept
        self.packed: PackedLinear | None = None  # by our kernels
        self._product: Callable[[Tensor], Tensor] | None = None  # by torch
        if form.kernels is not None and weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            inner = None if norm is None else norm.packed
            self.packed = PackedLinear(form.kernels, weight, bias, norm=inner, gated=gated, int8=form.int8)
            self.weight_bytes = self.packed.nbytes
            widths = (self.packed.in_features, self.out_features, self.out_features)
            self._alone = Chain(form.kernels, [Link(self.packed, 0, 1)], widths[:2])
            self._onto = Chain(form.kernels, [Link(self.packed, 0, 1, residual=2)], widths)
            return
        if form.int8:
            self._product, self.weight_bytes = _int8_product(weight, bias)
            return
        self._product = _product(weight, bias)
        self.weight = None if can_pack(weight) else weight
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the outputs [T, out_features] of rows [T, in_features]; `residual` has the shape of the outputs."""
        if self.packed is not None:
            chain = self._alone if residual is None else self._onto
            buffers = Buffers(len(rows), chain.widths)
            buffers[0] = rows
            buffers.fill(1)
            if residual is not None:
                buffers[2] = residual
            chain(buffers, chain.scratch(len(rows)))
            return buffers[1]
        assert self._product is not None
        out = self._product(rows if self.norm is None else self.norm(rows))
        if self.gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate).mul_(up)
        return out if residual is None else residual + out


def can_pack(weight: Tensor) -> bool:
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
    if not can_pack(weight):
        return lambda rows: F.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _int8_product(weight: Tensor, bias: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the same with W rounded to int8 times a scale per output, and its bytes. Slow: each call widens W."""
    largest = weight.float().abs().amax(1)
    # One division, as in the kernel: `127 / largest` would be a reciprocal and a product.
    scales, inverse = largest / 127, torch.where(largest > 0, torch.tensor(127.0).to(largest) / largest, 0)
    rounded = (weight.float() * inverse[:, None]).round_().to(torch.int8)
    offset = 0 if bias is None else bias.float()

    def product(rows: Tensor) -> Tensor:
        return (F.linear(rows.float(), rounded.float()) * scales + offset).to(rows.dtype)

    return product, rounded.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)
