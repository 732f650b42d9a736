"""Checkpoints that were served wrongly without a word: now as Transformers serves them, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model.same_tokens import differences, edit
from model.tiny import COMMON, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.core.errors import ConfigError
from headstart.model.kernels.library import find_kernels
from headstart.model.layers.decoder import Decoder
from headstart.model.layers.linear import embedding_rows
from headstart.model.transformers_model import TransformersModel
from headstart.model.transformers_probe import find_non_causal_mask_pair
from headstart.model.weights.model_loader import load_model

ALTERNATING = ["sliding_attention", "full_attention"]


def build(folder: Path, config: str, **settings: Any) -> Path:
    """A random checkpoint of any config class."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**COMMON, **settings})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> object:
    return load_model(folder, dtype="float32", device="cpu").model


def phimoe(folder: Path, **settings: Any) -> Path:
    return build(folder, "PhimoeConfig", num_local_experts=4, num_experts_per_tok=2, **settings)


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"PhimoeForCausalLM is not supported: the attention of layer 0 .* mask for it differs"
    ):
        load(phimoe(tmp_path, sliding_window=12))


@pytest.mark.parametrize("window", [None, 512])
def test_a_window_as_long_as_the_context_is_no_window(window: int | None, tmp_path: Path) -> None:
    assert differences(phimoe(tmp_path, sliding_window=window)) == []


def test_a_mistral_with_layer_types_is_the_ministral_that_transformers_makes_of_it(tmp_path: Path) -> None:
    folder = edit(make_checkpoint("mistral", tmp_path), layer_types=ALTERNATING)
    assert isinstance(load(folder), TransformersModel)
    assert differences(folder) == []


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_head_stored_beside_tied_embeddings_is_kept_if_it_differs(family: str, trained: bool, tmp_path: Path) -> None:
    folder = edit(make_checkpoint(family, tmp_path), tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if not trained:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(folder)
    assert isinstance(model, Decoder)
    assert any(held is model.embedding for held in (model.head.weight, *model.head.packed)) == (not trained)
    assert differences(folder) == []


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tied_embedding_is_kept_once_where_the_head_holds_its_rows(
    dtype: str, quantization: str, tmp_path: Path
) -> None:
    if find_kernels().kernels is None:
        pytest.skip(find_kernels().note)
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    model = load_model(folder, dtype=dtype, device="cpu", quantization=quantization).model
    assert isinstance(model, Decoder)
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(getattr(torch, dtype))
    assert torch.equal(embedding_rows(model.embedding, torch.arange(len(weight))), weight)
    assert (model.embedding is model.head.packed[0]) == (quantization == "none")


@pytest.mark.parametrize(
    "config", ["LlamaConfig", "Qwen3Config", "InternLM3Config", "IQuestCoderConfig", "MistralConfig"]
)
def test_attention_that_is_not_causal_is_refused_by_name(config: str, tmp_path: Path) -> None:
    folder = build(tmp_path, config)
    assert differences(edit(folder, is_causal=True)) == []
    with pytest.raises(ConfigError, match="ForCausalLM is not supported: it has attention that is not causal"):
        load(edit(folder, is_causal=False))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_partial_rotation_is_applied_where_transformers_applies_it(family: str, tmp_path: Path) -> None:
    folder = edit(make_checkpoint(family, tmp_path), remove=("rope_parameters",), partial_rotary_factor=0.25)
    assert differences(folder) == []


def test_a_window_that_only_the_cache_of_transformers_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the cache of Transformers keeps only the last 12 \(sliding_window\)"):
        load(edit(make_checkpoint("llama", tmp_path), sliding_window=12))
    assert isinstance(load(edit(tmp_path, sliding_window=512)), Decoder)


def test_weights_in_a_file_of_another_name_are_refused(tmp_path: Path) -> None:
    for family in ("llama", "olmo2"):
        folder = edit(make_checkpoint(family, tmp_path / family), transformers_weights="other.safetensors")
        with pytest.raises(ConfigError, match="names transformers_weights; weights are read from the usual files only"):
            load(folder)


@pytest.mark.parametrize("config", ["MixtralConfig", "Qwen3MoeConfig", "GptOssConfig", "LlamaConfig"])
def test_outputs_that_are_switched_on_change_nothing(config: str, tmp_path: Path) -> None:
    experts = {} if config == "LlamaConfig" else {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    folder = build(tmp_path, config, **experts, head_dim=16)
    assert differences(edit(folder, output_router_logits=True)) == []
    load(edit(folder, output_hidden_states=True, output_attentions=True, return_dict=False))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("OPTConfig", {"word_embed_proj_dim": 64, "ffn_dim": 96}, r"OPTForCausalLM is not supported: its [a-z, ]+ "),
        (
            "LongcatFlashConfig",
            {
                "num_layers": 1,
                "n_routed_experts": 4,
                "moe_topk": 2,
                "expert_ffn_hidden_size": 32,
                "ffn_hidden_size": 96,
            },
            r"LongcatFlashForCausalLM is not supported: [a-z]+ .* ",
        ),
        ("XmodConfig", {"is_decoder": True, "languages": ["en_XX"]}, r"XmodForCausalLM is not supported: its [a-z]+ "),
    ],
)
def test_refusals_are_sentences(config: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = getattr(transformers, config)(**{**COMMON, **settings})
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert not str(caught.value).endswith(":") and "_Echo" not in str(caught.value).split("(")[0]


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 100), 100),
        (lambda b, h, q, k: (k <= q) & (k > q - 5000), None),  # longer than the context
    ],
)
def test_masks_that_our_attention_applies_pass(rule: Any, window: int | None) -> None:
    assert find_non_causal_mask_pair(rule, window, 4096) is None


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (lambda b, h, q, k: k <= q + 1, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 4095), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 101), 100),
        (lambda b, h, q, k: (k <= q) & (k > q - 99), 100),
        (lambda b, h, q, k: k <= q, 100),
        (lambda b, h, q, k: (k <= q) & (k // 1000 == q // 1000), None),  # chunks
        (lambda b, h, q, k: (k <= q) & ((k > q - 100) | (k < 4)), 100),  # the first tokens are always seen
        (lambda b, h, q, k: (k <= q) | (k < 7), None),  # a prefix that sees itself
        (lambda b, h, q, k: (k <= q) & (k != 77), None),
    ],
)
def test_masks_that_it_does_not_apply_are_noticed(rule: Any, window: int | None) -> None:
    assert find_non_causal_mask_pair(rule, window, 4096) is not None
