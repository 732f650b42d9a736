"""Discovery: the interface that lists the replicas, and the static list.

FileDiscovery: the replicas that a file lists. The file is polled, and read when it has changed.

One address per line, as on the command line, with # comments; or a JSON list of addresses or of objects with url,
events and replay. To update it, write a new file and rename it. A file that is still being written is not read: it must
look the same in two polls.
"""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headstart.core.errors import ConfigError
from headstart.gateway.replicas.replica_address import (
    MAX_PORT,
    ReplicaAddress,
    is_allowed_replica_ip,
    parse_replica_address,
)
from headstart.http.logs import ServerLog
from headstart.http.web_pages import is_loopback

MAX_REPLICAS = 4_096  # that a file or a name may list: the health of each is polled continuously

Changed = Callable[[Sequence[ReplicaAddress]], None]
ASK_SECONDS = 5.0  # between two queries: resolvers cache an answer for its time to live

Resolve = Callable[[str, int], Awaitable[Sequence[Any]]]
"""Resolves a name and a port, as getaddrinfo does."""
POLL_SECONDS = 0.5
MAX_FILE_BYTES = 2**23  # 2 KB for each of the replicas that a file may list
_KEYS = {"url", "ranks", "events", "replay"}

Sight = tuple[int, int, int] | None
"""Modification time, length and inode of a file; None: there is no file."""


class Discovery(Protocol):
    """The source of a fleet's list of replicas."""

    def describe(self) -> str:
        """Return a short description for the banner: "2 replicas", "file:replicas.txt"."""
        ...

    async def watch_replicas(self, changed: Changed) -> None:
        """Call `changed` with all replicas, at once and after every change, until cancelled.

        Errors on the way (an unreadable file, a name that does not resolve) are logged on stderr, and the last known
        replicas stay. Raises ConfigError before the first call for a configuration that can never work.
        """
        ...


class StaticDiscovery:
    """The replicas given on the command line."""

    def __init__(self, addresses: Sequence[ReplicaAddress]) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))

    def describe(self) -> str:
        count = len(self._addresses)
        return f"{count} replica{'' if count == 1 else 's'}"

    async def watch_replicas(self, changed: Changed) -> None:
        changed(self._addresses)
        await asyncio.Event().wait()


class DiscoveredReplicas(NamedTuple):
    """Replicas that a name server or a cluster names, and the endpoints, HOST:PORT, that no replica can have."""

    addresses: tuple[ReplicaAddress, ...] = ()
    refused: tuple[str, ...] = ()


def replicas_at_endpoints(endpoints: Iterable[tuple[str, int]], *, allow_loopback: bool) -> DiscoveredReplicas:
    """Return the replicas at endpoints, each a host as in a URL and a port. `allow_loopback`: also at loopback ones."""
    found, refused = set[ReplicaAddress](), set[str]()
    for host, port in endpoints:
        if 1 <= port <= MAX_PORT and is_allowed_replica_ip(host.strip("[]"), allow_loopback=allow_loopback):
            found.add(ReplicaAddress(f"http://{host}:{port}"))
        else:
            refused.add(f"{host}:{port}")
    return DiscoveredReplicas(tuple(sorted(found, key=lambda address: address.url)), tuple(sorted(refused)))


class ReplicaListNotifier:
    """The list of replicas passed on so far, and the log of its changes and of failures to read it."""

    def __init__(self, source: str, changed: Changed, log: ServerLog, *, items: str = "replicas") -> None:
        """`items`: a word for what the source lists."""
        self._source = source
        self._items = items
        self._changed = changed
        self._log = log
        self._known: tuple[ReplicaAddress, ...] | None = None
        self._failures: dict[str, str] = {}  # last logged failure by part of the source
        self._complaint = ""

    @property
    def is_known(self) -> bool:
        """Whether any list was passed on."""
        return self._known is not None

    @property
    def is_empty(self) -> bool:
        """Whether no replica is known."""
        return not self._known

    def publish_if_changed(self, listed: DiscoveredReplicas) -> None:
        """Pass a list on if it differs from the last; of too many replicas those already known are kept."""
        found, refused = listed
        num_refused = len(refused)
        if len(found) > MAX_REPLICAS:
            self.log_complaint(f"has more than {MAX_REPLICAS} {self._items}; the rest is left out")
            before = set(self._known or ())
            kept = sorted(found, key=lambda address: address not in before)[:MAX_REPLICAS]
            found = tuple(sorted(kept, key=lambda address: address.url))
        elif refused:
            self.log_complaint(
                f"has {num_refused} {self._items} that no replica can have, as {refused[0]}; they are left out"
            )
        elif found:
            self._complaint = ""
        if found == self._known:
            return
        if self._known is not None:
            self._log.write_line(
                f"headstart: {self._source} lists {len(found)} replicas now, {len(self._known)} before"
            )
        self._known = found
        self._changed(found)

    def log_complaint(self, complaint: str) -> None:
        """Log why the list is not what one might expect, once."""
        if complaint != self._complaint:
            self._log.write_line(f"headstart: {self._source} {complaint}")
        self._complaint = complaint

    def log_failure(self, part: str, reason: str) -> None:
        """Log a failure to read a part of the source if it is not the one logged last; empty: it is read again."""
        if reason and reason != self._failures.get(part):
            self._log.write_line(f"headstart: {reason}; going on with the {len(self._known or ())} replicas known")
        self._failures[part] = reason


