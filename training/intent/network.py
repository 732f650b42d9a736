"""A Llama decoder for training on many short segments behind shared preambles, with each preamble computed once.

Parameter names and arithmetic are those of transformers' `LlamaForCausalLM`, so that `state_dict()` is a checkpoint.
Each segment attends to its preamble and, causally, to itself, as in a serving engine with a cached prefix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; the names are those of `LlamaConfig` where it has one."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Batch:
    """N preambles [N, P], B segments behind each [N, B, S], and their targets; -100 marks positions without loss."""

    preamble: Tensor
    preamble_positions: Tensor
    preamble_is_real: Tensor
    segments: Tensor
    segment_positions: Tensor
    targets: Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        q_size = shape.num_attention_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def query(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return the rotated queries: [..., T, hidden] -> [..., heads, T, D]."""
        return _rotate(_split(self.q_proj(x), self.shape.head_dim), rope)

    def key_value(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values: [..., T, hidden] -> [..., KV heads, T, D]."""
        return _rotate(_split(self.k_proj(x), self.shape.head_dim), rope), _split(self.v_proj(x), self.shape.head_dim)

    def output(self, heads: Tensor) -> Tensor:
        """Return the output projection: [..., heads, T, D] -> [..., T, hidden]."""
        return self.o_proj(heads.transpose(-2, -3).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer on the preambles and on the segments behind them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, p: Tensor, s: Tensor, ropes: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], *, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Run preambles [N, P, hidden] and segments [N, B, S, hidden]; the last layer leaves the preambles as is."""
        attention, (p_rope, s_rope) = self.self_attn, ropes
        p_norm, s_norm = self.input_layernorm(p), self.input_layernorm(s)
        p_key, p_value = attention.key_value(p_norm, p_rope)
        s_key, s_value = attention.key_value(s_norm, s_rope)
        query = attention.query(s_norm, s_rope)
        s = s + attention.output(_attend(query, (p_key, p_value), (s_key, s_value), masks))
        s = s + self.mlp(self.post_attention_layernorm(s))
        if is_last:
            return p, s
        repeats = self.self_attn.shape.num_attention_heads // self.self_attn.shape.num_key_value_heads
        heads = functional.scaled_dot_product_attention(
            attention.query(p_norm, p_rope),
            p_key.repeat_interleave(repeats, dim=1),
            p_value.repeat_interleave(repeats, dim=1),
            is_causal=True,
        )
        p = p + attention.output(heads)
        return p + self.mlp(self.post_attention_layernorm(p)), s


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """The language model with tied embeddings."""

    rope: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.register_buffer("rope", _rope_table(shape), persistent=False)
        for name, weight in self.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=shape.hidden_size**-0.5)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [K, vocab] and targets [K] at the K positions of the segments that have a target."""
        p, s = self.model.embed_tokens(batch.preamble), self.model.embed_tokens(batch.segments)
        ropes = self.rope[batch.preamble_positions][:, None], self.rope[batch.segment_positions][:, :, None]
        masks = _masks(batch)
        for i, layer in enumerate(self.model.layers):
            p, s = layer(p, s, ropes, masks, is_last=i == self.shape.num_hidden_layers - 1)
        is_learnt = batch.targets >= 0
        hidden = self.model.norm(s[is_learnt])
        return functional.linear(hidden, self.model.embed_tokens.weight), batch.targets[is_learnt]


def _split(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(-2, -3)


def _rope_table(shape: Shape) -> Tensor:
    """Return cosines and sines [positions, 2, D]; Su et al. 2021, in the half-split layout of Llama checkpoints."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float32), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope[..., 0, :].to(x.dtype), rope[..., 1, :].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _attend(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor]
) -> Tensor:
    """Return heads [N, B, H, S, D] of queries over shared keys [N, KV, P, D] and, causally, own keys [N, B, KV, S, D].

    Written as two matrix products and one softmax: ATen's fused kernel on CPU needs a copy of the shared part for every
    segment, and its backward pass took half of the training time.
    """
    n, b, h, s, d = query.shape
    kv = shared[0].shape[1]
    query = (query * d**-0.5).view(n, b, kv, h // kv, s, d)
    together = query.permute(0, 2, 1, 3, 4, 5).reshape(n, kv, -1, d)
    scores = (together @ shared[0].transpose(-1, -2)).view(n, kv, b, h // kv, s, -1) + masks[0].to(query.dtype)
    apart = query.reshape(n, b, kv, -1, d)
    own_scores = (apart @ own[0].transpose(-1, -2)).view(n, b, kv, h // kv, s, s) + masks[1].to(query.dtype)
    weights = torch.cat((scores, own_scores.transpose(1, 2)), dim=-1).softmax(dim=-1, dtype=query.dtype)
    shared_weights, own_weights = weights.split((shared[0].shape[2], s), dim=-1)
    from_shared = (shared_weights.reshape(n, kv, -1, shared[0].shape[2]) @ shared[1]).view(n, kv, b, h // kv, s, d)
    from_own = (own_weights.transpose(1, 2).reshape(n, b, kv, -1, s) @ own[1]).view(n, b, kv, h // kv, s, d)
    return (from_shared.transpose(1, 2) + from_own).reshape(n, b, h, s, d)


def _masks(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return additive masks: real preamble tokens [N, 1, 1, 1, 1, P], and the causal mask of the segment [S, S]."""
    size = batch.segments.shape[2]
    shared = torch.zeros(batch.preamble.shape).masked_fill(~batch.preamble_is_real, -1e9)
    return shared[:, None, None, None, None], torch.full((size, size), -1e9).triu(1)
