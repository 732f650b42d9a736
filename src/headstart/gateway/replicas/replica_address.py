"""ReplicaAddress: the URL of a replica, and the endpoints of its KV events, if it publishes any.

A server with several data-parallel engines (vLLM, SGLang) is a replica per rank, since each has a cache of its own.
Their names are the URL of the server and `#RANK`; requests to them have the header RANK_HEADER.
"""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from headstart.core.errors import ConfigError

MAX_PORT = 65_535
MAX_RANKS = 64  # of one server
RANK_HEADER = "x-data-parallel-rank"
MAX_ADDRESS = 2_048  # characters, with its events and replay

_PORT = re.compile(r":(\d{1,5})$", re.ASCII)
_EXAMPLE = "http://10.0.0.7:8000, or http://10.0.0.7:8000,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5558"


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The address of a replica. `url` has no path and no final slash; it is also the replica's name in the router.

    `ranks` above 1: a server with so many data-parallel engines, whose addresses `expand_ranks` returns.
    """

    url: str
    events: str | None = None  # ZMQ endpoint of its PUB socket, to connect to
    replay: str | None = None  # ZMQ endpoint of its ROUTER socket, for missed events
    ranks: int = 1

    def expand_ranks(self) -> "list[ReplicaAddress]":
        """Return the address of each rank; its own if there is one. As in vLLM, rank r publishes r ports higher."""
        if self.ranks == 1:
            return [self]
        ranks = range(self.ranks)
        return [
            ReplicaAddress(f"{self.url}#{rank}", _port_of_rank(self.events, rank), _port_of_rank(self.replay, rank))
            for rank in ranks
        ]


def server_url_of(name: str) -> str:
    """Return the URL of the server of a replica, which may be one of its ranks."""
    return name.partition("#")[0]


def data_parallel_rank_of(name: str) -> str:
    """Return the data-parallel rank of a replica; empty: it is the only one of its server."""
    return name.partition("#")[2]


def data_parallel_rank_headers(name: str) -> dict[str, str]:
    """Return the headers by which a server passes a request to the engine of this replica."""
    rank = data_parallel_rank_of(name)
    return {RANK_HEADER: rank} if rank else {}


def parse_replica_address(text: str) -> ReplicaAddress:
    """Parse a replica as in an option or a file: URL[,ranks=N][,events=ENDPOINT][,replay=ENDPOINT].

    Raises ConfigError.
    """
    if len(text) > MAX_ADDRESS:
        raise ConfigError(f"replica {text[:40]!r}... has {len(text)} characters, more than {MAX_ADDRESS} characters")
    url, *rest = (part.strip() for part in text.split(","))
    found, ranks = dict[str, str](), 1
    for part in rest:
        key, _, value = part.partition("=")
        if key == "ranks" and ranks == 1 and value.isascii() and value.isdecimal() and 1 < int(value[:9]) <= MAX_RANKS:
            ranks = int(value)
            continue
        if (
            key not in ("events", "replay")
            or not value.startswith(("tcp://", "ipc://"))
            or not value.isprintable()
            or key in found
        ):
            raise ConfigError(f"replica {text!r}: {part!r} says nothing; write it like {_EXAMPLE}")
        found[key] = value
    if "replay" in found and "events" not in found:
        raise ConfigError(f"replica {text!r}: replay is of no use without events")
    if ranks > 1 and not all(_PORT.search(value) for value in found.values()):
        raise ConfigError(f"replica {text!r}: with ranks, events need a port, tcp://HOST:PORT: that of rank 0")
    return ReplicaAddress(_checked_url(url), **found, ranks=ranks)


def is_allowed_replica_ip(address: str, *, allow_loopback: bool) -> bool:
    """Return whether an IP address that a cluster or a name server reports can be that of a replica.

    Link-local addresses are those of the machine's own network, as of a cloud's metadata service.
    """
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    found = mapped or parsed
    if found.is_loopback:
        return allow_loopback
    return not (found.is_link_local or found.is_multicast or found.is_unspecified or str(found) == "255.255.255.255")


def _port_of_rank(endpoint: str | None, rank: int) -> str | None:
    return None if endpoint is None else _PORT.sub(lambda found: f":{int(found[1]) + rank}", endpoint)


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"replica {text!r} is no address ({error}); write it like {_EXAMPLE}") from None
    path = parts.path.rstrip("/").removesuffix("/v1")
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or path
        or parts.query
        or parts.fragment
        or not _is_plain(text)
        or port == 0
    ):
        raise ConfigError(f"replica {text!r} is no address; write it like {_EXAMPLE}")
    if parts.username or parts.password:
        raise ConfigError("a replica's address holds a user or a password; give keys by --replica-api-key")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def _is_plain(text: str) -> bool:
    """Return whether a text has neither spaces nor unprintable characters; urlsplit drops line feeds."""
    return text.isprintable() and " " not in text
