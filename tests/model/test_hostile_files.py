"""Hostile files of models: each is refused with one line, at once and before memory is taken."""

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.tiny import make_checkpoint
from server.harness import spawn

from headstart.core.errors import ConfigError
from headstart.model.setup.sizing import loaded_weight_bytes
from headstart.model.weights.hub import resolve_model
from headstart.model.weights.json_file import MAX_JSON_BYTES
from headstart.model.weights.model_loader import load_model

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 900 + "]" * 900  # within what Python's parser takes, beyond what copies and printers take
MEMORY = 4 << 30  # bytes of address space beyond what the process holds already
TIMEOUT = 60  # seconds: against hanging only

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of the native path, one that Transformers runs, and one with experts."""
    root = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(name, root / name) for name in ("llama", "qwen2", "gemma2", "qwen3_moe")}


@pytest.fixture
def model(models: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(models[name], tmp_path / name))

    return copy


def refusal(folder: Path) -> str:
    """The one line with which `folder` is refused, as `headstart serve` reads it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, limit[1]))
    try:
        with pytest.raises(ConfigError) as caught:
            loaded_weight_bytes(folder)
            load_model(folder, dtype="float32", device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 1000, message
    return message


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("value", [DEEP, NESTED, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000, "{", "\x00", "[]"])
def test_json_that_is_nested_too_deeply_or_broken_is_refused(
    file: str, value: str, model: Callable[[str], Path]
) -> None:
    folder = model("llama")
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / file).write_text(value if value in ("{", "\x00", "[]") else f'{{"architectures": {value}}}')
    assert file in refusal(folder)


def test_a_json_file_of_absurd_size_is_refused_unread(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    with (folder / "config.json").open("ab") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    assert "config.json is" in refusal(folder)


def test_files_that_are_no_files_are_refused_without_waiting(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert name in refusal(folder)


SIZES = (10**9, 10**15, 10**30, 10**400)


@pytest.mark.parametrize("size", SIZES, ids=["1e9", "1e15", "1e30", "1e400"])
@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_attention_heads"],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_absurd_sizes_in_config_json_are_refused(name: str, key: str, size: int, model: Callable[[str], Path]) -> None:
    folder = model(name)
    edit(folder, **{key: size, **({"num_key_value_heads": size} if key == "num_attention_heads" else {})})
    refusal(folder)


@pytest.mark.parametrize("size", [10**6, *SIZES], ids=["1e6", "1e9", "1e15", "1e30", "1e400"])
@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"])
def test_absurd_numbers_of_experts_are_refused(key: str, size: int, model: Callable[[str], Path]) -> None:
    folder = model("qwen3_moe")
    edit(folder, **{key: size, "layer_types": None})
    refusal(folder)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("positions", [10**12, 10**400, -1, 0, 1.5, True, "512"])
def test_absurd_context_lengths_are_refused(name: str, positions: object, model: Callable[[str], Path]) -> None:
    folder = model(name)
    edit(folder, max_position_embeddings=positions)
    refusal(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("llama", value) for value in ("1e400", "-1e400", "NaN", "9" * 400, '"1e-6"', "[1]", "-1.0", "true")]
    + [("gemma2", value) for value in ("NaN", "9" * 400, '"1e-6"', "[1]")],
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_numbers_that_are_no_numbers_are_refused(name: str, key: str, value: str, model: Callable[[str], Path]) -> None:
    folder = model(name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    text = json.dumps({**config, key: "HERE"}).replace('"HERE"', value)
    (folder / "config.json").write_text(text)
    refusal(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": float("inf")},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 1e300},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": [1]},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "longrope", "short_factor": "a", "long_factor": {}},
        {"rope_type": ["default"]},
        {"rope_type": "default", "rope_theta": None},
        {"rope_type": "default", "rope_theta": 0},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1},
        [1],
        "yarn",
    ],
)
def test_rotary_settings_that_are_nonsense_are_refused(rope: object, model: Callable[[str], Path]) -> None:
    folder = model("llama")
    edit(folder, rope_parameters=rope)
    refusal(folder)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
]
ODD = [None, "x", "2.0", [], {}, [None], {"a": 1}, True, 0, -1, 1.5, float("nan")]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rotary_settings_that_are_incomplete_or_odd_are_read_or_refused(
    name: str, rope: dict[str, Any], model: Callable[[str], Path]
) -> None:
    folder = model(name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    keys = {key for one in ROPES for key in one} | {"rope_theta", "partial_rotary_factor", "attention_factor"}
    changed = [{key: value for key, value in rope.items() if key != without} for without in rope]
    changed += [{**rope, key: value} for key in sorted(keys) for value in ODD]
    changed_names: list[Any] = [{"model_type": value} for value in ODD[1:]]
    for number, settings in enumerate([*({"rope_parameters": one} for one in changed), *changed_names]):
        if name == "llama" or number % 5 == 0 or "original_max_position_embeddings" in str(settings)[-50:]:
            (folder / "config.json").write_text(json.dumps({**config, **settings}))
            try:
                load_model(folder, dtype="float32", device="cpu")
            except ConfigError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_git_lfs_pointer_is_named_with_the_remedy(file: str, model: Callable[[str], Path]) -> None:
    folder = model("llama")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    (folder / file).write_text(pointer)
    with pytest.raises(ConfigError, match=rf"{file} is a Git LFS pointer, not the file itself: run `git lfs pull`"):
        resolve_model(str(folder), offline=True)
    if file == "model.safetensors":
        assert "is a Git LFS pointer" in refusal(folder)
        (folder / "model.gguf").write_text(pointer)
        with pytest.raises(ConfigError, match=r"model\.gguf is a Git LFS pointer"):
            load_model(folder / "model.gguf")


def test_a_folder_with_a_gguf_only_is_refused_with_what_to_name(tmp_path: Path) -> None:
    for name in ("b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"which is named itself: .*a-00001-of-00002\.gguf or another of its 2 GGUF"):
        resolve_model(str(tmp_path), offline=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"named itself: .*a-00001"):
        resolve_model(str(tmp_path), offline=True)


def test_a_gguf_that_is_not_there_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file 'models/none\.gguf'; a GGUF is named by its path"):
        resolve_model("models/none.gguf", offline=True, download_dir=str(tmp_path))


@pytest.mark.parametrize(
    "architecture",
    ["Qwen2ForSequenceClassification", "LlamaForTokenClassification", "Qwen2ForRewardModel", "LlamaModel"],
)
def test_a_classifier_with_an_output_head_is_no_language_model(architecture: str, model: Callable[[str], Path]) -> None:
    folder = model("qwen2" if "Qwen2" in architecture else "llama")
    edit(folder, architectures=[architecture])
    assert f"{architecture} is not supported: it is no language model but a classifier" in refusal(folder)


def header(folder: Path, text: bytes, data: int = 64) -> None:
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + data)


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "entry",
    [
        tensor([10**15], 0, 64),
        tensor([2**62, 2**62], 0, 64),
        tensor([16], 0, 10**15),
        tensor([16], -64, 64),
        tensor([-16], 0, 64),
        tensor([16], 64, 0),
        tensor([16], 0, 64, "X99"),
        tensor([16], 8, 72),
        {"dtype": "F32", "shape": "16", "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16]},
        [],
        None,
    ],
)
def test_safetensors_headers_that_lie_are_refused(entry: object, model: Callable[[str], Path]) -> None:
    folder = model("llama")
    header(folder, json.dumps({"model.embed_tokens.weight": entry}).encode())
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("text", [DEEP, f'{{"a": {DEEP}}}', f'{{"__metadata__": {NESTED}}}', f'{{"a": {NESTED}}}', "1"])
def test_safetensors_headers_that_are_nested_too_deeply_are_refused(text: str, model: Callable[[str], Path]) -> None:
    folder = model("llama")
    header(folder, text.encode())
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 99_000_000, 0])
def test_lengths_of_safetensors_headers_that_lie_are_refused(length: int, model: Callable[[str], Path]) -> None:
    folder = model("llama")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(length.to_bytes(8, "little") + b"{}")
        stream.truncate(100_000_000)
    assert "model.safetensors" in refusal(folder)


