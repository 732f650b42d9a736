"""The keys of a Llama-family `config.json` that affect a model's results, as Transformers reads them.

The compact decoder takes a config only if every key in it is handled by `parse_config`, listed as harmless, unknown to
Transformers, or has the value that Transformers assumes by default. Any other key raises NotNativeError; the model then
runs with Transformers' code. Values are read from Transformers' config object, with its defaults and spellings.
tests/model/test_config_keys.py scans Transformers' sources for names that are missing here, and
tests/model/test_config_walk.py changes every key to other values and compares the logits with Transformers'.
"""

import copy
from typing import Any

from transformers import (
    BambaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from headstart.core.errors import ConfigError
from headstart.model.weights.json_file import one_line_error, shorten_text

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": Phi3Config,
    "qwen3_5_text": Qwen3_5TextConfig,
    "lfm2": Lfm2Config,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "bamba": BambaConfig,
}
# Read by parse_config or by the loader, or (is_causal, sliding_window, ...) checked there against the computation here.
HANDLED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "rope_parameters",
    "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "is_causal",
    "sliding_window", "layer_types",
}  # fmt: skip
_MAMBA = {
    "attention_bias", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "layers_block_type",
}  # fmt: skip
HANDLED_BY_FAMILY = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": set[str](),
    "qwen2": {"use_sliding_window", "max_window_layers"},
    "qwen3": {"use_sliding_window", "max_window_layers", "attention_bias"},
    "phi3": set[str](),
    "qwen3_5_text": {
        "attention_bias", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    },
    "lfm2": {
        "norm_eps", "conv_bias", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier",
        "block_auto_adjust_ff_dim", "block_ff_dim", "full_attn_idxs", "tie_embedding",
    },
    "granitemoehybrid": _MAMBA | {
        "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "num_local_experts",
        "shared_intermediate_size", "position_embedding_type",
    },
    "bamba": _MAMBA | {"attn_layer_indices", "mlp_bias"},
}  # fmt: skip
# Read by Transformers, but without effect on the logits of greedy decoding: training, outputs, labels, metadata.
HARMLESS = {
    "attention_dropout", "resid_pdrop", "embd_pdrop", "initializer_range", "use_cache", "pretraining_tp",
    "pad_token_id", "bos_token_id", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "use_return_dict", "torchscript", "tie_last_hidden_states", "transformers_version",
    "name_or_path", "_name_or_path", "id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward",
    "keys_to_ignore_at_inference", "gradient_checkpointing", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "mamba_chunk_size", "num_experts_per_tok", "router_aux_loss_coef",
    "z_loss_coefficient", "num_logits_to_keep",
}  # fmt: skip
# Read by Transformers with getattr, though its config classes do not declare them: name -> the value without effect.
READ_BESIDES: dict[str, Any] = dict.fromkeys((
    "attention_chunk_size", "kv_sharing_modes", "number_of_conv_states", "transformers_weights",
    "experts_implementation", "_experts_implementation", "distributed_config", "fusion_config", "mtp_layer_types",
    "num_mtp_layers", "_rope_type_labels", "decoder", "generator", "text_config", "text_encoder",
    "allow_global_per_layer_attribute_access", "mtp_mlp_layer_types", "mtp_per_layer_config", "first_k_dense_replace",
    "_post_init_done",
))  # fmt: skip


class NotNativeError(ConfigError):
    """A config that the compact decoder does not support; Transformers' code may support it."""


def transformers_config(raw: dict[str, Any], family: str) -> PretrainedConfig:
    """Return Transformers' config object of a `config.json`.

    Raises ConfigError if Transformers refuses it, NotNativeError for keys that the compact decoder does not support.
    """
    if raw.get("model_type", family) != family:
        raise NotNativeError(f"model_type is {shorten_text(repr(raw['model_type']))}, not {family!r}")
    if family == "mistral" and "layer_types" in raw:
        raise NotNativeError("layer_types is given, which makes Transformers read a Mistral as a Ministral")
    config_class = CONFIG_CLASSES[family]
    default = config_class()
    for key in sorted(raw.keys() - HANDLED - HANDLED_BY_FAMILY[family] - HARMLESS):
        if key not in READ_BESIDES and not hasattr(config_class, key):
            continue  # nothing reads it
        value, without = raw[key], getattr(default, key, READ_BESIDES.get(key))
        if type(value) is not type(without) or value != without:
            raise NotNativeError(f"{key} is {shorten_text(repr(value), 80)}")
    try:
        config: Any = config_class(**copy.deepcopy(raw))  # untyped in part
        config.standardize_rope_params()  # once more, as the rotary embedding does when it is built
    except Exception as error:  # third-party code may raise any type
        raise ConfigError(f"config.json is not one of a {family} model: {one_line_error(error)}") from error
    return config
