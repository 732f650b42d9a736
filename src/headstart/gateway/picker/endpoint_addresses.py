"""ReplicaIpAddresses: the addresses, IP:port, by which Envoy knows the replicas of a router."""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlsplit

from headstart.gateway.replicas.replica_address import ReplicaAddress

REFRESH_SECONDS = 10.0  # names of hosts are resolved again
_PORTS = {"http": 80, "https": 443}


class ReplicaIpAddresses:
    """Replicas by URL and by address. `on_change` is called with all addresses when one of them changes."""

    def __init__(self, on_change: Callable[[Sequence[str]], None] | None = None) -> None:
        self._on_change = on_change
        self._replicas: tuple[str, ...] = ()
        self._addresses: dict[str, str] = {}
        self._urls: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def on_replicas_changed(self, replicas: Iterable[ReplicaAddress]) -> None:
        """Note the replicas that there are now. Names of hosts are resolved soon; literal addresses at once."""
        self._replicas = tuple(replica.url for replica in replicas)
        literal = {url: found for url in self._replicas if (found := _literal(url)) is not None}
        known = {url: address for url, address in self._addresses.items() if url in self._replicas}
        self._set(known | literal)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if len(literal) < len(self._replicas):
            self._task = asyncio.create_task(self._resolve_forever(literal))

    def address(self, url: str) -> str | None:
        """Return the address of a replica; None if it is not known."""
        return self._addresses.get(url)

    def url(self, address: str) -> str | None:
        """Return the URL of the replica at an address; None if there is none."""
        return self._urls.get(address)

    def close(self) -> None:
        """Stop resolving."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _set(self, addresses: dict[str, str]) -> None:
        if addresses != self._addresses or not self._urls:
            self._addresses = addresses
            self._urls = {address: url for url, address in addresses.items()}
            if self._on_change is not None:
                self._on_change(sorted(self._urls))

    async def _resolve_forever(self, literal: dict[str, str]) -> None:
        while True:
            found = dict(literal)
            for url in self._replicas:
                if url not in found and (address := await _resolved(url) or self._addresses.get(url)) is not None:
                    found[url] = address
            self._set(found)
            await asyncio.sleep(REFRESH_SECONDS)


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _literal(url: str) -> str | None:
    """Return the address in a URL; None if it has the name of a host."""
    host, port = _host_and_port(url)
    for family, form in ((socket.AF_INET, f"{host}:{port}"), (socket.AF_INET6, f"[{host}]:{port}")):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return form
    return None


async def _resolved(url: str) -> str | None:
    host, port = _host_and_port(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return f"{address[0]}:{port}" if family == socket.AF_INET else f"[{address[0]}]:{port}"
