"""DnsDiscovery: the replicas behind one name. All its A and AAAA records, asked for again and again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import MAX_REPLICAS, Changed
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import Log

ASK_SECONDS = 5.0  # between two questions: resolvers keep an answer for its own time to live

Resolve = Callable[[str, int], Awaitable[Sequence[Any]]]
"""What getaddrinfo gives for a name and a port."""


class DnsDiscovery:
    """One replica per address of `name`, each at `port`; their URLs hold the addresses, so that each is its own."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        log: Log | None = None,
        ask_seconds: float = ASK_SECONDS,
        resolve: Resolve | None = None,
    ) -> None:
        """Raises ConfigError for a port that is none. `resolve`: asks instead of the system."""
        if not name or not 1 <= port <= 65535:
            raise ConfigError(f"dns:{name}:{port} names no service; write it like dns:replicas.default.svc:8000")
        self._name, self._port = name, port
        self._log = log or Log()
        self._ask_seconds = ask_seconds
        self._resolve = resolve or _ask_the_system

    def describe(self) -> str:
        return f"dns:{self._name}:{self._port}"

    async def watch(self, changed: Changed) -> None:
        """As Discovery.watch. A name that does not resolve at first is no replica, until it does."""
        known: tuple[ReplicaAddress, ...] | None = None
        complaint = ""
        while True:
            try:
                found, complaint = self._bounded(await self._resolve(self._name, self._port), known or (), complaint)
            except (OSError, UnicodeError) as error:  # UnicodeError: what no name can be
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
        """At most MAX_REPLICAS addresses, first those that are known; and what was complained of them."""
        found = _addresses(answer, self._port)
        if len(found) <= MAX_REPLICAS:
            return found, ""
        reason = f"has more than {MAX_REPLICAS} addresses"
        if complaint != reason:
            self._log.line(f"headstart: {self.describe()} {reason}; the rest is left out")
        before = set(known)
        kept = sorted(found, key=lambda address: address not in before)[:MAX_REPLICAS]
        return tuple(sorted(kept, key=lambda address: address.url)), reason


async def _ask_the_system(name: str, port: int) -> Sequence[Any]:
    return await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)


def _addresses(answer: Sequence[Any], port: int) -> tuple[ReplicaAddress, ...]:
    """Each address once, in an order that does not depend on that of the answer."""
    hosts = sorted({str(entry[4][0]) for entry in answer})
    return tuple(ReplicaAddress(f"http://{f'[{host}]' if ':' in host else host}:{port}") for host in hosts)
