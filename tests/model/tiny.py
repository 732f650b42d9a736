"""Tiny random checkpoints of real architectures, made on the fly: hidden 64, 2-3 layers, vocabulary 128."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# family -> (config class, its settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24, "tie_word_embeddings": False},
    ),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 1.5, "attention_multiplier": 0.3},
    ),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 12, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 12, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),  # every fourth layer is without positions
    "cohere2": ("Cohere2Config", {"sliding_window": 12, "logit_scale": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "gpt_oss": (  # attention sinks in every layer, a window in every other
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 12},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
MAMBA = {"num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 5,
            "full_attention_interval": 3,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 32},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.5,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
}
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "phi3")


def make_checkpoint(family: str, folder: Path, *, seed: int = 0, std: float = 0.2, **overrides: Any) -> Path:
    """Saves a random fp32 model of `family` into `folder` and returns it. Weights have spread `std`; no tokenizer."""
    name, settings = (FAMILIES | HYBRIDS)[family]
    config_class: type[PretrainedConfig] = getattr(transformers, name)
    config = config_class(**{**COMMON, **settings, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            gain = (
                "norm" in parameter_name
                and parameter_name.endswith("weight")
                and not family.startswith(("gemma", "qwen3_5"))
            )
            parameter.normal_(1.0 if gain else 0.0, std)
    model.save_pretrained(folder)
    return folder


def eager(folder: Path) -> PreTrainedModel:
    """The oracle: Transformers' own code with eager attention, fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
