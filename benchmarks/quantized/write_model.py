"""Write a GGUF file with random weights in the shape of a model: `python write_model.py llama-2-7b Q4_K FILE`.

Needs the package gguf. The weights are random blocks with small scales, so the outputs mean nothing; size, memory and
speed are those of a trained model. Tensors are written one by one: the file is never in memory as a whole.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from headstart.model.weights.gguf.block_formats import FORMATS, row_bytes
from headstart.model.weights.shapes import SHAPES, DecoderShape

HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}  # bytes of a block that are fp16; others: 0 and 2
SCALE = 0.001  # times integers of up to 6 bits in K types


def write_model(shape: DecoderShape, kind: str, path: Path) -> None:
    """Write the file: matrices in `kind`, norms in fp32."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    _add_vocabulary(writer, shape.vocab_size)
    tensors = _tensors(shape)
    for name, (rows, columns) in tensors.items():
        if rows == 1:
            writer.add_tensor_info(name, [columns], np.dtype(np.float32), 4 * columns)
            continue
        size = row_bytes(kind, columns)
        writer.add_tensor_info(
            name, [rows, size], np.dtype(np.uint8), rows * size, raw_dtype=GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for rows, columns in tensors.values():
        writer.write_tensor_data(np.ones(columns, np.float32) if rows == 1 else _blocks(kind, rows, columns, rng))
    writer.close()


def _tensors(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Return names with (rows, columns); norms have one row."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    found = {"token_embd.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_hidden_layers):
        parts = {
            "attn_norm": (1, hidden), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, queries), "ffn_norm": (1, hidden), "ffn_gate": (wide, hidden),
            "ffn_up": (wide, hidden), "ffn_down": (hidden, wide),
        }  # fmt: skip
        found |= {f"blk.{layer}.{name}.weight": size for name, size in parts.items()}
    return found | {"output_norm.weight": (1, hidden), "output.weight": (shape.vocab_size, hidden)}


def _blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks uint8 [rows, bytes of a row] with small finite scales."""
    form = FORMATS[kind]
    data = rng.integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8)
    blocks = data.reshape(-1, form.block_bytes)
    for at in HALVES.get(kind, (0, 2)):
        scales = (rng.standard_normal((len(blocks), 1), dtype=np.float32) * SCALE).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return data


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Add byte tokens and synthetic words: prompts and outputs of the benchmarks are token ids."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    words += [f"w{index}" for index in range(len(words), size)]
    kinds += [TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def main() -> None:
    """Write the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=[kind for kind, form in FORMATS.items() if form.block_size > 1])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write_model(SHAPES[arguments.shape], arguments.kind, arguments.file)


if __name__ == "__main__":
    main()
