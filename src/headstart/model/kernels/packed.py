"""PackedLinear: a frozen weight in the kernels' form, bf16 or int8, and in the same call all that happens around it."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.model.kernels.load import Descriptor, Kernels, threads

TILE = 32  # outputs side by side in the packed form; see linear.cpp
SCRATCH_ALIGNED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS normalisation of the rows that go in: weight [K] in bf16."""

    weight: Tensor
    eps: float


class PackedLinear:
    """y = x @ W^T + b on rows [T, K] of bf16; perhaps normalised before, gated or added to a residual after.

    `gated`: W holds gates above ups, [2 * out, K], and y is silu(gate) * up. int8: one scale for each row of W.
    """

    __slots__ = ("_descriptor", "_kept", "_kernels", "in_features", "nbytes", "out_features")

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        int8: bool = False,
    ) -> None:
        check(weight, "weight", weight.shape, torch.bfloat16)
        num_rows, self.in_features = weight.shape
        if gated and num_rows % 2:
            raise ValueError(f"a gated weight has as many gates as ups, not {num_rows} rows together")
        self.out_features = num_rows // 2 if gated else num_rows
        width = TILE // 2 if gated else TILE
        tiles, pairs = -(-self.out_features // width), -(-self.in_features // 2)
        packed = _aligned((tiles, pairs, TILE, 2), torch.int8 if int8 else torch.bfloat16)
        scales = torch.empty(tiles, TILE) if int8 else None
        sizes = (tiles, self.out_features, self.in_features, int(gated), threads())
        if scales is not None:
            kernels.library.headstart_pack_int8(weight.data_ptr(), packed.data_ptr(), scales.data_ptr(), *sizes)
        else:
            kernels.library.headstart_pack_bf16(weight.data_ptr(), packed.data_ptr(), *sizes)
        biases = None if bias is None else _in_tiles(bias, tiles, gated=gated)
        if norm is not None:
            check(norm.weight, "norm", (self.in_features,), torch.bfloat16)
        self._kernels = kernels
        self._kept = (packed, scales, biases, norm)  # the descriptor holds only their addresses
        self._descriptor = Descriptor(
            weight=packed.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if biases is None else biases.data_ptr(),
            norm=None if norm is None else norm.weight.data_ptr(),
            eps=0.0 if norm is None else norm.eps,
            gated=int(gated),
            in_features=self.in_features,
            out_features=self.out_features,
        )
        self.nbytes = packed.nbytes + sum(tensor.nbytes for tensor in (scales, biases) if tensor is not None)

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Outputs [T, out_features] for rows [T, K], plus `residual` of the outputs' shape. Raises ValueError."""
        count = rows.shape[0]
        check(rows, "rows", (count, self.in_features), torch.bfloat16)
        shape = (count, self.out_features)
        if residual is not None:
            check(residual, "residual", shape, torch.bfloat16)
        out = torch.empty(shape, dtype=torch.bfloat16)
        scratch = torch.empty(count * (4 * (self.in_features + 1) + 4), dtype=torch.uint8)
        self._kernels.library.headstart_linear(
            ctypes.addressof(self._descriptor),
            rows.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            count,
            threads(),
        )
        return out


def check(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless a kernel may read `tensor` as dense memory of this shape."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"the kernel takes dense {dtype} {list(shape)} on the CPU"
        )


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Fresh memory; torch aligns it to 64 bytes, which the sources count on."""
    tensor = torch.empty(shape, dtype=dtype)
    assert tensor.data_ptr() % SCRATCH_ALIGNED == 0, tensor.data_ptr()
    return tensor


def _in_tiles(bias: Tensor, tiles: int, *, gated: bool) -> Tensor:
    """A bias [N] as fp32 [tiles, TILE], in the order in which the tiles hold the outputs."""
    parts = bias.float().chunk(2) if gated else [bias.float()]
    width = TILE // len(parts)
    laid = torch.zeros(tiles, len(parts), width)
    for index, part in enumerate(parts):
        padded = torch.zeros(tiles * width)
        padded[: len(part)] = part
        laid[:, index] = padded.view(tiles, width)
    return laid.view(tiles, TILE)
