"""Layers with a recurrent state, by the kernels of recurrent.cpp: gated delta net, Mamba-2, short convolution, gate."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary, num_kernel_threads
from headstart.model.kernels.packed import PackedNorm, check_tensor
from headstart.model.step_inputs import RecurrentState
from headstart.model.weights.hybrid_config import MixerShape

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_DTYPES = (torch.bfloat16, torch.float32)


class _Convolution(ctypes.Structure):
    """`Convolution` of recurrent.cpp."""

    _fields_ = (
        *((name, _pointer) for name in ("weight", "bias")),
        *((name, _long) for name in ("offset", "taps", "channels")),
    )


class _Matrices(ctypes.Structure):
    """`Matrices` of recurrent.cpp."""

    _fields_ = (
        ("convolution", _Convolution),
        *((name, _pointer) for name in ("rows", "out", "rate", "rate_bias", "skip", "norm")),
        *((name, _long) for name in ("count", "key_heads", "heads", "key_dim", "value_dim")),
        ("eps", _float),
        ("is_bf16", _int),
        ("threads", _int),
    )


class _ShortConvolution(ctypes.Structure):
    """`ShortConvolution` of recurrent.cpp."""

    _fields_ = (
        ("convolution", _Convolution),
        ("rows", _pointer),
        ("out", _pointer),
        ("is_bf16", _int),
        ("threads", _int),
    )


class _Gate(ctypes.Structure):
    """`Gate` of recurrent.cpp."""

    _fields_ = (
        ("rows", _pointer),
        ("gates", _pointer),
        *((name, _long) for name in ("count", "size", "stride")),
        ("is_bf16", _int),
        ("threads", _int),
    )


class StepRecurrentStates:
    """The states of the requests of a step, for torch as `rows`, and as a table of addresses for the kernels.

    Raises ValueError unless chunks follow each other, saves are in order and states are dense fp32 of one size.
    """

    def __init__(self, rows: Sequence[RecurrentState]) -> None:
        self.rows = rows
        num_saves, chunks, saves = sum(len(row.saves) for row in rows), list[int](), list[int]()
        self._saves = (ctypes.c_int64 * (2 * num_saves))()
        end, address = 0, ctypes.addressof(self._saves)
        for row in rows:
            places = [at for at, _ in row.saves]
            if not end == row.begin < row.end or places != sorted(places) or not _within(places, row.end - row.begin):
                raise ValueError(f"a chunk {row.begin} : {row.end} behind {end} rows, with states after {places}")
            for state in (row.state, *(saved for _, saved in row.saves)):
                if state.device.type == "cpu":  # a kernel is not called with others
                    check_tensor(state, "state", rows[0].state.shape, torch.float32)
            chunks += (row.begin, row.end, row.state.data_ptr(), address + 8 * len(saves), len(places))
            for at, saved in row.saves:
                saves += (at, saved.data_ptr())
            end = row.end
        self._saves[:] = saves
        self._chunks = (ctypes.c_int64 * len(chunks))(*chunks)
        self._count, self._size = end, len(rows[0].state) if rows else 0

    def chunk_address_and_count(self, count: int, size: int) -> tuple[int, int]:
        """Return the address and number of `Chunk` of recurrent.cpp, for kernels that read `size` numbers of states.

        Raises ValueError unless the chunks have `count` rows and the states these numbers.
        """
        if count != self._count or size > self._size:
            raise ValueError(
                f"states of {self._count} rows and {self._size} numbers, for {count} rows and {size} numbers"
            )
        return ctypes.addressof(self._chunks), len(self.rows)


def _within(places: list[int], length: int) -> bool:
    return not places or 1 <= places[0] <= places[-1] <= length


class MixerWeights(NamedTuple):
    """The weights of a gated delta net or Mamba-2 between its two products; see layers/recurrent.py."""

    convolution: Tensor  # [conv_size, channels], fp32
    rate: Tensor  # [value heads], fp32
    rate_bias: Tensor  # [value heads], fp32
    norm: PackedNorm  # [value_dim]; of Mamba-2 [values]
    convolution_bias: Tensor | None = None  # [channels], fp32
    skip: Tensor | None = None  # [value heads], fp32: of Mamba-2 alone


def matrix_mixer_call(
    shape: MixerShape, weights: MixerWeights, rows: Tensor, out: Tensor, offset: int
) -> ctypes.Structure:
    """Return the checked argument for `rows` [T, channels + values + 2 heads], which change, and `out` [T, values].

    Mamba-2 has rows of channels + values + heads: queries (C), keys (B), values (x); gate; rate. Its run advances
    states, whose part for this layer begins at `offset`. It holds addresses of the tensors. Raises ValueError for
    arguments that do not fit.
    """
    heads, count, skip = shape.num_value_heads, len(rows), weights.skip
    _check_rows(rows, (count, shape.num_channels + shape.value_width + (2 if skip is None else 1) * heads))
    for name in ("rate", "rate_bias") if skip is None else ("rate", "rate_bias", "skip"):
        check_tensor(getattr(weights, name), name, (heads,), torch.float32)
    check_tensor(weights.norm.weight, "norm", (shape.value_dim if skip is None else shape.value_width,), rows.dtype)
    check_tensor(out, "out", (count, shape.value_width), rows.dtype)
    return _Matrices(
        convolution=_convolution(weights.convolution, weights.convolution_bias, offset, shape.num_channels),
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        rate=weights.rate.data_ptr(),
        rate_bias=weights.rate_bias.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        norm=weights.norm.weight.data_ptr(),
        count=count,
        key_heads=shape.num_key_heads,
        heads=heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        eps=weights.norm.eps,
        is_bf16=int(rows.dtype == torch.bfloat16),
        threads=num_kernel_threads(),
    )


def run_matrix_mixer(
    kernels: KernelLibrary,
    shape: MixerShape,
    weights: MixerWeights,
    rows: Tensor,
    states: StepRecurrentStates,
    offset: int,
) -> Tensor:
    """Return the outputs [T, values] of a call; see `matrix_call`."""
    out = torch.empty((len(rows), shape.value_width), dtype=rows.dtype)
    call = matrix_mixer_call(shape, weights, rows, out, offset)
    kernels.library.headstart_matrices(
        ctypes.byref(call), *states.chunk_address_and_count(len(rows), offset + shape.num_state_elements)
    )
    return out


def short_convolution_argument(
    weight: Tensor, bias: Tensor | None, rows: Tensor, out: Tensor, offset: int
) -> ctypes.Structure:
    """Return the checked argument for `rows` [T, 3 channels] of B, C, x; `out` [T, channels] is C * convolution(B * x).

    `weight` [taps, channels] and `bias` [channels] are fp32. Its run advances states, whose part for this layer begins
    at `offset`. It holds addresses of the tensors. Raises ValueError for arguments that do not fit.
    """
    channels = weight.shape[1]
    _check_rows(rows, (len(rows), 3 * channels))
    check_tensor(out, "out", (len(rows), channels), rows.dtype)
    convolution, is_bf16 = _convolution(weight, bias, offset, channels), int(rows.dtype == torch.bfloat16)
    return _ShortConvolution(convolution, rows.data_ptr(), out.data_ptr(), is_bf16, num_kernel_threads())


def short_convolution(
    kernels: KernelLibrary, weight: Tensor, bias: Tensor | None, rows: Tensor, states: StepRecurrentStates, offset: int
) -> Tensor:
    """Return the outputs [T, channels] of a call; see `convolution_call`."""
    taps, channels = weight.shape
    out = torch.empty((len(rows), channels), dtype=rows.dtype)
    call = short_convolution_argument(weight, bias, rows, out, offset)
    chunks = states.chunk_address_and_count(len(rows), offset + (taps - 1) * channels)
    kernels.library.headstart_short_convolution(ctypes.byref(call), *chunks)
    return out


def sigmoid_gate_call(rows: Tensor, gates: Tensor) -> ctypes.Structure:
    """Return the checked argument: `rows` [T, size] times the sigmoid of `gates`, which are columns of a dense tensor.

    It holds addresses of the tensors. Raises ValueError for arguments that do not fit.
    """
    count, size = rows.shape
    _check_rows(rows, (count, size))
    if gates.shape != rows.shape or gates.dtype != rows.dtype or (count and size and gates.stride(1) != 1):
        raise ValueError(f"gates {gates.dtype} {list(gates.shape)} for rows {rows.dtype} {list(rows.shape)}")
    is_bf16 = int(rows.dtype == torch.bfloat16)
    return _Gate(rows.data_ptr(), gates.data_ptr(), count, size, gates.stride(0), is_bf16, num_kernel_threads())


def apply_sigmoid_gate(kernels: KernelLibrary, rows: Tensor, gates: Tensor) -> None:
    """Multiply `rows` by the sigmoid of `gates`, in place; see `gate_call`."""
    kernels.library.headstart_gate(ctypes.byref(sigmoid_gate_call(rows, gates)))


def _convolution(weight: Tensor, bias: Tensor | None, offset: int, channels: int) -> Any:
    check_tensor(weight, "weight", (len(weight), channels), torch.float32)
    if bias is not None:
        check_tensor(bias, "bias", (channels,), torch.float32)
    return _Convolution(
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        offset=offset,
        taps=len(weight),
        channels=channels,
    )


def _check_rows(rows: Tensor, shape: tuple[int, int]) -> None:
    if rows.dtype not in _DTYPES:
        raise ValueError(f"rows are {rows.dtype}; the kernels take bfloat16 and float32")
    check_tensor(rows, "rows", shape, rows.dtype)
