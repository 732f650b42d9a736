"""Reading config.json: both spellings, family rules, and refusals that name the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.core.errors import ConfigError
from headstart.model.weights.architectures import architecture_of, refuse_quantised
from headstart.model.weights.json_file import read_json
from headstart.model.weights.model_config import eos_token_ids, parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}


def test_defaults_of_an_old_llama_file() -> None:
    config = parse_config({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.max_model_len) == (4, 16, 256)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert config.windows == (None,) * 4
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_old_and_new_rope_spelling_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}})
    assert old.rope.kind == new.rope.kind == "yarn"
    assert old.rope.theta == new.rope.theta == 5e5
    assert old.max_model_len == new.max_model_len == 256


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({}, (None, None, None, None)),
        ({"use_sliding_window": True}, (None, None, None, 32)),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (32, None, 32, None),
        ),
    ],
)
def test_qwen2_slides_only_where_told(extra: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = parse_config({**QWEN2, **extra})
    assert config.windows == windows
    assert config.qkv_bias and not config.o_bias


def test_mistral_slides_unless_null() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert parse_config({**mistral, "sliding_window": None}).windows == (None,) * 4
    assert parse_config({**mistral, "sliding_window": 8}).windows == (8,) * 4
    assert parse_config(mistral).windows == (4096,) * 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a positive integer"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported; supported are default, linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3': .*low_freq_factor"),
        ({"layer_types": ["conv"] * 4}, "layer_types \\['conv'\\]"),
    ],
)
def test_what_is_not_understood_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**LLAMA, **extra})


def test_quantised_checkpoints_are_refused_by_method() -> None:
    with pytest.raises(ConfigError, match="quantised \\(awq\\)"):
        refuse_quantised({"quantization_config": {"quant_method": "awq"}})


def test_a_config_without_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no architecture \\(model_type 'llama'\\)"):
        architecture_of({"model_type": "llama"})


def test_broken_json_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


def test_eos_ids_come_from_both_files_without_repeats(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": 5}) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 5}) == (5, 7)
    assert eos_token_ids(tmp_path, {"eos_token_id": None}) == (7, 5)
