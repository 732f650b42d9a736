"""The table of keys covers what Transformers' sources read of a config: a new release that reads more is noticed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from headstart.core.errors import ConfigError
from headstart.model.weights.config_keys import (
    CONFIG_CLASSES,
    HANDLED,
    HANDLED_BY_FAMILY,
    HARMLESS,
    READ_BESIDES,
    NotNativeError,
)
from headstart.model.weights.model_config import parse_config

ROOT = Path(transformers.__file__).parent
SHARED = [
    "cache_utils.py",
    "configuration_utils.py",
    "core_model_loading.py",
    "generation/utils.py",
    "masking_utils.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
    "utils/generic.py",
]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
# Read of configs of other kinds: quantisation, distribution, vision and audio, classifiers.
OTHER_CONFIGS = {
    "head_dim_key", "num_heads", "embed_dim", "mlp_layer_types", "init_std", "initializer_factor", "device_mesh",
    "is_quantized", "qk_head_dim", "sep_token_id", "quant_method", "encoder", "quantization_config",
}  # fmt: skip


def names_read(file: str) -> Iterator[str]:
    """Names that `file` asks of a config with getattr or hasattr."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            asked = ast.unparse(node.args[0])
            if ("config" in asked.lower() and "generation_config" not in asked) or (
                asked == "self" and "configuration" in file
            ):
                yield node.args[1].value


@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_every_name_that_transformers_reads_of_a_config_is_classified(family: str) -> None:
    name = family.removesuffix("_text")
    files = [*SHARED, f"models/{name}/modeling_{name}.py", f"models/{name}/configuration_{name}.py"]
    read = {name for file in files for name in names_read(file)}
    known = HANDLED | HANDLED_BY_FAMILY[family] | HARMLESS | set(READ_BESIDES) | OTHER_CONFIGS
    unknown = {name for name in read - known if not hasattr(CONFIG_CLASSES[family], name)}
    assert len(read) > 20
    assert unknown == set()


@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_every_field_of_a_config_class_is_classified(family: str) -> None:
    fields = set(vars(CONFIG_CLASSES[family]())) - {"_output_attentions", "_post_init_done", "_experts_implementation"}
    rest = fields - HANDLED - HANDLED_BY_FAMILY[family] - HARMLESS
    assert rest <= {
        "_experts_implementation_internal", "is_encoder_decoder", "ignore_keys_at_rope_validation",
    }  # refused beside their defaults  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attribute_map", {"hidden_act": "model_type"}),
        ("per_layer_config", {"0": {"rms_norm_eps": 0.1}}),
        ("get_text_config", "x"),
        ("text_config", {}),
        ("is_encoder_decoder", True),
        ("transformers_weights", "other.safetensors"),
        ("attention_chunk_size", 64),
        ("model_type", "qwen2"),
        ("sliding_window", 64),
        ("layer_types", ["sliding_attention"] * 4),
    ],
)
def test_a_key_that_would_change_the_model_is_left_to_transformers(key: str, value: object) -> None:
    with pytest.raises((NotNativeError, ConfigError), match=key):
        parse_config({**LLAMA, key: value})


@pytest.mark.parametrize("value", [None, True, 3, "x", [1], {"a": 1}])
def test_a_key_that_nothing_reads_is_harmless(value: object) -> None:
    assert parse_config({**LLAMA, "novelty": value, "unsloth_fixed": True}) == parse_config(LLAMA)


def test_a_harmless_key_holds_any_value() -> None:
    assert parse_config({**LLAMA, "output_router_logits": True, "use_cache": False}) == parse_config(LLAMA)
