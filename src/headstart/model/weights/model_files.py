"""The settings of a model, from the `config.json` of its folder or from the metadata of its GGUF file; no torch."""

from pathlib import Path
from typing import Any

from headstart.gguf.gguf_reader import has_gguf_suffix, read_gguf
from headstart.model.weights.gguf.gguf_config import gguf_config
from headstart.model.weights.json_file import read_json


def read_config(model: Path) -> dict[str, Any]:
    """Return the settings of a model folder or GGUF file in the form of a `config.json`. Raises ConfigError."""
    return gguf_config(read_gguf(model)) if has_gguf_suffix(model) else read_json(model / "config.json")
