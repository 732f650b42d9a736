"""Decoder: the forward pass of the Llama family over packed rows. It has no padding, no masks and no KV cache.

Query, key and value projections are one weight, and so are gate and up. With compiled kernels, all operations between
two attentions are one call (fused.py). Results follow the eager code of Transformers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headstart.allocator import trim_heap
from headstart.model.attention.base import AttentionFunction
from headstart.model.kernels.packed import PackedLinear
from headstart.model.kernels.stack import HeadOutputs
from headstart.model.layers.dispatch import are_linears_batch_invariant
from headstart.model.layers.fused import FusedLayers
from headstart.model.layers.layer_ops import RMSNorm, concatenate_rows
from headstart.model.layers.linear import PLAIN, Embedding, FusedLinear, Weight, WeightForm, embedding_rows
from headstart.model.layers.rotary import RotaryEmbedding
from headstart.model.step_inputs import StepInputs
from headstart.model.weights.checkpoint import ModelCheckpoint
from headstart.model.weights.model_config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint


class LanguageModel(Protocol):
    """The model interface of the runner; implemented by Decoder and TransformersModel."""

    weight_bytes: int
    state_size: int  # numbers of a request's recurrent state, in fp32; 0: it has none

    def forward(self, step: StepInputs, attend: AttentionFunction, ahead: HeadOutputs | None = None) -> Tensor:
        """Return the hidden states [T, hidden] of all tokens of a step, as input for `logits`.

        KV is written through `attend`. The result is valid until the next step. `ahead` may be filled in: it is given
        if the logits of all tokens are wanted.
        """
        ...

    def logits_from_hidden(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocab] of rows [n, hidden] of the result of `forward`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer."""

    qkv: FusedLinear
    query_norm: RMSNorm | None  # Qwen3 normalises each query and key head
    key_norm: RMSNorm | None
    out: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    window: int | None

    @property
    def linear_weights(self) -> tuple[FusedLinear, FusedLinear, FusedLinear, FusedLinear]:
        """The products of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


class Decoder:
    """A loaded Llama-like model."""

    state_size = 0

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: list[LayerWeights],
        head: FusedLinear,
        form: WeightForm = PLAIN,
    ) -> None:
        self.config, self.layers = config, layers
        self.head = head  # includes the final norm
        self.embedding = embedding  # the head's own weight if both are the same matrix and its form gives back rows
        self.weight_bytes = embedding.nbytes + sum(linear.weight_bytes for linear in self._linears())
        packed = isinstance(embedding, PackedLinear)
        dtype, device = (form.dtype, form.device) if packed else (embedding.dtype, embedding.device)
        self.rotary = RotaryEmbedding(config.rope, dtype, device)
        # Either all weights are packed for kernels, or none. In fp32 each product is a call.
        kernels = form.kernels if head.packed and form.dtype == torch.bfloat16 else None
        self.fused = None if kernels is None else FusedLayers(kernels, config, embedding, layers, head, self.rotary)

    def forward(self, step: StepInputs, attend: AttentionFunction, ahead: HeadOutputs | None = None) -> Tensor:
        """See LanguageModel."""
        if self.fused is not None:
            return self.fused.forward(step, attend, ahead)
        angles = self.rotary.cos_sin(step.positions)
        residual = embedding_rows(self.embedding, step.token_ids)
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, residual, angles, attend)
            residual = layer.out(attended, residual)
            residual = layer.down(layer.gate_up(residual), residual)
        return residual

    def logits_from_hidden(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return self.head(hidden)

    def is_batch_invariant(self) -> bool:
        """Return whether a row's outputs do not depend on the number of rows, by a test of each product of a layer."""
        layer = self.layers[0]
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down, self.head)
        return self.head.packed != () and are_linears_batch_invariant(linears)

    @property
    def has_plain_weights(self) -> bool:
        """Whether all weights are kept as they are multiplied by torch: neither packed for kernels nor quantised."""
        linears = [self.head, *self._linears()]
        return isinstance(self.embedding, Tensor) and all(linear.weight is not None for linear in linears)

    def _linears(self) -> list[FusedLinear]:
        """Return every weight matrix that has its own memory."""
        tied = any(held is self.embedding for held in (self.head.weight, *self.head.packed))
        head = [] if tied else [self.head]
        return head + [linear for layer in self.layers for linear in layer.linear_weights]

    def _attention(
        self, index: int, layer: LayerWeights, rows: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionFunction
    ) -> Tensor:
        """Return the attention outputs for `rows` [T, hidden], as [T, heads * head_dim]."""
        config = self.config
        heads = layer.qkv(rows).view(len(rows), -1, config.head_dim)
        queries, keys, values = self._apply_rotary(layer, heads, angles)
        attended = attend(index, queries, keys, values, scale=config.head_dim**-0.5, window=layer.window)
        return attended.reshape(len(rows), -1)

    def _apply_rotary(
        self, layer: LayerWeights, heads: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `heads` into queries, keys and values [T, num heads, head_dim]; normalise and rotate the first two."""
        config = self.config
        sizes, num_rotated = (config.num_heads, config.num_kv_heads), config.num_heads + config.num_kv_heads
        rotated = heads[:, :num_rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotated.split(sizes, dim=1)
            rotated = torch.cat((layer.query_norm(queries), layer.key_norm(keys)), dim=1)
        queries, keys = self.rotary.apply(rotated, angles).split(sizes, dim=1)
        return queries, keys, heads[:, num_rotated:]


def load_decoder(
    config: ModelConfig, checkpoint: ModelCheckpoint, dtype: torch.dtype, device: torch.device, form: WeightForm = PLAIN
) -> Decoder:
    """Read all weights. Raises ConfigError for a missing tensor or a wrong shape."""
    reader = WeightReader(config, checkpoint, dtype, device, form)
    layers = []
    for index in range(config.num_layers):
        layers.append(reader.read_layer(index))
        trim_heap()  # packing has freed the plain weights, which the heap would keep: as much again as the model
    norm = reader.norm("model.norm.weight", config.hidden_size)
    head, embedding = read_head_and_embedding(reader, norm, EMBEDDING, HEAD)
    return Decoder(config, embedding, layers, head, form)


def read_head_and_embedding(
    reader: "WeightReader", norm: RMSNorm, embedding: str, head: str
) -> tuple[FusedLinear, Embedding]:
    """Read the output head, behind `norm`, and the embedding, which may be one matrix; both by their names."""
    config, checkpoint, form = reader.config, reader.checkpoint, reader.form
    table = reader.weight(embedding, config.vocab_size, config.hidden_size)
    # As in Transformers: weights declared as tied, but stored twice with different values, are not tied.
    tied = config.tie_word_embeddings is not False and (
        head not in checkpoint or (config.tie_word_embeddings is True and checkpoint.are_tensors_equal(head, embedding))
    )
    weight = table if tied else reader.weight(head, config.vocab_size, config.hidden_size)
    linear = FusedLinear(weight, norm=norm, form=form.for_output_head)
    return linear, _embedding(table, linear if tied else None, form)


def _embedding(table: Weight, head: FusedLinear | None, form: WeightForm) -> Embedding:
    """Return the embedding in the least memory; `head` is the output head if it has the same weight."""
    if head is not None and head.packed and head.packed[0].has_rows and form.quantization == "none":
        return head.packed[0]  # in fp32 a quantised head has rows too, but rounded ones
    if isinstance(table, Tensor):
        return table
    assert form.kernels is not None, "without kernels weights are not kept in blocks"
    return PackedLinear(form.kernels, table)


class WeightReader:
    """Reader of layers from a checkpoint, by tensor name."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: ModelCheckpoint,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm,
    ) -> None:
        self.config, self.checkpoint, self.dtype, self.device, self.form = config, checkpoint, dtype, device, form

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.load_tensor(name, shape, self.dtype).to(self.device)

    def weight(self, name: str, rows: int, columns: int) -> Weight:
        """Return a weight in the blocks of its file if the form keeps them."""
        packed = self.checkpoint.load_packed_tensor(name, (rows, columns)) if self.form.keeps_quantised_blocks else None
        return self.tensor(name, rows, columns) if packed is None else packed

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.tensor(name, size), self.config.rms_norm_eps)

    def linear(
        self,
        names: list[tuple[str, int]],
        in_features: int,
        *,
        bias: bool,
        norm: RMSNorm | None = None,
        gated: bool = False,
    ) -> FusedLinear:
        """Return one FusedLinear of the named projections, rows concatenated; `names` are (name, out_features)."""
        weights = [self.weight(f"{name}.weight", rows, in_features) for name, rows in names]
        biases = [self.tensor(f"{name}.bias", rows) for name, rows in names] if bias else []
        return FusedLinear(weights, concatenate_rows(biases) if bias else None, norm=norm, gated=gated, form=self.form)

    def read_layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [(f"{attention}.{name}_proj", query_size if name == "q" else key_size) for name in "qkv"]
        gate_up = [(f"{mlp}.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
        if config.fused_weights:
            qkv = [(f"{attention}.qkv_proj", query_size + 2 * key_size)]
            gate_up = [(f"{mlp}.gate_up_proj", 2 * config.intermediate_size)]
        out, down = [(f"{attention}.o_proj", config.hidden_size)], [(f"{mlp}.down_proj", config.hidden_size)]
        input_norm = self.norm(f"{prefix}.input_layernorm.weight", config.hidden_size)
        mlp_norm = self.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        query_norm = self.norm(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None
        key_norm = self.norm(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None
        return LayerWeights(
            qkv=self.linear(qkv, config.hidden_size, bias=config.qkv_bias, norm=input_norm),
            query_norm=query_norm,
            key_norm=key_norm,
            out=self.linear(out, query_size, bias=config.o_bias),
            gate_up=self.linear(gate_up, config.hidden_size, bias=config.mlp_bias, norm=mlp_norm, gated=True),
            down=self.linear(down, config.intermediate_size, bias=config.mlp_bias),
            window=config.windows[index],
        )
