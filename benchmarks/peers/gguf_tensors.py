"""The tensors of a Hugging Face folder with llama.cpp's names and row order; needs only numpy.

bfloat16, which numpy does not have, is kept as uint16 until converted to float32. Supports Llama and Qwen2, the types
that `headstart init-model` writes and the benchmarks use.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Tensor(NamedTuple):
    """One tensor: its values, and whether they are bfloat16 stored as uint16."""

    name: str
    values: NDArray[Any]
    is_bfloat16: bool

    def float32(self) -> NDArray[np.float32]:
        """Return the values as float32, exactly."""
        if self.is_bfloat16:
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


def read_tensors(folder: Path) -> Iterator[Tensor]:
    """Yield every tensor of the folder's safetensors files, under Hugging Face's name.

    Raises:
        ValueError: the folder has no such file, or a tensor has a dtype other than bfloat16, float16 and float32.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors file")
    for path in files:
        size = int.from_bytes(path.open("rb").read(8), "little")
        data = np.memmap(path, np.uint8, "r")
        header = json.loads(data[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} in {path} is {entry['dtype']}; known are {', '.join(DTYPES)}")
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            values = data[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])  # pages of the file, no copy
            yield Tensor(name, values, entry["dtype"] == "BF16")


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor.

    Raises:
        ValueError: the tensor is unknown.
    """
    found = LAYER.fullmatch(name)
    if found is None and name in WHOLE:
        return WHOLE[name]
    if found is None or found[2] not in IN_LAYER:
        raise ValueError(f"no name is known in llama.cpp for {name}; Llama, Qwen2 and Qwen3 models can be written")
    return f"blk.{found[1]}.{IN_LAYER[found[2]]}.{found[3]}"


def interleaved(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Return the rows of a projection [H * D, ...] with the rotary pairs (i, i + D/2) of a head adjacent.

    llama.cpp rotates pairs (2i, 2i + 1) in Llama models, Hugging Face pairs (i, i + D/2). The same reordering of q and
    k does not change their products.
    """
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def gguf_tensors(folder: Path, config: dict[str, Any]) -> Iterator[Tensor]:
    """Yield every tensor in llama.cpp's form: renamed, and q and k interleaved where the model type needs it.

    Raises:
        ValueError: a tensor or the model type is unknown.
    """
    if config["model_type"] not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"model type {config['model_type']!r} cannot be written; llama, qwen2 and qwen3 can")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for tensor in read_tensors(folder):
        if config.get("tie_word_embeddings") and tensor.name == "lm_head.weight":
            continue
        values = tensor.values
        projection = tensor.name.split(".")[-2]
        if config["model_type"] == "llama" and projection in heads:
            values = interleaved(values, heads[projection])
        yield Tensor(gguf_name(tensor.name), values, tensor.is_bfloat16)
