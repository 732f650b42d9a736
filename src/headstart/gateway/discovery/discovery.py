"""Discovery: the interface that lists the replicas, and the static list."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headstart.gateway.replicas.replica_address import ReplicaAddress

MAX_REPLICAS = 4_096  # that a file or a name may list: the health of each is polled continuously

Changed = Callable[[Sequence[ReplicaAddress]], None]


class Discovery(Protocol):
    """The source of a fleet's list of replicas."""

    def describe(self) -> str:
        """Return a short description for the banner: "2 replicas", "file:replicas.txt"."""
        ...

    async def watch(self, changed: Changed) -> None:
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

    async def watch(self, changed: Changed) -> None:
        changed(self._addresses)
        await asyncio.Event().wait()
