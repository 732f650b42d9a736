"""Write the GGUF file of a Hugging Face folder: `python gguf_file.py FOLDER OUT --weights bf16|q8_0|f32`.

Runs in llama.cpp's own environment (package gguf). The vocabulary is synthetic, of the right size: benchmarks send and
receive token ids, and upstream's converter refuses unknown tokenizers. Matrices are stored in the requested type,
vectors (norms, biases) in float32, as in llama.cpp's own converter.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from gguf_tensors import Tensor, gguf_tensors

FILE_TYPES = {  # f32 is for checks: against another engine in float32 only rounding differs
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "f32": LlamaFileType.ALL_F32,
}


def ensure_gguf(folder: Path, out: Path, weights: str) -> Path:
    """Write `out` unless it exists and is newer than the folder's config; return its path."""
    if not out.exists() or out.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        write_gguf(folder, out, weights)
    return out


def write_gguf(folder: Path, out: Path, weights: str) -> None:
    """Write `out` atomically: it is complete or does not exist.

    Raises:
        ValueError: the model type is unknown.
    """
    config = json.loads((folder / "config.json").read_text())
    part = out.with_suffix(".part")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, config["model_type"])
    _write_shape(writer, config, weights)
    _write_vocabulary(writer, config)
    for tensor in gguf_tensors(folder, config):
        _write_tensor(writer, tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, out)


def _write_shape(writer: GGUFWriter, config: dict[str, Any], weights: str) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write three special tokens and synthetic words.

    There are no byte tokens: llama-server delays tokens that do not end with a whole character, which would distort
    token times.
    """
    size = config["vocab_size"]
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, size))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * (size - 3)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def _write_tensor(writer: GGUFWriter, tensor: Tensor, weights: str) -> None:
    if tensor.values.ndim == 1 or weights == "f32":
        writer.add_tensor(tensor.name, tensor.float32())
    elif weights == "q8_0":
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, quantize(tensor.float32(), kind), raw_dtype=kind)
    elif tensor.is_bfloat16:
        raw = tensor.values.view(np.uint8)  # unchanged: twice as many bytes in a row as elements
        writer.add_tensor(tensor.name, raw, raw_dtype=GGMLQuantizationType.BF16)
    else:
        kind = GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, quantize(tensor.float32(), kind), raw_dtype=kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", choices=FILE_TYPES, default="bf16")
    arguments = parser.parse_args()
    write_gguf(arguments.folder, arguments.out, arguments.weights)


if __name__ == "__main__":
    main()
