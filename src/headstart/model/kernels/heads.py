"""HeadTurner: normalises (Qwen3) and turns the queries and keys of packed rows in place, in one call."""

import ctypes

import torch
from torch import Tensor

from headstart.model.kernels.load import HeadsDescriptor, Kernels, threads
from headstart.model.kernels.packed import Norm, check


class HeadTurner:
    """For rows [T, heads, head_dim] that hold `num_queries` query heads, `num_keys` key heads, then value heads."""

    __slots__ = ("_descriptor", "_kept", "_kernels", "_shape", "rotary_dim")

    def __init__(
        self,
        kernels: Kernels,
        *,
        num_queries: int,
        num_keys: int,
        head_dim: int,
        rotary_dim: int,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
    ) -> None:
        if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and at most head_dim, {head_dim}")
        for norm in (query_norm, key_norm):
            if norm is not None:
                check(norm.weight, "norm", (head_dim,), torch.bfloat16)
        self._kernels, self.rotary_dim = kernels, rotary_dim
        self._kept = (query_norm, key_norm)  # the descriptor holds only their addresses
        self._shape = (num_queries + 2 * num_keys, head_dim)
        self._descriptor = HeadsDescriptor(
            query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
            key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
            query_eps=0.0 if query_norm is None else query_norm.eps,
            key_eps=0.0 if key_norm is None else key_norm.eps,
            heads=num_queries + 2 * num_keys,
            queries=num_queries,
            keys=num_keys,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
        )

    def __call__(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Changes `heads` [T, heads, head_dim] in place; `angles` as Rotary.angles gives them. Raises ValueError."""
        count = heads.shape[0]
        check(heads, "heads", (count, *self._shape), torch.bfloat16)
        cosine, sine = angles
        for name, tensor in (("cosine", cosine), ("sine", sine)):
            check(tensor, name, (count, 1, 2, self.rotary_dim // 2), torch.bfloat16)
        self._kernels.library.headstart_rotate(
            ctypes.addressof(self._descriptor),
            heads.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            count,
            threads(),
        )
