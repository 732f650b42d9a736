"""EngineReplica: the actor of one replica. Ray places it on a node; it runs a server there as a child process.

The server is the process that `headstart serve` runs, so an engine that fails or hangs cannot take the actor's calls
along, and the end of the actor ends the server.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from ray.util import get_node_ip_address

from headstart.config.options import EngineOptions, ServerOptions
from headstart.gateway.replicas.replica_child import Launch, ReplicaChild
from headstart.gateway.replicas.replica_options import ReplicaOptions, encode_options, environment, replica_command
from headstart.http.logs import Log

HOLD_SECONDS = 1800.0  # after which a call ends whose ingress has died
GRACE_SECONDS = 20.0  # beyond the drain: for cut connections and pending store writes


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of an EngineReplica: `cpus` are its compute threads, `num_on_node` the replicas that a node may hold."""

    engine: EngineOptions
    server: ServerOptions
    cpus: int
    num_on_node: int


class EngineReplica:
    """One replica. Ray calls `check_health` regularly, `record_replica_metadata` once, and `__del__` after a drain."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the server and wait until it can be used. Raises RuntimeError with its message if it ends."""
        self._end_seconds = settings.server.drain_timeout + GRACE_SECONDS
        self._child = ReplicaChild("server", _launch(settings), asyncio.get_running_loop(), Log())
        await self._child.settled.wait()
        self._url()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address of the server, by which the router knows this replica."""
        return {"url": self._url()}

    def check_health(self) -> None:
        """Raise RuntimeError if the server has ended; Ray then replaces the replica."""
        self._url()

    async def greet(self, name: str) -> None:
        """Do nothing: see Introduction."""

    async def hold(self, request_id: str) -> None:
        """Last as long as a request to the server, whose end cancels this call."""
        await asyncio.sleep(HOLD_SECONDS)

    async def __del__(self) -> None:
        """Let the server finish its requests and end."""
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.over.wait(), self._end_seconds)
        finally:
            self._child.kill()

    def _url(self) -> str:
        child = self._child
        if child.address is None or child.over.is_set():
            raise RuntimeError(f"the server {child.ending}")
        return child.address.url


def _launch(settings: ReplicaSettings) -> Launch:
    server = replace(settings.server, host=get_node_ip_address(), port=0, access_log="none")
    engine = replace(settings.engine, threads=settings.cpus)
    share = 1 / max(settings.num_on_node, 1)
    options = ReplicaOptions(engine, server, num_replicas=settings.num_on_node, memory_share=share)
    return Launch(replica_command(), encode_options(options), environment(settings.cpus))
