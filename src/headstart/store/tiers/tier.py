"""Tier: what the threads of a store need of a place for blocks: a folder (catalog.py), or a server (redis_tier.py).

And the places that --kv-store names, with the secret that seals blocks outside of this machine. Standard library only.
"""

import hmac
import os
import re
from collections.abc import Container, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.store.segment import ReadResult

REDIS_PACKAGES = ("redis", "cryptography")  # the extra [redis]
CLUSTER = "+cluster"  # ends the scheme of a URL that names nodes of a cluster
SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")
URL_OPTIONS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # may follow a "?"
MIN_SECRET_BYTES = 32
_PLACES = re.compile(rf"(?:(?P<folder>.*?),)?(?P<url>(?:{'|'.join(map(re.escape, SCHEMES))})://.*)", re.DOTALL)
_SALT = b"headstart kv store 1"


class TierError(OSError):
    """A server that holds blocks failed, or gave no complete answer in time."""


class StorageTier(Protocol):
    """Blocks of one shape. `contains`, `read` and `used` may be called from any thread, all else from one at a time."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def num_corrupt(self) -> int: ...

    def contains(self, block_hash: BlockHash) -> bool:
        """Return whether a read of this block would probably succeed; from memory, O(1)."""
        ...

    def refresh_from_other_writers(self) -> None:
        """Learn what other processes wrote. Raises OSError."""
        ...

    def read_blocks_until_miss(
        self, keys: Sequence[BlockKey], buffer: memoryview, ahead: Sequence[BlockKey] = ()
    ) -> ReadResult:
        """Read blocks from the first on, each verified against its key, until one is unavailable. Raises nothing.

        `ahead`: what the next call reads if it is given this very object, so that it may be fetched meanwhile.
        """
        ...

    def write_new_blocks(self, blocks: Sequence[tuple[BlockKey, Data]]) -> int:
        """Write those that are not stored yet; return their number. Raises OSError."""
        ...

    def make_room(self, num_bytes: int, *, kept: Container[BlockHash]) -> int:
        """Make space for so many bytes; return the number of blocks dropped for it. Raises OSError."""
        ...

    def mark_used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Mark blocks as used now. Raises OSError."""
        ...

    def discard_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Drop these for all processes. Raises OSError."""
        ...

    def clear(self) -> None:
        """Drop all. Raises OSError."""
        ...

    def close(self) -> None: ...


class StoreTierLocations(NamedTuple):
    """The tiers of --kv-store, in the order in which they are asked."""

    folder: Path | None
    url: str | None


def parse_tier_places(text: str) -> StoreTierLocations:
    """Return the places of --kv-store: DIR, URL, or DIR,URL. Raises ConfigError for a URL that cannot be used."""
    match = _PLACES.fullmatch(text)
    folder, url = (text, None) if match is None else (match["folder"], match["url"])
    if folder is not None and "://" in folder:
        raise ConfigError(f"--kv-store: unknown kind of URL; known: {', '.join(SCHEMES)}")
    if url is not None:
        _check_url(url)
        if missing := [name for name in REDIS_PACKAGES if find_spec(name) is None]:
            raise ConfigError(f"--kv-store {url} needs {', '.join(missing)}: pip install 'headstart[redis]'")
    return StoreTierLocations(None if folder is None else Path(folder).expanduser(), url)


def parse_node_urls(url: str) -> list[str]:
    """Return the URL of each server that a URL names: some nodes of a cluster, or one server."""
    scheme, _, rest = url.partition("://")
    found = re.fullmatch(r"([^/?]*@)?([^/?]*)(.*)", rest, re.DOTALL)
    if found is None or not scheme.endswith(CLUSTER):
        return [url]
    user, hosts, options = found.groups("")
    return [f"{scheme.removesuffix(CLUSTER)}://{user}{host}{options}" for host in hosts.split(",")]


def _check_url(url: str) -> None:
    scheme = url.partition("://")[0]
    is_cluster = scheme.endswith(CLUSTER)
    form, path = ("host:port,host:port", r"(/0?)?") if is_cluster else ("host:port/db, db a number", r"(/\d*)?")
    try:
        nodes = [urlsplit(node) for node in parse_node_urls(url)]
        has_password, _ = any(parts.password is not None for parts in nodes), [parts.port for parts in nodes]
    except ValueError:  # its text may show a part of a password
        raise ConfigError("--kv-store: its URL is invalid; write redis://host:port/db") from None
    if has_password:
        raise ConfigError(
            "--kv-store: a password does not belong into the URL, which logs and lists of processes show: "
            "set HEADSTART_KV_STORE_PASSWORD, or kv_store_password in headstart.toml"
        )
    if scheme == "unix" and not nodes[0].path:
        raise ConfigError("--kv-store: name the socket: unix:///path/of/redis.sock?db=0")
    if scheme != "unix" and not all(parts.hostname and re.fullmatch(path, parts.path) for parts in nodes):
        raise ConfigError(f"--kv-store {url}: write {scheme}://{form}")
    known = URL_OPTIONS[is_cluster:]  # a cluster has no databases
    unknown = [name for name, _ in parse_qsl(nodes[0].query, keep_blank_values=True) if name not in known]
    if unknown:
        raise ConfigError(f"--kv-store {url}: unknown option {unknown[0]!r}; known: {', '.join(known)}")


def read_shared_secrets(paths: str | None) -> tuple[bytes, ...]:
    """Return the keys of NEW or NEW,OLD,...: the first seals blocks, all open them, and domains derive from the last.

    Raises ConfigError as below.
    """
    return tuple(derive_key_from_secret_file(path) for path in (paths or "").split(","))


def derive_key_from_secret_file(path: str) -> bytes:
    """Return a key from the content of the secret file, white space at its ends left out: HKDF-Extract (RFC 5869).

    Raises ConfigError if there is none, and for a file that is too short or that every user may read.
    """
    if not path:
        raise ConfigError(
            "--kv-store: blocks leave this machine sealed only: name the file of a secret, the same for all servers "
            "that share blocks, with --kv-store-secret (make one: openssl rand -hex 32 > FILE; chmod 600 FILE)"
        )
    try:
        with Path(path).expanduser().open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(1 << 16).strip()
    except OSError as error:
        raise ConfigError(f"--kv-store-secret {path}: {error.strerror}") from error
    if mode & 0o007:
        raise ConfigError(f"--kv-store-secret {path} is open to every user (mode {mode & 0o777:o}): chmod o-rwx {path}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--kv-store-secret {path} holds {len(secret)} bytes; it needs {MIN_SECRET_BYTES}: openssl rand -hex 32"
        )
    return hmac.digest(_SALT, secret, "sha256")


def derive_key(key: bytes, info: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose: HKDF-Expand with SHA-256 (RFC 5869)."""
    return hmac.digest(key, info + b"\x01", "sha256")
