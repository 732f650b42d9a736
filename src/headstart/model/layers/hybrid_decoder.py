"""HybridDecoder: decoders in which some layers have attention and the others a recurrent state (see KINDS).

Like Decoder it works on packed rows without padding. Each layer is one of four kinds: attention over the paged KV, a
gated delta net, Mamba-2, or a short convolution; all have a gated MLP behind it. With kernels, all products between two
mixers are one call; in bfloat16 with the attention of attention/cpu.py, all layers are.

Granite-4 multiplies what each layer adds to the residual. Here the residual is kept divided by that number instead,
which only the embedding's multiplier and the epsilon of the layers' norms can tell.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.model.attention.base import AttentionFunction
from headstart.model.attention.cpu import CPUAttention, CPUAttentionStep
from headstart.model.kernels.attention import AttentionCall
from headstart.model.kernels.chain import MAX_LINKS, ChainBuffers, ChainLink, LinearChain, LinearChainWorkspace
from headstart.model.kernels.library import KernelLibrary
from headstart.model.kernels.packed import PackedLinear, RotaryHeads
from headstart.model.kernels.recurrence import StepRecurrentStates, apply_sigmoid_gate, sigmoid_gate_call
from headstart.model.kernels.stack import HeadOutputs, KernelKind, LayerStack, StepTokens
from headstart.model.layers.dispatch import are_linears_batch_invariant
from headstart.model.layers.layer_ops import RMSNorm
from headstart.model.layers.linear import Embedding, FusedLinear, WeightForm, embedding_rows
from headstart.model.layers.recurrent import TokenMixer, sigmoid
from headstart.model.layers.rotary import RotaryEmbedding
from headstart.model.step_inputs import StepInputs
from headstart.model.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights of an attention layer; with `gated` each query head has a gate of its size for its output."""

    input_projection: FusedLinear  # norm, then queries, keys, values and, if it is gated, gates
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    out: FusedLinear
    gated: bool
    rotary: RotaryHeads | None  # in bf16 on kernels: norms of heads and rotary embedding, done behind `inner`

    @property
    def kernel_kinds(self) -> list[KernelKind]:
        """Its kernels."""
        return [KernelKind.ATTENTION, KernelKind.GATE] if self.gated else [KernelKind.ATTENTION]


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayerWeights:
    """One layer: a mixer or attention, and an MLP."""

    mixer: TokenMixer | AttentionWeights
    gate_up: FusedLinear
    down: FusedLinear

    @property
    def mixer_kernel_kinds(self) -> list[KernelKind]:
        """The kernels of the mixer."""
        return self.mixer.kernel_kinds if isinstance(self.mixer, AttentionWeights) else [self.mixer.kernel_kind]

    @property
    def linear_weights(self) -> tuple[FusedLinear, ...]:
        """The products of the layer."""
        return (self.mixer.input_projection, self.mixer.out, self.gate_up, self.down)


