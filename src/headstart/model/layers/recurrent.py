"""Mixers with a recurrent state: gated delta net (Qwen3.5), Mamba-2 (Granite-4, Bamba), short convolution (LFM2).

The state of a request is one vector in fp32, with a part for each of these layers. States are computed token after
token, in one order, so they do not depend on how the tokens are cut into chunks; see invariant 15. Between their
products the layers run on our kernels (kernels/recurrence.py), or slowly in torch, the reference.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.model.kernels.library import KernelLibrary
from headstart.model.kernels.recurrence import (
    MixerWeights,
    StepRecurrentStates,
    matrix_mixer_call,
    run_matrix_mixer,
    short_convolution,
    short_convolution_argument,
)
from headstart.model.kernels.stack import KernelKind
from headstart.model.layers.linear import FusedLinear
from headstart.model.weights.hybrid_config import MixerShape

EPSILON = 1e-6  # of the norm of queries and keys, as in Transformers and in flash-linear-attention


class TokenMixer(Protocol):
    """A layer's way to mix the tokens of a request, other than attention."""

    @property
    def kernel_kind(self) -> KernelKind:
        """Its kernel."""
        ...

    @property
    def num_state_elements(self) -> int:
        """Numbers of its part of a state."""
        ...

    @property
    def input_projection(self) -> FusedLinear: ...
    @property
    def out(self) -> FusedLinear: ...

    def __call__(self, rows: Tensor, states: StepRecurrentStates, offset: int) -> Tensor:
        """Return the inputs of `out` for `rows`, the outputs of `inner`, which may be overwritten.

        Updates the states, whose part for this layer begins at `offset`, and fills in those to be saved.
        """
        ...

    def kernel_argument(self, rows: Tensor, out: Tensor, offset: int) -> ctypes.Structure:
        """Return the argument with which its kernel does the same for the chunks of a step, and writes to `out`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """A gated causal convolution over the last tokens, per channel: C * conv(B * x)."""

    input_projection: FusedLinear  # norm, then B, C and x
    weight: Tensor  # [conv_size, hidden], fp32, the oldest token first
    bias: Tensor | None  # [hidden], fp32
    out: FusedLinear
    kernels: KernelLibrary | None

    @property
    def kernel_kind(self) -> KernelKind:
        return KernelKind.SHORT_CONVOLUTION

    @property
    def num_state_elements(self) -> int:
        return (len(self.weight) - 1) * self.weight.shape[1]

    def __call__(self, rows: Tensor, states: StepRecurrentStates, offset: int) -> Tensor:
        if self.kernels is None:
            return convolve_in_torch(self.weight, self.bias, rows, states, offset)
        return short_convolution(self.kernels, self.weight, self.bias, rows, states, offset)

    def kernel_argument(self, rows: Tensor, out: Tensor, offset: int) -> ctypes.Structure:
        return short_convolution_argument(self.weight, self.bias, rows, out, offset)


@dataclass(frozen=True, slots=True, eq=False)
class MatrixMixer:
    """A gated delta net (arXiv 2412.06464), or Mamba-2 (arXiv 2405.21060) if its weights have a skip.

    Both keep a matrix per head, which decays by each token and takes up its key and value; a delta net takes up only
    what the matrix does not give for that key.
    """

    shape: MixerShape
    input_projection: (
        FusedLinear  # norm, then queries, keys and values together, gate, strength (b, of a delta net), rate (a)
    )
    weights: MixerWeights
    out: FusedLinear
    kernels: KernelLibrary | None

    @property
    def kernel_kind(self) -> KernelKind:
        return KernelKind.MATRICES

    @property
    def num_state_elements(self) -> int:
        return self.shape.num_state_elements

    def __call__(self, rows: Tensor, states: StepRecurrentStates, offset: int) -> Tensor:
        if self.kernels is not None:
            return run_matrix_mixer(self.kernels, self.shape, self.weights, rows, states, offset)
        twin = delta_net_in_torch if self.weights.skip is None else mamba_in_torch
        return twin(self.shape, self.weights, rows, states, offset)

    def kernel_argument(self, rows: Tensor, out: Tensor, offset: int) -> ctypes.Structure:
        return matrix_mixer_call(self.shape, self.weights, rows, out, offset)


def convolve_in_torch(
    weight: Tensor, bias: Tensor | None, rows: Tensor, states: StepRecurrentStates, offset: int
) -> Tensor:
    """Do the same as `short_convolution`."""
    before, after, inputs = rows.chunk(3, dim=-1)
    mixed = _convolve((before * inputs).float(), weight, states, offset)
    if bias is not None:
        mixed += bias
    return after * mixed.to(rows.dtype)


def delta_net_in_torch(
    shape: MixerShape, weights: MixerWeights, rows: Tensor, states: StepRecurrentStates, offset: int
) -> Tensor:
    """Do the same as `run_matrix_mixer` for a delta net, but leave `rows` as they are."""
    num_rows, heads = len(rows), shape.num_value_heads
    sizes = (shape.num_channels, shape.value_width, heads, heads)
    mixed, gate, beta, rate = rows.split(sizes, dim=-1)
    queries, keys, values = _mixed(shape, weights, mixed, states, offset)
    queries, keys = _unit(shape, queries) * shape.key_dim**-0.5, _unit(shape, keys)
    values = values.reshape(num_rows, heads, 1, shape.value_dim)
    decay = (weights.rate * _softplus(rate.float() + weights.rate_bias)).exp()[:, :, None, None]
    strength = sigmoid(beta.float())[:, :, None, None]
    found = _scan(shape, states, offset, _update, queries, keys, values, decay, strength)
    found = found.to(rows.dtype).view(num_rows, heads, shape.value_dim)
    normed = F.rms_norm(found, (shape.value_dim,), weights.norm.weight, weights.norm.eps)
    gate = gate.float().reshape(normed.shape)
    gated = normed * (gate * sigmoid(gate))
    return gated.to(rows.dtype).reshape(num_rows, -1)


def mamba_in_torch(
    shape: MixerShape, weights: MixerWeights, rows: Tensor, states: StepRecurrentStates, offset: int
) -> Tensor:
    """Do the same as `run_matrix_mixer` for Mamba-2, but leave `rows` as they are."""
    num_rows, heads, groups = len(rows), shape.num_value_heads, shape.num_key_heads
    mixed, gate, rate = rows.split((shape.num_channels, shape.value_width, heads), dim=-1)
    queries, keys, values = _mixed(shape, weights, mixed, states, offset)
    queries, keys = (
        part.reshape(num_rows, groups, 1, shape.key_dim).repeat_interleave(heads // groups, dim=1)
        for part in (queries, keys)
    )
    values = values.reshape(num_rows, heads, 1, shape.value_dim)
    step = _softplus(rate.float() + weights.rate_bias)
    decay = (weights.rate * step).exp()[:, :, None, None]
    found = _scan(shape, states, offset, _take_up, queries, keys, values * step[:, :, None, None], decay)
    assert weights.skip is not None
    found = (found + weights.skip[:, None, None] * values).to(rows.dtype).float().reshape(num_rows, groups, -1)
    gate = gate.float().reshape(found.shape)
    normed = F.rms_norm(found * (gate * sigmoid(gate)), found.shape[-1:], None, weights.norm.eps)
    return normed.to(rows.dtype).reshape(num_rows, -1) * weights.norm.weight


def _mixed(
    shape: MixerShape, weights: MixerWeights, inputs: Tensor, states: StepRecurrentStates, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in fp32 after the convolution of `inputs` [T, channels] and its silu."""
    convolved = _convolve(inputs.float(), weights.convolution, states, offset)
    if weights.convolution_bias is not None:
        convolved += weights.convolution_bias
    convolved = convolved.to(inputs.dtype).float()
    mixed = (convolved * sigmoid(convolved)).to(inputs.dtype).float()
    queries, keys, values = mixed.split((shape.key_width, shape.key_width, shape.value_width), dim=-1)
    return queries, keys, values


