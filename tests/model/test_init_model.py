import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.core.errors import ConfigError
from headstart.model.setup.sizing import loaded_weight_bytes
from headstart.model.weights import init_model as module
from headstart.model.weights.hub import resolve_model
from headstart.model.weights.init_model import write_random_model
from headstart.model.weights.shapes import SHAPES, DecoderShape

SMALL = {
    name: DecoderShape(name, 32, 2, 4, 2, 48, 300, 128, head_dim=8, tie_word_embeddings=tied)
    for name, tied in (("Llama", False), ("Qwen2", True), ("Qwen3", True))
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("tiny", tmp_path_factory.mktemp("models") / "tiny", progress=False)


def test_tiny_is_a_model_that_transformers_loads_and_runs(tiny: Path) -> None:
    assert resolve_model(str(tiny)) == tiny
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) == model.config.vocab_size == 512
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert prompt == "<|bos|><|user|>System: Be kind.<|eos|><|user|>Hello<|eos|><|assistant|>"
    output = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=3, min_new_tokens=3)
    assert tokenizer.decode(output[0, -3:])


@pytest.mark.parametrize("architecture", SMALL)
def test_every_architecture_loads_without_a_missing_or_unexpected_tensor(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL[architecture])
    out = write_random_model("small", tmp_path / "m", dtype="float32", shard_bytes=20_000, progress=False)
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert sum(p.numel() for p in model.parameters()) == SMALL[architecture].num_parameters
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size


def test_shards_are_bounded_and_hold_what_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL["Llama"])
    one = write_random_model("small", tmp_path / "one", progress=False)
    many = write_random_model("small", tmp_path / "many", shard_bytes=20_000, progress=False)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    whole = safe_open(one / "model.safetensors", "pt")
    assert set(index["weight_map"]) == set(whole.keys())
    assert index["metadata"]["total_size"] == loaded_weight_bytes(one) == loaded_weight_bytes(many)
    for name, file in index["weight_map"].items():
        assert (many / file).stat().st_size < 20_000 + 2000 + SMALL["Llama"].hidden_size * 300 * 2
        assert torch.equal(safe_open(many / file, "pt").get_tensor(name), whole.get_tensor(name))


def test_same_seed_same_weights_and_std_is_obeyed(tmp_path: Path) -> None:
    weights = {}
    for name, seed, std in (("a", 0, 0.02), ("b", 0, 0.02), ("c", 1, 0.02), ("d", 0, 0.2)):
        write_random_model("tiny", tmp_path / name, seed=seed, std=std, progress=False)
        weights[name] = safe_open(tmp_path / name / "model.safetensors", "pt").get_tensor("lm_head.weight").float()
    assert torch.equal(weights["a"], weights["b"])
    assert not torch.equal(weights["a"], weights["c"])
    assert weights["a"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["d"].std().item() == pytest.approx(0.2, rel=0.05)


def test_weights_are_as_readable_as_the_config(tiny: Path) -> None:
    assert (tiny / "model.safetensors").stat().st_mode == (tiny / "config.json").stat().st_mode


def test_norms_are_one(tiny: Path) -> None:
    file = safe_open(tiny / "model.safetensors", "pt")
    norms = [name for name in file.keys() if name.endswith("norm.weight")]  # noqa: SIM118 - not a dict
    assert len(norms) == 5
    assert all(bool((file.get_tensor(name) == 1).all()) for name in norms)


def test_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not empty"):
        write_random_model("tiny", tmp_path, progress=False)
    with pytest.raises(ConfigError, match="not a model"):
        write_random_model("tiny", tmp_path, overwrite=True, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_model_is_overwritten_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL["Llama"])
    write_random_model("small", tmp_path / "m", shard_bytes=20_000, progress=False)
    write_random_model("tiny", tmp_path / "m", overwrite=True, progress=False)
    assert [p.name for p in (tmp_path / "m").glob("*.safetensors*")] == ["model.safetensors"]
    assert loaded_weight_bytes(tmp_path / "m") == SHAPES["tiny"].num_parameters * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": "gpt-9"}, "choose one of tiny, llama-100m"),
        ({"dtype": "int4"}, "choose one of bfloat16"),
        ({"std": 0.0}, "std is 0.0"),
        ({"std": float("nan")}, "std is nan"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    arguments: dict[str, object] = {"shape": "tiny", **changes}
    with pytest.raises(ConfigError, match=words):
        write_random_model(out=tmp_path / "m", progress=False, **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()


def test_file_in_the_way_and_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_random_model("tiny", tmp_path / "file", progress=False)
    with pytest.raises(ConfigError, match="cannot make"):
        write_random_model("tiny", tmp_path / "file" / "m", progress=False)
    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="free"):
        write_random_model("tiny", tmp_path / "m", progress=False)
