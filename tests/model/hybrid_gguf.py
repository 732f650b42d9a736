"""Hybrids as GGUF files, as llama.cpp's converter writes them: norms plus 1, -exp(A_log), value heads in turns."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizer_folders
import torch
from model.tiny import eager, make_checkpoint
from model.tiny_gguf import add_value, encode, write_vocabulary
from tokenizer_folders import BYTE_LEVEL
from tokenizers import Tokenizer
from transformers import PreTrainedModel

ARCHITECTURES = {"qwen3_5_text": "qwen35", "lfm2": "lfm2"}
NAMES = {
    "qwen35": {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "input_layernorm.": "attn_norm.",
        "post_attention_layernorm.": "post_attention_norm.",
        "linear_attn.in_proj_qkv.": "attn_qkv.",
        "linear_attn.in_proj_z.": "attn_gate.",
        "linear_attn.in_proj_a.": "ssm_alpha.",
        "linear_attn.in_proj_b.": "ssm_beta.",
        "linear_attn.conv1d.": "ssm_conv1d.",
        "linear_attn.norm.": "ssm_norm.",
        "linear_attn.out_proj.": "ssm_out.",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a",
        "self_attn.q_norm.": "attn_q_norm.",
        "self_attn.k_norm.": "attn_k_norm.",
        "self_attn.o_proj.": "attn_output.",
        "mlp.gate_proj.": "ffn_gate.",
        "mlp.up_proj.": "ffn_up.",
        "mlp.down_proj.": "ffn_down.",
    },
    "lfm2": {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
        "operator_norm.": "attn_norm.",
        "feed_forward.w1.": "ffn_gate.",
        "feed_forward.w2.": "ffn_down.",
        "feed_forward.w3.": "ffn_up.",
        "self_attn.q_layernorm.": "attn_q_norm.",
        "self_attn.k_layernorm.": "attn_k_norm.",
        "self_attn.out_proj.": "attn_output.",
        "conv.conv.": "shortconv.conv.",
        "conv.in_proj.": "shortconv.in_proj.",
        "conv.out_proj.": "shortconv.out_proj.",
    },
}
BOTH = {"lm_head.weight": "output.weight", "self_attn.q_proj.": "attn_q.", "self_attn.k_proj.": "attn_k.",
        "self_attn.v_proj.": "attn_v."}  # fmt: skip


SIZES: dict[str, dict[str, Any]] = {  # rows of whole blocks
    "qwen3_5_text": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_value_head_dim": 64,
                     "linear_key_head_dim": 32},
    "lfm2": {"hidden_size": 256, "intermediate_size": 512, "block_auto_adjust_ff_dim": False},
}  # fmt: skip


def random_hybrid(
    path: Path, family: str, kind: str = "F32", metadata: dict[str, Any] | None = None, **overrides: Any
) -> PreTrainedModel:
    """Write a random model of `family` with rows of whole blocks; its folder is beside it. Return its oracle."""
    words = tokenizer_folders.build(BYTE_LEVEL)
    sizes = SIZES[family] | {"vocab_size": words.get_vocab_size(), "std": 0.1} | overrides
    oracle = eager(make_checkpoint(family, path.parent / "model", **sizes))
    write_hybrid(path, oracle, words, kind, metadata)
    return oracle


def write_hybrid(
    path: Path, oracle: PreTrainedModel, words: Tokenizer, kind: str = "F32", metadata: dict[str, Any] | None = None
) -> None:
    """Write a model with matrices of `kind`, and give it the weights that the file has, as gguf dequantises them.

    `metadata` is added, or taken in place of what the file would have; None: without that key.
    """
    config, arch = oracle.config, ARCHITECTURES[oracle.config.model_type]
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
    width = next(
        len(part) for name, part in oracle.named_parameters() if name.endswith(("gate_proj.weight", "w1.weight"))
    )
    own = {f"{arch}.{key}": value for key, value in settings(config, arch, width).items()} | (metadata or {})
    for key, value in own.items():
        add_value(writer, key, value)
    write_vocabulary(writer, words, metadata or {})
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name == "lm_head.weight" and tied:
                continue
            values = np.ascontiguousarray(stored(name, parameter.float().numpy(), config, arch))
            is_matrix = values.ndim == 2 and "conv" not in name.split(".")[-2] and "norm" not in name
            whole = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            form = kind if is_matrix and values.shape[1] % whole == 0 else "F32"
            blocks = encode(form, values, rng)
            exact = gguf.dequantize(blocks, gguf.GGMLQuantizationType[form]).reshape(values.shape)
            if form != "F32":  # else the weight stays as it is: no way there and back rounds it
                parameter.copy_(torch.from_numpy(loaded(name, exact.copy(), config, arch)).view_as(parameter))
            writer.add_tensor(gguf_name(name, arch), blocks, raw_dtype=gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(config: Any, arch: str, width: int) -> dict[str, Any]:
    """Return the metadata of a model with MLPs of `width`, without the architecture's name before them."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if arch == "lfm2":
        has_heads = [kind == "full_attention" for kind in config.layer_types]
        return found | {
            "attention.head_count_kv": [config.num_key_value_heads * each for each in has_heads],
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "shortconv.l_cache": config.conv_L_cache,
            "vocab_size": config.vocab_size,
        }
    return found | {
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def gguf_name(name: str, arch: str) -> str:
    """Return llama.cpp's name of a tensor."""
    for ours, theirs in (NAMES[arch] | BOTH).items():
        name = name.replace(ours, theirs)
    return re.sub(r"^model\.layers\.", "blk.", name)


def stored(name: str, values: np.ndarray, config: Any, arch: str) -> np.ndarray:
    """Return a tensor as a file holds it."""
    if name.endswith((".conv1d.weight", ".conv.weight")):
        values = values[:, 0]
    if arch == "lfm2":
        return values
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if name.endswith("A_log"):
        values = -np.exp(values)
    return _heads(name, values, config, grouped=True)


def loaded(name: str, values: np.ndarray, config: Any, arch: str) -> np.ndarray:
    """Return a matrix of a file as a model holds it."""
    return values if arch == "lfm2" else _heads(name, values, config, grouped=False)


def _heads(name: str, values: np.ndarray, config: Any, *, grouped: bool) -> np.ndarray:
    """Return a tensor with its value heads in turns, or, if not `grouped`, those of a file side by side."""
    size = config.linear_value_head_dim
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return _turned(values, 1, config, grouped)
    if part == "in_proj_z":
        return _turned(values, size, config, grouped)
    if part == "out_proj":
        return _turned(values.T, size, config, grouped).T
    if part in ("in_proj_qkv", "conv1d"):
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate((values[:before], _turned(values[before:], size, config, grouped)))
    return values


def _turned(rows: np.ndarray, size: int, config: Any, grouped: bool) -> np.ndarray:
    keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // keys
    shape = (keys, each, size, -1) if grouped else (each, keys, size, -1)
    return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)
