"""PickerServer: the gRPC server of an endpoint picker: the external processing service, and health services.

Services by name are `liveness`, `readiness`, and the external processing service itself.
"""

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any

from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from headstart.core.errors import ConfigError, DrainingError
from headstart.gateway.gateway_app import build_front
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.endpoint_addresses import EndpointAddresses
from headstart.gateway.picker.endpoint_picker import EndpointPicker
from headstart.gateway.picker.ext_proc_messages import call_of, decoded
from headstart.gateway.picker.ext_proc_stream import ExtProcStream
from headstart.gateway.picker.grpc_connection import GrpcConnection
from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStream, Status
from headstart.gateway.picker.peer_limits import Callers
from headstart.http.http_errors import HttpError

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
READY = ("", "readiness", SERVICE)  # health services that need a replica; `liveness` needs none
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
WATCH_SECONDS = 0.5  # between two looks for a client that watches
MAX_WATCHERS = 64


class PickerServer:
    """The gRPC server of one router. `trusts_address`: its only client is our own Envoy."""

    def __init__(self, state: GatewayState, addresses: EndpointAddresses, *, trusts_address: bool = False) -> None:
        self.num_requests = 0
        self._state = state
        self._app: ASGIApp = build_front(state, EndpointPicker(state, addresses).forward)
        self._trusts_address = trusts_address
        self._calls: dict[str, tuple[GrpcStream, ExtProcStream]] = {}  # requests of our own Envoy, by id
        self._ids = count(1)
        self._num_watchers = 0
        self._server: asyncio.Server | None = None
        self._callers = Callers()
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
            self._state.log.failure("internal_error", error, "")

        return GrpcConnection(self._handlers, self._callers, failed)

    def _process(self, stream: GrpcStream) -> Coroutine[Any, Any, None] | None:
        """Begin a call: a request, or the head of an answer that our own Envoy reports. Raises GrpcError."""
        message = stream.first()
        if message is None:
            return None
        first = decoded(message)
        kind = first.WhichOneof("request")
        if kind == "response_headers" and self._trusts_address:
            return self._answered(stream, message, first)
        if kind != "request_headers" or first.observability_mode:
            raise GrpcError(Status.INVALID_ARGUMENT, "the first message must be request_headers")
        call_id = str(next(self._ids)) if self._trusts_address else ""
        request = ExtProcStream(_Peer(stream), first, trusts_address=self._trusts_address, call_id=call_id)
        self.num_requests += 1
        if not request.is_usable:
            raise GrpcError(Status.INVALID_ARGUMENT, "set request_body_mode to FULL_DUPLEX_STREAMED")
        return self._serve(stream, request)

    async def _serve(self, stream: GrpcStream, request: ExtProcStream) -> None:
        if not request.call_id:
            await request.run(self._app)
            return
        self._calls[request.call_id] = (stream, request)
        try:
            await request.run(self._app)
        finally:
            del self._calls[request.call_id]

    def _answered(
        self, stream: GrpcStream, message: bytes, head: pb.ProcessingRequest
    ) -> Coroutine[Any, Any, None] | None:
        """Pass the head of an answer to its request; reply if Envoy waits. One whose request has ended is ignored."""
        call = self._calls.get(call_of(head))
        if call is None:
            return None
        call[0].push(message)
        return None if head.observability_mode else call[1].check(_Peer(stream))

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
            raise GrpcError(Status.NOT_FOUND, "there is no such service")
        await stream.write(pb.HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, stream: GrpcStream) -> None:
        service, last = _service_in(stream), None
        if self._num_watchers >= MAX_WATCHERS:
            raise GrpcError(Status.RESOURCE_EXHAUSTED, "too many clients watch; use Check")
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


class _Peer:
    """The messages of one request."""

    def __init__(self, stream: GrpcStream) -> None:
        self._stream = stream

    async def read(self) -> pb.ProcessingRequest | None:
        """Return the next message; None at the end. One that cannot be read ends the call, which is cancelled."""
        message = await self._stream.read()
        if message is None:
            return None
        try:
            return decoded(message)
        except GrpcError as error:
            await self._stream.give_up(error.status, str(error))

    async def write(self, *responses: pb.ProcessingResponse) -> None:
        """Send messages together."""
        await self._stream.write(*[response.SerializeToString() for response in responses])

    def end_gently(self) -> None:
        """Let the call end, in place of its cancellation, when Envoy gives the request up."""
        self._stream.ends_gently = True


def _service_in(stream: GrpcStream) -> str:
    """Return the name in a health request. Raises GrpcError."""
    try:
        return pb.HealthCheckRequest.FromString(stream.first() or b"").service
    except DecodeError:
        raise GrpcError(Status.INVALID_ARGUMENT, "a message that cannot be decoded") from None
