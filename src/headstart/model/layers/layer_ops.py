"""The operations of a decoder layer that are neither attention nor a matrix product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.kernels.packed import PackedNorm


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in fp32 inside."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight, eps, (weight.shape[0],)

    def __call__(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.shape, self.weight, self.eps)

    @property
    def packed(self) -> PackedNorm:
        """The same norm for a kernel, which normalises rows as it reads them."""
        return PackedNorm(self.weight, self.eps)


def concatenate_rows(tensors: list[Tensor]) -> Tensor:
    """Concatenate the rows of several weights into one weight."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
