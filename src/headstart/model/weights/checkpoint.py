"""Checkpoint: the safetensors of a model folder, single or sharded, read by name with a check of the shape.

Never reads pickles. Tensors are copied out of a memory map one by one, so peak memory is the model plus one tensor.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.model.weights.json_file import one_line, read_json

MAX_HEADER_BYTES = 32 << 20  # room for 250,000 tensors in one file; the format itself allows 100 MB
CHUNK_BYTES = 1 << 20  # read and hashed at a time: small enough to stay in the CPU cache between the two
SLOW_SECONDS = 2.0  # a load that takes longer shows its progress even without a terminal


class Entry(NamedTuple):
    """The location of one tensor: file, safetensors dtype, shape, and the bytes [begin, end) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors of one folder, by name; call `take` within `with checkpoint.reading(...)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._progress: Callable[[int], None] | None = None
        self._digests: dict[str, bytes] = {}  # XXH3-128 of the tensors read so far
        self._open: dict[Path, Any] = {}  # safetensors exports no type for its handles
        for file in weight_files(folder):
            self.entries.update(read_header(file))

    @contextmanager
    def reading(self, progress: Callable[[int], None]) -> Generator[None]:
        """Keep files open within the context; call `progress` with the bytes of every tensor taken."""
        self._progress = progress
        try:
            yield
        finally:
            self._open.clear()
            self._progress = None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors as stored."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of tensor `name` as `dtype` on the CPU. Raises ConfigError if it is missing or misshaped."""
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError(f"{self.folder}: tensor {name} is missing from the safetensors files")
        if entry.shape != shape:
            raise ConfigError(
                f"{self.folder}: tensor {name} has shape {list(entry.shape)}, but config.json implies {list(shape)}"
            )
        if not entry.dtype.startswith(("F16", "F32", "F64", "BF16")):
            raise ConfigError(f"{self.folder}: tensor {name} is stored as {entry.dtype}; only floating point is read")
        handle = self._open.get(entry.file)
        if handle is None:
            handle = self._open[entry.file] = safe_open(entry.file, framework="pt")
        stored: Tensor = handle.get_tensor(name)
        if name not in self._digests:
            self._digests[name] = xxhash.xxh3_128_digest(stored.reshape(-1).view(torch.uint8).numpy().data)
        tensor = stored.to(dtype, copy=True)
        if self._progress is not None:
            self._progress(entry.end - entry.begin)
        return tensor

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same dtype, shape and bytes. Each is read from the disk at most once."""
        first, second = self.entries[name], self.entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        self._digest_the_rest([name, other])
        return self._digests[name] == self._digests[other]

    def fingerprint(self, *extra: bytes) -> bytes:
        """Return the SHA-256 of `extra` and of the name, dtype, shape and XXH3-128 of every tensor.

        Covers every byte of every tensor. Independent of file names, sharding and times. Tensors that `take` has read
        are not read again; the others are read now, with progress on stderr. 128 bits detect any accidental or edited
        difference, but do not protect against deliberately forged weights. Raises ConfigError if a file cannot be read.
        """
        self._digest_the_rest()
        digest = hashlib.sha256()
        for part in extra:
            digest.update(len(part).to_bytes(8, "little") + part)
        for name, entry in sorted(self.entries.items()):
            header = json.dumps([name, entry.dtype, entry.shape]).encode()
            digest.update(len(header).to_bytes(8, "little") + header + self._digests[name])
        return digest.digest()

    def _digest_the_rest(self, names: Iterable[str] | None = None) -> None:
        """Read and hash those tensors of `names`, or of all, that have no digest yet."""
        wanted = self.entries if names is None else names
        rest = {name: self.entries[name] for name in wanted if name not in self._digests}
        num_bytes = sum(entry.end - entry.begin for entry in rest.values())
        with ExitStack() as stack:
            bar = stack.enter_context(LoadingBar(num_bytes, f"Identifying {self.folder.name}"))
            streams: dict[Path, FileIO] = {}
            for name, entry in rest.items():
                try:
                    if entry.file not in streams:
                        streams[entry.file] = stack.enter_context(FileIO(entry.file))
                    self._digests[name] = _file_digest(streams[entry.file], entry)
                except OSError as error:
                    raise ConfigError(f"cannot read {entry.file}: {error.strerror}") from error
                bar.advance(entry.end - entry.begin)


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


class LoadingBar:
    """A progress bar on stderr, shown at once on a terminal, otherwise as lines if loading takes long."""

    def __init__(self, num_bytes: int, label: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(label, total=num_bytes)
        self._console, self._label, self._num_bytes = console, label, num_bytes
        self._done, self._next_line = 0, time.monotonic() + SLOW_SECONDS

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes loaded so far."""
        self._done += num_bytes
        self._bar.advance(self._task, num_bytes)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            share = self._done / max(self._num_bytes, 1)
            self._console.print(f"{self._label}: {share:.0%} of {self._num_bytes / 2**30:.2f} GiB", highlight=False)
            self._next_line = time.monotonic() + 5 * SLOW_SECONDS


def _file_digest(stream: FileIO, entry: Entry) -> bytes:
    """Return the XXH3-128 of one tensor, as in `take`. Raises OSError; ConfigError if the file has become shorter."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK_BYTES, entry.end - entry.begin)))
    stream.seek(entry.begin)
    left = entry.end - entry.begin
    while left:
        read = stream.readinto(chunk[:left])
        if not read:
            raise ConfigError(f"{entry.file} ended while it was read: it is being replaced, or was not copied whole")
        digest.update(chunk[:read])
        left -= read
    return digest.digest()


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of one safetensors file. Raises ConfigError for a header that is too long or invalid."""
    if not file.is_file():
        raise ConfigError(f"{file} is not a regular file")
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ConfigError(f"{file} is not a safetensors file: its header would be {length} bytes long")
            with safe_open(file, framework="pt"):  # checks dtypes, shapes and offsets before anything is parsed here
                pass
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        return {
            name: Entry(file, item["dtype"], tuple(item["shape"]), *(start + at for at in item["data_offsets"]))
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
        raise ConfigError(f"{file} is not a complete safetensors file: {one_line(error)}; download it again") from None
