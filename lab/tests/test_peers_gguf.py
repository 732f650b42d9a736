"""Files that llama.cpp is given: names, row order and bytes of a model's tensors, without llama.cpp."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headstart.model.weights.init_model import write_random_model

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gguf = _load("gguf_tensors")


def _rotated(x: NDArray[np.float64], position: float, pairs: list[tuple[int, int]]) -> NDArray[np.float64]:
    """One head [D] turned by its position: pair number i by position / 100 ** i."""
    out = x.copy()
    for index, (a, b) in enumerate(pairs):
        angle = position / 100.0**index
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
    return out


@given(heads=st.integers(1, 3), half=st.integers(1, 4), seed=st.integers(0, 99), gap=st.integers(0, 9))
def test_interleaved_rows_with_llama_cpps_rotation_give_hugging_faces_scores(
    heads: int, half: int, seed: int, gap: int
) -> None:
    rng = np.random.default_rng(seed)
    size, hidden = 2 * half, 5
    q, k = rng.normal(size=(2, heads * size, hidden))
    x, y = rng.normal(size=(2, hidden))
    halves = [(i, i + half) for i in range(half)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(half)]

    def scores(q: NDArray[np.float64], k: NDArray[np.float64], pairs: list[tuple[int, int]]) -> list[float]:
        heads_q, heads_k = (q @ x).reshape(heads, size), (k @ y).reshape(heads, size)
        return [
            float(_rotated(a, 3 + gap, pairs) @ _rotated(b, 3, pairs)) for a, b in zip(heads_q, heads_k, strict=True)
        ]

    theirs = scores(gguf.interleaved(q, heads), gguf.interleaved(k, heads), neighbours)
    assert np.allclose(theirs, scores(q, k, halves))


def test_rows_of_a_head_are_interleaved_and_heads_stay_apart() -> None:
    rows = np.arange(8)[:, None]
    assert gguf.interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf.interleaved(np.arange(4), 1).tolist() == [0, 2, 1, 3]  # a bias


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("tiny", tmp_path_factory.mktemp("models") / "tiny", std=0.2, progress=False)


def test_every_tensor_of_a_model_is_written_once_under_its_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = {tensor.name: tensor for tensor in gguf.gguf_tensors(folder, config)}
    layers = config["num_hidden_layers"]
    assert len(tensors) == 3 + 9 * layers
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    expected = {f"blk.{layer}.{part}.weight" for layer in range(layers) for part in parts}
    assert set(tensors) == expected | {"token_embd.weight", "output_norm.weight", "output.weight"}


def test_values_arrive_exactly_and_only_q_and_k_are_reordered(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    original = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()  # torch reads them on its own
    }
    tensors = {tensor.name: tensor for tensor in gguf.gguf_tensors(folder, config)}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in original.items():
        expected = tensor.float().numpy()
        part = name.split(".")[-2]
        if part in heads:
            expected = gguf.interleaved(expected, heads[part])
            assert not np.array_equal(expected, tensor.float().numpy())
        assert tensors[gguf.gguf_name(name)].is_bfloat16
        assert np.array_equal(tensors[gguf.gguf_name(name)].float32(), expected), name


def test_a_tied_head_is_left_out_and_qwen2_keeps_its_rows_and_biases(tmp_path: Path) -> None:
    rows = torch.arange(8, dtype=torch.float32)
    names = ["model.layers.0.self_attn.q_proj.bias", "lm_head.weight"]
    save_file({names[0]: rows, names[1]: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    (tensor,) = gguf.gguf_tensors(tmp_path, config)
    assert tensor.name == "blk.0.attn_q.bias"
    assert tensor.values.tolist() == list(range(8))
    untied = [tensor.name for tensor in gguf.gguf_tensors(tmp_path, {**config, "tie_word_embeddings": False})]
    assert sorted(untied) == ["blk.0.attn_q.bias", "output.weight"]


def test_qwen3_keeps_its_rows_and_has_norms_of_queries_and_keys(tmp_path: Path) -> None:
    rows = torch.arange(8, dtype=torch.float32)
    names = [f"model.layers.0.self_attn.{part}.weight" for part in ("q_proj", "q_norm", "k_norm")]
    save_file({name: rows.clone() for name in names}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1}
    tensors = {tensor.name: tensor.values.tolist() for tensor in gguf.gguf_tensors(tmp_path, config)}
    assert tensors == {f"blk.0.{part}.weight": list(range(8)) for part in ("attn_q", "attn_q_norm", "attn_k_norm")}


def test_what_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors"):
        list(gguf.read_tensors(tmp_path))
    with pytest.raises(ValueError, match="router"):
        gguf.gguf_name("model.layers.0.mlp.router.weight")
    with pytest.raises(ValueError, match="gemma"):
        list(gguf.gguf_tensors(tmp_path, {"model_type": "gemma"}))
    save_file({"model.norm.weight": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="I32"):
        list(gguf.read_tensors(tmp_path))
