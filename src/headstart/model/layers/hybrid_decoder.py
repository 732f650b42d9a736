"""HybridDecoder: decoders in which some layers have attention and the others a recurrent state (Qwen3.5, LFM2).

Like Decoder it works on packed rows without padding. Each layer is one of three kinds: attention over the paged KV, a
gated delta net, or a short convolution; all have a gated MLP behind it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.allocator import trim
from headstart.model.attention.base import Attend
from headstart.model.kernels.chain import Buffers, Chain
from headstart.model.kernels.packed import Norm, PackedLinear, RotaryHeads
from headstart.model.kernels.recurrence import DeltaWeights, States, gate_rows
from headstart.model.layers.decoder import EMBEDDING, HEAD, WeightReader, tied_embedding
from headstart.model.layers.dispatch import are_rows_exact
from headstart.model.layers.layer_ops import RMSNorm, join
from headstart.model.layers.linear import PLAIN, Embedding, Form, Linear, Weight, look_up
from headstart.model.layers.recurrent import GatedDeltaNet, Mixer, ShortConvolution, sigmoid
from headstart.model.layers.rotary import Rotary
from headstart.model.step_inputs import StepInputs
from headstart.model.weights.checkpoint import Checkpoint
from headstart.model.weights.gguf.block_formats import PackedTensor
from headstart.model.weights.hybrid_config import HybridConfig
from headstart.model.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights of an attention layer; with `gated` each query head has a gate of its size for its output."""

    qkv: Linear  # norm, then queries, keys, values and, if it is gated, gates
    query_norm: RMSNorm
    key_norm: RMSNorm
    out: Linear
    gated: bool
    chain: Chain | None  # in bf16 on kernels: `qkv`, the norms of heads and the rotary embedding


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayer:
    """One layer: a mixer or attention, and an MLP."""

    mixer: Mixer | AttentionWeights
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products of the layer."""
        mixer = self.mixer
        own = (mixer.qkv, mixer.out) if isinstance(mixer, AttentionWeights) else mixer.linears
        return (*own, self.gate_up, self.down)


class HybridDecoder:
    """A loaded hybrid model. `state_size` is the length of a request's state, in numbers of fp32."""

    def __init__(
        self, config: ModelConfig, embedding: Embedding, layers: list[HybridLayer], head: Linear, form: Form
    ) -> None:
        self.config, self.embedding, self.layers, self.head = config, embedding, layers, head
        self.kernels = form.kernels
        dtype, device = (
            (form.dtype, form.device) if isinstance(embedding, PackedLinear) else (embedding.dtype, embedding.device)
        )
        self.rotary = Rotary(config.rope, dtype, device)
        self.state_size = sum(
            layer.mixer.state_size for layer in layers if not isinstance(layer.mixer, AttentionWeights)
        )
        tied = any(held is embedding for held in (head.weight, *head.packed))
        linears = [linear for layer in layers for linear in layer.linears] + ([] if tied else [head])
        self.weight_bytes = embedding.nbytes + sum(linear.weight_bytes for linear in linears)

    def forward(self, step: StepInputs, attend: Attend) -> Tensor:
        """See LanguageModel."""
        assert step.states is not None, "a hybrid model needs the states of its requests"
        angles = self.rotary.angles(step.positions)
        residual = look_up(self.embedding, step.token_ids)
        states, index, offset = States(step.states), 0, 0
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, AttentionWeights):
                residual = self._attention(index, mixer, residual, angles, attend)
                index += 1
            else:
                residual = mixer(residual, residual, states, offset)
                offset += mixer.state_size
            residual = layer.down(layer.gate_up(residual), residual)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return self.head(hidden)

    def are_rows_exact(self) -> bool:
        """Return whether a row's outputs do not depend on the number of rows, by a test of each kind of layer."""
        kinds = {type(layer.mixer): layer for layer in self.layers}
        linears = [linear for layer in kinds.values() for linear in layer.linears]
        return self.head.packed != () and are_rows_exact((*linears, self.head))

    def _attention(
        self, index: int, layer: AttentionWeights, rows: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return `rows` [T, hidden] plus the outputs of attention layer `index`."""
        config, num_rows = self.config, len(rows)
        size = config.num_heads * config.head_dim
        heads = layer.qkv(rows) if layer.chain is None else _run(layer.chain, rows, angles)
        gates = heads[:, -size:] if layer.gated else None
        num_rotated = config.num_heads + config.num_kv_heads
        heads = heads.view(num_rows, -1, config.head_dim)[:, : num_rotated + config.num_kv_heads]
        queries, keys, values = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.chain is None:
            normed = torch.cat((layer.query_norm(queries), layer.key_norm(keys)), dim=1)
            queries, keys = self.rotary.apply(normed, angles).split((config.num_heads, config.num_kv_heads), dim=1)
        attended = attend(index, queries, keys, values, scale=config.head_dim**-0.5).reshape(num_rows, size)
        if gates is not None and self.kernels is not None:
            gate_rows(self.kernels, attended, gates)
        elif gates is not None:
            attended = attended * sigmoid(gates.float()).to(attended.dtype)
        return layer.out(attended, rows)


def _rows(weight: Weight, order: np.ndarray) -> Weight:
    """Return some rows of a weight, or of a bias."""
    order = order.reshape(-1)
    if isinstance(weight, PackedTensor):
        return replace(weight, shape=(len(order), *weight.shape[1:]), data=weight.data[order])
    return weight[torch.from_numpy(order)]


def _run(chain: Chain, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return the heads [T, width] that a chain makes of `rows`."""
    buffers = Buffers(len(rows), chain.widths)
    buffers[0] = rows
    buffers.fill(1)
    chain(buffers, chain.scratch(len(rows)), angles)
    return buffers[1]


def load_hybrid(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, form: Form = PLAIN
) -> HybridDecoder:
    """Read all weights of a hybrid model. Raises ConfigError for a missing tensor or a wrong shape."""
    reader = _HybridReader(config, checkpoint, dtype, device, form)
    layers: list[HybridLayer] = []
    for index in range(config.num_layers):
        layers.append(reader.hybrid_layer(index))
        trim()
    names = reader.names
    norm = reader.norm(names.final_norm, config.hidden_size)
    head, embedding = tied_embedding(reader, norm, f"{names.prefix}.{EMBEDDING.removeprefix('model.')}", HEAD)
    return HybridDecoder(config, embedding, layers, head, form)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of tensors in a checkpoint of one family."""

    prefix: str
    final_norm: str
    input_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    out: str
    query_norm: str
    key_norm: str


def _names(config: HybridConfig) -> _Names:
    if config.delta is None:
        return _Names(
            "model", "model.embedding_norm.weight", "operator_norm", "ffn_norm", "feed_forward.w1", "feed_forward.w3",
            "feed_forward.w2", "out_proj", "q_layernorm", "k_layernorm",
        )  # fmt: skip
    prefix = config.tensor_prefix
    return _Names(
        prefix, f"{prefix}.norm.weight", "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "o_proj", "q_norm", "k_norm",
    )  # fmt: skip


class _HybridReader(WeightReader):
    """Reader of the layers of a hybrid model."""

    @property
    def names(self) -> _Names:
        return _names(self.hybrid)

    @property
    def hybrid(self) -> HybridConfig:
        assert self.config.hybrid is not None
        return self.config.hybrid

    def norm(self, name: str, size: int) -> RMSNorm:
        """Return a norm; folders of Qwen3.5 store the weight less 1."""
        if self.hybrid.delta is None or self.checkpoint.are_applied:
            return super().norm(name, size)
        weight = self.checkpoint.take(name, (size,), torch.float32) + 1.0
        return RMSNorm(weight.to(self.dtype).to(self.device), self.config.rms_norm_eps)

    def hybrid_layer(self, index: int) -> HybridLayer:
        config, names = self.config, self.names
        layer = f"{names.prefix}.layers.{index}"
        input_norm = self.norm(f"{layer}.{names.input_norm}.weight", config.hidden_size)
        mlp_norm = self.norm(f"{layer}.{names.mlp_norm}.weight", config.hidden_size)
        match self.hybrid.kinds[index]:
            case "attention":
                mixer: Mixer | AttentionWeights = self._attention(f"{layer}.self_attn", input_norm)
            case "delta":
                mixer = self._delta(f"{layer}.linear_attn", input_norm)
            case _:
                mixer = self._convolution(f"{layer}.conv", input_norm)
        wide = config.intermediate_size
        gate_up = [(f"{layer}.{names.gate}", wide), (f"{layer}.{names.up}", wide)]
        return HybridLayer(
            mixer,
            self.linear(gate_up, config.hidden_size, bias=False, norm=mlp_norm, gated=True),
            self.linear([(f"{layer}.{names.down}", config.hidden_size)], wide, bias=False),
        )

    def _attention(self, name: str, norm: RMSNorm) -> AttentionWeights:
        config, names = self.config, self.names
        gated = self.hybrid.delta is not None
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q": query_size * (2 if gated else 1), "k": key_size, "v": key_size}
        parts = {part: f"{name}.{part}_proj" for part in sizes}
        weights = [self.weight(f"{parts[part]}.weight", size, config.hidden_size) for part, size in sizes.items()]
        biases = [self.tensor(f"{parts[part]}.bias", size) for part, size in sizes.items()] if config.qkv_bias else []
        if gated:
            weights, biases = self._gates_last(weights), self._gates_last(biases)
        qkv = Linear(weights, join(biases) if biases else None, norm=norm, form=self.form)
        query_norm, key_norm = (
            self.norm(f"{name}.{own}.weight", config.head_dim) for own in (names.query_norm, names.key_norm)
        )
        chain, kernels = None, self.form.kernels
        if qkv.packed and kernels is not None and self.dtype == torch.bfloat16:
            rotary = RotaryHeads(
                num_queries=config.num_heads,
                num_keys=config.num_kv_heads,
                num_others=config.num_heads if gated else 0,
                head_dim=config.head_dim,
                rotary_dim=config.rope.rotary_dim,
                query_norm=query_norm.packed,
                key_norm=key_norm.packed,
            )
            chain = Chain(kernels, qkv.links(0, 1, rotary=rotary), (config.hidden_size, qkv.out_features))
        out = self.linear([(f"{name}.{names.out}", config.hidden_size)], query_size, bias=config.o_bias)
        return AttentionWeights(qkv, query_norm, key_norm, out, gated, chain)

    def _gates_last(self, parts: list[Any]) -> list[Any]:
        """Return weights or biases of queries with gates, keys and values as queries, keys, values and gates."""
        if not parts:
            return parts
        rows = np.arange(parts[0].shape[0]).reshape(self.config.num_heads, 2, self.config.head_dim)
        return [_rows(parts[0], rows[:, 0]), *parts[1:], _rows(parts[0], rows[:, 1])]

    def _delta(self, name: str, norm: RMSNorm) -> GatedDeltaNet:
        config, shape = self.config, self.hybrid.delta
        assert shape is not None
        heads = shape.num_value_heads
        rate = self._wide(f"{name}.A_log", heads)
        parts = (("qkv", shape.num_channels), ("z", shape.num_values), ("b", heads), ("a", heads))
        return GatedDeltaNet(
            shape,
            self.linear(
                [(f"{name}.in_proj_{part}", size) for part, size in parts], config.hidden_size, bias=False, norm=norm
            ),
            DeltaWeights(
                self._wide(f"{name}.conv1d.weight", shape.num_channels, 1, shape.conv_size)[:, 0].T.contiguous(),
                rate if self.checkpoint.are_applied else -rate.exp(),
                self._wide(f"{name}.dt_bias", heads),
                Norm(self.tensor(f"{name}.norm.weight", shape.value_dim), config.rms_norm_eps),
            ),
            self.linear([(f"{name}.out_proj", config.hidden_size)], shape.num_values, bias=False),
            self.form.kernels,
        )

    def _convolution(self, name: str, norm: RMSNorm) -> ShortConvolution:
        hidden, bias = self.config.hidden_size, self.hybrid.conv_bias
        return ShortConvolution(
            self.linear([(f"{name}.in_proj", 3 * hidden)], hidden, bias=bias, norm=norm),
            self._wide(f"{name}.conv.weight", hidden, 1, self.hybrid.conv_size)[:, 0].T.contiguous(),
            self._wide(f"{name}.conv.bias", hidden) if bias else None,
            self.linear([(f"{name}.out_proj", hidden)], hidden, bias=bias),
            self.form.kernels,
        )

    def _wide(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in fp32: what states are computed from is not rounded."""
        return self.checkpoint.take(name, shape, torch.float32).to(self.device)
