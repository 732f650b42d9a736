"""DnsDiscovery: the replicas behind one DNS name: all its A and AAAA records, resolved periodically."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import MAX_REPLICAS, Changed
from headstart.gateway.replicas.replica_address import ReplicaAddress, is_of_a_replica
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
        allow_loopback: bool = False,
    ) -> None:
        """Raises ConfigError for an invalid port. `resolve` replaces the system's resolver.

        `allow_loopback`: the name may have loopback addresses, as those of this machine may.
        """
        if not name or not 1 <= port <= 65535:
            raise ConfigError(f"dns:{name}:{port} names no service; write it like dns:replicas.default.svc:8000")
        self._name, self._port = name, port
        self._log = log or Log()
        self._ask_seconds = ask_seconds
        self._resolve = resolve or _system_resolve
        self._allow_loopback = allow_loopback or name == "localhost" or _is_loopback(name)

    def describe(self) -> str:
        return f"dns:{self._name}:{self._port}"

    async def watch(self, changed: Changed) -> None:
        """As Discovery.watch. A name that does not resolve at first has no replicas until it does."""
        known: tuple[ReplicaAddress, ...] | None = None
        complaint = ""
        while True:
            try:
                answer = await self._resolve(self._name, self._port)
                if not answer:
                    raise OSError("it has no addresses")
                found, complaint = self._bounded(answer, known or (), complaint)
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
        hosts = sorted({str(entry[4][0]) for entry in answer})
        kept = [host for host in hosts if is_of_a_replica(host, allow_loopback=self._allow_loopback)]
        found = tuple(ReplicaAddress(f"http://{f'[{host}]' if ':' in host else host}:{self._port}") for host in kept)
        reason = ""
        if len(kept) < len(hosts):
            reason = f"has {len(hosts) - len(kept)} addresses that no replica can have, as link-local or loopback ones"
        if len(found) > MAX_REPLICAS:
            reason = f"has more than {MAX_REPLICAS} addresses"
        if reason and complaint != reason:
            self._log.line(f"headstart: {self.describe()} {reason}; the rest is left out")
        if len(found) <= MAX_REPLICAS:
            return found, reason
        before = set(known)
        most = sorted(found, key=lambda address: address not in before)[:MAX_REPLICAS]
        return tuple(sorted(most, key=lambda address: address.url)), reason


async def _system_resolve(name: str, port: int) -> Sequence[Any]:
    return await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