class DnsDiscovery:
    """One replica per address of `name`, each at `port`; URLs hold the addresses, so that the replicas are distinct."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        log: ServerLog | None = None,
        ask_seconds: float = ASK_SECONDS,
        resolve: Resolve | None = None,
        allow_loopback: bool = False,
    ) -> None:
        """Raises ConfigError for an invalid port. `resolve` replaces the system's resolver.

        `allow_loopback`: the name may have loopback addresses, as those of this machine may.
        """
        if not name or not 1 <= port <= 65535:
            raise ConfigError(f"dns:{name}:{port} names no service; write it like dns:replicas.default.svc:8000")
        self._name, self._port = name, port
        self._log = log or ServerLog()
        self._ask_seconds = ask_seconds
        self._resolve = resolve or _system_resolve
        self._allow_loopback = allow_loopback or is_loopback(name)

    def describe(self) -> str:
        return f"dns:{self._name}:{self._port}"

    async def watch_replicas(self, changed: Changed) -> None:
        """As Discovery.watch_replicas. A name that does not resolve at first has no replicas until it does."""
        listing = ReplicaListNotifier(self.describe(), changed, self._log, items="addresses")
        while True:
            try:
                answer = await self._resolve(self._name, self._port)
                if not answer:
                    raise OSError("it has no addresses")
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
                listing.log_failure("name", f"{self.describe()} does not resolve ({error})")
                if not listing.is_known:
                    listing.publish_if_changed(DiscoveredReplicas())
            else:
                listing.log_failure("name", "")
                hosts = {str(entry[4][0]) for entry in answer}
                endpoints = [(f"[{host}]" if ":" in host else host, self._port) for host in hosts]
                listing.publish_if_changed(replicas_at_endpoints(endpoints, allow_loopback=self._allow_loopback))
            await asyncio.sleep(self._ask_seconds)


async def _system_resolve(name: str, port: int) -> Sequence[Any]:
    return await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)


class FileDiscovery:
    """The replicas of a file. One that becomes empty keeps its last list: `[]` says that there are no replicas."""

    def __init__(self, path: Path, *, log: ServerLog | None = None, poll_seconds: float = POLL_SECONDS) -> None:
        self._path = path
        self._log = log or ServerLog()
        self._poll_seconds = poll_seconds

    def describe(self) -> str:
        return f"file:{self._path}"

    async def watch_replicas(self, changed: Changed) -> None:
        """As Discovery.watch_replicas. Raises ConfigError for a file that cannot be read at first."""
        read = await asyncio.to_thread(_look, self._path)
        listing = ReplicaListNotifier(self.describe(), changed, self._log)
        listing.publish_if_changed(DiscoveredReplicas(await asyncio.to_thread(read_replica_file, self._path)))
        before = read
        while True:
            await asyncio.sleep(self._poll_seconds)
            seen = await asyncio.to_thread(_look, self._path)
            is_settled, before = seen == before, seen
            if not is_settled or seen == read:
                continue
            read = seen
            try:
                found = await asyncio.to_thread(read_replica_file, self._path, may_be_empty=listing.is_empty)
                if await asyncio.to_thread(_look, self._path) != seen:
                    continue  # it changed during the read, and will differ at the next poll
            except ConfigError as error:
                listing.log_failure("file", str(error))
                continue
            listing.log_failure("file", "")
            listing.publish_if_changed(DiscoveredReplicas(found))


def read_replica_file(path: Path, *, may_be_empty: bool = True) -> tuple[ReplicaAddress, ...]:
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
    return [_at(f"line {number}", lambda line=line: parse_replica_address(line)) for number, line in lines if line]


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
        return parse_replica_address(entry)
    if not isinstance(entry, dict) or "url" not in entry or not entry.keys() <= _KEYS:
        raise ConfigError('write it like "http://10.0.0.7:8000" or {"url": "http://10.0.0.7:8000"}')
    if not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError("url, ranks, events and replay must be texts")
    return parse_replica_address(",".join([entry["url"], *(f"{key}={entry[key]}" for key in entry if key != "url")]))


def _at(where: str, parse: Callable[[], ReplicaAddress]) -> ReplicaAddress:
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
