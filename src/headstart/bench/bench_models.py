"""Finds the model a benchmark asks for; a shape's name means random weights, made on first use and kept in a cache."""

import os
import tempfile
from pathlib import Path

from headstart.bench.progress_bar import QUIET, Bar
from headstart.core.errors import ConfigError
from headstart.model.weights.init_model import init_model
from headstart.model.weights.shapes import SHAPES

STD = 0.2
"""Standard deviation of the weights: so large that every token changes what follows, and a wrong block shows."""


def find_model(name: str, cache: Path, seed: int = 0, bar: Bar = QUIET) -> str:
    """What `EngineOptions.model` takes: a folder or hub id as it is, or the folder of a model made from a shape's name.

    A folder in the way of a shape's name wins. Raises ConfigError if the cache cannot be written.
    """
    if name not in SHAPES or Path(name).is_dir():
        return name
    folder = cache / f"{name}-std{STD}-seed{seed}"
    if folder.is_dir():
        return str(folder)
    bar.stage(f"making {name} with random weights", None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as scratch:
            made = init_model(name, Path(scratch) / "model", std=STD, seed=seed, progress=False)
            _move(made, folder)
    except OSError as error:
        raise ConfigError(f"cannot write models into {cache}: {error.strerror}; set XDG_CACHE_HOME") from error
    return str(folder)


def _move(made: Path, folder: Path) -> None:
    """Puts a whole model in place at once; another process that was faster has made the same one."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
