"""EnvoyFront: Envoy as the server of a router's clients. PickerFront: an endpoint picker for a gateway's own Envoy."""

import asyncio
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.gateway_state import FILES_PER_REQUEST, GatewayState
from headstart.gateway.http_front import Front, url_of
from headstart.gateway.picker.endpoint_addresses import EndpointAddresses
from headstart.gateway.picker.envoy_config import REPLICAS, SOCKET, EnvoySettings, write_bootstrap, write_replicas
from headstart.gateway.picker.envoy_process import EnvoyProcess, find_envoy
from headstart.gateway.picker.picker_server import PickerServer
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.lifecycle import listen
from headstart.http.logs import Log
from headstart.http.protocol.connections import most_connections


def picker_fronts(router: RouterOptions, server: ServerOptions) -> list[Front]:
    """Return the fronts of the options about Envoy. Raises ConfigError."""
    fronts: list[Front] = []
    if router.envoy != "none":
        fronts.append(EnvoyFront(router, server))
    if router.ext_proc is not None:
        fronts.append(PickerFront(router.ext_proc))
    return fronts


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PickerFront:
    """An endpoint picker at HOST:PORT, for gateways."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that is none."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(f"--ext-proc {address!r} is no address; write HOST:PORT, as in 127.0.0.1:9002")
        self.ended = asyncio.Event()
        self._log = Log()
        self._address = address
        self._addresses = EndpointAddresses()
        self._server: PickerServer | None = None

    @property
    def url(self) -> str:
        """Empty: its clients are proxies."""
        return ""

    def changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Note the replicas that there are now."""
        self._addresses.changed(replicas)

    async def start(self, state: GatewayState) -> None:
        """Serve. Raises ConfigError."""
        self._server = PickerServer(state, self._addresses)
        await self._server.start(self._address)
        if not is_loopback(self._address):
            self._log.line(
                f"headstart: the endpoint picker at {self._address} asks for no key: let only an Envoy reach it"
            )

    async def stop(self, *, at_once: bool) -> None:
        """Stop serving."""
        self._addresses.close()
        if self._server is not None:
            await self._server.close()


class EnvoyFront:
    """Envoy at the router's address, run by the router or by others, and the endpoint picker of it."""

    def __init__(self, router: RouterOptions, server: ServerOptions) -> None:
        """Raises ConfigError if there is no Envoy, the port is in use, or the folder cannot be written."""
        self.ended = asyncio.Event()
        self._log = Log()
        self._binary = None if router.envoy == "external" else find_envoy(router.envoy)
        port = server.port
        if self._binary is not None:
            with listen(server.host, server.port) as probe:
                port = probe.getsockname()[1]
        elif router.envoy_folder is None or port == 0:
            raise ConfigError("--envoy external needs --envoy-folder, and a --port other than 0")
        self._own_folder = None if router.envoy_folder else tempfile.TemporaryDirectory(prefix="headstart-envoy-")
        folder = Path(self._own_folder.name if self._own_folder else router.envoy_folder or "").absolute()
        self._settings = EnvoySettings(
            folder=folder,
            host=server.host,
            port=port,
            fails_open=not (server.api_key or server.tenants or router.replica_api_key),
            max_attempts=router.max_attempts,
            connect_timeout=router.connect_timeout,
            response_timeout=router.response_timeout,
            max_body_bytes=server.max_body_bytes,
            max_connections=most_connections(files_each=FILES_PER_REQUEST),
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._config = write_bootstrap(self._settings)
            if not (folder / REPLICAS).exists():
                write_replicas(folder, ())
        except OSError as error:
            raise ConfigError(f"--envoy-folder {folder}: {error.strerror}") from None
        self._addresses = EndpointAddresses(lambda found: write_replicas(folder, found))
        self._server: PickerServer | None = None
        self._envoy: EnvoyProcess | None = None

    @property
    def url(self) -> str:
        """The address of Envoy's clients."""
        return url_of(self._settings.host, self._settings.port)

    def changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Note the replicas that there are now, for Envoy too."""
        plain = [replica for replica in replicas if not replica.url.startswith("https:")]
        for replica in replicas:
            if replica not in plain:
                self._log.line(f"headstart: Envoy is set up for plain HTTP here; it does not use {replica.url}")
        self._addresses.changed(plain)

    async def start(self, state: GatewayState) -> None:
        """Serve. Raises ConfigError."""
        socket = self._settings.folder / SOCKET
        socket.unlink(missing_ok=True)
        if self._binary is not None:  # before gRPC has threads, which a fork would have to stop
            self._envoy = EnvoyProcess(self._binary, self._config, self._log)
            self.ended = self._envoy.ended
        self._server = PickerServer(state, self._addresses, trusts_address=True)
        await self._server.start(f"unix:{socket}")
        os.chmod(socket, 0o600)  # a writer is taken for Envoy
        if self._envoy is None:
            return
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        picker = self._server
        await self._envoy.wait_ready(host.strip("[]"), int(port), lambda: picker.num_requests > 0)

    async def stop(self, *, at_once: bool) -> None:
        """Stop serving."""
        self._addresses.close()
        if self._envoy is not None:
            await self._envoy.stop()
        if self._server is not None:
            await self._server.close()
        if self._own_folder is not None:
            self._own_folder.cleanup()
