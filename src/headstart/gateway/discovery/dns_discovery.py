"""DnsDiscovery: the replicas behind one DNS name: all its A and AAAA records, resolved periodically."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import MAX_REPLICAS, Changed
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import Log

ASK_SECONDS = 5.0  # between two queries: resolvers cache an answer for its time to live

Resolve = Callable[[str, int], Awaitable[Sequence[Any]]]
"""Resolves a name and a port, as getaddrinfo does."""


class DnsDiscovery:
    """One replica per address of `name`, each at `port`; URLs hold the addresses, so that the replicas are distinct."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        log: Log | None = None,
        ask_seconds: float = ASK_SECONDS,
        resolve: Resolve | None = None,
    ) -> None:
        """Raises ConfigError for an invalid port. `resolve` replaces the system's resolver."""
        if not name or not 1 <= port <= 65535:
            raise ConfigError(f"dns:{name}:{port} names no service; write it like dns:replicas.default.svc:8000")
        self._name, self._port = name, port
        self._log = log or Log()
        self._ask_seconds = ask_seconds
        self._resolve = resolve or _system_resolve

    def describe(self) -> str:
        return f"dns:{self._name}:{self._port}"

    async def watch(self, changed: Changed) -> None:
        """As Discovery.watch. A name that does not resolve at first has no replicas until it does."""
        known: tuple[ReplicaAddress, ...] | None = None
        complaint = ""
        while True:
            try:
                found, complaint = self._bounded(await self._resolve(self._name, self._port), known or (), complaint)
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
                found = known or ()
                if complaint != str(error):
                    self._log.line(
                        f"headstart: {self.describe()} does not resolve ({error}); "
                        f"going on with the {len(found)} replicas known"
                    )
                complaint = str(error)
            if found != known:
                if known is not None:
                    self._log.line(f"headstart: {self.describe()} has {len(found)} addresses now, {len(known)} before")
                known = found
                changed(known)
            await asyncio.sleep(self._ask_seconds)

    def _bounded(
        self, answer: Sequence[Any], known: tuple[ReplicaAddress, ...], complaint: str
    ) -> tuple[tuple[ReplicaAddress, ...], str]:
        """Return at most MAX_REPLICAS addresses, known ones first, and why others were left out (empty: none were)."""
        found = _addresses(answer, self._port)
        if len(found) <= MAX_REPLICAS:
            return found, ""
        reason = f"has more than {MAX_REPLICAS} addresses"
        if complaint != reason:
            self._log.line(f"headstart: {self.describe()} {reason}; the rest is left out")
        before = set(known)
        kept = sorted(found, key=lambda address: address not in before)[:MAX_REPLICAS]
        return tuple(sorted(kept, key=lambda address: address.url)), reason


async def _system_resolve(name: str, port: int) -> Sequence[Any]:
    return await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)


def _addresses(answer: Sequence[Any], port: int) -> tuple[ReplicaAddress, ...]:
    """Return each address once, in an order that does not depend on the order of the answer."""
    hosts = sorted({str(entry[4][0]) for entry in answer})
    return tuple(ReplicaAddress(f"http://{f'[{host}]' if ':' in host else host}:{port}") for host in hosts)
