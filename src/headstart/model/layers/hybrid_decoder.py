"""HybridDecoder: decoders in which some layers have attention and the others a recurrent state (see KINDS).

Like Decoder it works on packed rows without padding. Each layer is one of four kinds: attention over the paged KV, a
gated delta net, Mamba-2, or a short convolution; all have a gated MLP behind it. With kernels, all products between two
mixers are one call; in bfloat16 with the attention of attention/cpu.py, all layers are.

Granite-4 multiplies what each layer adds to the residual. Here the residual is kept divided by that number instead,
which only the embedding's multiplier and the epsilon of the layers' norms can tell.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from headstart.model.attention.base import Attend
from headstart.model.attention.cpu import CPUStep
from headstart.model.kernels.chain import MAX_LINKS, Chain, Link, Workspace
from headstart.model.kernels.library import Kernels
from headstart.model.kernels.packed import PackedLinear, RotaryHeads
from headstart.model.kernels.recurrence import States, gate_call, gate_rows
from headstart.model.kernels.stack import KernelKind, Stack
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

    inner: Linear  # norm, then queries, keys, values and, if it is gated, gates
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    out: Linear
    gated: bool
    rotary: RotaryHeads | None  # in bf16 on kernels: norms of heads and rotary embedding, done behind `inner`

    @property
    def kinds(self) -> list[KernelKind]:
        """Its kernels."""
        return [KernelKind.ATTENTION, KernelKind.GATE] if self.gated else [KernelKind.ATTENTION]


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayer:
    """One layer: a mixer or attention, and an MLP."""

    mixer: Mixer | AttentionWeights
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products of the layer."""
        return (self.mixer.inner, self.mixer.out, self.gate_up, self.down)


class _Products:
    """The products between two mixers as chains, on buffers of a step. Buffer 0 is the residual stream."""

    def __init__(self, kernels: Kernels, config: ModelConfig, layers: list[HybridLayer]) -> None:
        inners, mixed_widths = (list(dict.fromkeys(widths)) for widths in zip(*map(_ends, layers), strict=True))
        widths = (config.hidden_size, config.intermediate_size, *inners, *mixed_widths)
        self._ends = [
            (2 + inners.index(inner), 2 + len(inners) + mixed_widths.index(mixed))
            for inner, mixed in map(_ends, layers)
        ]
        runs = [list[list[Link]]() for _ in range(len(layers) + 1)]
        for index, (layer, (inner, mixed)) in enumerate(zip(layers, self._ends, strict=True)):
            rotary = layer.mixer.rotary if isinstance(layer.mixer, AttentionWeights) else None
            runs[index].append(layer.mixer.inner.links(0, inner, rotary=rotary))
            runs[index + 1] += [
                layer.mixer.out.links(mixed, 0, residual=0),
                layer.gate_up.links(0, 1),
                layer.down.links(1, 0, residual=0),
            ]
        self._chains = [[Chain(kernels, links, widths) for links in _joined(run)] for run in runs]
        self._workspace = Workspace([chain for run in self._chains for chain in run])
        self._stack = Stack(kernels, self._chains, [_kinds(layer.mixer) for layer in layers])

    def forward_at_once(self, residual: Tensor, angles: tuple[Tensor, Tensor], calls: "Calls") -> Tensor:
        """Return the residual stream behind all layers, in one call with the arguments of all mixers' kernels."""
        buffers, scratch = self._workspace.of(len(residual))
        buffers[0].copy_(residual)
        mixers = [
            call
            for index, (inner, mixed) in enumerate(self._ends)
            for call in calls(index, buffers[inner], buffers[mixed])
        ]
        self._stack(buffers, scratch, angles, mixers)
        return buffers[0]

    def forward(self, residual: Tensor, angles: tuple[Tensor, Tensor], mix: "Mix") -> Tensor:
        """Do the same, but `mix` is called for each layer between its products."""
        buffers, scratch = self._workspace.of(len(residual))
        buffers[0].copy_(residual)
        for index, chains in enumerate(self._chains):
            for chain in chains:
                chain(buffers, scratch, angles)
            if index < len(self._ends):
                inner, mixed = self._ends[index]
                buffers[mixed].copy_(mix(index, buffers[inner]))
        return buffers[0]


Mix = Callable[[int, Tensor], Tensor]  # layer and the outputs of `inner` -> the inputs of `out`
Calls = Callable[
    [int, Tensor, Tensor], Sequence[ctypes.Structure]
]  # and the memory of the latter -> kernels' arguments


def _kinds(mixer: Mixer | AttentionWeights) -> list[KernelKind]:
    return mixer.kinds if isinstance(mixer, AttentionWeights) else [mixer.kind]


def _ends(layer: HybridLayer) -> tuple[int, int]:
    """Return the widths of the rows that a mixer takes and gives."""
    return layer.mixer.inner.out_features, layer.mixer.out.packed[0].in_features