def _scan(
    shape: MixerShape,
    states: StepRecurrentStates,
    offset: int,
    update: Callable[..., None],
    queries: Tensor,
    *parts: Tensor,
) -> Tensor:
    """Apply `update` to the matrices of each request token after token; return the outputs [T, H, 1, value_dim]."""
    heads = shape.num_value_heads
    found = queries.new_empty(len(queries), heads, 1, shape.value_dim)
    tokens = list(zip(*(part.unbind(0) for part in (queries, *parts, found)), strict=True))
    begin = offset + (shape.conv_size - 1) * shape.num_channels
    matrices = (heads, shape.key_dim, shape.value_dim)
    for row in states.rows:
        memory = row.state[begin : offset + shape.num_state_elements].view(matrices)
        saves = {at: saved[begin : offset + shape.num_state_elements].view(matrices) for at, saved in row.saves}
        for at in range(row.begin, row.end):
            update(memory, *tokens[at])
            if at + 1 - row.begin in saves:
                saves[at + 1 - row.begin].copy_(memory)
    return found


def _unit(shape: MixerShape, rows: Tensor) -> Tensor:
    """Return queries or keys [T, keys] as unit vectors [T, value heads, 1, key_dim]: a head serves several."""
    heads = rows.reshape(len(rows), shape.num_key_heads, shape.key_dim)
    unit = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + EPSILON)
    return unit.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=1)[:, :, None]


def sigmoid(rows: Tensor) -> Tensor:
    """Return the logistic function of `rows` in fp32, the same bits for the same number.

    torch.sigmoid and silu are not: the last numbers of a tensor take another path than those that fill a vector.
    """
    return 1 / (1 + torch.exp(-rows))


def _softplus(rows: Tensor) -> Tensor:
    return rows.clamp(min=0) + torch.log1p(torch.exp(-rows.abs()))


def _update(
    memory: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, found: Tensor
) -> None:
    """Apply one token to a head's matrices [H, key_dim, value_dim], and read the output [H, 1, value_dim] of it."""
    memory.mul_(decay)
    change = (value - torch.bmm(key, memory)).mul_(strength)
    memory.baddbmm_(key.transpose(1, 2), change)
    torch.bmm(query, memory, out=found)


def _take_up(memory: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, found: Tensor) -> None:
    """Do the same as `_update`, but for Mamba-2."""
    memory.mul_(decay).baddbmm_(key.transpose(1, 2), value)
    torch.bmm(query, memory, out=found)


def _convolve(inputs: Tensor, weight: Tensor, states: StepRecurrentStates, offset: int) -> Tensor:
    """Return the causal convolution of each request's rows of `inputs` [T, channels], per channel."""
    kept, channels = len(weight) - 1, inputs.shape[1]
    outputs = torch.empty_like(inputs)
    for row in states.rows:
        num = row.end - row.begin
        before = row.state[offset : offset + kept * channels].view(kept, channels)
        seen = torch.cat((before, inputs[row.begin : row.end]))
        total = outputs[row.begin : row.end]
        torch.mul(seen[:num], weight[0], out=total)
        for at in range(1, kept + 1):
            total += seen[at : at + num] * weight[at]
        for at, saved in row.saves:
            saved[offset : offset + kept * channels].view(kept, channels).copy_(seen[at : at + kept])
        before.copy_(seen[num:])
    return outputs
