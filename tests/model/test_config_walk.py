"""Every key of every config class of the native path, changed to other values: refused, or tokens as Transformers'."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model.paged import forced_logits
from model.tiny import FAMILIES, HYBRIDS, NATIVE, eager, make_checkpoint

from headstart.core.errors import ConfigError
from headstart.model.weights.config_keys import HANDLED, HANDLED_BY_FAMILY, HARMLESS, READ_BESIDES
from headstart.model.weights.model_loader import LoadedModel, load_model

PROMPT, STEPS = 36, 6  # longer than the windows of the tiny models
TOLERANCE = 2e-4  # of logits between 1 and 10
WALK_SHARE = 19  # every nineteenth change runs in the short suite
BREADTH = sorted(set(FAMILIES) - set(NATIVE))
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0},
]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
ROPE_KEYS = {
    "rope_type": ["default", "linear", "su", "mrope", None],
    "type": ["linear", "yarn"],
    "rope_theta": [500.0, 1e6, None, 0],
    "factor": [1.0, 3, 0.5, None],
    "partial_rotary_factor": [0.5, 1.0, 0.3, None, 2.0],
    "original_max_position_embeddings": [32, 512, None, 100.0],
    "low_freq_factor": [2.0, 4.0],
    "high_freq_factor": [8.0, 1.0],
    "attention_factor": [0.7, 2, None],
    "beta_fast": [16, None, 0],
    "beta_slow": [4, None, 0],
    "mscale": [0.7, 0],
    "mscale_all_dim": [0.5, 1.0],
    "truncate": [False, None],
    "short_factor": [[1.5] * 4, [1.5] * 8, None],
    "long_factor": [[3.0] * 4, None],
    "novelty": [1],
    "full_attention": [{"rope_type": "default", "rope_theta": 500.0}],
}
# Keys that the config classes do not declare, and values worth trying for those that need a shape of their own.
BESIDES: dict[str, list[Any]] = {
    "is_causal": [False, True, None, 0],
    "sliding_window": [5, 12, 512, 0, -1, None],
    "layer_types": [
        ["full_attention", "full_attention"],
        ["sliding_attention", "full_attention"],
        ["sliding_attention", "sliding_attention"],
        ["attention", "full_attention"],
        ["full_attention"],
        ["chunked_attention", "full_attention"],
        None,
    ],
    "attention_chunk_size": [5, None],
    "partial_rotary_factor": [0.5, 1.0, None],
    "rope_theta": [500.0, None],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}, {}, None],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0}, {}, None],
    "original_max_position_embeddings": [64, None],
    "head_dim": [16, 8, 32, None],
    "num_key_value_heads": [4, 1, None],
    "hidden_act": ["gelu", "relu", "swish", "gelu_pytorch_tanh", None],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "novel", None],
    "architectures": [["LlamaForCausalLM"], ["Qwen2ForCausalLM"], None],
    "dtype": ["bfloat16", "float32", None],
    "torch_dtype": ["bfloat16"],
    "attn_implementation": ["sdpa", "flash_attention_2"],
    "_attn_implementation": ["sdpa"],
    "attribute_map": [{"hidden_act": "model_type"}],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.1}}],
    "get_text_config": ["x"],
    "text_config": [{"vocab_size": 7}],
    "decoder": [{"vocab_size": 7}],
    "transformers_weights": ["other.safetensors", None],
    "kv_sharing_modes": [["reuse", "reuse"]],
    "num_nextn_predict_layers": [1],
    "novelty": [1, "x", None, {"a": 1}],
    "rope_type": ["linear"],
    "auto_map": [{"AutoConfig": "configuration_x.XConfig"}],
    "logits_scaling": [2.0],
    "embedding_multiplier": [2.0],
    "final_logit_softcapping": [1.0],
    "attn_logit_softcapping": [1.0],
    "qk_layernorm": [True],
    "use_qk_norm": [True],
    "no_rope_layers": [[0, 1]],
    "clip_qkv": [0.1],
    "qkv_bias": [True],
}
# Transformers refuses these, or cannot run them, and we serve them all the same: (key, value) -> why that is right.
MORE_THAN_TRANSFORMERS: dict[str, str] = {
    "pad_token_id": "only the embedding's padding index, which loading ignores",
    "auto_map": "Transformers asks whether to run the code; it is never run here",
    "head_dim": "null is hidden_size by heads, as in the other families",
    "return_dict": "the form of what a forward pass returns, which is chosen here anyway",
    "attn_implementation": "attention is computed by our code, whatever the file names",
    "_attn_implementation": "attention is computed by our code, whatever the file names",
    "architectures": "Transformers does not read it",
    "mamba_chunk_size": "the pieces in which Transformers computes a prompt; ours go token after token",
    "number_of_conv_states": "null is what its cache assumes without the key",
}


def plausible(value: Any) -> list[Any]:
    """Other values of the same kind, as users might write them, and of another kind."""
    match value:
        case bool():
            return [not value, None, int(not value)]
        case int():
            return [value + 1, value * 2, max(value // 2, 1), 0, None, float(value), str(value)]
        case float():
            return [value * 2, value / 2, 0.0, 1, None, str(value)]
        case str():
            return ["other", None, 1]
        case list():
            return [[], None, [*value, *value]]
        case _:
            return [True, 1, 0.5, "other", None]


Change = tuple[dict[str, Any] | None, str, Any]  # rotary settings that the key belongs to, key, new value


def changes(family: str) -> Iterator[Change]:
    """Changes of every key that the config class declares, that Transformers reads besides, or that we list."""
    config_class = getattr(transformers, (FAMILIES | HYBRIDS)[family][0])
    default = config_class()
    own = {key: getattr(default, key) for key in vars(default) if not key.startswith("_")}
    keys = {*own, *BESIDES, *HANDLED, *HARMLESS, *READ_BESIDES, *HANDLED_BY_FAMILY.get(family, ())}
    for key in sorted(keys - {"quantization_config"}):
        values = BESIDES.get(key, [])
        if key not in BESIDES or key in own:
            values = [*values, *plausible(own.get(key))]
        yield from ((None, key, value) for value in values)


def rope_changes(family: str) -> Iterator[Change]:
    """Changes within the rotary settings, of every kind of scaling."""
    if family not in (*NATIVE, *HYBRIDS):
        return
    for rope in [*ROPES, LONGROPE] if family != "phi3" else [ROPES[0], LONGROPE]:
        yield from ((rope, key, value) for key, values in ROPE_KEYS.items() for value in values)


@cache
def _prompt() -> torch.Tensor:
    return torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(5))


def reference_logits(folder: Path) -> torch.Tensor:
    """Logits [STEPS, vocab] of Transformers' own `generate`, greedy, with its cache."""
    with torch.inference_mode():
        out = eager(folder).generate(
            _prompt(),
            attention_mask=torch.ones_like(_prompt()),
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return torch.cat([out.sequences[0, PROMPT:, None].float(), torch.cat(list(out.logits)).float()], dim=1)


def verdict(folder: Path, ours: LoadedModel) -> str:
    """ "" if the tokens and logits of `ours` are Transformers', else the difference."""
    try:
        due = reference_logits(folder)
    except Exception as error:
        return f"Transformers cannot run it ({type(error).__name__}: {str(error)[:200]})"
    tokens = due[:, 0].long().tolist()
    got = forced_logits(ours, _prompt()[0].tolist(), tokens)
    if got.shape[1] != due.shape[1] - 1:
        return f"{got.shape[1]} logits, {due.shape[1] - 1} are due"
    worst = float((got - due[:, 1:]).abs().max() / due[:, 1:].abs().max().clamp(min=1.0))
    return "" if worst < TOLERANCE else f"logits differ by {worst:.2g}"


def tried(folder: Path, key: str, value: Any) -> str | None:
    """None if refused; else what is wrong with how the checkpoint is served, "" if nothing."""
    try:
        ours = load_model(folder, dtype="float32", device="cpu")
    except ConfigError as error:
        assert "\n" not in str(error) and str(error), error
        return None
    wrong = verdict(folder, ours)
    if wrong.startswith("Transformers cannot run it") and key in MORE_THAN_TRANSFORMERS:
        return ""
    return wrong and f"{key} = {value!r}: {wrong}"


class Walk:
    """Copies of one checkpoint with one key changed."""

    def __init__(self, family: str, folder: Path, **overrides: Any) -> None:
        self.original = make_checkpoint(family, folder / "original", **overrides)
        self.folder = Path(shutil.copytree(self.original, folder / "changed"))
        self.config: dict[str, Any] = json.loads((self.original / "config.json").read_text())

    def write(self, config: dict[str, Any]) -> Path:
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder

    def change(self, key: str, value: Any) -> Path:
        config = {**self.config, key: value}
        if key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
            config.pop("rope_parameters", None)
        return self.write(config)

    def change_rope(self, rope: dict[str, Any], key: str, value: Any) -> Path:
        return self.write({**self.config, "rope_parameters": {**rope, key: value}})


def walk(family: str, folder: Path, share: int) -> tuple[int, int, list[str]]:
    """Numbers of changes served and refused, and what was wrong."""
    walked, served, refused, wrong = Walk(family, folder), 0, 0, list[str]()
    assert tried(walked.write(walked.config), "", None) == ""
    for number, (rope, key, value) in enumerate([*changes(family), *rope_changes(family)]):
        if number % share:
            continue
        changed = walked.change(key, value) if rope is None else walked.change_rope(rope, key, value)
        outcome = tried(changed, key if rope is None else f"{rope['rope_type']} {key}", value)
        served, refused = served + (outcome is not None), refused + (outcome is None)
        wrong += [outcome] if outcome else []
    return served, refused, wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [*NATIVE, *HYBRIDS])
def test_a_changed_key_is_refused_or_served_as_transformers_serves_it(family: str, tmp_path: Path) -> None:
    served, refused, wrong = walk(family, tmp_path, WALK_SHARE)
    assert wrong == []
    assert served > 10 and refused > 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [*NATIVE, *BREADTH])
def test_every_changed_key_is_refused_or_served_as_transformers_serves_it(family: str, tmp_path: Path) -> None:
    served, refused, wrong = walk(family, tmp_path, 1)
    print(f"\n{family}: {served} served, {refused} refused")
    assert wrong == []
    assert served > 30 and refused > 20