class _Products:
    """The products between two mixers as chains, on buffers of a step. Buffer 0 is the residual stream."""

    def __init__(
        self,
        kernels: KernelLibrary,
        config: ModelConfig,
        layers: list[HybridLayerWeights],
        embedding: Embedding,
        head: FusedLinear,
    ) -> None:
        inners, mixed_widths = (list(dict.fromkeys(widths)) for widths in zip(*map(_ends, layers), strict=True))
        widths = (config.hidden_size, config.intermediate_size, *inners, *mixed_widths)
        self._ends = [
            (2 + inners.index(inner), 2 + len(inners) + mixed_widths.index(mixed))
            for inner, mixed in map(_ends, layers)
        ]
        runs = [list[list[ChainLink]]() for _ in range(len(layers) + 1)]
        for index, (layer, (inner, mixed)) in enumerate(zip(layers, self._ends, strict=True)):
            rotary = layer.mixer.rotary if isinstance(layer.mixer, AttentionWeights) else None
            runs[index].append(layer.mixer.input_projection.chain_links(0, inner, rotary=rotary))
            runs[index + 1] += [
                layer.mixer.out.chain_links(mixed, 0, residual=0),
                layer.gate_up.chain_links(0, 1),
                layer.down.chain_links(1, 0, residual=0),
            ]
        self._chains = [[LinearChain(kernels, links, widths) for links in _joined(run)] for run in runs]
        self._workspace = LinearChainWorkspace([chain for run in self._chains for chain in run])
        self._config, self._layers, (self._places, self._state_size) = config, layers, _places(layers)
        mixers = [
            [(kind, place) for kind in layer.mixer_kernel_kinds]
            for layer, place in zip(layers, self._places, strict=True)
        ]
        self._stack = LayerStack(
            kernels, self._chains, mixers, embedding, head.as_chain, stream=0, scale=_scale(config)
        )
        self._prepared: tuple[ChainBuffers, CPUAttention, list[_Call], dict[_Ends, AttentionCall]] | None = None

    def forward_at_once(
        self,
        given: StepTokens | Tensor,
        states: StepRecurrentStates,
        attend: CPUAttentionStep,
        ahead: HeadOutputs | None,
    ) -> Tensor:
        """Return the residual stream behind all layers, in one call; `given`: tokens, or the stream before them."""
        tokens, residual = (given, None) if isinstance(given, StepTokens) else (None, given)
        buffers, scratch = self._workspace.buffers_for_rows(
            given[0].shape[0] if residual is None else residual.shape[0]
        )
        if residual is not None:
            buffers[0].copy_(residual)
        if self._prepared is None or self._prepared[:2] != (buffers, attend.backend):
            self._prepared = buffers, attend.backend, *self._prepare(buffers, attend.backend)
        _, _, prepared, attentions = self._prepared
        planned = {ends: attend.bind_call_to_step(attention) for ends, attention in attentions.items()}
        calls = [planned[call] if isinstance(call, tuple) else call for call in prepared]
        chunks = states.chunk_address_and_count(buffers.count, self._state_size)
        self._stack(
            buffers, scratch, calls, tokens=tokens, ahead=ahead, layer_bytes=attend.layer_stride_bytes, chunks=chunks
        )
        return buffers[0]

    def _prepare(
        self, buffers: ChainBuffers, backend: CPUAttention
    ) -> "tuple[list[_Call], dict[_Ends, AttentionCall]]":
        """Return the calls of mixers with these buffers, for attentions where they are; and the attentions there."""
        calls, attentions, scale = list[_Call](), dict[_Ends, AttentionCall](), _attention_scale(self._config)
        for layer, place, ends in zip(self._layers, self._places, self._ends, strict=True):
            inner, mixed = (buffers[end] for end in ends)
            if not isinstance(layer.mixer, AttentionWeights):
                calls.append(layer.mixer.kernel_argument(inner, mixed, place))
                continue
            queries, keys, values, gates = _split(self._config, layer.mixer, inner)
            attentions[ends] = backend.prepare_call(0, queries, keys, values, mixed.view(queries.shape), scale=scale)
            calls += [ends] if gates is None else [ends, sigmoid_gate_call(mixed, gates)]
        return calls, attentions

    def forward(self, residual: Tensor, angles: tuple[Tensor, Tensor], mix: "Mix") -> Tensor:
        """Do the same, but `mix` is called for each layer between its products."""
        buffers, scratch = self._workspace.buffers_for_rows(len(residual))
        buffers[0].copy_(residual)
        for index, chains in enumerate(self._chains):
            for chain in chains:
                chain(buffers, scratch, angles)
            if index < len(self._ends):
                inner, mixed = self._ends[index]
                buffers[mixed].copy_(mix(index, buffers[inner]))
        return buffers[0]


Mix = Callable[[int, Tensor], Tensor]  # layer and the outputs of `inner` -> the inputs of `out`
_Ends = tuple[int, int]  # the numbers of the buffers between which a mixer is
_Call = ctypes.Structure | _Ends  # the argument of a mixer's kernel, or for an attention its ends


def _places(layers: list[HybridLayerWeights]) -> tuple[list[int], int]:
    """Return for each layer the number of its KV, or where its part of the states begins; and the states' size."""
    found, num_attentions, state_size = list[int](), 0, 0
    for layer in layers:
        if isinstance(layer.mixer, AttentionWeights):
            found.append(num_attentions)
            num_attentions += 1
        else:
            found.append(state_size)
            state_size += layer.mixer.num_state_elements
    return found, state_size


def _scale(config: ModelConfig) -> float:
    """Return the factor of embeddings."""
    assert config.hybrid is not None
    return config.hybrid.embedding_scale / config.hybrid.residual_scale


def _attention_scale(config: ModelConfig) -> float:
    """Return the factor of scores."""
    assert config.hybrid is not None
    return config.head_dim**-0.5 if config.hybrid.attention_scale is None else config.hybrid.attention_scale


