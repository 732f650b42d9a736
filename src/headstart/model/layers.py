"""The pieces of a decoder layer that are not attention: RMS normalisation and the gated feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.linear import Linear


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in fp32 inside."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight, eps, (weight.shape[0],)

    def __call__(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.shape, self.weight, self.eps)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one weight [2 * intermediate, hidden]."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


def join(tensors: list[Tensor]) -> Tensor:
    """Rows of several weights below each other, as one weight."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
