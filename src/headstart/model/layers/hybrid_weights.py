"""Reading the weights of hybrids: names of tensors by family, and the order in which the decoder wants their rows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.allocator import trim_heap
from headstart.model.kernels.packed import PackedNorm, RotaryHeads
from headstart.model.kernels.recurrence import MixerWeights
from headstart.model.layers.decoder import EMBEDDING, HEAD, WeightReader, read_head_and_embedding
from headstart.model.layers.hybrid_decoder import AttentionWeights, HybridDecoder, HybridLayerWeights
from headstart.model.layers.layer_ops import RMSNorm, concatenate_rows
from headstart.model.layers.linear import PLAIN, FusedLinear, Weight, WeightForm
from headstart.model.layers.recurrent import MatrixMixer, ShortConvolution, TokenMixer
from headstart.model.weights.checkpoint import ModelCheckpoint
from headstart.model.weights.gguf.block_formats import PackedTensor
from headstart.model.weights.hybrid_config import HybridConfig
from headstart.model.weights.model_config import ModelConfig


def load_hybrid(
    config: ModelConfig, checkpoint: ModelCheckpoint, dtype: torch.dtype, device: torch.device, form: WeightForm = PLAIN
) -> HybridDecoder:
    """Read all weights of a hybrid model. Raises ConfigError for a missing tensor or a wrong shape."""
    reader = _HybridReader(config, checkpoint, dtype, device, form)
    layers: list[HybridLayerWeights] = []
    for index in range(config.num_layers):
        layers.append(reader.hybrid_layer(index))
        trim_heap()
    prefix = reader.hybrid.tensor_prefix
    norm = reader.norm(f"{prefix}.{reader.names.final_norm}.weight", config.hidden_size)
    head, embedding = read_head_and_embedding(reader, norm, f"{prefix}.{EMBEDDING.removeprefix('model.')}", HEAD)
    return HybridDecoder(config, embedding, layers, head, form)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of tensors in a checkpoint of one family."""

    final_norm: str
    input_norm: str
    mlp_norm: str
    gate: str
    up: str  # "": behind the gate, in one tensor
    down: str
    out: str
    query_norm: str  # "": none
    key_norm: str


_NAMES = {
    "lfm2": _Names(
        "embedding_norm", "operator_norm", "ffn_norm", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2",
        "out_proj", "q_layernorm", "k_layernorm",
    ),
    "qwen3_5_text": _Names(
        "norm", "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "o_proj", "q_norm", "k_norm",
    ),
    "granitemoehybrid": _Names(
        "norm", "input_layernorm", "post_attention_layernorm", "shared_mlp.input_linear", "",
        "shared_mlp.output_linear", "o_proj", "", "",
    ),
    "bamba": _Names(
        "final_layernorm", "input_layernorm", "pre_ff_layernorm", "feed_forward.gate_proj", "feed_forward.up_proj",
        "feed_forward.down_proj", "o_proj", "", "",
    ),
}  # fmt: skip