def _joined(run: list[list[Link]]) -> list[list[Link]]:
    """Return products as few lists of at most MAX_LINKS links; the links of one product stay together."""
    found: list[list[Link]] = [[]]
    for links in run:
        if len(found[-1]) + len(links) > MAX_LINKS:
            found.append([])
        found[-1] += links
    return found


class HybridDecoder:
    """A loaded hybrid model. `state_size` is the length of a request's state, in numbers of fp32."""

    def __init__(
        self, config: ModelConfig, embedding: Embedding, layers: list[HybridLayer], head: Linear, form: Form
    ) -> None:
        self.config, self.embedding, self.layers, self.head = config, embedding, layers, head
        assert config.hybrid is not None
        self.hybrid = config.hybrid
        self.kernels = form.kernels
        # Either all weights are packed for kernels, or none.
        self._products = None if form.kernels is None or not head.packed else _Products(form.kernels, config, layers)
        dtype, device = (
            (form.dtype, form.device) if isinstance(embedding, PackedLinear) else (embedding.dtype, embedding.device)
        )
        self.rotary = Rotary(config.rope, dtype, device)
        attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionWeights)]
        # Whether queries and keys need nothing from torch between the products and attention.
        self._is_one_call = self._products is not None and all(
            attention.rotary or not (attention.query_norm or self.hybrid.has_rope) for attention in attentions
        )
        self.state_size, num_attentions, self._places = 0, 0, list[int]()  # of a layer: its KV, or its part of states
        for layer in layers:
            if isinstance(layer.mixer, AttentionWeights):
                self._places.append(num_attentions)
                num_attentions += 1
            else:
                self._places.append(self.state_size)
                self.state_size += layer.mixer.state_size
        tied = any(held is embedding for held in (head.weight, *head.packed))
        linears = [linear for layer in layers for linear in layer.linears] + ([] if tied else [head])
        self.weight_bytes = embedding.nbytes + sum(linear.weight_bytes for linear in linears)

    def forward(self, step: StepInputs, attend: Attend) -> Tensor:
        """See LanguageModel."""
        assert step.states is not None, "a hybrid model needs the states of its requests"
        cosines, sines = self.rotary.tables(step.positions)
        angles = cosines[step.positions], sines[step.positions]
        residual = look_up(self.embedding, step.token_ids)
        scale = self.hybrid.embedding_scale / self.hybrid.residual_scale
        residual = residual if scale == 1 else residual * scale
        states = States(step.states)

        def calls(index: int, inner: Tensor, mixed: Tensor) -> list[ctypes.Structure]:
            mixer, place = self.layers[index].mixer, self._places[index]
            if not isinstance(mixer, AttentionWeights):
                return [mixer.call(inner, mixed, states, place)]
            assert isinstance(attend, CPUStep)
            queries, keys, values, gates = self._heads(mixer, inner)
            out = mixed.view(queries.shape)
            attention = attend.call(place, queries, keys, values, out, scale=self._attention_scale)
            return [attention] if gates is None else [attention, gate_call(mixed, gates)]

        def mix(index: int, inner: Tensor) -> Tensor:
            mixer, place = self.layers[index].mixer, self._places[index]
            if isinstance(mixer, AttentionWeights):
                return self._attention(place, mixer, inner, angles, attend)
            return mixer(inner, states, place)

        if self._products is not None and self._is_one_call and isinstance(attend, CPUStep):
            return self._products.forward_at_once(residual, angles, calls)
        if self._products is not None:
            return self._products.forward(residual, angles, mix)
        for index, layer in enumerate(self.layers):
            residual = layer.mixer.out(mix(index, layer.mixer.inner(residual)), residual)
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

    @property
    def _attention_scale(self) -> float:
        scale = self.hybrid.attention_scale
        return self.config.head_dim**-0.5 if scale is None else scale

    def _heads(self, layer: AttentionWeights, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the outputs of `inner`: queries, keys and values [T, num heads, head_dim]; gates [T, size] if any."""
        config = self.config
        gates = rows[:, -config.num_heads * config.head_dim :] if layer.gated else None
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        heads = rows.view(len(rows), -1, config.head_dim)[:, : sum(sizes)]
        queries, keys, values = heads.split(sizes, dim=1)
        return queries, keys, values, gates

    def _attention(
        self, index: int, layer: AttentionWeights, heads: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return what attention layer `index` makes [T, size] of the outputs [T, width] of its `inner`."""
        queries, keys, values, gates = self._heads(layer, heads)
        if layer.query_norm is not None and layer.key_norm is not None and layer.rotary is None:
            queries, keys = layer.query_norm(queries), layer.key_norm(keys)
        if self.hybrid.has_rope and layer.rotary is None:
            queries, keys = self.rotary.apply(queries, angles), self.rotary.apply(keys, angles)
        attended = attend(index, queries, keys, values, scale=self._attention_scale).reshape(len(heads), -1)
        if gates is not None and self.kernels is not None:
            gate_rows(self.kernels, attended, gates)
        elif gates is not None:
            attended = attended * sigmoid(gates.float()).to(attended.dtype)
        return attended
