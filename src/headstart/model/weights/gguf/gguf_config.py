"""The content of a `config.json` for a GGUF file, from its metadata and tensor infos; needs no torch.

All further checks are those of a model folder. Metadata that would change the results and are not understood here are
refused by name, as are tensors that the architecture does not have: nothing in a file is ignored silently.
"""

import math
from typing import Any

import numpy as np

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile
from headstart.gguf.metadata import read_end_token_ids, read_float, read_int, read_string, read_token_texts
from headstart.model.weights.gguf.gguf_hybrids import OWN_KEYS, hybrid_settings, refuse_misplaced_mixers
from headstart.model.weights.gguf.gguf_names import BIASED, LAYER, ROPE_TENSORS, hf_tensor_name

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}
_HANDLED = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "attention.sliding_window",
}  # fmt: skip
# Without effect on a decoder of these architectures.
_HARMLESS = {"attention.layer_norm_epsilon", "rope.scaling.finetuned", "tensor_data_layout"}
_NEUTRAL = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}
_MAX_ROPE_FACTORS = 4096


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the settings of a GGUF model as in `config.json`. Raises ConfigError for one that cannot be served."""
    arch = _architecture(file)
    _refuse_unknown(file, arch)
    heads = _count(file, arch, "attention.head_count")
    hidden = _count(file, arch, "embedding_length")
    head_dim = _count(file, arch, "attention.key_length", hidden // heads)
    if (value_dim := read_int(file, f"{arch}.attention.value_length", head_dim)) != head_dim:
        raise ConfigError(f"{file.path}: values of {value_dim} beside keys of {head_dim} per head are not supported")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _vocab_size(file, arch),
        "hidden_size": hidden,
        "intermediate_size": _count(file, arch, "feed_forward_length"),
        "num_hidden_layers": _count(file, arch, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if arch == "lfm2" else _count(file, arch, "attention.head_count_kv", heads),
        "max_position_embeddings": read_int(file, f"{arch}.context_length"),
        "rms_norm_eps": read_float(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, arch, head_dim),
        "dtype": "float32" if _all_float32(file) else "bfloat16",
        "eos_token_id": list(read_end_token_ids(file)),
    }
    if arch != "phi3":
        config["head_dim"] = head_dim
    elif head_dim * heads != hidden:
        raise ConfigError(f"{file.path}: {heads} heads of {head_dim} are not the {hidden} dimensions of a phi3 model")
    if arch == "phi3":
        config["sliding_window"] = read_int(file, "phi3.attention.sliding_window", 0) or None
        original = read_int(file, "phi3.rope.scaling.original_context_length", None)
        if original is not None:
            config["original_max_position_embeddings"] = original
    if arch in OWN_KEYS:
        rotated = read_int(file, f"{arch}.rope.dimension_count", head_dim)
        config |= hybrid_settings(file, arch, config["num_hidden_layers"], rotated)
        refuse_misplaced_mixers(file, arch, config["layer_types"])
    biases = {setting: _has_biases(file, arch, parts) for setting, parts in BIASED[arch].items()}
    if not biases.pop("qkv_bias", True):
        raise ConfigError(f"{file.path}: tensor blk.0.attn_q.bias is missing, and a {arch} model has biases")
    return config | biases


def _architecture(file: GGUFFile) -> str:
    """Return the architecture. Raises ConfigError for one that is not supported, and for files that hold no model."""
    kind = read_string(file, "general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path} holds no model but a GGUF of type {kind!r:.80}")
    arch = read_string(file, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: the architecture {arch!r:.80} is not supported in GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return arch


def _refuse_unknown(file: GGUFFile, arch: str) -> None:
    """Raise ConfigError for settings that are not understood, and for tensors that the decoder would not use."""
    handled = _HANDLED | OWN_KEYS.get(arch, set())
    for key, value in file.metadata.items():
        prefix, _, name = key.partition(".")
        if prefix != arch and name in _HANDLED:
            raise ConfigError(f"{file.path}: {key} is a setting of another architecture than {arch}")
        if prefix != arch or name in handled or name in _HARMLESS:
            continue
        neutral = _NEUTRAL.get(name)
        if value == neutral if neutral is not None else not value:  # 0 experts, no scale, an empty list
            continue
        raise ConfigError(f"{file.path}: {key} is {value!r:.80}; this setting is not supported")
    window = read_int(file, f"{arch}.attention.sliding_window", 0)
    if window < 0 or (arch != "phi3" and 0 < window < read_int(file, f"{arch}.context_length")):
        raise ConfigError(
            f"{file.path}: {arch}.attention.sliding_window is {window}; the layers it is for are not known"
        )
    if (version := file.metadata.get("general.quantization_version", 2)) != 2 and not _all_plain(file):
        raise ConfigError(f"{file.path}: general.quantization_version is {version!r:.80}; blocks of version 2 are read")
    blocks = _count(file, arch, "block_count")
    if blocks > len(file.tensors):
        raise ConfigError(f"{file.path}: {arch}.block_count is {blocks}, but there are {len(file.tensors)} tensors")
    for name in file.tensors:
        layer = LAYER.fullmatch(name)
        if hf_tensor_name(name, arch) is None and name not in ROPE_TENSORS:
            raise ConfigError(f"{file.path}: tensor {name!r:.80} is not part of a {arch} model as it is computed here")
        if layer is not None and int(layer[1]) >= blocks:
            raise ConfigError(f"{file.path}: tensor {name!r:.80} belongs to no layer; {arch}.block_count is {blocks}")


def _has_biases(file: GGUFFile, arch: str, parts: tuple[str, ...]) -> bool:
    """Return whether `parts` have biases. Raises ConfigError if only some have."""
    names = [f"blk.{layer}.{part}.bias" for layer in range(_count(file, arch, "block_count")) for part in parts]
    there = [name for name in names if name in file.tensors]
    if there and len(there) < len(names):
        absent = next(name for name in names if name not in file.tensors)
        raise ConfigError(
            f"{file.path}: tensor {there[0]} is there, but not {absent}; biases are read for all of "
            f"{', '.join(parts)} in all layers, or for none"
        )
    return bool(there)


def _count(file: GGUFFile, arch: str, name: str, default: int | None = None) -> int:
    """Return a positive number of the model, which a file may also give per layer. Raises ConfigError otherwise."""
    key = f"{arch}.{name}"
    found = file.metadata.get(key)
    if isinstance(found, list):
        if not found or any(item != found[0] for item in found) or type(found[0]) is not int:
            raise ConfigError(f"{file.path}: {key} differs per layer; that is not supported")
        if len(found) != read_int(file, f"{arch}.block_count"):
            raise ConfigError(f"{file.path}: {key} has {len(found)} values; there must be one per layer")
        count = found[0]
    else:
        count = read_int(file, key) if default is None else read_int(file, key, default)
    if count < 1:
        raise ConfigError(f"{file.path}: {key} is {count}; it must be positive")
    return count


def _vocab_size(file: GGUFFile, arch: str) -> int:
    """Return the rows of the embedding, which may be more than the tokens of the tokenizer."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path}: tensor token_embd.weight is missing")
    rows, num_tokens = embedding.shape[0], len(read_token_texts(file))
    if rows < num_tokens or read_int(file, f"{arch}.vocab_size", rows) != rows:
        raise ConfigError(
            f"{file.path}: token_embd.weight has {rows} rows, but there are {num_tokens} tokens, and "
            f"{arch}.vocab_size is {read_int(file, f'{arch}.vocab_size', None)}"
        )
    return rows


