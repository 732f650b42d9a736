"""Front: where clients, or a proxy of theirs, reach a router. HttpFront: the router's own HTTP server."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

from headstart.gateway.gateway_app import build_gateway_app
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.proxy.proxy import FILES_PER_REQUEST
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.lifecycle import UvicornWithoutSignals, listener_address, uvicorn_config
from headstart.http.protocol.connections import MIN_CONNECTIONS, ConnectionTable, max_server_connections


class RouterFront(Protocol):
    """One way into a router. `ended` is set if it stops by itself, after it has written why to the log."""

    ended: asyncio.Event

    @property
    def url(self) -> str:
        """The address of its clients; empty: it has none of its own."""
        ...

    def on_replicas_changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Note the replicas that there are now."""
        ...

    async def start(self, state: GatewayState) -> None:
        """Serve. Raises ConfigError."""
        ...

    async def stop(self, *, at_once: bool) -> None:
        """Stop serving: after the responses that are being written, or `at_once`."""
        ...


class HttpFront:
    """The router's own HTTP server on a listening socket, which it does not close."""

    def __init__(self, listener: socket.socket) -> None:
        self.ended = asyncio.Event()
        self._listener = listener
        self.connections = ConnectionTable(MIN_CONNECTIONS)
        self._max_queued = 0  # per replica
        self._num_replicas = 1
        self._http: UvicornWithoutSignals | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address of its clients."""
        host, port, path = listener_address(self._listener)
        return "http://localhost" if path else local_client_url(host, port)

    def on_replicas_changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Change the cap on connections with the requests that may wait; those that are open stay open."""
        self._num_replicas = max(len(replicas), 1)
        self._set_cap()

    async def start(self, state: GatewayState) -> None:
        """Serve."""
        self._max_queued = state.server_options.max_num_queued_reqs
        self._set_cap()
        self._http = UvicornWithoutSignals(uvicorn_config(build_gateway_app(state), self.connections))
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))

    async def stop(self, *, at_once: bool) -> None:
        """Stop serving."""
        if self._http is None or self._serving is None:
            return
        self._http.should_exit = True
        self._http.force_exit = at_once
        await asyncio.wait([self._serving])

    def _set_cap(self) -> None:
        max_queued = self._max_queued * self._num_replicas
        self.connections.max_connections = max_server_connections(max_queued, files_each=FILES_PER_REQUEST)


def local_client_url(host: str, port: int) -> str:
    """Return the URL by which a client on this machine reaches a server that listens at an address."""
    where = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{where}:{port}"
