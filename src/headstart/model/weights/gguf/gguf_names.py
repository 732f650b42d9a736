"""Names of tensors in GGUF files and in model folders, and the order of the rows of queries and keys."""

import re

import numpy as np

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BY_ARCHITECTURE = {
    "llama": _IN_LAYER | _SEPARATE,
    "qwen2": _IN_LAYER | _SEPARATE,
    "qwen3": _IN_LAYER | _SEPARATE | _HEAD_NORMS,
    "phi3": _IN_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen35": {name: part for name, part in _IN_LAYER.items() if name != "ffn_norm"}
    | {"post_attention_norm": _IN_LAYER["ffn_norm"]}
    | _SEPARATE
    | _HEAD_NORMS
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    "lfm2": {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
}
_WHOLE_BY_ARCHITECTURE = {  # where they differ
    "lfm2": {"output_norm.weight": None, "token_embd_norm.weight": "model.embedding_norm.weight"},
}
_UNLIKE = {"qwen35": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}}  # with their endings
_ATTENTION, _MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
BIASED: dict[str, dict[str, tuple[str, ...]]] = {  # the parts with biases, together or not at all, by the setting
    "llama": {"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    "qwen2": {"qkv_bias": _ATTENTION[:3]},
    "qwen3": {"attention_bias": _ATTENTION},
    "phi3": {},
    "qwen35": {},
    "lfm2": {},
}
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.([a-z0-9_.]+)")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # settings, not weights


def hf_tensor_name(name: str, architecture: str) -> str | None:
    """Return the name of a GGUF tensor in a model folder, or None if models of the architecture have no such tensor."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return (_WHOLE | _WHOLE_BY_ARCHITECTURE.get(architecture, {})).get(name)
    base, _, ending = layer[2].rpartition(".")
    inner = _UNLIKE.get(architecture, {}).get(layer[2])
    if inner is None and base in _BY_ARCHITECTURE[architecture]:
        biased = any(base in parts for parts in BIASED[architecture].values())
        if ending == "weight" or (ending == "bias" and biased):
            inner = f"{_BY_ARCHITECTURE[architecture][base]}.{ending}"
    return None if inner is None else f"model.layers.{int(layer[1])}.{inner}"


def stored_row_order(
    name: str, architecture: str, num_heads: int, num_kv_heads: int, num_rows: int
) -> np.ndarray | None:
    """Return the stored rows of the tensor `name` (of a model folder) in a model folder's order; None: as stored.

    llama.cpp rotates pairs (2i, 2i + 1) of a head in models of the architecture llama, so rows of queries and keys are
    stored with those pairs side by side; Hugging Face rotates pairs (i, i + D/2).
    """
    projection = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(projection)
    if architecture != "llama" or heads is None or num_rows % (2 * heads):
        return None
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
