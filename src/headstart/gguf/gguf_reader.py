"""Reader of GGUF files: header, metadata and the places of the tensors, whose bytes it does not read.

A file is not trusted: every length is checked against the bytes that are left before anything is read or allocated, and
the tensors must tile the rest of the file, so that a changed type or shape cannot make one read the bytes of another.
Format: `docs/gguf.md` of the ggml repository; versions 2 and 3, little-endian. A model split into several files is read
as one. The `gguf` package reads the same, but checks no bounds and takes seconds for a vocabulary of 150,000 tokens.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headstart.core.errors import ConfigError
from headstart.gguf.tensor_types import SUPPORTED_TYPES, TENSOR_TYPES

MAGIC = b"GGUF"
LFS_POINTER = (
    b"version https://git-lfs"  # how a file begins that a clone without Git LFS has in the place of a large one
)
VERSIONS = (2, 3)
SUFFIX = ".gguf"
MAX_HEADER_BYTES = 256 << 20  # vocabularies of 260,000 tokens with merges take about 12 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ITEMS = 1 << 22  # of an array: the largest published vocabularies have 2^18 tokens
MAX_DIMENSIONS = 4
MAX_PARTS = 1000
MAX_ALIGNMENT = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_OWN_KEYS = {"split.no", "split.count", "split.tensors.count", "general.alignment"}  # of each file of a split model
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class TensorInfo(NamedTuple):
    """The place of one tensor: file, type, shape in torch's order, and the bytes [begin, end) in the file."""

    file: Path
    kind: str  # a name of SUPPORTED_TYPES
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model in GGUF: metadata by key (bool, int, float, str, or a list of these), and tensors by their GGUF name."""

    path: Path  # of a split model: the first file
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def has_gguf_suffix(model: Path) -> bool:
    """Return whether `model` names a GGUF file, by its suffix."""
    return model.suffix.lower() == SUFFIX


def refuse_lfs_pointer(path: Path, begin: bytes) -> None:
    """Raise ConfigError if a file with these first bytes is a Git LFS pointer."""
    if begin.startswith(LFS_POINTER):
        raise ConfigError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`, or download the file")


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file, or all files of a split model from its first. Raises ConfigError, with the file and reason."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise ConfigError(f"{path}: split.count is {count!r}; it must be a number of files up to {MAX_PARTS}")
    if count <= 1:
        return first
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ConfigError(f"{path} is one of {count} files of a model, but is not called NAME-00001-of-{count:05}.gguf")
    parts = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if int(named[2]) != 1:
        raise ConfigError(f"{path} is file {int(named[2])} of {count} of a model: name the first, {parts[0].name}")
    tensors = dict(first.tensors)
    for number, part in enumerate(parts):
        if not part.is_file():
            raise ConfigError(f"{path} is the first of {count} files, but {part.name} is missing beside it")
        held = first if number == 0 else _read_part(part)
        _check_metadata(held, number, first)
        for name, info in held.tensors.items() if number else ():
            if name in tensors:
                raise ConfigError(f"{part}: tensor {_shown(name)} is also in {tensors[name].file.name}")
            tensors[name] = info
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ConfigError(f"{path}: the {count} files hold {len(tensors)} tensors, not {expected} as the first says")
    return GGUFFile(path, first.metadata, tensors)


def _check_metadata(part: GGUFFile, number: int, first: GGUFFile) -> None:
    """Raise ConfigError unless a file of a split model is the one that its name says, with no metadata of its own."""
    if (found := part.metadata.get("split.no")) != number:
        raise ConfigError(f"{part.path}: split.no is {_shown(repr(found))}; by its name it is file {number} from 0")
    for key, value in part.metadata.items():
        if key not in _OWN_KEYS and (key not in first.metadata or first.metadata[key] != value):
            raise ConfigError(
                f"{part.path}: metadata key {_shown(key)} is not that of {first.path.name}, which is read"
            )


def _read_part(path: Path) -> GGUFFile:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file")
        with path.open("rb") as stream:
            begin = stream.read(len(LFS_POINTER))
            refuse_lfs_pointer(path, begin)
            if begin[: len(MAGIC)] != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it begins with {begin[: len(MAGIC)]!r}, not {MAGIC!r}")
            with mmap.mmap(stream.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as header:
                return _Header(path, header, size).read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} cannot be read: {_shown(str(reason), 200)}") from error


class _Header:
    """The bytes of a header, read from front to back."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int) -> None:
        self.path, self.data, self.file_bytes = path, data, file_bytes
        self.at = len(MAGIC)

    def read(self) -> GGUFFile:
        version = self._number(_U32)
        if version not in VERSIONS:
            big = (version & 0xFFFF == 0 and "; it seems to be big-endian") or ""
            raise ConfigError(f"{self.path}: GGUF version {version} is not supported; {VERSIONS} are{big}")
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_keys = self._count(MAX_KEYS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a metadata key")
            if key in metadata:
                raise ConfigError(f"{self.path}: metadata key {_shown(key)} is there twice")
            metadata[key] = self._value(self._number(_U32), key)
        places = [self._place() for _ in range(num_tensors)]
        return GGUFFile(self.path, metadata, self._tensors(places, _alignment(self.path, metadata)))

    def _tensors(self, places: list[tuple[str, int, tuple[int, ...], int]], alignment: int) -> dict[str, TensorInfo]:
        """Return tensors by name, from (name, type, shape, offset behind the header).

        Each begins at the first aligned byte behind the one before it, as llama.cpp requires too.
        """
        start = expected = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, type_id, shape, offset in places:
            shown = f"{self.path}: tensor {_shown(name)}"
            if name in tensors:
                raise ConfigError(f"{shown} is there twice")
            kind = TENSOR_TYPES.get(type_id)
            if kind is None or not kind.block_size:
                named = f"type {type_id}" if kind is None else kind.name
                raise ConfigError(f"{shown} is stored as {named}; supported are {', '.join(SUPPORTED_TYPES)}")
            if shape[-1] % kind.block_size:
                raise ConfigError(f"{shown}: {shape[-1]} weights are no whole number of {kind.name} blocks")
            num_weights = 1
            for extent in shape:
                num_weights *= extent
            begin = start + offset
            if begin != expected:
                raise ConfigError(
                    f"{shown} begins at byte {begin}, not at {expected}, the first multiple of {alignment} behind what "
                    f"is before it: types, shapes and offsets of the tensors do not fit together"
                )
            end = begin + num_weights // kind.block_size * kind.block_bytes
            if end > self.file_bytes:
                raise ConfigError(
                    f"{shown} ends at byte {end}, but the file has {self.file_bytes}: it was not downloaded or copied "
                    f"whole"
                )
            tensors[name] = TensorInfo(self.path, kind.name, shape, begin, end)
            expected = -(-end // alignment) * alignment
        if self.file_bytes > expected:
            raise ConfigError(f"{self.path}: {self.file_bytes - expected} bytes behind byte {expected} are no tensor's")
        return tensors

    def _place(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text("the name of a tensor")
        num_dimensions = self._number(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ConfigError(
                f"{self.path}: tensor {_shown(name)} has {num_dimensions} dimensions; 1 to 4 are possible"
            )
        shape = tuple(reversed([self._number(_U64) for _ in range(num_dimensions)]))  # the file begins with the last
        if 0 in shape:
            raise ConfigError(f"{self.path}: tensor {_shown(name)} has a dimension of 0")
        return name, self._number(_U32), shape, self._number(_U64)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(f"the value of {_shown(key)}")
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind = self._number(_U32)
        length = self._count(MAX_ITEMS, f"items of {_shown(key)}")
        if kind == _STRING:
            where = f"an item of {_shown(key)}"
            return [self._text(where) for _ in range(length)]
        return self._scalars(kind, length, key)

    def _scalars(self, kind: int, length: int, key: str) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise ConfigError(f"{self.path}: metadata key {_shown(key)} has values of type {kind}, which is not known")
        form = struct.Struct(f"<{length}{code}")
        return list(form.unpack_from(self.data, self._take(form.size, f"the value of {_shown(key)}")))

    def _text(self, what: str) -> str:
        length = self._number(_U64)
        at = self._take(length, what)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: {what} is not UTF-8") from None

    def _count(self, limit: int, what: str) -> int:
        count = self._number(_U64)
        if count > limit:
            raise ConfigError(f"{self.path}: {count} {what} are more than the {limit} that are read")
        return count

    def _number(self, form: struct.Struct) -> int:
        return form.unpack_from(self.data, self._take(form.size, "its header"))[0]

    def _take(self, num_bytes: int, what: str) -> int:
        """Return the position of the next `num_bytes` and step behind them. Raises ConfigError at the end."""
        at = self.at
        if num_bytes > len(self.data) - at:
            limit = "is too long" if len(self.data) < self.file_bytes else "goes beyond the end of the file"
            raise ConfigError(f"{self.path}: {what} {limit} ({num_bytes} bytes from byte {at} on): damaged or cut off")
        self.at = at + num_bytes
        return at


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ConfigError(f"{path}: general.alignment is {_shown(repr(alignment))}; it must be a power of two")
    return alignment


def _shown(text: str, max_chars: int = 80) -> str:
    """Return text from a file in printable characters, cut to `max_chars`."""
    cut = text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
