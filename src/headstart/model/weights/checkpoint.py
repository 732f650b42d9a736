"""Checkpoint: the tensors of a model, by name: of the safetensors of a folder, or of a GGUF file.

Never reads pickles. Tensors are copied out of the files one by one, so peak memory is the model plus one tensor.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Self

import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import has_gguf_suffix
from headstart.model.weights.gguf.block_formats import PackedTensor
from headstart.model.weights.gguf.gguf_tensors import GGUFTensors
from headstart.model.weights.safetensors_files import SafetensorsFiles
from headstart.model.weights.tensor_files import TensorEntry, TensorFiles

CHUNK_BYTES = 1 << 20  # read and hashed at a time: small enough to stay in the CPU cache between the two
SLOW_SECONDS = 2.0  # a load that takes longer shows its progress even without a terminal


class ModelCheckpoint:
    """The tensors of one model, by their names in a model folder; call `take` within `with checkpoint.reading(...)`."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of a model folder, or of a GGUF file. Raises ConfigError."""
        self.folder = folder
        self._files: TensorFiles = GGUFTensors(folder) if has_gguf_suffix(folder) else SafetensorsFiles(folder)
        self.entries: dict[str, TensorEntry] = self._files.entries
        self._progress: Callable[[int], None] | None = None
        self._digests: dict[str, bytes] = {}  # XXH3-128 of the tensors read so far

    @contextmanager
    def reading(self, progress: Callable[[int], None]) -> Generator[None]:
        """Keep files open within the context; call `progress` with the bytes of every tensor taken."""
        self._progress = progress
        try:
            yield
        finally:
            self._files.close()
            self._progress = None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors as stored."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    @property
    def stores_transformed_weights(self) -> bool:
        """See TensorFiles."""
        return self._files.stores_transformed_weights

    def load_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of tensor `name` as `dtype` on the CPU. Raises ConfigError if it is missing or misshaped."""
        entry = self._entry(name, shape)
        tensor, stored = self._files.read(name, dtype)
        self._account(name, entry, stored)
        return tensor

    def load_packed_tensor(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        """Return tensor `name` in the blocks that its file stores, or None if it is stored as plain numbers.

        Raises ConfigError if it is missing or misshaped.
        """
        entry = self._entry(name, shape)
        found = self._files.read_packed(name)
        if found is None:
            return None
        packed, stored = found
        self._account(name, entry, stored)
        return packed

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise ConfigError(
                f"{self.folder}: tensor {self._files.stored_name(name)} is missing from {self._files.noun}"
            )
        if entry.shape != shape:
            raise ConfigError(
                f"{self.folder}: tensor {self._files.stored_name(name)} has shape {list(entry.shape)}, but "
                f"{self._files.config_noun} implies {list(shape)}"
            )
        return entry

    def _account(self, name: str, entry: TensorEntry, stored: memoryview) -> None:
        """Digest the stored bytes of a tensor, and report progress."""
        if name not in self._digests:
            self._digests[name] = xxhash.xxh3_128_digest(stored)
        if self._progress is not None:
            self._progress(entry.end - entry.begin)

    def are_tensors_equal(self, name: str, other: str) -> bool:
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


def _file_digest(stream: FileIO, entry: TensorEntry) -> bytes:
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
