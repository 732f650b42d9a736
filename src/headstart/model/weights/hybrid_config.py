"""HybridConfig: the settings of models in which some layers keep a recurrent state instead of keys and values."""

import math
from typing import Any, NamedTuple

from headstart.core.errors import ConfigError
from headstart.model.weights.config_bounds import MAX_SIZE, check_number
from headstart.model.weights.config_keys import NotNativeError
from headstart.model.weights.json_file import shorten_text

KINDS = {  # family -> layer_types of its config, and what they are here
    "qwen3_5_text": {"full_attention": "attention", "linear_attention": "delta"},
    "lfm2": {"full_attention": "attention", "conv": "convolution"},
    "granitemoehybrid": {"full_attention": "attention", "linear_attention": "mamba"},
    "bamba": {"full_attention": "attention", "linear_attention": "mamba"},
}
MIN_SCALE = 1e-6  # of multipliers; published ones are 0.008 to 12
MULTIMODAL = "Qwen3_5ForConditionalGeneration"
_OF_ALL = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


class MixerShape(NamedTuple):
    """The sizes of a layer whose state is a matrix per head; `conv_size` is the number of tokens its convolution sees.

    In Mamba-2 key heads are called groups, keys B, queries C, values x, and key_dim the size of the state.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values, and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def num_state_elements(self) -> int:
        """Numbers of a layer's state: the last inputs of the convolution, and a matrix per head."""
        matrix = self.num_value_heads * self.key_dim * self.value_dim
        return (self.conv_size - 1) * self.num_channels + matrix


class HybridConfig(NamedTuple):
    """The settings of a hybrid that a Llama-like decoder does not have."""

    family: str
    kinds: tuple[str, ...]  # per layer: "attention", "delta", "mamba" or "convolution"
    matrix: MixerShape | None = None  # of a gated delta net or Mamba-2
    conv_size: int = 0  # tokens that a short convolution sees
    conv_bias: bool = False
    mixer_bias: bool = False  # of Mamba-2's two products
    tensor_prefix: str = "model"  # of the tensors of layers in a checkpoint
    has_rope: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each layer adds
    attention_scale: float | None = None  # None: head_dim**-0.5
    logits_divisor: float = 1.0


def decode_infinite_limits(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with infinite limits of time steps as numbers; Transformers saves them as objects."""
    limit = raw.get("time_step_limit")
    if not isinstance(limit, list):
        return raw
    return raw | {"time_step_limit": [math.inf if each == {"__float__": "Infinity"} else each for each in limit]}


def language_model_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a `config.json`: of one that takes images they are a part of it."""
    text = raw.get("text_config")
    if raw.get("architectures") != [MULTIMODAL] or text is None:
        return raw
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config is {shorten_text(repr(text), 80)}; it must be an object")
    found = {key: raw[key] for key in _OF_ALL if key in raw} | text | {"architectures": raw["architectures"]}
    if raw.get("tie_word_embeddings") != text.get("tie_word_embeddings"):
        del found["tie_word_embeddings"]  # the tensors decide
    return found


def read_hybrid(config: Any, family: str, architecture: str) -> HybridConfig | None:
    """Return the settings of a family in KINDS, None for others. Raises ConfigError."""
    kinds = KINDS.get(family)
    if kinds is None:
        return None
    names: list[str] = config.layer_types or []
    if len(names) != config.num_hidden_layers:
        raise ConfigError(f"layer_types names {len(names)} layers, num_hidden_layers is {config.num_hidden_layers}")
    if not set(names) <= kinds.keys():
        raise NotNativeError(f"layer_types {sorted(set(names) - kinds.keys())}: only {', '.join(kinds)} are supported")
    if getattr(config, "sliding_window", None) is not None:
        raise NotNativeError(f"sliding_window is {config.sliding_window}")
    found = tuple(kinds[name] for name in names)
    if "attention" not in found:
        raise NotNativeError("no layer has attention")
    if family == "lfm2":
        size = _count(config.conv_L_cache, "conv_L_cache")
        return HybridConfig(family, found, conv_size=size, conv_bias=bool(config.conv_bias))
    if "mamba_n_heads" in type(config).__dict__:
        return _mamba(config, family, found)
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    prefix = "model.language_model" if architecture == MULTIMODAL else "model"
    return HybridConfig(family, found, _shape(config, *(f"linear_{name}" for name in sizes)), tensor_prefix=prefix)


def _shape(config: Any, *keys: str) -> MixerShape:
    """Return the shape of the numbers at `keys`, in the order of its fields."""
    shape = MixerShape(*(_count(getattr(config, key), key) for key in keys))
    if shape.num_value_heads % shape.num_key_heads:
        raise ConfigError(f"{keys[1]} {shape.num_value_heads} is not a multiple of {keys[0]} {shape.num_key_heads}")
    return shape


def _mamba(config: Any, family: str, kinds: tuple[str, ...]) -> HybridConfig:
    """Return the settings of Granite-4 or Bamba. Raises ConfigError."""
    if config.time_step_limit != (0.0, math.inf):
        raise NotNativeError(f"time_step_limit is {config.time_step_limit}")
    made = HybridConfig(
        family,
        kinds,
        _shape(config, "mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        conv_bias=bool(config.mamba_conv_bias),
        mixer_bias=bool(config.mamba_proj_bias),
    )
    if family == "bamba":
        return made
    if config.num_local_experts:
        raise NotNativeError(f"num_local_experts is {config.num_local_experts}")

    def scale(name: str) -> float:
        return check_number(getattr(config, name), name, at_least=MIN_SCALE, at_most=1 / MIN_SCALE)

    return made._replace(
        has_rope=config.position_embedding_type == "rope",
        embedding_scale=scale("embedding_multiplier"),
        residual_scale=scale("residual_multiplier"),
        attention_scale=scale("attention_multiplier"),
        logits_divisor=scale("logits_scaling"),
    )


def mlp_width(config: Any, family: str) -> int:
    """Return the width of the MLP: LFM2 computes it unless told not to, Granite-4 has only that of shared experts."""
    if family == "granitemoehybrid":
        return _count(config.shared_intermediate_size, "shared_intermediate_size")
    size: int = config.intermediate_size
    if family != "lfm2" or not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is not None:
        multiple = _count(config.block_multiple_of, "block_multiple_of")
        size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return _count(size, "intermediate_size, as adjusted,")


def _count(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value
