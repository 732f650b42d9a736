"""GGUF files of hybrids give the logits of Transformers with the weights that the gguf package reads from them."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.hybrid_gguf import ARCHITECTURES
from model.hybrid_gguf import random_hybrid as write
from model.paged import tiny_runner
from model.test_hybrid_decoder import in_chunks
from transformers import PreTrainedModel
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

from headstart.core.errors import ConfigError
from headstart.gguf.tokenizer_json import PRE_TOKENIZERS
from headstart.model.weights.model_loader import load_model


def largest_error(path: Path, oracle: PreTrainedModel, dtype: str = "float32", bits: int = 16) -> float:
    """The largest difference of logits, of prompts in chunks, relative to the largest logit of the oracle."""
    loaded = load_model(path, dtype=dtype, device="cpu", activation_bits=bits)
    rng = Random(1)
    texts = [[rng.randrange(3, 400) for _ in range(length)] for length in (60, 9, 1)]
    worst = 0.0
    for text, logits in zip(texts, in_chunks(tiny_runner(loaded), texts, rng), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([text])).logits[0]
        worst = max(worst, float((logits - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q4_K", "BF16"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_transformers_with_the_dequantised_weights(family: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write(path, family, kind)
    assert largest_error(path, oracle) < 2e-5


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "BF16"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_in_bfloat16_stay_close_to_fp32(family: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write(path, family, kind, std=0.05)
    assert largest_error(path, oracle, "bfloat16") < 0.05
    assert largest_error(path, oracle, "bfloat16", 8) < 0.1


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_in_float32_has_the_logits_of_its_model_folder(family: str, tmp_path: Path) -> None:
    path, texts = tmp_path / "model.gguf", [[Random(2).randrange(3, 400) for _ in range(40)]]
    write(path, family)
    (one,), (other,) = (
        in_chunks(tiny_runner(load_model(source, dtype="float32", device="cpu")), texts, Random(1))
        for source in (path, tmp_path / "model")
    )
    limit = 2e-5 if family == "qwen3_5_text" else 0.0  # its norms are stored plus 1, which rounds
    torch.testing.assert_close(one, other, atol=limit, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_5_text", {"tie_word_embeddings": True, "linear_num_key_heads": 4}),
        ("qwen3_5_text", {"num_hidden_layers": 4, "layer_types": ["linear_attention", *["full_attention"] * 3]}),
        ("lfm2", {"tie_word_embeddings": False, "num_key_value_heads": 4, "conv_L_cache": 4}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 64}),
    ],
)
def test_other_shapes_are_read(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert largest_error(path, write(path, family, **overrides)) < 2e-5


def test_layers_follow_the_interval_where_no_list_names_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 3}
    assert largest_error(path, write(path, "qwen3_5_text", metadata=metadata)) < 2e-5


@pytest.mark.parametrize(
    ("family", "message", "metadata"),
    [
        (
            "qwen3_5_text",
            r"blk\.2\.attn_q\.weight is not part of layer 2",
            {"qwen35.attention.recurrent_layers": [True] * 4 + [False]},
        ),
        (
            "qwen3_5_text",
            "names 2 of 5 layers",
            {"qwen35.attention.recurrent_layers": [True, False]},
        ),
        ("qwen3_5_text", r"dimension_sections \[1, 1, 1, 0\] leave", {"qwen35.rope.dimension_sections": [1, 1, 1, 0]}),
        ("qwen3_5_text", "inner_size is no multiple", {"qwen35.ssm.inner_size": 255}),
        ("qwen3_5_text", "time_step_rank", {"qwen35.ssm.time_step_rank": 0}),
        ("qwen3_5_text", "shape", {"qwen35.ssm.group_count": 1}),
        ("qwen3_5_text", "group_count|linear_num_key_heads", {"qwen35.ssm.group_count": 0}),
        ("qwen3_5_text", "nextn_predict_layers is 1", {"qwen35.nextn_predict_layers": 1}),
        ("lfm2", "head_count_kv is", {"lfm2.attention.head_count_kv": [0, 2, 0, 4]}),
        ("lfm2", "head_count_kv", {"lfm2.attention.head_count_kv": 2}),
        ("lfm2", "l_cache", {"lfm2.shortconv.l_cache": None}),
        ("lfm2", "sliding_window is 16", {"lfm2.attention.sliding_window": 16}),
        ("lfm2", "ssm.conv_kernel is 4", {"lfm2.ssm.conv_kernel": 4}),
    ],
)
def test_settings_that_make_another_model_are_refused(
    family: str, message: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", family, metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "model.gguf", dtype="float32", device="cpu")


def test_texts_are_split_as_in_transformers() -> None:
    assert PRE_TOKENIZERS["qwen35"].parts[0]["pattern"]["Regex"] == PRETOKENIZE_REGEX
    assert Qwen3_5Tokenizer().backend_tokenizer.normalizer is not None and PRE_TOKENIZERS["qwen35"].is_nfc
