"""FileDiscovery: the replicas that a file lists. The file is polled, and read when it has changed.

One address per line, as on the command line, with # comments; or a JSON list of addresses or of objects with url,
events and replay. To update it, write a new file and rename it. A file that is still being written is not read: it must
look the same in two polls.
"""

import asyncio
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import MAX_REPLICAS, Changed
from headstart.gateway.replicas.replica_address import ReplicaAddress, parse_address
from headstart.http.logs import Log

POLL_SECONDS = 0.5
MAX_FILE_BYTES = 2**23  # 2 KB for each of the replicas that a file may list
_KEYS = {"url", "ranks", "events", "replay"}

Sight = tuple[int, int, int] | None
"""Modification time, length and inode of a file; None: there is no file."""


class FileDiscovery:
    """The replicas of a file. One that becomes empty keeps its last list: `[]` says that there are no replicas."""

    def __init__(self, path: Path, *, log: Log | None = None, poll_seconds: float = POLL_SECONDS) -> None:
        self._path = path
        self._log = log or Log()
        self._poll_seconds = poll_seconds

    def describe(self) -> str:
        return f"file:{self._path}"

    async def watch(self, changed: Changed) -> None:
        """As Discovery.watch. Raises ConfigError for a file that cannot be read at first."""
        read = await asyncio.to_thread(_look, self._path)
        known = await asyncio.to_thread(read_addresses, self._path)
        changed(known)
        before, complaint = read, ""
        while True:
            await asyncio.sleep(self._poll_seconds)
            seen = await asyncio.to_thread(_look, self._path)
            is_settled, before = seen == before, seen
            if not is_settled or seen == read:
                continue
            read = seen
            try:
                found = await asyncio.to_thread(read_addresses, self._path, may_be_empty=not known)
                if await asyncio.to_thread(_look, self._path) != seen:
                    continue  # it changed during the read, and will differ at the next poll
            except ConfigError as error:
                if str(error) != complaint:
                    self._log.line(f"headstart: {error}; going on with the {len(known)} replicas known")
                complaint = str(error)
                continue
            complaint = ""
            if found != known:
                self._log.line(f"headstart: {self.describe()} lists {len(found)} replicas now, {len(known)} before")
                known = found
                changed(known)


def read_addresses(path: Path, *, may_be_empty: bool = True) -> tuple[ReplicaAddress, ...]:
    """Return the replicas that a file lists, each once. Raises ConfigError, also for a file without any list."""
    try:
        text = _read(path).decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 at byte {error.start}") from error
    parse = _from_json if text.lstrip().startswith("[") else _from_lines
    try:
        found = tuple(dict.fromkeys(parse(text)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not found and not may_be_empty and parse is _from_lines:
        raise ConfigError(f"{path} is empty; write [] if there are no replicas")
    if len(found) > MAX_REPLICAS:
        raise ConfigError(f"{path} lists {len(found)} replicas, more than {MAX_REPLICAS}; start several routers")
    return found


def _read(path: Path) -> bytes:
    """Return the content of a regular file of bounded size; any other file is closed as soon as its type is known."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"cannot read {path}: it is no regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"cannot read {path}: it has more than {MAX_FILE_BYTES >> 20} MiB")
    return content


def _look(path: Path) -> Sight:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _from_lines(text: str) -> list[ReplicaAddress]:
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [_at(f"line {number}", lambda line=line: parse_address(line)) for number, line in lines if line]


def _from_json(text: str) -> list[ReplicaAddress]:
    try:
        entries: Sequence[Any] = json.loads(text)
    except RecursionError:
        raise ConfigError("its JSON is nested too deeply; write a list of texts or objects") from None
    except ValueError as error:
        raise ConfigError(f"it begins like a JSON list and is none: {error}") from None
    return [_at(f"entry {number}", lambda entry=entry: _of_entry(entry)) for number, entry in enumerate(entries, 1)]


def _of_entry(entry: object) -> ReplicaAddress:
    if isinstance(entry, str):
        return parse_address(entry)
    if not isinstance(entry, dict) or "url" not in entry or not entry.keys() <= _KEYS:
        raise ConfigError('write it like "http://10.0.0.7:8000" or {"url": "http://10.0.0.7:8000"}')
    if not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError("url, ranks, events and replay must be texts")
    return parse_address(",".join([entry["url"], *(f"{key}={entry[key]}" for key in entry if key != "url")]))


def _at(where: str, parse: Callable[[], ReplicaAddress]) -> ReplicaAddress:
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
