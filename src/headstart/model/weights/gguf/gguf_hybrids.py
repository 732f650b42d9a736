"""Hybrids in GGUF files: Qwen3.5 (`qwen35`) and LFM2 (`lfm2`), and what differs there from a model folder.

In `qwen35`, norms are stored plus 1 and A_log as -exp(A_log), so as they are applied. The value heads of a delta net
are stored as 0 of each key head, 1 of each, and so on; in a model folder those of one key head are adjacent.
"""

from typing import Any

import numpy as np

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile
from headstart.gguf.metadata import read_float, read_int, read_list
from headstart.model.weights.gguf.gguf_names import hf_tensor_name

OWN_KEYS = {
    "qwen35": {
        "full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections", "ssm.conv_kernel",
        "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
    },
    "lfm2": {"shortconv.l_cache"},
}  # fmt: skip


def hybrid_settings(file: GGUFFile, arch: str, num_layers: int, num_rotated: int) -> dict[str, Any]:
    """Return the settings in which a hybrid differs from a Llama-like model. Raises ConfigError."""
    if arch == "lfm2":
        heads: list[int] = read_list(file, "lfm2.attention.head_count_kv", int)
        if len(heads) != num_layers or len(set(heads) - {0}) != 1:
            raise ConfigError(f"{file.path}: lfm2.attention.head_count_kv is {heads!r:.80}; one number or 0 per layer")
        return {
            "model_type": "lfm2",
            "layer_types": ["full_attention" if count else "conv" for count in heads],
            "num_key_value_heads": max(heads),
            "norm_eps": read_float(file, "lfm2.attention.layer_norm_rms_epsilon"),
            "conv_L_cache": read_int(file, "lfm2.shortconv.l_cache"),
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
        }
    interval = read_int(file, "qwen35.full_attention_interval", 4)
    by_interval = [interval < 1 or bool((layer + 1) % interval) for layer in range(num_layers)]
    recurrent: list[bool] = read_list(file, "qwen35.attention.recurrent_layers", bool, by_interval)
    if len(recurrent) != num_layers:
        raise ConfigError(
            f"{file.path}: qwen35.attention.recurrent_layers names {len(recurrent)} of {num_layers} layers"
        )
    sections: list[int] = read_list(file, "qwen35.rope.dimension_sections", int, [num_rotated] * 3)
    if len(sections) not in (3, 4) or any(3 * sections[i % 3] <= i for i in range(num_rotated // 2)):
        raise ConfigError(f"{file.path}: qwen35.rope.dimension_sections {sections!r:.80} leave frequencies unrotated")
    sizes = {name: read_int(file, f"qwen35.ssm.{name}") for name in ("group_count", "time_step_rank", "inner_size")}
    if sizes["time_step_rank"] < 1 or sizes["inner_size"] % sizes["time_step_rank"]:
        raise ConfigError(f"{file.path}: qwen35.ssm.inner_size is no multiple of time_step_rank: {sizes}")
    return {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_conv_kernel_dim": read_int(file, "qwen35.ssm.conv_kernel"),
        "linear_key_head_dim": read_int(file, "qwen35.ssm.state_size"),
        "linear_value_head_dim": sizes["inner_size"] // sizes["time_step_rank"],
        "linear_num_key_heads": sizes["group_count"],
        "linear_num_value_heads": sizes["time_step_rank"],
    }


def refuse_misplaced_mixers(file: GGUFFile, arch: str, kinds: list[str]) -> None:
    """Raise ConfigError for a tensor of attention in a layer of another kind, or the other way round."""
    for stored in file.tensors:
        parts = (hf_tensor_name(stored, arch) or "").split(".")  # model.layers.N.MIXER...
        is_mixer = len(parts) > 4 and parts[3] in ("self_attn", "linear_attn", "conv")
        if is_mixer and (parts[3] == "self_attn") != (kinds[int(parts[2])] == "full_attention"):
            raise ConfigError(f"{file.path}: tensor {stored} is not part of layer {parts[2]}, {kinds[int(parts[2])]}")


def delta_net_row_order(name: str, config: dict[str, Any]) -> np.ndarray | None:
    """Return the stored rows of a delta net's tensor `name` in a model folder's order; None: as stored."""
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return _values(config, 1)
    values = _values(config, config["linear_value_head_dim"])
    if part in ("in_proj_qkv", "conv1d") and values is not None:
        num_before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate((np.arange(num_before), num_before + values))
    return values if part == "in_proj_z" else None


def delta_net_column_order(name: str, config: dict[str, Any]) -> np.ndarray | None:
    """Return the stored value heads of the columns of tensor `name` in a model folder's order; None: as stored."""
    return _values(config, 1) if name.endswith("linear_attn.out_proj.weight") else None


def _values(config: dict[str, Any], size: int) -> np.ndarray | None:
    """Return the places of value heads of `size` in a file, in a model folder's order; None if it is the same."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if num_keys < 1 or num_values % num_keys or num_values == num_keys:
        return None
    return np.arange(num_values * size).reshape(-1, num_keys, size).swapaxes(0, 1).reshape(-1)
