"""EnvoyFront: Envoy as the server of a router's clients.

StandalonePickerFront: an endpoint picker for a gateway's own Envoy.

PickerServer: the gRPC server of an endpoint picker: the external processing service, and health services.

Services by name are `liveness`, `readiness`, and the external processing service itself.
"""

import asyncio
import os
import tempfile
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import ConfigError, DrainingError
from headstart.gateway.gateway_app import build_gateway_app
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.http_front import RouterFront, local_client_url
from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.endpoint_picker import EndpointPicker
from headstart.gateway.picker.envoy_config import (
    REPLICAS,
    SOCKET,
    EnvoySettings,
    write_envoy_config,
    write_envoy_endpoints,
)
from headstart.gateway.picker.envoy_process import EnvoyProcess, find_envoy
from headstart.gateway.picker.ext_proc_messages import call_id_from_metadata, decode_request
from headstart.gateway.picker.ext_proc_stream import ExtProcPeer, ExtProcStream
from headstart.gateway.picker.grpc_calls import GrpcConnectionTable
from headstart.gateway.picker.grpc_connection import GrpcConnection
from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStatusCode, GrpcStream
from headstart.gateway.proxy.proxy import FILES_PER_REQUEST
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.http_errors import HttpError
from headstart.http.lifecycle import open_listener
from headstart.http.logs import ServerLog
from headstart.http.protocol.connections import raise_connection_limit
from headstart.http.web_pages import is_loopback

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
READY = ("", "readiness", SERVICE)  # health services that need a replica; `liveness` needs none
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
WATCH_SECONDS = 0.5  # between two looks for a client that watches
MAX_WATCHERS = 64


