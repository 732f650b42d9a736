"""SafetensorsFiles: the safetensors of a model folder, single or sharded. Never reads pickles."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import LFS_POINTER, refuse_lfs_pointer
from headstart.model.weights.gguf.block_formats import PackedTensor
from headstart.model.weights.json_file import one_line_error, read_json, shorten_text
from headstart.model.weights.tensor_files import TensorEntry

MAX_HEADER_BYTES = 32 << 20  # room for 250,000 tensors in one file; the format itself allows 100 MB


class SafetensorsFiles:
    """The tensors of one folder. See TensorFiles."""

    noun, config_noun, stores_transformed_weights = "the safetensors files", "config.json", False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        self._open: dict[Path, Any] = {}  # safetensors exports no type for its handles
        for file in weight_files(folder):
            for name, entry in read_header(file).items():
                if name in self.entries:
                    raise ConfigError(
                        f"{file}: tensor {shorten_text(name, 200)} is also in {self.entries[name].file.name}"
                    )
                self.entries[name] = entry

    def stored_name(self, name: str) -> str:
        """See TensorFiles."""
        return name

    def read(self, name: str, dtype: torch.dtype) -> tuple[Tensor, memoryview]:
        """See TensorFiles. Raises ConfigError for a tensor that is not floating point."""
        entry = self.entries[name]
        if not entry.dtype.startswith(("F16", "F32", "F64", "BF16")):
            raise ConfigError(f"{self.folder}: tensor {name} is stored as {entry.dtype}; only floating point is read")
        handle = self._open.get(entry.file)
        if handle is None:
            handle = self._open[entry.file] = safe_open(entry.file, framework="pt")
        stored: Tensor = handle.get_tensor(name)
        return stored.to(dtype, copy=True), stored.reshape(-1).view(torch.uint8).numpy().data

    def read_packed(self, name: str) -> tuple[PackedTensor, memoryview] | None:
        """See TensorFiles: None, since safetensors hold plain numbers."""
        return None

    def close(self) -> None:
        """See TensorFiles."""
        self._open.clear()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`: one, or by its index, or all. Raises ConfigError if there are none.

    A single file has priority over an index, as in Transformers: the fingerprint must cover the files it loads.
    """
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(f"{index}: weight_map is not an object of file names")
        outside = [name for name in names.values() if not re.fullmatch(r"[\w.\-]+", name)]
        if outside:
            raise ConfigError(f"{index}: {outside[0]!r} is not a plain file name")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ConfigError(f"{folder}: {len(missing)} of {len(files)} shards are missing, first {missing[0]}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder} holds its weights as {pickles[0]}: pickles run code when loaded and are never read; "
            f"convert them to safetensors (model.save_pretrained in Transformers does)"
        )
    raise ConfigError(f"{folder} holds no *.safetensors")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file. Raises ConfigError for a header that is too long or invalid."""
    if not file.is_file():
        raise ConfigError(f"{file} is not a regular file")
    try:
        with file.open("rb") as stream:
            refuse_lfs_pointer(file, stream.read(len(LFS_POINTER)))
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ConfigError(f"{file} is not a safetensors file: its header would be {length} bytes long")
            with safe_open(file, framework="pt"):  # checks dtypes, shapes and offsets before anything is parsed here
                pass
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        return {
            name: TensorEntry(file, item["dtype"], tuple(item["shape"]), *(start + at for at in item["data_offsets"]))
            for name, item in header.items()
        }
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
        SafetensorError,
    ) as error:
        raise ConfigError(
            f"{file} is not a complete safetensors file: {one_line_error(error)}; download it again"
        ) from None
