"""HybridConfig: the settings of models in which some layers keep a recurrent state instead of keys and values."""

from typing import Any, NamedTuple

from headstart.core.errors import ConfigError
from headstart.model.weights.config_bounds import MAX_SIZE
from headstart.model.weights.config_keys import NotNativeError
from headstart.model.weights.json_file import shorten

KINDS = {  # family -> layer_types of its config, and what they are here
    "qwen3_5_text": {"full_attention": "attention", "linear_attention": "delta"},
    "lfm2": {"full_attention": "attention", "conv": "convolution"},
}
MULTIMODAL = "Qwen3_5ForConditionalGeneration"
_OF_ALL = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


class DeltaShape(NamedTuple):
    """The sizes of a gated delta net; `conv_size` is the number of tokens that its convolution sees."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int

    @property
    def num_keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        """Width of all values, and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys, values."""
        return 2 * self.num_keys + self.num_values

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state: the last inputs of the convolution, and a matrix per head."""
        matrix = self.num_value_heads * self.key_dim * self.value_dim
        return (self.conv_size - 1) * self.num_channels + matrix


class HybridConfig(NamedTuple):
    """The settings of a hybrid that a Llama-like decoder does not have."""

    kinds: tuple[str, ...]  # per layer: "attention", "delta" or "convolution"
    delta: DeltaShape | None = None
    conv_size: int = 0  # tokens that a short convolution sees
    conv_bias: bool = False
    tensor_prefix: str = "model"  # of the tensors of layers in a checkpoint


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a `config.json`: of one that takes images they are a part of it."""
    text = raw.get("text_config")
    if raw.get("architectures") != [MULTIMODAL] or text is None:
        return raw
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config is {shorten(repr(text), 80)}; it must be an object")
    found = {key: raw[key] for key in _OF_ALL if key in raw} | text | {"architectures": raw["architectures"]}
    if raw.get("tie_word_embeddings") != text.get("tie_word_embeddings"):
        del found["tie_word_embeddings"]  # the tensors decide
    return found


def read_hybrid(config: Any, family: str, architecture: str) -> HybridConfig | None:
    """Return the settings of a family in KINDS, None for others. Raises ConfigError."""
    kinds = KINDS.get(family)
    if kinds is None:
        return None
    names: list[str] = config.layer_types
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
        return HybridConfig(found, None, _count(config.conv_L_cache, "conv_L_cache"), bool(config.conv_bias))
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    delta = DeltaShape(*(_count(getattr(config, f"linear_{name}"), f"linear_{name}") for name in sizes))
    if delta.num_value_heads % delta.num_key_heads:
        raise ConfigError(
            f"linear_num_value_heads {delta.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{delta.num_key_heads}"
        )
    prefix = "model.language_model" if architecture == MULTIMODAL else "model"
    return HybridConfig(found, delta, tensor_prefix=prefix)


def mlp_size(config: Any, family: str) -> int:
    """Return the width of the MLP, which LFM2 computes from its settings unless told not to."""
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
