"""ModelConfig: the settings of a checkpoint for the compact decoders, read from a Hugging Face `config.json`.

Covers the Llama family and hybrids only; `eos_token_ids` works for every model. Values are those of Transformers'
config object. Both spellings of rotary settings are read: `rope_parameters` (Transformers 5) and `rope_theta` +
`rope_scaling` (before). No key that would change the results is ignored: see config_keys.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.model.layers.rotary import RopeConfig, read_rope
from headstart.model.weights.architectures import NATIVE_ARCHITECTURES, architecture_of
from headstart.model.weights.config_bounds import MAX_EPSILON, MAX_THETA, MIN_THETA, check_config_sizes, check_number
from headstart.model.weights.config_keys import NotNativeError, transformers_config
from headstart.model.weights.hybrid_config import (
    KINDS,
    HybridConfig,
    decode_infinite_limits,
    language_model_config,
    mlp_width,
    read_hybrid,
)
from headstart.model.weights.json_file import read_json, shorten_text


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and settings of a Llama-like decoder. Lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]  # per layer: position i sees (i - w, i]; None: the whole prefix
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool | None  # None: tied exactly if the checkpoint has no lm_head
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_weights: bool  # the checkpoint holds gate and up as one tensor, and Phi-3's queries, keys and values
    hybrid: HybridConfig | None = None  # None: all layers have attention

    @property
    def num_attention_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return self.num_layers if self.hybrid is None else self.hybrid.kinds.count("attention")


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of config.json and generation_config.json, in that order, without repeats."""
    found: dict[int, None] = {}
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.append(read_json(folder / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                found[token_id] = None
    return tuple(found)


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Llama-family `config.json`.

    Raises ConfigError with the invalid field and value, NotNativeError for a model that Transformers' code may run.
    """
    architecture = architecture_of(raw)
    family = NATIVE_ARCHITECTURES[architecture]
    check_config_sizes(raw)
    raw = decode_infinite_limits(language_model_config(raw))
    for key in ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"):
        given = (
            raw.get("block_ff_dim", raw.get(key)) if (family, key) == ("lfm2", "intermediate_size") else raw.get(key)
        )
        _count(given, key)  # Transformers would use the size of its example model
    config: Any = transformers_config(raw, family)  # untyped in part
    heads = _count(config.num_attention_heads, "num_attention_heads")
    kv_heads = _count(config.num_key_value_heads, "num_key_value_heads")
    given_head_dim = getattr(config, "head_dim", None)
    head_dim = config.hidden_size // heads if given_head_dim is None else _count(given_head_dim, "head_dim")
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise NotNativeError(f"hidden_act {config.hidden_act!r} is not supported for {architecture}; only silu is")
    if not getattr(config, "is_causal", True):
        raise NotNativeError(f"is_causal is {config.is_causal!r}")
    rope = _rope(config, family, head_dim)
    attention_bias = (
        config.attention_bias if family in ("llama", "qwen3", "qwen3_5_text", "granitemoehybrid", "bamba") else False
    )
    epsilon = config.norm_eps if family == "lfm2" else config.rms_norm_eps
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=mlp_width(config, family),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=check_number(epsilon, "rms_norm_eps", at_least=0.0, at_most=MAX_EPSILON),
        windows=_windows(config, family, rope.max_positions),
        rope=rope,
        max_model_len=rope.max_positions,
        tie_word_embeddings=config.tie_word_embeddings if family == "lfm2" else raw.get("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.mlp_bias if family in ("llama", "bamba") else False,
        qk_norm=family == "qwen3",
        fused_weights=family in ("phi3", "granitemoehybrid"),
        hybrid=read_hybrid(config, family, architecture),
    )


def _count(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _rope(config: Any, family: str, head_dim: int) -> RopeConfig:
    """Return the rotary settings as the family's Transformers code applies them."""
    parameters = config.rope_parameters
    if not isinstance(parameters, dict):
        raise ConfigError(f"rotary settings {shorten_text(repr(parameters), 80)} are not an object")
    if family not in ("phi3", "qwen3_5_text", "bamba") and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        if parameters.get("rope_type") != "default":
            raise NotNativeError("partial_rotary_factor is given beside a scaled rotary embedding")
        parameters = {**parameters, "partial_rotary_factor": 1.0}  # as in Transformers: rotates all
    check_number(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor", above=0.0)
    check_number(parameters.get("rope_theta", 1.0), "rope_theta", at_least=MIN_THETA, at_most=MAX_THETA)
    if not isinstance(parameters.get("rope_type"), str):
        raise ConfigError(f"config.json: rope_type is {parameters.get('rope_type')!r}; it must be a name")
    if parameters.get("original_max_position_embeddings", 1) == 0:
        raise ConfigError("config.json: original_max_position_embeddings is 0; it must be a positive integer")
    if family in KINDS and parameters.get("original_max_position_embeddings", 1) is None:
        raise NotNativeError("original_max_position_embeddings is null")
    positions = _count(config.max_position_embeddings, "max_position_embeddings")
    return read_rope({"rope_parameters": parameters, "max_position_embeddings": positions}, head_dim)


def _windows(config: Any, family: str, max_positions: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the rules of the family's Transformers code."""
    layers: int = config.num_hidden_layers
    kinds: list[str] = getattr(config, "layer_types", None) or []
    window: int | None = getattr(config, "sliding_window", None)
    if family in KINDS:
        return (None,) * layers
    if window is not None and _count(window, "sliding_window") < 2:  # the cache of Transformers keeps all of one token
        raise ConfigError("config.json: sliding_window is 1; it must be at least 2, or null")
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise NotNativeError(
            f"layer_types {sorted(set(kinds))}: only full_attention and sliding_attention are supported"
        )
    if family in ("qwen2", "qwen3"):
        if window is None and "sliding_attention" in kinds:
            raise ConfigError(
                "layer_types names sliding_attention, but there is no sliding_window (use_sliding_window?)"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if "sliding_attention" in kinds:
        raise NotNativeError("layer_types names sliding_attention")
    if family == "llama":  # its mask ignores the window, but Transformers' cache drops tokens before it
        if window is not None and window < max_positions:
            raise NotNativeError(f"sliding_window is {window}")
        window = None
    return (window,) * layers
