"""PickerServer: the gRPC server of an endpoint picker: the external processing service, and health services.

Services by name are `liveness`, `readiness`, and the external processing service itself.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from starlette.types import ASGIApp

from headstart.core.errors import ConfigError, DrainingError
from headstart.gateway.gateway_app import build_front
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.endpoint_addresses import EndpointAddresses
from headstart.gateway.picker.endpoint_picker import EndpointPicker
from headstart.gateway.picker.ext_proc_stream import ExtProcStream
from headstart.http.http_errors import HttpError

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
READY = ("", "readiness", SERVICE)  # health services that need a replica; `liveness` needs none
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
WATCH_SECONDS = 0.5  # between two looks for a client that watches
MAX_MESSAGE_BYTES = 16 << 20  # Envoy sends a body in pieces, by default of up to 1 MiB
Context = Any  # grpc.aio.ServicerContext is generic in messages of untyped stubs


class PickerServer:
    """The gRPC server of one router. `trusts_address`: its only client is our own Envoy."""

    def __init__(self, state: GatewayState, addresses: EndpointAddresses, *, trusts_address: bool = False) -> None:
        self.num_requests = 0
        self._state = state
        self._app: ASGIApp = build_front(state, EndpointPicker(state, addresses).forward)
        self._trusts_address = trusts_address
        options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        decode, encode = pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
        check = grpc.unary_unary_rpc_method_handler(self._check, decode, encode)
        watch = grpc.unary_stream_rpc_method_handler(self._watch, decode, encode)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check, "Watch": watch}),
            )
        )

    async def start(self, address: str) -> int:
        """Serve at HOST:PORT or unix:PATH; return the port. Raises ConfigError."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for Envoy on {address}: {error}") from None
        await self._server.start()
        return port

    async def close(self) -> None:
        """Stop at once; requests that are still in flight fail."""
        await self._server.stop(None)

    async def _process(self, _requests: AsyncIterator[Any], context: Context) -> None:
        peer = _Peer(context)
        first = await peer.read()
        if first is None:
            return
        if first.WhichOneof("request") != "request_headers" or first.observability_mode:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be request_headers")
        stream = ExtProcStream(peer, first, trusts_address=self._trusts_address)
        self.num_requests += 1
        if not stream.is_usable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "set request_body_mode to FULL_DUPLEX_STREAMED")
        await stream.run(self._app)

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

    async def _check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return pb.HealthCheckResponse(status=status)

    async def _watch(self, request: pb.HealthCheckRequest, context: Context) -> AsyncIterator[pb.HealthCheckResponse]:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield pb.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(WATCH_SECONDS)


class _Peer:
    """The gRPC stream of one request."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> pb.ProcessingRequest | None:
        """Return the next message; None at the end."""
        message = await self._context.read()
        return message if isinstance(message, pb.ProcessingRequest) else None  # grpc.aio.EOF

    async def write(self, response: pb.ProcessingResponse) -> None:
        """Send a message."""
        await self._context.write(response)