def _split(config: ModelConfig, layer: AttentionWeights, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split the outputs of `inner`: queries, keys and values [T, num heads, head_dim]; gates [T, size] if any."""
    gates = rows[:, -config.num_heads * config.head_dim :] if layer.gated else None
    sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    heads = rows.view(len(rows), -1, config.head_dim)[:, : sum(sizes)]
    queries, keys, values = heads.split(sizes, dim=1)
    return queries, keys, values, gates


def _ends(layer: HybridLayerWeights) -> tuple[int, int]:
    """Return the widths of the rows that a mixer takes and gives."""
    return layer.mixer.input_projection.out_features, layer.mixer.out.packed[0].in_features


def _joined(run: list[list[ChainLink]]) -> list[list[ChainLink]]:
    """Return products as few lists of at most MAX_LINKS links; the links of one product stay together."""
    found: list[list[ChainLink]] = [[]]
    for links in run:
        if len(found[-1]) + len(links) > MAX_LINKS:
            found.append([])
        found[-1] += links
    return found


class HybridDecoder:
    """A loaded hybrid model. `state_size` is the length of a request's state, in numbers of fp32."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: list[HybridLayerWeights],
        head: FusedLinear,
        form: WeightForm,
    ) -> None:
        self.config, self.embedding, self.layers, self.head = config, embedding, layers, head
        assert config.hybrid is not None
        self.hybrid = config.hybrid
        self.kernels = form.kernels
        dtype, device = (
            (form.dtype, form.device) if isinstance(embedding, PackedLinear) else (embedding.dtype, embedding.device)
        )
        self.rotary = RotaryEmbedding(config.rope, dtype, device)
        attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionWeights)]
        # Whether queries and keys need nothing from torch between the products and attention.
        self._is_one_call = all(
            attention.rotary or not (attention.query_norm or self.hybrid.has_rope) for attention in attentions
        )
        self._places, self.state_size = _places(layers)
        # Either all weights are packed for kernels, or none.
        self._products: _Products | None = None
        if form.kernels is not None and head.packed:
            self._products = _Products(form.kernels, config, layers, embedding, head)
        tied = any(held is embedding for held in (head.weight, *head.packed))
        linears = [linear for layer in layers for linear in layer.linear_weights] + ([] if tied else [head])
        self.weight_bytes = embedding.nbytes + sum(linear.weight_bytes for linear in linears)

    def forward(self, step: StepInputs, attend: AttentionFunction, ahead: HeadOutputs | None = None) -> Tensor:
        """See LanguageModel."""
        assert step.states is not None, "a hybrid model needs the states of its requests"
        tables, states = self.rotary.tables_up_to(step.max_end_position), StepRecurrentStates(step.states)
        if self._products is not None and self._is_one_call and isinstance(attend, CPUAttentionStep):
            is_bf16 = self.rotary.dtype == torch.bfloat16
            given = StepTokens(step.token_ids, step.positions, tables) if is_bf16 else self._embedded(step.token_ids)
            hidden = self._products.forward_at_once(given, states, attend, ahead if is_bf16 else None)
            if ahead is not None and ahead.logits is not None:
                ahead.logits = self._divided(ahead.logits)
            return hidden
        angles, residual = (tables[0][step.positions], tables[1][step.positions]), self._embedded(step.token_ids)

        def mix(index: int, inner: Tensor) -> Tensor:
            mixer, place = self.layers[index].mixer, self._places[index]
            if isinstance(mixer, AttentionWeights):
                return self._attention(place, mixer, inner, angles, attend)
            return mixer(inner, states, place)

        if self._products is not None:
            return self._products.forward(residual, angles, mix)
        for index, layer in enumerate(self.layers):
            residual = layer.mixer.out(mix(index, layer.mixer.input_projection(residual)), residual)
            residual = layer.down(layer.gate_up(residual), residual)
        return residual

    def logits_from_hidden(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return self._divided(self.head(hidden))

    def is_batch_invariant(self) -> bool:
        """Return whether a row's outputs do not depend on the number of rows, by a test of each kind of layer."""
        kinds = {type(layer.mixer): layer for layer in self.layers}
        linears = [linear for layer in kinds.values() for linear in layer.linear_weights]
        return self.head.packed != () and are_linears_batch_invariant((*linears, self.head))

    def _divided(self, logits: Tensor) -> Tensor:
        divisor = self.hybrid.logits_divisor
        return logits if divisor == 1 else logits / divisor

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream [T, hidden] before the first layer."""
        rows, scale = embedding_rows(self.embedding, token_ids), _scale(self.config)
        return rows if scale == 1 else rows * scale

    def _attention(
        self,
        index: int,
        layer: AttentionWeights,
        heads: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: AttentionFunction,
    ) -> Tensor:
        """Return what attention layer `index` makes [T, size] of the outputs [T, width] of its `inner`."""
        queries, keys, values, gates = _split(self.config, layer, heads)
        if layer.query_norm is not None and layer.key_norm is not None and layer.rotary is None:
            queries, keys = layer.query_norm(queries), layer.key_norm(keys)
        if self.hybrid.has_rope and layer.rotary is None:
            queries, keys = self.rotary.apply(queries, angles), self.rotary.apply(keys, angles)
        attended = attend(index, queries, keys, values, scale=_attention_scale(self.config)).reshape(len(heads), -1)
        if gates is not None and self.kernels is not None:
            apply_sigmoid_gate(self.kernels, attended, gates)
        elif gates is not None:
            attended = attended * sigmoid(gates.float()).to(attended.dtype)
        return attended
