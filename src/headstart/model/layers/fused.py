"""FusedLayers: the layers of a decoder as chains of kernels. All operations between two attentions are one call.

With the attention of attention/cpu.py, all layers together are one call, on buffers that are reused in every step. The
loop in Decoder is the slower reference; all variants round to bfloat16 at the same places.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headstart.model.attention.base import AttentionFunction
from headstart.model.attention.cpu import CPUAttention, CPUAttentionStep
from headstart.model.kernels.attention import AttentionCall
from headstart.model.kernels.chain import ChainBuffers, ChainLink, LinearChain, LinearChainWorkspace
from headstart.model.kernels.library import KernelLibrary
from headstart.model.kernels.packed import RotaryHeads
from headstart.model.kernels.stack import HeadOutputs, KernelKind, LayerStack, StepTokens
from headstart.model.layers.layer_ops import RMSNorm
from headstart.model.layers.linear import Embedding, FusedLinear, embedding_rows
from headstart.model.layers.rotary import RotaryEmbedding
from headstart.model.step_inputs import StepInputs
from headstart.model.weights.model_config import ModelConfig

# The buffers: attention outputs; the residual stream; silu(gate) * up; queries, keys and values.
ATTENDED, STREAM, GATED, HEADS = range(4)


class FusableLayer(Protocol):
    """The fields of a LayerWeights that are used here."""

    @property
    def qkv(self) -> FusedLinear: ...
    @property
    def query_norm(self) -> RMSNorm | None: ...
    @property
    def key_norm(self) -> RMSNorm | None: ...
    @property
    def out(self) -> FusedLinear: ...
    @property
    def gate_up(self) -> FusedLinear: ...
    @property
    def down(self) -> FusedLinear: ...
    @property
    def window(self) -> int | None: ...


class FusedLayers:
    """Layers of which all weights are packed. Norms and gates are part of the Linears."""

    def __init__(
        self,
        kernels: KernelLibrary,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[FusableLayer],
        head: FusedLinear,
        rotary: RotaryEmbedding,
    ) -> None:
        self._embedding, self._rotary = embedding, rotary
        self._sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim, self._scale = config.head_dim, config.head_dim**-0.5
        self._windows = [layer.window for layer in layers]
        attended = config.num_heads * config.head_dim
        widths = (attended, config.hidden_size, config.intermediate_size, sum(self._sizes) * config.head_dim)
        before = [self._before(config, layer) for layer in layers]
        after = [_after(layer) for layer in layers]
        # chain i runs before attention i, the last one after the last attention
        parts = [before[0], *(tail + head for tail, head in zip(after, before[1:], strict=False)), after[-1]]
        self._chains = [LinearChain(kernels, links, widths) for links in parts]
        attentions = [[(KernelKind.ATTENTION, layer)] for layer in range(len(layers))]
        runs = [[chain] for chain in self._chains]
        self._stack = LayerStack(kernels, runs, attentions, embedding, head.as_chain, stream=STREAM)
        self._workspace = LinearChainWorkspace(self._chains)
        self._prepared: tuple[ChainBuffers, CPUAttention, dict[int | None, AttentionCall]] | None = None

    def forward(self, step: StepInputs, attend: AttentionFunction, ahead: HeadOutputs | None = None) -> Tensor:
        """Return the residual stream [T, hidden] after the last layer; valid until the next step."""
        if not isinstance(attend, CPUAttentionStep):
            return self._forward_by_layer(step, attend)
        buffers, scratch = self._workspace.buffers_for_rows(step.num_tokens)
        if self._prepared is None or self._prepared[:2] != (buffers, attend.backend):
            self._prepared = buffers, attend.backend, self._prepare(buffers, attend.backend)
        calls = {window: attend.bind_call_to_step(prepared) for window, prepared in self._prepared[2].items()}
        self._stack(
            buffers,
            scratch,
            [calls[window] for window in self._windows],
            tokens=StepTokens(step.token_ids, step.positions, self._rotary.tables_up_to(step.max_end_position)),
            ahead=ahead,
            layer_bytes=attend.layer_stride_bytes,
        )
        return buffers[STREAM]

    def _prepare(self, buffers: ChainBuffers, backend: CPUAttention) -> dict[int | None, AttentionCall]:
        """Return what is the same in the attention of all steps with these buffers, by window."""
        heads = self._heads(buffers)
        out = buffers[ATTENDED].view(heads[0].shape)
        return {
            window: backend.prepare_call(0, *heads, out, scale=self._scale, window=window)
            for window in dict.fromkeys(self._windows)
        }

    def _forward_by_layer(self, step: StepInputs, attend: AttentionFunction) -> Tensor:
        """Do the same as `forward` for any attention, with one call per chain."""
        angles = self._rotary.cos_sin(step.positions)
        buffers, scratch = self._workspace.buffers_for_rows(step.num_tokens)
        buffers[STREAM].copy_(embedding_rows(self._embedding, step.token_ids))
        queries, keys, values = self._heads(buffers)
        for index, window in enumerate(self._windows):
            self._chains[index](buffers, scratch, angles)
            attended = attend(index, queries, keys, values, scale=self._scale, window=window)
            buffers[ATTENDED].copy_(attended.reshape(step.num_tokens, -1))
        self._chains[-1](buffers, scratch)
        return buffers[STREAM]

    def _heads(self, buffers: ChainBuffers) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values [T, num heads, head_dim]."""
        queries, keys, values = buffers[HEADS].view(buffers.count, -1, self._head_dim).split(self._sizes, dim=1)
        return queries, keys, values

    def _before(self, config: ModelConfig, layer: FusableLayer) -> list[ChainLink]:
        norms = (layer.query_norm, layer.key_norm)
        rotary = RotaryHeads(
            num_queries=config.num_heads,
            num_keys=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            query_norm=None if norms[0] is None else norms[0].packed,
            key_norm=None if norms[1] is None else norms[1].packed,
        )
        return layer.qkv.chain_links(STREAM, HEADS, rotary=rotary)


def _after(layer: FusableLayer) -> list[ChainLink]:
    return [
        *layer.out.chain_links(ATTENDED, STREAM, residual=STREAM),
        *layer.gate_up.chain_links(STREAM, GATED),
        *layer.down.chain_links(GATED, STREAM, residual=STREAM),
    ]
