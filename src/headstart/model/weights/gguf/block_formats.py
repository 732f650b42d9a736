"""Block formats of GGUF tensors: sizes, and the unpacking of blocks to fp32, bit-equal to the `gguf` package.

A row is a sequence of blocks, each with its own scale. Layouts: `ggml/src/ggml-common.h` of llama.cpp. This is the
reference of the kernels that multiply packed weights, and the way to load a model where no kernel exists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.gguf.tensor_types import TENSOR_TYPES

CHUNK_BYTES = 1 << 20  # of packed rows unpacked at a time: temporaries are about ten times as large


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One type of GGUF tensors: `block_size` weights are stored in `block_bytes` bytes."""

    name: str
    type_id: int  # the number in a file: enum ggml_type
    block_size: int
    block_bytes: int


FORMATS: dict[str, BlockFormat] = {
    kind.name: BlockFormat(kind.name, type_id, kind.block_size, kind.block_bytes)
    for type_id, kind in TENSOR_TYPES.items()
    if kind.block_size
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A tensor as its file stores it: `data` uint8 [rows, bytes of a row] of blocks of `kind`, perhaps a memory map.

    `shape` is torch's: [out_features, in_features], or [size] for a vector, whose data has one row.
    """

    name: str
    kind: str  # a key of FORMATS
    shape: tuple[int, ...]
    data: np.ndarray

    def __post_init__(self) -> None:
        expected = (self.num_rows, row_bytes(self.kind, self.shape[-1]))
        if self.data.shape != expected or self.data.dtype != np.uint8:
            raise ConfigError(f"tensor {self.name}: {self.data.shape} bytes are not {expected} of {self.kind}")

    @property
    def num_rows(self) -> int:
        """The product of all dimensions but the last."""
        count = 1
        for extent in self.shape[:-1]:
            count *= extent
        return count


def row_bytes(kind: str, width: int) -> int:
    """Return the bytes of a row of `width` weights. Raises ConfigError if no whole number of blocks holds them."""
    form = FORMATS[kind]
    if width % form.block_size:
        raise ConfigError(f"a row of {width} weights is no whole number of {kind} blocks of {form.block_size}")
    return width // form.block_size * form.block_bytes


def dequantise(tensor: PackedTensor, dtype: torch.dtype = torch.float32, rows: np.ndarray | None = None) -> Tensor:
    """Return the weights of a tensor as `dtype`, in its shape, in memory of their own.

    `rows` are the numbers of the stored rows in the order wanted, by default all as stored.
    """
    form, width = FORMATS[tensor.kind], tensor.shape[-1]
    count = tensor.num_rows if rows is None else len(rows)
    out = torch.empty(count, width, dtype=dtype)
    step = max(1, CHUNK_BYTES // max(1, tensor.data.shape[1]))
    for start in range(0, count, step):
        chosen = slice(start, start + step) if rows is None else rows[start : start + step]
        packed = tensor.data[chosen]
        if not packed.flags.writeable:
            packed = packed.copy()  # torch takes no read-only arrays, such as memory maps
        blocks = torch.from_numpy(packed.reshape(-1, form.block_bytes))
        out[start : start + step] = dequantise_blocks(tensor.kind, blocks).view(-1, width)
    return out.view(tensor.shape if rows is None else (count, width))


def dequantise_blocks(kind: str, blocks: Tensor) -> Tensor:
    """Return the weights fp32 [n, block_size] of contiguous uint8 blocks [n, block_bytes]."""
    return _UNPACK[kind](blocks)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _halves(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:], 16) - 8.0) * _halves(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16) * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 6:], 16) + 16.0 * _bits(blocks[:, 2:6]) - 16.0) * _halves(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 8:], 16) + 16.0 * _bits(blocks[:, 4:8])) * _halves(blocks, 0) + _halves(blocks, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_k(blocks)
    quants = _nibbles(blocks[:, 16:], 32).view(-1, 8, 32)
    return (quants * scales - minima).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_k(blocks)
    high = (blocks[:, None, 16:48] >> _shifts(1, 8)) & 1  # bit i of byte j belongs to weight j of sub-block i
    quants = _nibbles(blocks[:, 48:], 32).view(-1, 8, 32) + 16.0 * high
    return (quants * scales - minima).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(2, 4)) & 3
    quants = (low + 16.0 * high.reshape(-1, 256) - 32.0).view(-1, 16, 16)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (quants * scales[:, :, None]).view(-1, 256)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 at byte `at` of each block as fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, group: int) -> Tensor:
    """Return fp32 [n, 2 * bytes]: of each `group` bytes first the low halves, then the high halves."""
    pairs = packed.reshape(len(packed), -1, 1, group)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).view(len(packed), -1).float()


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes [n, bytes] as uint8 [n, 8 * bytes], lowest first."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(len(packed), -1)


def _shifts(step: int, count: int) -> Tensor:
    """Return 0, step, 2 * step, ... as uint8 [count, 1]."""
    return torch.arange(0, step * count, step, dtype=torch.uint8)[:, None]


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima fp32 [n, 8, 1] of Q4_K and Q5_K: 6 bits each, times an fp16 for each of the two.

    Of 12 bytes from byte 4 on, bytes 0-3 hold scales 0-3 in their low 6 bits, bytes 4-7 minima 0-3, bytes 8-11 the low
    4 bits of scales and minima 4-7, whose high 2 bits are at the top of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1).float()
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1).float()
    return (_halves(blocks, 0) * scales)[:, :, None], (_halves(blocks, 2) * minima)[:, :, None]


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
assert _UNPACK.keys() == FORMATS.keys()