def test_a_sparse_file_larger_than_the_memory_is_refused_before_it_is_read(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    rows = 1 << 34
    header(folder, json.dumps({"model.embed_tokens.weight": tensor([rows, 64], 0, rows * 256)}).encode(), rows * 256)
    edit(folder, vocab_size=rows)
    refusal(folder)


@pytest.mark.parametrize(
    "model_id",
    [
        "a" * 5000,
        "o/" + "a" * 5000,
        "/" + "a" * 5000,
        "a/" * 3000,
        "o/a\x00b",
        "o/a\nb",
        "o/a\x1b[2J",
        "o/\u202eb",
        "~nobody-of-that-name/model",
        "\udcff",
    ],
)
def test_ids_that_are_no_ids_are_refused_with_one_short_line(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model_id, offline=True, download_dir=str(tmp_path))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400, message


@pytest.mark.parametrize("case", ["layers", "header", "id"])
def test_serve_ends_with_exit_code_2_and_one_line(case: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model("llama")
    if case == "layers":
        edit(folder, num_hidden_layers=10**9)
    elif case == "header":
        header(folder, DEEP.encode())
    named = "a" * 5000 if case == "id" else str(folder)
    command = [sys.executable, "-m", "headstart", "serve", named, "--offline", "--port", "0"]
    with spawn(command, tmp_path / "log") as server:
        assert server.wait() == 2, server.log
    assert len([line for line in server.log.splitlines() if line.strip()]) == 1, server.log


def test_the_models_themselves_load(models: dict[str, Path]) -> None:
    for folder in models.values():
        assert load_model(folder, dtype="float32", device="cpu").dtype == torch.float32
