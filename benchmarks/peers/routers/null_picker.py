"""Envoy as `headstart route --envoy` configures it, with a picker that always names the first replica.

What is left of the cost is Envoy's and the protocol's: there is no application, no routing core and no index. Kinds:

- `none`: no picker, nor the filters that ask one;
- `frames`: the router's own HTTP/2 server;
- `aio` and `threads`: the servers of `grpcio`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))  # the Headstart of this checkout

import grpc
import grpc.aio
import uvloop

from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.envoy_config import SOCKET, EnvoySettings, write_envoy_config, write_envoy_endpoints
from headstart.gateway.picker.envoy_process import EnvoyProcess
from headstart.gateway.picker.ext_proc_messages import (
    ANSWER_HEADERS,
    CALL,
    DESTINATION,
    LB,
    header_mutation,
    replaced_body_response,
)
from headstart.gateway.picker.grpc_connection import GrpcConnection
from headstart.gateway.picker.grpc_stream import GrpcStream
from headstart.gateway.picker.picker_fronts import HEALTH, SERVICE
from headstart.http.answer_report import REPORT_HEADER
from headstart.http.logs import ServerLog

MAX_BODY_BYTES = 1 << 20
_SERVING = 1


class NullPicker:
    """Replies to the messages of one call."""

    def __init__(self, address: str) -> None:
        self.num_requests = 0
        headers = [(DESTINATION.encode(), address.encode()), (b"x-request-id", b"1"), (REPORT_HEADER, b"1")]
        common = pb.CommonResponse(header_mutation=header_mutation(headers), clear_route_cache=True)
        head = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        head.dynamic_metadata.update({LB: {DESTINATION: address, CALL: "1", ANSWER_HEADERS: {"x-request-id": "1"}}})
        self._head = head.SerializeToString()

    def replies(self, message: bytes, pieces: list[bytes]) -> list[bytes]:
        """Return the replies to one message; `pieces` of the body are kept until its end."""
        request = pb.ProcessingRequest.FromString(message)
        kind = request.WhichOneof("request")
        self.num_requests += kind == "request_headers"
        if kind == "request_headers" and request.request_headers.end_of_stream:
            return [self._head]
        if kind != "request_body":
            return []
        pieces.append(request.request_body.body)
        if not request.request_body.end_of_stream:
            return []
        return [self._head, *[replaced_body_response(piece).SerializeToString() for piece in pieces]]


async def serve_frames(picker: NullPicker, path: str) -> object:
    """Serve by the router's own HTTP/2 server."""

    async def rest(stream: GrpcStream) -> None:
        pieces = list[bytes]()
        stream.ends_gently = True
        while (message := await stream.read()) is not None:
            if found := picker.replies(message, pieces):
                await stream.write(*found)

    def process(stream: GrpcStream) -> Coroutine[Any, Any, None] | None:
        first = pb.ProcessingRequest.FromString(message) if (message := stream.take_first()) else pb.ProcessingRequest()
        if message is None or first.WhichOneof("request") != "request_headers":
            return None  # the head of an answer
        stream.inject_message(message)
        return rest(stream)

    async def check(stream: GrpcStream) -> None:
        await stream.write(pb.HealthCheckResponse(status=_SERVING).SerializeToString())

    handlers = {f"/{SERVICE}/Process": process, f"/{HEALTH}/Check": check}
    connections = set[GrpcConnection]()
    return await asyncio.get_running_loop().create_unix_server(
        lambda: GrpcConnection(handlers, connections, lambda error: print(error, file=sys.stderr)), path
    )


async def serve_aio(picker: NullPicker, path: str) -> object:
    """Serve by `grpcio` on the event loop."""

    async def process(messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        pieces = list[bytes]()
        async for message in messages:
            for reply in picker.replies(message, pieces):
                yield reply

    async def check(message: bytes, context: object) -> bytes:
        return pb.HealthCheckResponse(status=_SERVING).SerializeToString()

    server = grpc.aio.server()
    _listen(server, path, process, check)
    await server.start()
    return server


async def serve_threads(picker: NullPicker, path: str) -> object:
    """Serve by `grpcio` with a thread per call."""

    def process(messages: Iterable[bytes], context: object) -> Iterator[bytes]:
        pieces = list[bytes]()
        for message in messages:
            yield from picker.replies(message, pieces)

    def check(message: bytes, context: object) -> bytes:
        return pb.HealthCheckResponse(status=_SERVING).SerializeToString()

    server = grpc.server(ThreadPoolExecutor(1024))
    _listen(server, path, process, check)
    server.start()
    return server


def _listen(server: Any, path: str, process: Callable[..., Any], check: Callable[..., Any]) -> None:
    services = {
        SERVICE: {"Process": grpc.stream_stream_rpc_method_handler(process)},
        HEALTH: {"Check": grpc.unary_unary_rpc_method_handler(check)},
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(*item) for item in services.items()])
    server.add_insecure_port(f"unix:{path}")


def without_picker(config: Path) -> None:
    """Remove the filters of the picker from a configuration; replicas are used in turn."""
    document = json.loads(config.read_text())
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    config.write_text(json.dumps(document))


async def serve(envoy: Path, port: int, folder: Path, kind: str, replicas: list[str]) -> None:
    """Serve until Envoy ends."""
    settings = EnvoySettings(
        folder=folder,
        host="127.0.0.1",
        port=port,
        fails_open=True,
        max_attempts=3,
        connect_timeout=2.0,
        response_timeout=600.0,
        max_body_bytes=MAX_BODY_BYTES,
        max_connections=10_000,
    )
    config = write_envoy_config(settings)
    write_envoy_endpoints(folder, replicas)
    picker = NullPicker(replicas[0])
    served: object = None
    if kind == "none":
        without_picker(config)
    else:
        start = {"frames": serve_frames, "aio": serve_aio, "threads": serve_threads}[kind]
        served = await start(picker, str(folder / SOCKET))
    process = EnvoyProcess(envoy, config, ServerLog())
    await process.ended.wait()
    del served


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("none", "frames", "aio", "threads"), default="frames")
    parser.add_argument("--envoy", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--replica", action="append", required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="n-") as folder:
        uvloop.run(serve(given.envoy, given.port, Path(folder), given.kind, given.replica))


if __name__ == "__main__":
    main()
