"""Tensors between guards: memory before and after them is known, so that a kernel that leaves its bounds is seen.

Guards are NaN, so what is read from them shows in the result; `intact` says whether they were written to.
"""

import torch
from torch import Tensor

GUARD = 64  # elements on each side
NAN_BITS = {torch.bfloat16: 0x7FC1, torch.float32: 0x7FC00001}
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class Guards:
    """Gives copies of tensors, each between guards of its own, and checks them all."""

    def __init__(self) -> None:
        self._sides: list[Tensor] = []

    def put(self, tensor: Tensor) -> Tensor:
        """A dense copy of `tensor`, aligned as torch aligns, with a guard right before and right after it."""
        kind = INTEGERS[tensor.dtype]
        bits = torch.full((tensor.numel() + 2 * GUARD,), NAN_BITS[tensor.dtype], dtype=kind)
        inner = bits[GUARD : GUARD + tensor.numel()]
        inner.view(tensor.dtype).copy_(tensor.reshape(-1))
        self._sides += [bits[:GUARD], bits[GUARD + tensor.numel() :]]
        return inner.view(tensor.dtype).view(tensor.shape)

    def intact(self) -> bool:
        """Whether no guard was written to."""
        return all(bool((side == side[0]).all()) and int(side[0]) in NAN_BITS.values() for side in self._sides)
