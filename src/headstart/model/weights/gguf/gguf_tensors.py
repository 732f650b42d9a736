"""GGUFTensors: the tensors of a GGUF file under their names in a model folder, with the rows in that order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import read_gguf
from headstart.model.weights.gguf.block_formats import FORMATS, PackedTensor, dequantise, row_bytes
from headstart.model.weights.gguf.gguf_config import gguf_config
from headstart.model.weights.gguf.gguf_hybrids import delta_net_column_order, delta_net_row_order
from headstart.model.weights.gguf.gguf_names import hf_tensor_name, stored_row_order
from headstart.model.weights.tensor_files import TensorEntry


class GGUFTensors:
    """The weights of one GGUF file, or of a split one. See TensorFiles."""

    noun, config_noun, stores_transformed_weights = "the file", "its metadata", True

    def __init__(self, path: Path) -> None:
        """Read the header. Raises ConfigError for a file that cannot be served."""
        file = read_gguf(path)
        self.path = path
        self.config: dict[str, Any] = gguf_config(file)
        self._architecture: str = file.metadata["general.architecture"]
        self._stored_names: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        for stored, info in file.tensors.items():
            name = hf_tensor_name(stored, self._architecture)
            if name is not None:  # else a setting, which the config holds
                self._stored_names[name] = stored
                is_convolution = name.endswith((".conv1d.weight", ".conv.weight"))
                shape = (info.shape[0], 1, *info.shape[1:]) if is_convolution else info.shape
                self.entries[name] = TensorEntry(info.file, info.kind, shape, info.begin, info.end)

    def stored_name(self, name: str) -> str:
        """See TensorFiles."""
        return self._stored_names.get(name, name)

    def read(self, name: str, dtype: torch.dtype) -> tuple[Tensor, memoryview]:
        """See TensorFiles."""
        packed, stored = self._read(name)
        tensor, order = dequantise(packed, dtype), self._columns(name)
        if order is not None:
            tensor = tensor.unflatten(1, (len(order), -1))[:, order].flatten(1)
        return tensor, stored

    def read_packed(self, name: str) -> tuple[PackedTensor, memoryview] | None:
        """See TensorFiles."""
        entry, order = self.entries[name], self._columns(name)
        block_size = FORMATS[entry.dtype].block_size
        if block_size == 1 or (order is not None and entry.shape[1] % (len(order) * block_size)):
            return None
        packed, stored = self._read(name)
        if order is not None:
            heads = packed.data.reshape(len(packed.data), len(order), -1)[:, order]
            packed = replace(packed, data=heads.reshape(packed.data.shape))
        return packed, stored

    def close(self) -> None:
        """See TensorFiles: nothing stays open."""

    def _read(self, name: str) -> tuple[PackedTensor, memoryview]:
        """Return a tensor with its rows in a model folder's order, and its bytes as stored."""
        entry = self.entries[name]
        num_bytes = entry.end - entry.begin
        try:
            stored = np.fromfile(entry.file, np.uint8, num_bytes, offset=entry.begin)
        except OSError as error:
            raise ConfigError(f"cannot read {entry.file}: {error.strerror}") from error
        if len(stored) != num_bytes:
            raise ConfigError(f"{entry.file} ended while it was read: it is being replaced, or was not copied whole")
        rows = stored.reshape(-1, row_bytes(entry.dtype, entry.shape[-1]))
        order = self._row_order(name, entry)
        if order is not None and len(entry.shape) > 1:
            rows = rows[order]
        elif order is not None:  # a bias
            if FORMATS[entry.dtype].block_size > 1:
                raise ConfigError(f"{entry.file}: tensor {self.stored_name(name)} is a vector in {entry.dtype}")
            rows = rows.reshape(len(order), -1)[order].reshape(1, -1)
        return PackedTensor(name, entry.dtype, entry.shape, rows), stored.data

    def _columns(self, name: str) -> np.ndarray | None:
        return delta_net_column_order(name, self.config) if self._architecture == "qwen35" else None

    def _row_order(self, name: str, entry: TensorEntry) -> np.ndarray | None:
        if self._architecture == "qwen35":
            return delta_net_row_order(name, self.config)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        return stored_row_order(name, self._architecture, heads, kv_heads, entry.shape[0])
