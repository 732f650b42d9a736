"""Checkpoints: single, sharded, broken, pickled; and what the fingerprint notices."""

import json
from pathlib import Path

import pytest
import torch
from model.paged import all_logits, chunk, tiny_runner
from model.tiny import make_checkpoint
from safetensors.torch import save_file

from headstart.core.errors import ConfigError
from headstart.model.attention.base import BACKENDS
from headstart.model.weights import checkpoint as weights
from headstart.model.weights import model_loader as loader
from headstart.model.weights.checkpoint import LoadingBar, ModelCheckpoint
from headstart.model.weights.model_loader import load_model
from headstart.model.weights.safetensors_files import weight_files


def save(folder: Path, **tensors: torch.Tensor) -> ModelCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    return ModelCheckpoint(folder)


def test_a_tensor_is_read_as_asked_and_progress_is_told(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, a=torch.arange(6.0).view(2, 3), b=torch.ones(4))
    told: list[int] = []
    with checkpoint.reading(told.append):
        tensor = checkpoint.load_tensor("a", (2, 3), torch.bfloat16)
    assert tensor.dtype == torch.bfloat16 and tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (told, checkpoint.num_bytes) == ([24], 40)


def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, a=torch.zeros(2, 3), ids=torch.zeros(2, dtype=torch.int64))
    with checkpoint.reading(lambda _: None):
        with pytest.raises(ConfigError, match="tensor b is missing"):
            checkpoint.load_tensor("b", (1,), torch.float32)
        with pytest.raises(ConfigError, match=r"tensor a has shape \[2, 3\], but config.json implies \[3, 2\]"):
            checkpoint.load_tensor("a", (3, 2), torch.float32)
        with pytest.raises(ConfigError, match="tensor ids is stored as I64"):
            checkpoint.load_tensor("ids", (2,), torch.float32)


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"two\.safetensors: tensor a is also in one\.safetensors"):
        ModelCheckpoint(tmp_path)


def test_pickled_weights_are_refused_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: pickles run code"):
        weight_files(tmp_path)


def test_an_empty_folder_and_a_torn_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        weight_files(tmp_path)
    save(tmp_path, a=torch.zeros(100))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for torn in (whole[:-10], whole[:20], b"", b"\xff" * 40):
        (tmp_path / "model.safetensors").write_bytes(torn)
        with pytest.raises(ConfigError, match="is not a "):
            ModelCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [({"a": "gone.safetensors"}, "1 of 1 shards are missing, first gone"), ({"a": "../x"}, "not a plain file name")],
)
def test_a_broken_index_is_refused(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=message):
        weight_files(tmp_path)


