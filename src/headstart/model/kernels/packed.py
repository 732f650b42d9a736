"""The parts of a chain: packed weights, in any of their formats, and heads with a rotary embedding; see chain.py."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.model.kernels.library import HeadsDescriptor, KernelLibrary, LinearDescriptor, num_kernel_threads
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor

TILE = 32  # outputs side by side in the packed form; see linear.h
# The numbers of `Format` in linear.h. Names of blocks are those of GGUF.
BF16, INT8 = 0, 1
BLOCKS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 4, "Q5_1": 5, "Q8_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}
FP32 = 10
ACTIVATION_BITS = (8, 16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedNorm:
    """RMS normalisation of the input rows: weight [K] in their dtype."""

    weight: Tensor
    eps: float


class PackedLinear:
    """The product x @ W^T + b on rows [T, K], with an optional norm before and gate after; run by chain.py.

    The weight is bf16, or one of BLOCKS, which keep their bits; rows are bf16 then. Or weight and rows are fp32.
    `gated`: W [2 * out, K] holds the gate rows, then the up rows, and y is silu(gate) * up. int8: a bf16 weight is
    rounded, with a scale per W row. `activation_bits` 8: x is rounded for blocks of at most 6 bits, with a scale per 32
    inputs; 16: it keeps about the bits of bf16.
    """

    __slots__ = ("_kept", "_library", "descriptor", "dtype", "has_rows", "in_features", "nbytes", "out_features")

    def __init__(
        self,
        kernels: KernelLibrary,
        weight: Tensor | PackedTensor,
        bias: Tensor | None = None,
        *,
        norm: PackedNorm | None = None,
        gated: bool = False,
        int8: bool = False,
        activation_bits: int = 16,
    ) -> None:
        if activation_bits not in ACTIVATION_BITS:
            raise ValueError(f"activations have {' or '.join(map(str, ACTIVATION_BITS))} bits, not {activation_bits}")
        num_rows, self.in_features = weight.shape
        if gated and num_rows % 2:
            raise ValueError(f"a gated weight has as many gates as ups, not {num_rows} rows together")
        self.out_features = num_rows // 2 if gated else num_rows
        tiles = -(-self.out_features // (TILE // 2 if gated else TILE))
        if isinstance(weight, PackedTensor):
            scales, (packed, form) = None, _pack_blocks(kernels, weight, tiles, gated=gated)
        else:
            packed, scales, form = _pack(kernels, weight, tiles, gated=gated, int8=int8)
        self.dtype = torch.float32 if form == FP32 else torch.bfloat16  # of rows, bias and norm
        if bias is not None:
            check_tensor(bias, "bias", (num_rows,), self.dtype)
        biases = None if bias is None else _in_tiles(bias, tiles, gated=gated)
        if norm is not None:
            check_tensor(norm.weight, "norm", (self.in_features,), self.dtype)
        self._kept = (packed, scales, biases, norm)  # the descriptor holds only their addresses
        self._library = kernels.library
        self.has_rows = form != INT8 and not gated  # whether `look_up` gives back the rows of the weight
        self.descriptor = LinearDescriptor(
            weight=packed.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if biases is None else biases.data_ptr(),
            norm=None if norm is None else norm.weight.data_ptr(),
            eps=0.0 if norm is None else norm.eps,
            gated=int(gated),
            in_features=self.in_features,
            out_features=self.out_features,
            format=form,
            row_bits=activation_bits,
        )
        self.nbytes = packed.nbytes + sum(tensor.nbytes for tensor in (scales, biases) if tensor is not None)

    def look_up_rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [T] int64 of the weight [T, in_features] in `dtype`; those in blocks as `unpack` does.

        Raises ValueError for a weight without `has_rows`, and for a row that does not exist.
        """
        check_tensor(ids, "ids", (len(ids),), torch.int64)
        if not self.has_rows:
            raise ValueError("an int8 or gated weight does not hold the rows that it was made of")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise ValueError(f"a row outside [0, {self.out_features})")
        out = torch.empty(len(ids), self.in_features, dtype=self.dtype)
        self._library.headstart_look_up(ctypes.byref(self.descriptor), ids.data_ptr(), len(ids), out.data_ptr())
        return out


