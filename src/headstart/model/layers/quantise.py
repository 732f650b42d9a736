"""Rounding of weights to 4 bits at load: blocks of Q4_1, an fp16 scale and minimum for each 32 inputs of an output.

The kernel (kernels/quantise.cpp) does the same for bf16; this is torch, for fp32 and for machines without kernels.
"""

import numpy as np
import torch
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, num_kernel_threads
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor

KIND = "Q4_1"
BLOCK = FORMATS[KIND].block_size
WIDTHS = (1.0, 0.95, 0.9, 0.85)  # of a block's range that are tried; mirrored by quantise.cpp
CHUNK = 1 << 16  # blocks rounded at a time


def can_quantise(weight: Tensor) -> bool:
    """Return whether the inputs of a weight [N, K] are whole blocks."""
    return weight.shape[1] % BLOCK == 0


def quantise_weight(weight: Tensor, kernels: KernelLibrary | None = None) -> PackedTensor:
    """Return a weight [N, K] rounded to blocks of Q4_1. K must be a multiple of 32."""
    rows, columns = weight.shape
    assert columns % BLOCK == 0, columns
    data = np.empty((rows, columns // BLOCK * FORMATS[KIND].block_bytes), np.uint8)
    if kernels is not None and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        dense = weight.contiguous()
        kernels.library.headstart_quantise_q4_1(dense.data_ptr(), data.ctypes.data, rows, columns, num_kernel_threads())
    else:
        blocks = torch.from_numpy(data).view(-1, FORMATS[KIND].block_bytes)
        values = weight.reshape(-1, BLOCK)
        for begin in range(0, len(values), CHUNK):
            blocks[begin : begin + CHUNK] = _round(values[begin : begin + CHUNK].float().cpu())
    return PackedTensor("weight", KIND, (rows, columns), data)


def _round(values: Tensor) -> Tensor:
    """Return blocks uint8 [n, 20] of weights [n, 32] in fp32. A block with a number that is not finite becomes NaN."""
    least, greatest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    mean = values.mean(1, keepdim=True)
    best = _Rounded(values, torch.full_like(least, torch.nan), least * 0, torch.zeros_like(values))
    for width in WIDTHS:
        middle, reach = (least + greatest) * 0.5, (greatest - least) * 0.5 * width
        scale, start = (reach * 2 / 15).half().float(), (middle - reach).half().float()
        inverse = torch.where(scale > 0, 1 / scale, 0)
        whole = ((values - start) * inverse).round().clamp(0, 15)
        best.keep(_Rounded(values, scale, start, whole))
        apart = whole - whole.mean(1, keepdim=True)
        square = apart.square().sum(1, keepdim=True)
        fitted = (apart * (values - mean)).sum(1, keepdim=True) / torch.where(square > 0, square, 1)
        best.keep(_Rounded(values, fitted, mean - fitted * whole.mean(1, keepdim=True), whole))
    integers = best.whole.to(torch.uint8)
    halves = torch.cat((best.scale, best.start), dim=1).half().view(torch.uint8)
    return torch.cat((halves, integers[:, :16] | integers[:, 16:] << 4), dim=1)


class _Rounded:
    """Weights as whole * scale + start, with scale and start [n, 1] as fp16 stores them, and the errors."""

    def __init__(self, values: Tensor, scale: Tensor, start: Tensor, whole: Tensor) -> None:
        self.scale, self.start, self.whole = scale.half().float(), start.half().float(), whole
        errors = (whole * self.scale + self.start - values).square().sum(1, keepdim=True)
        self.errors = torch.where(errors.isnan(), torch.inf, errors)

    def keep(self, other: "_Rounded") -> None:
        """Take over the blocks of `other` that have smaller errors."""
        better = other.errors < self.errors
        for name in ("scale", "start", "whole", "errors"):
            setattr(self, name, torch.where(better, getattr(other, name), getattr(self, name)))
