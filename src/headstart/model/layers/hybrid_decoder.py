"""HybridDecoder: decoders in which some layers have attention and the others a recurrent state (see KINDS).

Like Decoder it works on packed rows without padding. Each layer is one of four kinds: attention over the paged KV, a
gated delta net, Mamba-2, or a short convolution; all have a gated MLP behind it.

Granite-4 multiplies what each layer adds to the residual. Here the residual is kept divided by that number instead,
which only the embedding's multiplier and the epsilon of the layers' norms can tell.
"""

from dataclasses import dataclass

from torch import Tensor

from headstart.model.attention.base import Attend
from headstart.model.kernels.chain import Buffers, Chain
from headstart.model.kernels.packed import PackedLinear
from headstart.model.kernels.recurrence import States, gate_rows
from headstart.model.layers.dispatch import are_rows_exact
from headstart.model.layers.layer_ops import RMSNorm
from headstart.model.layers.linear import Embedding, Form, Linear, look_up
from headstart.model.layers.recurrent import Mixer, sigmoid
from headstart.model.layers.rotary import Rotary
from headstart.model.step_inputs import StepInputs
from headstart.model.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights of an attention layer; with `gated` each query head has a gate of its size for its output."""

    qkv: Linear  # norm, then queries, keys, values and, if it is gated, gates
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
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
        assert config.hybrid is not None
        self.hybrid = config.hybrid
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
        scale = self.hybrid.embedding_scale / self.hybrid.residual_scale
        residual = residual if scale == 1 else residual * scale
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
        logits, divisor = self.head(hidden), self.hybrid.logits_divisor
        return logits if divisor == 1 else logits / divisor

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
        if layer.query_norm is not None and layer.key_norm is not None and layer.chain is None:
            queries, keys = layer.query_norm(queries), layer.key_norm(keys)
        if self.hybrid.has_rope and layer.chain is None:
            queries, keys = self.rotary.apply(queries, angles), self.rotary.apply(keys, angles)
        scale = config.head_dim**-0.5 if self.hybrid.attention_scale is None else self.hybrid.attention_scale
        attended = attend(index, queries, keys, values, scale=scale).reshape(num_rows, size)
        if gates is not None and self.kernels is not None:
            gate_rows(self.kernels, attended, gates)
        elif gates is not None:
            attended = attended * sigmoid(gates.float()).to(attended.dtype)
        return layer.out(attended, rows)


def _run(chain: Chain, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return the heads [T, width] that a chain makes of `rows`."""
    buffers = Buffers(len(rows), chain.widths)
    buffers[0] = rows
    buffers.fill(1)
    chain(buffers, chain.scratch(len(rows)), angles)
    return buffers[1]
