from pathlib import Path

import pytest

from headstart.bench.cli.cli_run import resolve_or_create_bench_model
from headstart.core.errors import ConfigError


def test_a_shapes_name_makes_a_model_once(tmp_path: Path) -> None:
    folder = Path(resolve_or_create_bench_model("tiny", tmp_path))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (folder / "config.json").is_file() and folder.parent == tmp_path
    assert resolve_or_create_bench_model("tiny", tmp_path) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_another_seed_makes_another_model(tmp_path: Path) -> None:
    one, two = (Path(resolve_or_create_bench_model("tiny", tmp_path, seed)) / "model.safetensors" for seed in (1, 2))
    assert one.read_bytes() != two.read_bytes()


@pytest.mark.parametrize("name", ["", "Qwen/Qwen3-0.6B", "/some/folder"])
def test_everything_else_is_left_to_the_engine(name: str, tmp_path: Path) -> None:
    assert resolve_or_create_bench_model(name, tmp_path) == name and not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write models"):
        resolve_or_create_bench_model("tiny", tmp_path / "file" / "cache")
