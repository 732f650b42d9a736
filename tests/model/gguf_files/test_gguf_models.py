"""GGUF models of every architecture and block format give the logits of Transformers with the dequantised weights."""

import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from model.paged import Shared, tiny_runner
from model.tiny_gguf import write_gguf
from transformers import PreTrainedModel

from headstart.core.errors import ConfigError
from headstart.model.kernels.library import find_kernels
from headstart.model.kernels.packed import PackedLinear
from headstart.model.layers.decoder import Decoder
from headstart.model.setup.sizing import loaded_weight_bytes
from headstart.model.weights.checkpoint import ModelCheckpoint
from headstart.model.weights.gguf.block_formats import FORMATS
from headstart.model.weights.model_loader import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
USUAL_REACTION = 2e-7  # of most tokens: at most this, of the largest logit
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def largest_error(path: Path, oracle: PreTrainedModel, dtype: str = "float32", bits: int = 16) -> float:
    """The largest difference of logits from float64, of prompts in chunks with shared blocks, relative to the largest.

    Where rounding the embeddings moves a token's logits more than usual, its difference is divided by how much more:
    few weights are so balanced, which ones depends on the processor that drew them.
    """
    loaded = load_model(path, dtype=dtype, device="cpu", activation_bits=bits)
    rng = Random(1)
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (60, 9, 1)]
    prompts.append([*prompts[0][:32], 5, 6, 7])
    session = Shared(tiny_runner(loaded), prompts, rng)
    oracle.double()
    worst = 0.0
    for prompt, start, logits in zip(session.prompts, session.starts, session.run(longest=30), strict=True):
        with torch.inference_mode():
            embedded = oracle.get_input_embeddings()(torch.tensor([prompt]))
            rounding = 1 + torch.finfo(torch.float32).eps * torch.randn(
                (3, *embedded.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            expected, *moved = oracle(inputs_embeds=torch.cat([embedded, embedded * rounding])).logits[:, start:]
        largest = expected.abs().max()
        reaction = torch.stack([(each - expected).abs().amax(1) for each in moved]).amax(0) / largest
        errors = (logits - expected).abs().amax(1) / largest
        worst = max(worst, float((errors / (reaction / USUAL_REACTION).clamp(min=1)).max()))
    return worst


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_logits_of_every_architecture_equal_transformers(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert largest_error(path, write_gguf(path, family, "Q4_1")) < 1e-5


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_of_every_block_format_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, "llama", kind, tie_word_embeddings=kind in ("Q4_K", "Q8_0"))
    assert largest_error(path, oracle) < 1e-5


K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K", "token_embd": "Q8_0"}  # as llama-quantize mixes formats


@pytest.mark.parametrize(
    ("family", "kind", "mixed", "overrides"),
    [
        ("llama", "Q4_1", {}, {"tie_word_embeddings": True}),
        ("llama", "Q4_K", K_M, {}),
        ("qwen2", "Q4_0", {"attn_k": "Q8_0", "attn_v": "BF16"}, {"tie_word_embeddings": True}),
        ("qwen3", "Q5_K", K_M, {}),
        ("phi3", "Q4_K", {"attn_qkv": "Q5_1"}, {}),
    ],
)
def test_models_in_bfloat16_with_blocks_in_one_or_several_formats_stay_close_to_fp32(
    family: str, kind: str, mixed: dict[str, str], overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, family, kind, std=0.05, mixed=mixed, **overrides)
    assert largest_error(path, oracle, "bfloat16") < 0.05
    assert largest_error(path, oracle, "bfloat16", 8) < 0.1
    assert largest_error(path, oracle) < 1e-5


@pytest.mark.parametrize(
    ("family", "overrides", "metadata"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1}, {}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        ),
        (
            "qwen2",
            {"rope_parameters": YARN},
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 64,
            },
        ),
        (
            "qwen2",
            {"rope_parameters": {**YARN, "attention_factor": 2.0 * (1.0 + 0.1 * math.log(4.0))}},
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 64,
                "qwen2.rope.scaling.attn_factor": 2.0,
            },
        ),
        ("phi3", {"sliding_window": 9, "partial_rotary_factor": 1.0}, {}),
        ("llama", {}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            {"llama.rope.scaling.factor": 4.0},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            {"llama.rope.scale_linear": 4.0},
        ),
    ],
    ids=["biases", "five-heads", "linear", "yarn", "yarn-strength", "window", "none", "linear-unnamed", "scale-linear"],
)
def test_settings_are_those_of_the_metadata(
    family: str, overrides: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    assert largest_error(path, write_gguf(path, family, "F16", metadata=metadata, **overrides)) < 1e-5


def test_factors_of_llama_3_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    plain = 1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / plain
    smooth = np.clip((64 / wavelengths - 1.0) / (4.0 - 1.0), 0, 1)
    factors = 1.0 / ((1 - smooth) / 8.0 + smooth)  # as llama.cpp's converter computes them
    oracle = write_gguf(
        path, "llama", "F32", tensors={"rope_freqs.weight": factors.astype(np.float32)}, rope_parameters=LLAMA3
    )
    assert largest_error(path, oracle) < 1e-5


@pytest.mark.parametrize("strength", [1.1338934, None])
def test_factors_of_longrope_are_applied_within_the_original_context(strength: float | None, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    short, long = np.linspace(1, 2, 16, dtype=np.float32), np.full(16, 4, np.float32)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0}
    rope |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
    if strength is None:  # as in llama.cpp, which computes none from the lengths
        rope["attention_factor"] = 1.0
    given = {} if strength is None else {"phi3.rope.scaling.attn_factor": strength}
    oracle = write_gguf(
        path,
        "phi3",
        "F32",
        tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
        metadata={"phi3.rope.scaling.original_context_length": 128, **given},
        rope_parameters=rope,
        original_max_position_embeddings=128,
        partial_rotary_factor=0.5,
    )
    assert largest_error(path, oracle) < 1e-5
    assert load_model(path, dtype="float32", device="cpu").max_model_len == 128


def test_factors_of_longrope_in_a_llama_end_at_the_original_context_too(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    short, long = np.linspace(1, 2, 32, dtype=np.float32), np.full(32, 4, np.float32)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.0}
    rope |= {"short_factor": short.tolist(), "long_factor": long.tolist(), "original_max_position_embeddings": 128}
    oracle = write_gguf(
        path,
        "llama",
        "F32",
        tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
        metadata={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 128},
        rope_parameters=rope,
    )
    assert largest_error(path, oracle) < 1e-5
    assert load_model(path, dtype="float32", device="cpu").max_model_len == 128


def test_the_fingerprint_covers_weights_and_settings_not_the_name(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf", "d.gguf")]
    write_gguf(paths[0], seed=1)
    write_gguf(paths[1], seed=1)
    write_gguf(paths[2], seed=2)
    write_gguf(paths[3], seed=1, metadata={"llama.rope.freq_base": 500.0})
    first, same, *others = (
        ModelCheckpoint(path).fingerprint(str(load_model(path).fingerprint).encode()) for path in paths
    )
    assert first == same and first not in others and others[0] != others[1]


def test_memory_is_that_of_the_unpacked_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, kind="Q4_0", tie_word_embeddings=True)
    sizes = [parameter.numel() for parameter in oracle.parameters()]
    assert loaded_weight_bytes(path, dtype="float32") == 4 * sum(sizes)
    matrices = sum(parameter.numel() for parameter in oracle.parameters() if parameter.ndim == 2)
    assert 0 <= load_model(path, dtype="float32").weight_bytes - 4 * matrices < 0.01 * 4 * matrices  # whole tiles


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_stays_in_blocks_and_a_tied_one_is_kept_once(tied: bool, tmp_path: Path) -> None:
    if find_kernels().kernels is None:
        pytest.skip(find_kernels().note)
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, kind="Q4_K", mixed={"token_embd": "Q6_K"}, tie_word_embeddings=tied)
    model = load_model(path, dtype="bfloat16", device="cpu").model
    assert isinstance(model, Decoder) and isinstance(model.embedding, PackedLinear)
    assert (model.embedding in model.head.packed) == tied
    weight = oracle.get_input_embeddings().weight.detach().bfloat16()  # type: ignore[union-attr]
    assert torch.equal(model.embedding.look_up_rows(torch.arange(len(weight))), weight)
    matrices = [linear for one in model.layers for linear in (one.qkv, one.out, one.gate_up, one.down)]
    held = model.head.weight_bytes + sum(linear.weight_bytes for linear in matrices)
    assert model.weight_bytes == held + (0 if tied else model.embedding.nbytes)


def test_a_bias_in_blocks_and_a_missing_tensor_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata={"llama.block_count": 3})
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.input_layernorm\.weight is missing from the file"):
        load_model(path)
