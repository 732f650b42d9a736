"""Tiny random models as GGUF files of any block format, written with the `gguf` package, each with its oracle.

The oracle is Transformers' model of the same architecture with the weights that the package's dequantisation gives for
the blocks of the file. Formats that the package cannot quantise get random blocks with small scales.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizer_folders
import torch
import transformers
from model.tiny import COMMON, FAMILIES
from tokenizer_folders import BYTE_LEVEL
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES = dict(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=512)  # K blocks have 256
TEXTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CAN_QUANTISE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def write_gguf(
    path: Path,
    family: str = "llama",
    kind: str = "Q8_0",
    *,
    seed: int = 0,
    std: float = 0.1,
    tokenizer: str = BYTE_LEVEL,
    mixed: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a model of `family` with matrices of `kind` to `path`, and return its oracle in fp32.

    `mixed` names other formats for some tensors, by parts of their GGUF names. `metadata` and `tensors` (F32) are added
    to the file as they are; `overrides` are settings of the oracle.
    """
    name, settings = FAMILIES[family]
    words = tokenizer_folders.build(tokenizer)
    sizes = {**COMMON, **settings, **SIZES, "vocab_size": words.get_vocab_size(), **overrides}
    if family == "phi3":
        sizes.pop("head_dim")
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    writer = gguf.GGUFWriter(path, family)
    _write_settings(writer, family, oracle.config, metadata or {})
    write_vocabulary(writer, words, metadata or {})
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    rng = np.random.default_rng(seed)
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            if parameter_name == "lm_head.weight" and tied:
                continue
            gain = "norm" in parameter_name
            values = rng.normal(1.0 if gain else 0.0, std, tuple(parameter.shape)).astype(np.float32)
            named = [other for part, other in (mixed or {}).items() if part in gguf_name(parameter_name)]
            form = (named or [kind])[0] if values.ndim == 2 else "F32"
            blocks = encode(form, values, rng)
            parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[form]).copy()))
            stored = llama_order(parameter_name, blocks, oracle.config) if family == "llama" else blocks
            writer.add_tensor(gguf_name(parameter_name), stored, raw_dtype=gguf.GGMLQuantizationType[form])
    for tensor_name, values in (tensors or {}).items():
        writer.add_tensor(tensor_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return oracle


def encode(kind: str, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rows as blocks of `kind`: near `values`, or random with small scales if gguf cannot quantise to it."""
    member = gguf.GGMLQuantizationType[kind]
    if kind in CAN_QUANTISE:
        return gguf.quantize(values, member)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[member]
    shape = (*values.shape[:-1], values.shape[-1] // block_size, block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    scales = {"Q4_K": {0: 3e-4, 2: 2e-3}, "Q5_K": {0: 1.5e-4, 2: 2e-3}, "Q6_K": {208: 1e-4}}[kind]
    for at, scale in scales.items():
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def llama_order(name: str, rows: np.ndarray, config: Any) -> np.ndarray:
    """Return the rows of queries and keys as llama.cpp's converter orders them, others unchanged."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    base, _, ending = name.rpartition(".")
    if base in TEXTS:
        return f"{TEXTS[base]}.{ending}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{ending}"


def write_vocabulary(writer: Any, words: Tokenizer, metadata: dict[str, Any]) -> None:
    """Add the vocabulary of a tokenizer: byte-level BPE as gpt2, with merges; other BPE as llama, with scores.

    Keys that are in `metadata` are left to the caller.
    """
    document = json.loads(words.to_str())
    by_id = {token_id: token for token, token_id in words.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id[i] for i in range(len(by_id))]
    special = {item["id"]: 3 if item["special"] else 4 for item in document["added_tokens"]}
    types = [6 if token.startswith("<0x") else special.get(i, 1) for i, token in enumerate(tokens)]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in document["model"]["merges"]]
    values: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if (document["decoder"] or {}).get("type") == "ByteLevel":
        values |= {"model": "gpt2", "pre": "gpt-2", "merges": [" ".join(merge) for merge in merges]}
    else:
        ranks = {left + right: float(rank) for rank, (left, right) in reversed(list(enumerate(merges)))}
        values |= {"model": "llama", "scores": [-ranks.get(token, 1e6) for token in tokens]}
    values["bos_token_id"] = tokens.index("<|im_start|>" if "<s>" not in tokens else "<s>")
    values["eos_token_id"] = tokens.index("<|im_end|>")
    for name, value in values.items():
        if f"tokenizer.ggml.{name}" not in metadata:
            add_value(writer, f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(tokenizer_folders.TEMPLATE)


def _write_settings(writer: Any, family: str, config: Any, metadata: dict[str, Any]) -> None:
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family == "phi3":
        values["rope.dimension_count"] = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        values["attention.sliding_window"] = config.sliding_window or 0
    else:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for name, value in values.items():
        if f"{family}.{name}" not in metadata:
            add_value(writer, f"{family}.{name}", value)


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add one metadata value: numbers as uint32 or float32, texts, truth values, and lists of these; None: no key."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)
