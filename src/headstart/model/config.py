"""ModelConfig: what the compact decoder must know of a checkpoint, read from a Hugging Face `config.json`.

Covers the Llama family only; `read_json` and `eos_token_ids` serve every model. Both spellings of rotary settings are
read: `rope_parameters` (Transformers 5) and `rope_theta` + `rope_scaling` (before). Whatever is not understood raises
ConfigError; nothing is ignored that would change the numbers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.model.rope import RopeConfig, read_rope

NATIVE_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
}


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
    tie_word_embeddings: bool | None  # None: tied exactly if the checkpoint brings no lm_head
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_weights: bool  # the checkpoint holds qkv_proj and gate_up_proj


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError if it is missing or is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model folder holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def architecture_of(config: dict[str, Any]) -> str:
    """The model class a `config.json` names. Raises ConfigError if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json names no architecture (model_type {config.get('model_type')!r}); expected an entry such as "
            f'"architectures": ["LlamaForCausalLM"]'
        )
    return names[0]


def refuse_quantised(config: dict[str, Any]) -> None:
    """Raises ConfigError for a checkpoint whose weights are quantised: they would be read as plain numbers."""
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ConfigError(f"the checkpoint is quantised ({method}); use the bfloat16 or float32 original")


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together, without repeats, in that order."""
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


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """A ModelConfig of a Llama-family `config.json`. Raises ConfigError with the offending field and value."""
    architecture = architecture_of(config)
    family = NATIVE_ARCHITECTURES[architecture]
    heads, hidden, layers = (_count(config, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = _count(config, "num_key_value_heads", 8 if family == "mistral" else heads)
    head_dim = _count(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported for {architecture}; only silu is")
    rope = read_rope(config, head_dim)
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-5 if family == "phi3" else 1e-6)),
        windows=_windows(config, family, layers),
        rope=rope,
        max_model_len=rope.max_positions,
        tie_word_embeddings=config.get("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        fused_weights=family == "phi3",
    )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _windows(config: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, by the rules of the family's Transformers code."""
    kinds = config.get("layer_types")
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types {sorted(set(kinds))}: only full_attention and sliding_attention are supported")
    if family == "llama":
        return (None,) * layers
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"config.json: sliding_window is {window!r}; it must be a positive integer or null")
    if family in ("mistral", "phi3"):
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(layers))
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
