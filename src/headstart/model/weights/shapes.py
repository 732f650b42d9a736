"""Shapes of real architectures, for models with random weights: the content of config.json and the list of tensors.

Speed and memory depend only on the shape, so a model from `headstart init-model` can be measured without a download.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headstart.core.errors import ConfigError

WEIGHT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder of the Llama family; names as in config.json."""

    architecture: str  # "Llama" | "Qwen2" | "Qwen3"
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def num_parameters(self) -> int:
        total = 0
        for _, size in self.tensors():
            count = 1
            for extent in size:
                count *= extent
            total += count
        return total

    def config(self, *, dtype: str, bos_token_id: int, eos_token_id: int, std: float) -> dict[str, Any]:
        """Return the content of config.json, in the form that Transformers reads."""
        return {
            "architectures": [f"{self.architecture}ForCausalLM"],
            "model_type": self.architecture.lower(),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": std,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, size) of every tensor of the checkpoint, in the order of the layers."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_hidden_layers):
            for name, size in self._layer():
                yield f"model.layers.{layer}.{name}", size
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield "input_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"self_attn.{name}_proj.weight", (rows, hidden)
            if self.architecture == "Qwen2":
                yield f"self_attn.{name}_proj.bias", (rows,)
        if self.architecture == "Qwen3":
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "self_attn.o_proj.weight", (hidden, queries)
        yield "post_attention_layernorm.weight", (hidden,)
        yield "mlp.gate_proj.weight", (wide, hidden)
        yield "mlp.up_proj.weight", (wide, hidden)
        yield "mlp.down_proj.weight", (hidden, wide)


SHAPES: dict[str, DecoderShape] = {
    "tiny": DecoderShape("Llama", 64, 2, 4, 2, 128, 512, 4096, head_dim=16),
    "llama-100m": DecoderShape("Llama", 768, 12, 12, 4, 2048, 32_000, 4096, head_dim=64),
    "llama-100m-152k": DecoderShape(
        "Llama", 768, 12, 12, 4, 2048, 152_064, 4096, head_dim=64, tie_word_embeddings=True
    ),
    "tinyllama-1.1b": DecoderShape("Llama", 2048, 22, 32, 4, 5632, 32_000, 2048, head_dim=64),
    "llama-2-7b": DecoderShape("Llama", 4096, 32, 32, 32, 11_008, 32_000, 4096, head_dim=128),
    "qwen2.5-0.5b": DecoderShape(
        "Qwen2", 896, 24, 14, 2, 4864, 151_936, 32_768, 64, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True
    ),
    "qwen3-0.6b": DecoderShape(
        "Qwen3",
        1024,
        28,
        16,
        8,
        3072,
        151_936,
        40_960,
        128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": DecoderShape(
        "Qwen3",
        2048,
        28,
        16,
        8,
        6144,
        151_936,
        40_960,
        128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": DecoderShape(
        "Qwen3",
        2560,
        36,
        32,
        8,
        9728,
        151_936,
        40_960,
        128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": DecoderShape("Llama", 4096, 32, 32, 8, 14_336, 128_256, 131_072, head_dim=128, rope_theta=5e5),
    "llama-3m": DecoderShape("Llama", 256, 4, 4, 2, 768, 512, 4096, head_dim=64),
}


def check_random_weights(shape: str, *, std: float, dtype: str) -> None:
    """Raise ConfigError for an unknown shape or dtype, or an invalid `std`. Does not import torch."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; choose one of {', '.join(SHAPES)}")
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"there is no dtype {dtype!r} for weights; choose one of {', '.join(WEIGHT_DTYPES)}")
    if not 0 < std < 100:
        raise ConfigError(f"std is {std}; it must be above 0 (0.02 as real models, 0.2 for tests)")
