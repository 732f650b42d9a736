"""The model of a benchmark. A shape name means random weights, made on first use and cached on disk."""

import os
import tempfile
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.model.weights.init_model import init_model
from headstart.model.weights.shapes import SHAPES

STD = 0.2
"""Standard deviation of the weights: large enough that every token affects the output, so that a wrong KV block shows.
"""


def find_model(name: str, cache: Path, seed: int = 0, bar: Bar = QUIET) -> str:
    """Return a value for `EngineOptions.model`: a folder or hub id unchanged, or the folder made for a shape name.

    An existing folder takes precedence over a shape of the same name. Raises ConfigError if the cache is not writable.
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
    """Move a complete model into place atomically. A concurrent process may already have made the same one."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