class PickerServer:
    """The gRPC server of one router. `trusts_address`: its only client is our own Envoy."""

    def __init__(self, state: GatewayState, addresses: ReplicaIpAddresses, *, trusts_address: bool = False) -> None:
        self.num_requests = 0
        self._state = state
        self._app: ASGIApp = build_gateway_app(state, EndpointPicker(state, addresses).forward)
        self._trusts_address = trusts_address
        self._calls: dict[str, tuple[GrpcStream, ExtProcStream]] = {}  # requests of our own Envoy, by id
        self._ids = count(1)
        self._num_watchers = 0
        self._server: asyncio.Server | None = None
        self._callers = GrpcConnectionTable()
        self._handlers = {
            f"/{SERVICE}/Process": self._process,
            f"/{HEALTH}/Check": self._check,
            f"/{HEALTH}/Watch": self._watch,
        }

    async def start(self, address: str) -> int:
        """Serve at HOST:PORT or unix:PATH; return the port, 0 for a path. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            if address.startswith("unix:"):
                self._server = await loop.create_unix_server(self._connection, address.removeprefix("unix:"))
                return 0
            host, _, port = address.rpartition(":")
            self._server = await loop.create_server(self._connection, host.strip("[]"), int(port), backlog=2048)
            return self._server.sockets[0].getsockname()[1]
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen for Envoy on {address}: {error}") from None

    async def close(self) -> None:
        """Stop at once; requests that are still in flight fail."""
        if self._server is not None:
            self._server.close()
        self._callers.close()

    def _connection(self) -> GrpcConnection:
        def failed(error: Exception) -> None:
            self._state.log.log_exception("internal_error", error, "")

        return GrpcConnection(self._handlers, self._callers, failed)

    def _process(self, stream: GrpcStream) -> Coroutine[Any, Any, None] | None:
        """Begin a call: a request, or the head of an answer that our own Envoy reports. Raises GrpcError."""
        message = stream.take_first()
        if message is None:
            return None
        first = decode_request(message)
        kind = first.WhichOneof("request")
        if kind == "response_headers" and self._trusts_address:
            return self._answered(stream, message, first)
        if kind != "request_headers" or first.observability_mode:
            raise GrpcError(GrpcStatusCode.INVALID_ARGUMENT, "the first message must be request_headers")
        call_id = str(next(self._ids)) if self._trusts_address else ""
        request = ExtProcStream(ExtProcPeer(stream), first, trusts_address=self._trusts_address, call_id=call_id)
        self.num_requests += 1
        if not request.is_usable:
            raise GrpcError(GrpcStatusCode.INVALID_ARGUMENT, "set request_body_mode to FULL_DUPLEX_STREAMED")
        return self._serve(stream, request)

    async def _serve(self, stream: GrpcStream, request: ExtProcStream) -> None:
        if not request.call_id:
            await request.run_app(self._app)
            return
        self._calls[request.call_id] = (stream, request)
        try:
            await request.run_app(self._app)
        finally:
            del self._calls[request.call_id]

    def _answered(
        self, stream: GrpcStream, message: bytes, head: pb.ProcessingRequest
    ) -> Coroutine[Any, Any, None] | None:
        """Pass the head of an answer to its request; reply if Envoy waits. One whose request has ended is ignored."""
        call = self._calls.get(call_id_from_metadata(head))
        if call is None:
            return None
        call[0].inject_message(message)
        return None if head.observability_mode else call[1].attach_answer_peer(ExtProcPeer(stream))

    def _status(self, service: str) -> int:
        if service == "liveness":
            return _SERVING
        if service not in READY:
            return _UNKNOWN
        try:
            self._state.check_ready()
        except (DrainingError, HttpError):
            return _NOT_SERVING
        return _SERVING

    async def _check(self, stream: GrpcStream) -> None:
        status = self._status(_service_in(stream))
        if status == _UNKNOWN:
            raise GrpcError(GrpcStatusCode.NOT_FOUND, "there is no such service")
        await stream.write(pb.HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, stream: GrpcStream) -> None:
        service, last = _service_in(stream), None
        if self._num_watchers >= MAX_WATCHERS:
            raise GrpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, "too many clients watch; use Check")
        self._num_watchers += 1
        try:
            while True:
                status = self._status(service)
                if status != last:
                    await stream.write(pb.HealthCheckResponse(status=status).SerializeToString())
                    last = status
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self._num_watchers -= 1


def _service_in(stream: GrpcStream) -> str:
    """Return the name in a health request. Raises GrpcError."""
    try:
        return pb.HealthCheckRequest.FromString(stream.take_first() or b"").service
    except DecodeError:
        raise GrpcError(GrpcStatusCode.INVALID_ARGUMENT, "a message that cannot be decoded") from None


def make_envoy_fronts(router: RouterOptions, server: ServerOptions) -> list[RouterFront]:
    """Return the fronts of the options about Envoy. Raises ConfigError."""
    fronts: list[RouterFront] = []
    if router.envoy != "none":
        fronts.append(EnvoyFront(router, server))
    if router.ext_proc is not None:
        fronts.append(StandalonePickerFront(router.ext_proc))
    return fronts


class StandalonePickerFront:
    """An endpoint picker at HOST:PORT, for gateways."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address that is none."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(f"--ext-proc {address!r} is no address; write HOST:PORT, as in 127.0.0.1:9002")
        self.ended = asyncio.Event()
        self._log = ServerLog()
        self._address = address
        self.is_local = is_loopback(host.strip("[]"))  # only this machine reaches it
        self._addresses = ReplicaIpAddresses()
        self._server: PickerServer | None = None

    @property
    def url(self) -> str:
        """Empty: its clients are proxies."""
        return ""

    def on_replicas_changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Note the replicas that there are now."""
        self._addresses.on_replicas_changed(replicas)

    async def start(self, state: GatewayState) -> None:
        """Serve. Raises ConfigError."""
        self._server = PickerServer(state, self._addresses)
        await self._server.start(self._address)
        if not self.is_local:
            self._log.write_line(
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
        self._log = ServerLog()
        self._binary = None if router.envoy == "external" else find_envoy(router.envoy)
        port = server.port
        if self._binary is not None:
            with open_listener(server.host, server.port) as probe:
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
            max_connections=raise_connection_limit(files_each=FILES_PER_REQUEST),
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._config = write_envoy_config(self._settings)
            if not (folder / REPLICAS).exists():
                write_envoy_endpoints(folder, ())
        except OSError as error:
            raise ConfigError(f"--envoy-folder {folder}: {error.strerror}") from None
        self._addresses = ReplicaIpAddresses(lambda found: write_envoy_endpoints(folder, found))
        self._server: PickerServer | None = None
        self._envoy: EnvoyProcess | None = None

    @property
    def url(self) -> str:
        """The address of Envoy's clients."""
        return local_client_url(self._settings.host, self._settings.port)

    def on_replicas_changed(self, replicas: Sequence[ReplicaAddress]) -> None:
        """Note the replicas that there are now, for Envoy too."""
        plain = [replica for replica in replicas if not replica.url.startswith("https:")]
        for replica in replicas:
            if replica not in plain:
                self._log.write_line(f"headstart: Envoy is set up for plain HTTP here; it does not use {replica.url}")
        self._addresses.on_replicas_changed(plain)

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
