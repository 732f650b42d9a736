"""Names of tensors in GGUF files and in model folders, and the order of the rows of queries and keys."""

import re

import numpy as np

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
}
_SEPARATE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_BY_ARCHITECTURE = {
    "llama": _IN_LAYER | _SEPARATE,
    "qwen2": _IN_LAYER | _SEPARATE,
    "qwen3": _IN_LAYER | _SEPARATE | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    "phi3": _IN_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_ATTENTION, _MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
BIASED: dict[str, dict[str, tuple[str, ...]]] = {  # the parts with biases, together or not at all, by the setting
    "llama": {"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    "qwen2": {"qkv_bias": _ATTENTION[:3]},
    "qwen3": {"attention_bias": _ATTENTION},
    "phi3": {},
}
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.([a-z_]+)\.(weight|bias)")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # settings, not weights


def hf_name(name: str, architecture: str) -> str | None:
    """Return the name of a GGUF tensor in a model folder, or None if models of the architecture have no such tensor."""
    layer = LAYER.fullmatch(name)
    if layer is not None:
        inner = _BY_ARCHITECTURE[architecture].get(layer[2])
        if layer[3] == "bias" and not any(layer[2] in parts for parts in BIASED[architecture].values()):
            return None
        return None if inner is None else f"model.layers.{int(layer[1])}.{inner}.{layer[3]}"
    whole, _, kind = name.rpartition(".")
    return f"{_WHOLE[whole]}.weight" if whole in _WHOLE and kind == "weight" else None


def row_order(name: str, architecture: str, num_heads: int, num_kv_heads: int, num_rows: int) -> np.ndarray | None:
    """Return the stored rows of the tensor `name` (of a model folder) in a model folder's order; None: as stored.

    llama.cpp rotates pairs (2i, 2i + 1) of a head in models of the architecture llama, so rows of queries and keys are
    stored with those pairs side by side; Hugging Face rotates pairs (i, i + D/2).
    """
    projection = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(projection)
    if architecture != "llama" or heads is None or num_rows % (2 * heads):
        return None
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
