"""Files of traces: lines of text, sessions of coding agents as JSON, one a file or one a line; folders; gzip.

Files are UTF-8, with or without a byte order mark. One session is in memory at a time while sessions are read.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any
from zlib import error as ZlibError

from headstart.core.errors import ConfigError
from headstart.workload.block_paths import overlap_sessions
from headstart.workload.recorded.agent_sessions import SessionReader, is_agent_session
from headstart.workload.recorded.trace_units import RECOGNISED, TraceUnits
from headstart.workload.traces import Trace, parse_trace

MAX_SESSION_CHARS = 512 << 20  # of one session, uncompressed
ENDINGS = (".json", ".json.gz", ".jsonl", ".jsonl.gz")

OnFile = Callable[[int, int], object]
"""Called before each file with its number, from 0, and the number of files."""


def read_trace_path(path: Path, units: TraceUnits = RECOGNISED, on_file: OnFile = lambda index, count: None) -> Trace:
    """Return the trace in a file, or the sessions in all files of a folder. Raises ConfigError with the file's name."""
    paths = [path]
    if path.is_dir():
        paths = sorted(each for each in path.iterdir() if each.name.endswith(ENDINGS))
        if not paths:
            raise ConfigError(f"--trace {path}: no file in this folder ends with {', '.join(ENDINGS)}")
    reader = SessionReader()
    for index, each in enumerate(paths):
        on_file(index, len(paths))
        try:
            with _opened(each) as file:
                found = _sessions_or_lines(file)
                if isinstance(found, _Lines):
                    if len(paths) > 1:
                        raise ConfigError("it holds no session; give files of other kinds one by one")
                    return parse_trace(found.lines, units)
                for session in found:
                    reader.add_session(session)
        except (OSError, EOFError, ZlibError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"--trace {each}: {error}") from error
    return reader.trace()


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of reading: units, a divisor of all lengths, the longest prompt, sessions at a time (0: no limit)."""

    units: TraceUnits = RECOGNISED
    divisor: int = 1
    skip_above: int = 0
    sessions_at_once: int = 0

    def read(self, path: Path, on_file: OnFile = lambda index, count: None) -> Trace:
        """Return the trace at a path. Raises ConfigError."""
        trace = read_trace_path(path, self.units, on_file).up_to_length(self.skip_above)
        if self.sessions_at_once:
            trace = overlap_sessions(trace, self.sessions_at_once)
        return trace.with_divided_lengths(self.divisor)

    def report_facts(self, trace: Trace) -> dict[str, Any]:
        """Return what a report states of a trace that was read so."""
        ids = {"tokens_per_id": trace.block_size} if any(row.hash_ids for row in trace.requests) else {}
        return {
            "kind": trace.kind,
            **ids,
            "divisor": self.divisor,
            "skip_above": self.skip_above,
            "dropped_requests": trace.num_dropped,
            "sessions_at_once": self.sessions_at_once,
        }


class _Lines:
    """The lines of a file that holds no sessions."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines = lines


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _sessions_or_lines(file: IO[str]) -> "Iterator[Mapping[str, Any]] | _Lines":
    """Return the sessions of a file, or its lines if the first object is no session."""
    blank: list[str] = []
    first = file.readline(MAX_SESSION_CHARS)
    while first and not first.strip():
        blank.append(first)
        first = file.readline(MAX_SESSION_CHARS)
    if not first.lstrip().startswith("{"):
        return _Lines(chain(blank, [first], file))
    value = _parsed(first)
    if value is None and not first.rstrip().endswith("}"):  # an object of several lines
        value = _parsed(first + file.read(MAX_SESSION_CHARS))
        if is_agent_session(value):
            return iter([value])
        file.seek(0)
        return _Lines(iter(file))
    if not is_agent_session(value):
        return _Lines(chain(blank, [first], file))
    return _each(value, file)


def _each(first: Mapping[str, Any], file: IO[str]) -> Iterator[Mapping[str, Any]]:
    yield first
    while line := file.readline(MAX_SESSION_CHARS):
        if line.strip():
            value = _parsed(line)
            if not is_agent_session(value):
                raise ConfigError("a line behind the first session holds none")
            yield value


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