class _HybridReader(WeightReader):
    """Reader of the layers of a hybrid model."""

    @property
    def names(self) -> _Names:
        return _NAMES[self.hybrid.family]

    @property
    def hybrid(self) -> HybridConfig:
        assert self.config.hybrid is not None
        return self.config.hybrid

    def norm(self, name: str, size: int) -> RMSNorm:
        """Return a norm; folders of Qwen3.5 store the weight less 1."""
        weight = self.checkpoint.load_tensor(name, (size,), torch.float32)
        if self.hybrid.family == "qwen3_5_text" and not self.checkpoint.stores_transformed_weights:
            weight += 1.0
        epsilon = self.config.rms_norm_eps / self.hybrid.residual_scale**2
        return RMSNorm(weight.to(self.dtype).to(self.device), epsilon)

    def hybrid_layer(self, index: int) -> HybridLayerWeights:
        config, names = self.config, self.names
        layer = f"{self.hybrid.tensor_prefix}.layers.{index}"
        input_norm = self.norm(f"{layer}.{names.input_norm}.weight", config.hidden_size)
        mlp_norm = self.norm(f"{layer}.{names.mlp_norm}.weight", config.hidden_size)
        match self.hybrid.kinds[index]:
            case "attention":
                mixer: TokenMixer | AttentionWeights = self._attention(f"{layer}.self_attn", input_norm)
            case "delta":
                mixer = self._delta(f"{layer}.linear_attn", input_norm)
            case "mamba":
                mixer = self._mamba(f"{layer}.mamba", input_norm)
            case _:
                mixer = self._convolution(f"{layer}.conv", input_norm)
        wide = config.intermediate_size
        gate_up = [(f"{layer}.{names.gate}", wide), (f"{layer}.{names.up}", wide)]
        if not names.up:
            gate_up = [(f"{layer}.{names.gate}", 2 * wide)]
        return HybridLayerWeights(
            mixer,
            self.linear(gate_up, config.hidden_size, bias=config.mlp_bias, norm=mlp_norm, gated=True),
            self.linear([(f"{layer}.{names.down}", config.hidden_size)], wide, bias=config.mlp_bias),
        )

    def _attention(self, name: str, norm: RMSNorm) -> AttentionWeights:
        config, names = self.config, self.names
        gated = self.hybrid.family == "qwen3_5_text"
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q": query_size * (2 if gated else 1), "k": key_size, "v": key_size}
        parts = {part: f"{name}.{part}_proj" for part in sizes}
        weights = [self.weight(f"{parts[part]}.weight", size, config.hidden_size) for part, size in sizes.items()]
        biases = [self.tensor(f"{parts[part]}.bias", size) for part, size in sizes.items()] if config.qkv_bias else []
        if gated:
            weights, biases = self._gates_last(weights), self._gates_last(biases)
        qkv = FusedLinear(weights, concatenate_rows(biases) if biases else None, norm=norm, form=self.form)
        query_norm, key_norm = (
            self.norm(f"{name}.{own}.weight", config.head_dim) if own else None
            for own in (names.query_norm, names.key_norm)
        )
        rotary = None
        if self.hybrid.has_rope and qkv.packed and self.dtype == torch.bfloat16:
            rotary = RotaryHeads(
                num_queries=config.num_heads,
                num_keys=config.num_kv_heads,
                num_others=config.num_heads if gated else 0,
                head_dim=config.head_dim,
                rotary_dim=config.rope.rotary_dim,
                query_norm=None if query_norm is None else query_norm.packed,
                key_norm=None if key_norm is None else key_norm.packed,
            )
        out = self.linear([(f"{name}.{names.out}", config.hidden_size)], query_size, bias=config.o_bias)
        return AttentionWeights(qkv, query_norm, key_norm, out, gated, rotary)

    def _gates_last(self, parts: list[Any]) -> list[Any]:
        """Return weights or biases of queries with gates, keys and values as queries, keys, values and gates."""
        if not parts:
            return parts
        rows = np.arange(parts[0].shape[0]).reshape(self.config.num_heads, 2, self.config.head_dim)
        return [_rows(parts[0], rows[:, 0]), *parts[1:], _rows(parts[0], rows[:, 1])]

    def _delta(self, name: str, norm: RMSNorm) -> MatrixMixer:
        config, shape = self.config, self.hybrid.matrix
        assert shape is not None
        heads = shape.num_value_heads
        rate = self._wide(f"{name}.A_log", heads)
        parts = (("qkv", shape.num_channels), ("z", shape.value_width), ("b", heads), ("a", heads))
        return MatrixMixer(
            shape,
            self.linear(
                [(f"{name}.in_proj_{part}", size) for part, size in parts], config.hidden_size, bias=False, norm=norm
            ),
            MixerWeights(
                self._wide(f"{name}.conv1d.weight", shape.num_channels, 1, shape.conv_size)[:, 0].T.contiguous(),
                rate if self.checkpoint.stores_transformed_weights else -rate.exp(),
                self._wide(f"{name}.dt_bias", heads),
                PackedNorm(self.tensor(f"{name}.norm.weight", shape.value_dim), config.rms_norm_eps),
            ),
            self.linear([(f"{name}.out_proj", config.hidden_size)], shape.value_width, bias=False),
            self.form.kernels,
        )

    def _mamba(self, name: str, norm: RMSNorm) -> MatrixMixer:
        hybrid, shape = self.hybrid, self.hybrid.matrix
        assert shape is not None
        hidden, heads = self.config.hidden_size, shape.num_value_heads
        values, channels = shape.value_width, shape.num_channels
        # Stored as gate, x, B, C, rate; here C, B and x are queries, keys and values, as in a delta net.
        order = np.concatenate(np.split(np.arange(channels), (values, values + shape.key_width))[::-1])
        gate, rate = np.arange(values), np.arange(values + channels, values + channels + heads)
        rows = np.concatenate((values + order, gate, rate))
        inner = _rows(self.weight(f"{name}.in_proj.weight", len(rows), hidden), rows)
        bias = self.tensor(f"{name}.in_proj.bias", len(rows))[rows] if hybrid.mixer_bias else None
        kernel = self._wide(f"{name}.conv1d.weight", channels, 1, shape.conv_size)[:, 0][order]
        return MatrixMixer(
            shape,
            FusedLinear(inner, bias, norm=norm, form=self.form),
            MixerWeights(
                kernel.T.contiguous(),
                -self._wide(f"{name}.A_log", heads).exp(),
                self._wide(f"{name}.dt_bias", heads),
                PackedNorm(self.tensor(f"{name}.norm.weight", values), self.config.rms_norm_eps),
                self._wide(f"{name}.conv1d.bias", channels)[order] if hybrid.conv_bias else None,
                self._wide(f"{name}.D", heads),
            ),
            self.linear([(f"{name}.out_proj", hidden)], values, bias=hybrid.mixer_bias),
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
        return self.checkpoint.load_tensor(name, shape, torch.float32).to(self.device)


def _rows(weight: Weight, order: np.ndarray) -> Weight:
    """Return some rows of a weight, or of a bias."""
    order = order.reshape(-1)
    if isinstance(weight, PackedTensor):
        return replace(weight, shape=(len(order), *weight.shape[1:]), data=weight.data[order])
    return weight[torch.from_numpy(order)]