class RotaryHeads:
    """The rotary embedding of rows of heads [heads, head_dim]: queries, then keys, then values, then others.

    Queries and keys are rotated by their position. Before that, each head is normalised if norms [head_dim] are given
    (Qwen3). Values and others do not change.
    """

    __slots__ = ("_kept", "descriptor", "rotary_dim", "width")

    def __init__(
        self,
        *,
        num_queries: int,
        num_keys: int,
        num_others: int = 0,
        head_dim: int,
        rotary_dim: int,
        query_norm: PackedNorm | None = None,
        key_norm: PackedNorm | None = None,
    ) -> None:
        if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and at most head_dim, {head_dim}")
        for norm in (query_norm, key_norm):
            if norm is not None:
                check_tensor(norm.weight, "norm", (head_dim,), torch.bfloat16)
        self.rotary_dim = rotary_dim
        num_heads = num_queries + 2 * num_keys + num_others
        self.width = num_heads * head_dim  # of a row
        self._kept = (query_norm, key_norm)  # the descriptor holds only their addresses
        self.descriptor = HeadsDescriptor(
            query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
            key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
            query_eps=0.0 if query_norm is None else query_norm.eps,
            key_eps=0.0 if key_norm is None else key_norm.eps,
            heads=num_heads,
            queries=num_queries,
            keys=num_keys,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
        )


def _pack(
    kernels: KernelLibrary, weight: Tensor, tiles: int, *, gated: bool, int8: bool
) -> tuple[Tensor, Tensor | None, int]:
    """Return the tiles of a weight [N, K], the scales of their outputs if they are int8, and their format."""
    plain = not int8 and weight.dtype == torch.float32
    check_tensor(weight, "weight", weight.shape, torch.float32 if plain else torch.bfloat16)
    num_rows, in_features = weight.shape
    sizes = (tiles, num_rows // 2 if gated else num_rows, in_features, int(gated), num_kernel_threads())
    if plain:
        packed = kernels.arena.take_zeros((tiles, in_features, TILE), torch.float32)
        kernels.library.headstart_pack_fp32(weight.data_ptr(), packed.data_ptr(), *sizes)
        return packed, None, FP32
    dtype = torch.int8 if int8 else torch.bfloat16
    tile_bytes = kernels.library.headstart_tile_bytes(INT8 if int8 else BF16, in_features)
    packed = kernels.arena.take_zeros((tiles, tile_bytes // dtype.itemsize), dtype)
    if not int8:
        kernels.library.headstart_pack_bf16(weight.data_ptr(), packed.data_ptr(), *sizes)
        return packed, None, BF16
    scales = torch.empty(tiles, TILE)
    kernels.library.headstart_pack_int8(weight.data_ptr(), packed.data_ptr(), scales.data_ptr(), *sizes)
    return packed, scales, INT8


def _pack_blocks(kernels: KernelLibrary, weight: PackedTensor, tiles: int, *, gated: bool) -> tuple[Tensor, int]:
    """Return the tiles of a weight in blocks, and their format. Raises ValueError for blocks without a kernel."""
    if weight.kind not in BLOCKS:
        raise ValueError(f"{weight.name}: there are kernels for {', '.join(BLOCKS)}, not for {weight.kind}")
    form, (num_rows, in_features) = BLOCKS[weight.kind], weight.shape
    assert in_features % FORMATS[weight.kind].block_size == 0, weight.shape  # by PackedTensor
    blocks = np.ascontiguousarray(weight.data)
    packed = kernels.arena.take_zeros((tiles, kernels.library.headstart_tile_bytes(form, in_features)), torch.uint8)
    kernels.library.headstart_pack_blocks(
        blocks.ctypes.data,
        blocks.shape[1],
        packed.data_ptr(),
        form,
        tiles,
        num_rows // 2 if gated else num_rows,
        int(gated),
        num_kernel_threads(),
    )
    return packed, form


def check_tensor(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless a kernel may read `tensor` as dense memory of this shape."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"the kernel takes dense {dtype} {list(shape)} on the CPU"
        )


def _in_tiles(bias: Tensor, tiles: int, *, gated: bool) -> Tensor:
    """Return a bias [N] as fp32 [tiles, TILE], in the order in which the tiles hold the outputs."""
    parts = bias.float().chunk(2) if gated else [bias.float()]
    width = TILE // len(parts)
    laid = torch.zeros(tiles, len(parts), width)
    for index, part in enumerate(parts):
        padded = torch.zeros(tiles * width)
        padded[: len(part)] = part
        laid[:, index] = padded.view(tiles, width)
    return laid.view(tiles, TILE)
