"""The decoder on chains of kernels gives what its own loop gives, for every family, chunking and variant."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.paged import all_logits, chunk, tiny_runner
from model.tiny import NATIVE, make_checkpoint
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.kernels.library import VARIABLE, runnable_variants
from headstart.model.layers.decoder import Decoder
from headstart.model.weights.model_loader import load_model

RUNNABLE = runnable_variants()
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in NATIVE),
    ("llama", {"num_key_value_heads": 1, "head_dim": 20, "tie_word_embeddings": True, "num_hidden_layers": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 77, "hidden_size": 52, "head_dim": 10}),
]


def logits(folder: Path, variant: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> Tensor:
    """Of a prompt of 60 tokens that is computed in four chunks, the last of one token."""
    monkeypatch.setenv(VARIABLE, variant)
    loaded = load_model(folder, dtype="bfloat16", device="cpu", attention_backend="reference", **settings)
    assert isinstance(loaded.model, Decoder)
    if variant != "none" and loaded.model.fused is None:
        pytest.skip("no compiler")
    assert (loaded.model.fused is None) == (variant == "none")
    runner, tokens = tiny_runner(loaded), [Random(3).randrange(3, 128) for _ in range(60)]
    cuts = [(0, 25), (25, 32), (32, 59), (59, 60)]
    return torch.cat([all_logits(runner, chunk(tokens, begin, end, [5, 3, 9, 1]))[0] for begin, end in cuts])


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(FAMILIES)])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_fused_layers_equal_the_loop(
    family: str, overrides: dict[str, Any], quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, std=0.08, **overrides)
    expected = logits(tmp_path, "none", monkeypatch, quantization=quantization)
    for variant in RUNNABLE:
        found = logits(tmp_path, variant, monkeypatch, quantization=quantization)
        assert (found - expected).abs().max() < 0.02 * expected.abs().max(), variant


def test_int8_stays_close_to_bfloat16_and_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path, std=0.08)
    plain, rounded = (logits(tmp_path, "none", monkeypatch, quantization=q) for q in ("none", "int8"))
    assert 0 < (plain - rounded).abs().max() < 0.05 * plain.abs().max()
    names = {q: load_model(tmp_path, device="cpu", quantization=q).fingerprint for q in ("none", "int8", "int4")}
    assert len(set(names.values())) == 3


def test_unknown_quantizations_and_models_of_transformers_are_refused(tmp_path: Path) -> None:
    make_checkpoint("olmo2", tmp_path)
    with pytest.raises(ConfigError, match=r"int8 is not supported for Olmo2ForCausalLM"):
        load_model(tmp_path, device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="quantization 'int3' is not known"):
        load_model(tmp_path, device="cpu", quantization="int3")
