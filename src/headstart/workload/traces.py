"""Recorded traffic, read from files: lengths and shared prefixes as block ids (Mooncake), or the texts themselves.

The files are the user's; none come with the package. Times are seconds after the first request of a file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from headstart.core.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per id

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """One request without its text: equal ids in two requests stand for equal prefixes up to that block."""

    at: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]  # of MOONCAKE_BLOCK tokens; the last one may be partial


@dataclass(frozen=True, slots=True)
class TracedText:
    """One call of an agent: what it sent, what came back."""

    at: float
    prompt: str
    output: str
    session: str


class _BlocksRow(msgspec.Struct):
    """A line of a Mooncake trace; milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class _TextRow(msgspec.Struct):
    """A line of an agent trace; microseconds."""

    timestamp: float
    input: str
    output: str
    session_id: str


def read_mooncake(path: Path) -> list[TracedBlocks]:
    """The requests of a Mooncake trace in the order of their time. Raises ConfigError."""
    rows = sorted(_rows(path, _BlocksRow), key=lambda row: row.timestamp)
    start = rows[0].timestamp if rows else 0.0
    return [
        TracedBlocks((row.timestamp - start) / 1e3, row.input_length, row.output_length, row.hash_ids) for row in rows
    ]


def read_agents(path: Path) -> list[TracedText]:
    """The calls of an LMCache agent trace in the order of their time. Raises ConfigError."""
    rows = sorted(_rows(path, _TextRow), key=lambda row: row.timestamp)
    start = rows[0].timestamp if rows else 0.0
    return [TracedText((row.timestamp - start) / 1e6, row.input, row.output, row.session_id) for row in rows]


def _rows(path: Path, kind: type[Row]) -> list[Row]:
    decoder, rows = msgspec.json.Decoder(kind), list[Row]()
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                rows.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}:{number}: {error}; this is another kind of trace") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    return rows