def test_a_sharded_checkpoint_gives_the_same_logits_and_fingerprint(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "one")
    tokens = list(range(3, 23))
    single = load_model(folder, dtype="float32", device="cpu")
    whole = all_logits(tiny_runner(single), chunk(tokens, 0, 20, [1, 2]))[0]
    from_one = ModelCheckpoint(folder)
    names = sorted(from_one.entries)
    shards = [f"model-0000{part + 1}-of-00003.safetensors" for part in range(3)]
    with from_one.reading(lambda _: None):
        for part, shard in enumerate(shards):
            chosen = {n: from_one.load_tensor(n, from_one.entries[n].shape, torch.float32) for n in names[part::3]}
            save_file(chosen, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shards[at % 3] for at, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_model(folder, dtype="float32", device="cpu")
    assert torch.equal(all_logits(tiny_runner(sharded), chunk(tokens, 0, 20, [1, 2]))[0], whole)
    assert sharded.fingerprint == single.fingerprint


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    save(tmp_path, a=torch.zeros(2))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("taken", [True, False])
def test_one_flipped_bit_anywhere_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1000)
    kept = {"a": torch.arange(1500, dtype=torch.float32), "b": torch.ones(7, dtype=torch.bfloat16), "c": torch.ones(())}
    file = tmp_path / "model.safetensors"
    entries = save(tmp_path, **kept).entries
    content = bytearray(file.read_bytes())

    def fingerprint() -> bytes:
        file.write_bytes(content)
        checkpoint = ModelCheckpoint(tmp_path)
        if taken:
            with checkpoint.reading(lambda _: None):
                for name, tensor in kept.items():
                    checkpoint.load_tensor(name, tuple(tensor.shape), torch.float32)
        return checkpoint.fingerprint()

    found = {fingerprint()}
    for entry in entries.values():
        places = {entry.begin, (entry.begin + entry.end) // 2, entry.end - 1, min(entry.begin + 999, entry.end - 1)}
        for place in places:
            content[place] ^= 16
            found.add(fingerprint())
            content[place] ^= 16
    assert len(found) == 1 + 4 + 3 + 3
    assert fingerprint() in found


def test_tensors_that_were_taken_and_others_have_the_same_fingerprint(tmp_path: Path) -> None:
    kept = {"a": torch.randn(3, 50), "b": torch.randn(7).to(torch.bfloat16), "none": torch.zeros(0, 4)}
    untouched = save(tmp_path, **kept, ids=torch.arange(3)).fingerprint(b"x")
    checkpoint = ModelCheckpoint(tmp_path)
    with checkpoint.reading(lambda _: None):
        for name, tensor in [*kept.items(), ("a", kept["a"])]:
            checkpoint.load_tensor(name, tuple(tensor.shape), torch.bfloat16)
    assert checkpoint.fingerprint(b"x") == untouched != checkpoint.fingerprint(b"y")


def test_the_same_bytes_under_another_name_shape_or_dtype_are_another_fingerprint(tmp_path: Path) -> None:
    a, b = torch.arange(6.0), torch.ones(6)
    variants = [
        dict(a=a, b=b),
        dict(a=b, b=a),
        dict(a=a, c=b),
        dict(a=a.view(2, 3), b=b),
        dict(a=a.view(torch.int32), b=b),
        dict(a=a),
    ]
    assert len({save(tmp_path, **variant).fingerprint() for variant in variants}) == len(variants)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, a=torch.zeros(100))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="ended while it was read"):
        checkpoint.fingerprint()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors: No such file"):
        checkpoint.fingerprint()


@pytest.mark.parametrize(("family", "dependent"), [("llama", False), ("gpt_neox", True)])
def test_the_fingerprint_follows_the_releases_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dependent: bool
) -> None:
    folder = make_checkpoint(family, tmp_path)

    def fingerprint() -> bytes:
        return load_model(folder, dtype="float32", device="cpu").fingerprint

    first = fingerprint()
    monkeypatch.setattr(loader, "__version__", "9.9.9")
    second = fingerprint()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    third = fingerprint()
    monkeypatch.setattr(loader.transformers, "__version__", "9.9.9")
    assert len({first, second, third}) == 3
    assert (fingerprint() != third) is dependent


def test_the_fingerprint_follows_the_attention_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)
    first = load_model(folder, dtype="float32", device="cpu", attention_backend="reference").fingerprint
    monkeypatch.setitem(BACKENDS, "other", BACKENDS["reference"])
    assert load_model(folder, dtype="float32", device="cpu", attention_backend="reference").fingerprint == first
    assert load_model(folder, dtype="float32", device="cpu", attention_backend="other").fingerprint != first


def test_the_fingerprint_follows_weights_config_and_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "a")
    first = load_model(folder, dtype="float32", device="cpu").fingerprint
    assert load_model(folder, dtype="float32", device="cpu").fingerprint == first
    assert load_model(folder, dtype="bfloat16", device="cpu").fingerprint != first
    other = make_checkpoint("llama", tmp_path / "b", seed=1)
    assert load_model(other, dtype="float32", device="cpu").fingerprint != first
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 9999.0
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder, dtype="float32", device="cpu").fingerprint != first


def test_a_fast_load_without_a_terminal_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingBar(100, "Loading x") as bar:
        bar.advance(100)
    assert capsys.readouterr() == ("", "")


def test_a_slow_load_without_a_terminal_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SLOW_SECONDS", 0.0)
    with LoadingBar(100, "Loading x") as bar:
        bar.advance(25)
    assert capsys.readouterr() == ("", "Loading x: 25% of 0.00 GiB\n")
