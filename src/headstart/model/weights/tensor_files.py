"""TensorFiles: the files of a checkpoint in one format, safetensors or GGUF. Used by checkpoint.py."""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.model.weights.gguf.block_formats import PackedTensor


class TensorEntry(NamedTuple):
    """The location of one tensor: file, stored type, shape, and the bytes [begin, end) in the file."""

    file: Path
    dtype: str  # of safetensors, or a type of GGUF
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFiles(Protocol):
    """The tensors of a checkpoint by their names in a model folder."""

    entries: dict[str, TensorEntry]
    noun: str  # of the files, for messages
    config_noun: str  # of the settings, for messages
    stores_transformed_weights: bool  # whether Qwen3.5's norms and rates of decay are stored as they are applied

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> tuple[Tensor, memoryview]:
        """Return a copy of a tensor as `dtype` on the CPU, and its stored bytes. Raises ConfigError."""
        ...

    def read_packed(self, name: str) -> tuple[PackedTensor, memoryview] | None:
        """Return a tensor as stored in blocks, rows in a model folder's order, and its stored bytes.

        None for a format without blocks, and for plain numbers. Raises ConfigError.
        """
        ...

    def close(self) -> None:
        """Close the files; `read` opens them again."""
        ...
