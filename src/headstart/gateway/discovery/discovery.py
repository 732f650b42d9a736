"""Discovery: which replicas there are. The seam, and the list that never changes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headstart.gateway.replicas.replica_address import ReplicaAddress

MAX_REPLICAS = 4_096  # that a file or a name may list: each is asked for its health all the time

Changed = Callable[[Sequence[ReplicaAddress]], None]


class Discovery(Protocol):
    """Where a fleet learns of its replicas."""

    def describe(self) -> str:
        """In a few words for the banner: "2 replicas", "file:replicas.txt"."""
        ...

    async def watch(self, changed: Changed) -> None:
        """Calls `changed` with all replicas, at once and whenever they are others; until it is cancelled.

        What goes wrong on the way (a file that cannot be read, a name that does not resolve) is told on stderr and
        changes nothing: those known last stay. Raises ConfigError for what could never work, before the first call.
        """
        ...


class StaticDiscovery:
    """Those of the command line."""

    def __init__(self, addresses: Sequence[ReplicaAddress]) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))

    def describe(self) -> str:
        count = len(self._addresses)
        return f"{count} replica{'' if count == 1 else 's'}"

    async def watch(self, changed: Changed) -> None:
        changed(self._addresses)
        await asyncio.Event().wait()