def _all_float32(file: GGUFFile) -> bool:
    return all(info.kind == "F32" for info in file.tensors.values())


def _all_plain(file: GGUFFile) -> bool:
    return all(info.kind in ("F32", "F16", "BF16") for info in file.tensors.values())


def _rope(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any]:
    """Return the rotary settings: those of the metadata, or of the factors per frequency that a tensor gives."""
    prefix = f"{arch}.rope"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read_float(file, f"{prefix}.freq_base", 10000.0)}
    rotated = read_int(file, f"{prefix}.dimension_count", head_dim)
    if arch in ("phi3", "qwen35"):
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ConfigError(f"{file.path}: {prefix}.dimension_count is {rotated}, but a head has {head_dim} dimensions")
    return rope | _rope_scaling(file, arch)


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Return the part of the rotary settings that says how they are scaled, with llama.cpp's defaults."""
    prefix = f"{arch}.rope.scaling"
    kind = read_string(file, f"{prefix}.type", "linear")
    given = read_float(file, f"{prefix}.factor", read_float(file, f"{arch}.rope.scale_linear", None))
    factor = 1.0 if kind == "none" else given or 1.0
    strength = read_float(file, f"{prefix}.attn_factor", 1.0)
    tensors = {name: factors for name in ROPE_TENSORS if (factors := _factors(file, name)) is not None}
    if tensors:
        return _longrope(file, arch, tensors, kind, factor) | {"attention_factor": strength}
    if kind == "yarn" and given:
        original = read_int(file, f"{prefix}.original_context_length", None)
        found = {"factor": factor, "original_max_position_embeddings": original or None}
        found |= {name: read_float(file, f"{prefix}.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
        if strength != 1.0:
            found["attention_factor"] = strength * (1.0 + 0.1 * math.log(max(factor, 1.0)))
        return {"rope_type": "yarn"} | {name: value for name, value in found.items() if value is not None}
    if kind not in ("none", "linear"):
        missing = f"{prefix}.factor" if kind == "yarn" else "tensors of factors"
        raise ConfigError(f"{file.path}: {prefix}.type is {kind!r:.80} without {missing}, or is not known")
    if strength != 1.0:
        raise ConfigError(f"{file.path}: {prefix}.attn_factor is {strength} beside scaling of type {kind!r:.80}")
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _longrope(file: GGUFFile, arch: str, tensors: dict[str, list[float]], kind: str, factor: float) -> dict[str, Any]:
    """Return the settings of factors per frequency: for short and long contexts, or the same for all (Llama 3)."""
    if kind not in ("none", "linear", "longrope") or factor != 1.0:
        raise ConfigError(
            f"{file.path}: {', '.join(tensors)} beside scaling of type {kind!r:.80} by {factor} is not supported"
        )
    if tensors.keys() == {"rope_freqs.weight"}:
        factors, positions = tensors["rope_freqs.weight"], read_int(file, f"{arch}.context_length")
        found = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": positions}
    elif len(tensors) == 2 and "rope_freqs.weight" not in tensors:
        short, long = tensors["rope_factors_short.weight"], tensors["rope_factors_long.weight"]
        original = read_int(file, f"{arch}.rope.scaling.original_context_length", None)
        found = {"short_factor": short, "long_factor": long}
        found |= {"original_max_position_embeddings": original} if original else {}
    else:
        raise ConfigError(f"{file.path}: {', '.join(tensors)}: factors are read for short and long contexts together")
    return {"rope_type": "longrope"} | found


def _factors(file: GGUFFile, name: str) -> list[float] | None:
    """Return the numbers of a small F32 tensor, or None if there is none."""
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_ROPE_FACTORS:
        raise ConfigError(f"{file.path}: {name} is {info.kind} {list(info.shape)}; a short F32 vector is expected")
    return np.fromfile(info.file, "<f4", info.shape[0], offset=info.begin).tolist()
