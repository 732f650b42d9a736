"""FusedLayers: the layers of a decoder as chains of kernels. All that lies between two attentions is one call.

The slow twin is the Decoder's own loop; both round to bfloat16 at the same places.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headstart.model.attention.base import Attend
from headstart.model.config import ModelConfig
from headstart.model.kernels.chain import Angles, Buffers, Chain, Link
from headstart.model.kernels.load import Kernels
from headstart.model.kernels.packed import HeadTurner, PackedLinear
from headstart.model.layers import RMSNorm
from headstart.model.linear import Linear

# The buffers: what attention gives; the residual stream; silu(gate) * up; queries, keys and values.
ATTENDED, STREAM, GATED, HEADS = range(4)


class Layer(Protocol):
    """What is read of a DecoderLayer."""

    @property
    def qkv(self) -> Linear: ...
    @property
    def query_norm(self) -> RMSNorm | None: ...
    @property
    def key_norm(self) -> RMSNorm | None: ...
    @property
    def out(self) -> Linear: ...
    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...
    @property
    def window(self) -> int | None: ...


class FusedLayers:
    """Layers whose weights are all packed; the norms and gates around them are part of their Linears."""

    def __init__(self, kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> None:
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._windows = [layer.window for layer in layers]
        attended = config.num_heads * config.head_dim
        self._widths = (attended, config.hidden_size, config.intermediate_size, sum(self._sizes) * config.head_dim)
        before = [self._before(config, layer) for layer in layers]
        after = [_after(layer) for layer in layers]
        # chain i runs before attention i, the last one after the last attention
        parts = [before[0], *(tail + head for tail, head in zip(after, before[1:], strict=False)), after[-1]]
        self._chains = [Chain(kernels, links, self._widths) for links in parts]

    def forward(self, stream: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """The residual stream behind the last layer, for embedded tokens `stream` [T, hidden], which it overwrites."""
        count = len(stream)
        buffers = Buffers(count, self._widths)
        buffers[STREAM] = stream
        buffers.fill(ATTENDED, GATED, HEADS)
        scratch = max((chain.scratch(count) for chain in self._chains[:2]), key=len)
        queries, keys, values = buffers[HEADS].view(count, -1, self._head_dim).split(self._sizes, dim=1)
        scale = self._head_dim**-0.5
        for index, window in enumerate(self._windows):
            self._chains[index](buffers, scratch, angles)
            attended = attend(index, queries, keys, values, scale=scale, window=window)
            buffers[ATTENDED] = attended.reshape(count, -1)
        self._chains[-1](buffers, scratch)
        return stream

    def _before(self, config: ModelConfig, layer: Layer) -> list[Link]:
        norms = (layer.query_norm, layer.key_norm)
        turner = HeadTurner(
            num_queries=config.num_heads,
            num_keys=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            query_norm=None if norms[0] is None else norms[0].packed,
            key_norm=None if norms[1] is None else norms[1].packed,
        )
        return [Link(_packed(layer.qkv), STREAM, HEADS, turner=turner)]


def _after(layer: Layer) -> list[Link]:
    return [
        Link(_packed(layer.out), ATTENDED, STREAM, residual=STREAM),
        Link(_packed(layer.gate_up), STREAM, GATED),
        Link(_packed(layer.down), GATED, STREAM, residual=STREAM),
    ]


def _packed(linear: Linear) -> PackedLinear:
    assert linear.packed is not None, "fused layers are made of packed weights"
    return linear.packed
