"""A gRPC server that echoes messages, and frames for it without a client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import hpack
from gateway.harness import run

from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.grpc_calls import GrpcConnectionTable
from headstart.gateway.picker.grpc_connection import GrpcConnection
from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStatusCode, GrpcStream

ECHO = "/test/Echo"


class EchoServer:
    """Answers each message by itself; `cancelled` counts calls that were given up."""

    def __init__(self, callers: GrpcConnectionTable | None = None) -> None:
        self.callers = callers or GrpcConnectionTable()
        self.connections: list[GrpcConnection] = []
        self.errors: list[Exception] = []
        self.num_open = self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0

    def connection(self) -> GrpcConnection:
        handlers = {ECHO: self._echo, "/test/Fail": self._fail, "/test/Refuse": self._refuse}
        self.connections.append(GrpcConnection(handlers, self.callers, self.errors.append))
        return self.connections[-1]

    async def _echo(self, stream: GrpcStream) -> None:
        self.num_open += 1
        try:
            await self.gate.wait()
            while (message := await stream.read()) is not None:
                await stream.write(message)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _fail(self, stream: GrpcStream) -> None:
        raise ValueError("our mistake")

    async def _refuse(self, stream: GrpcStream) -> None:
        raise GrpcError(GrpcStatusCode.NOT_FOUND, "100% of them are gone")


@asynccontextmanager
async def serving(callers: GrpcConnectionTable | None = None) -> AsyncIterator[EchoServer]:
    echo = EchoServer(callers)
    server = await asyncio.get_running_loop().create_server(echo.connection, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    try:
        yield echo
    finally:
        server.close()
        echo.callers.close()


def with_server(test: Callable[[EchoServer], Any], **limits: int) -> None:
    async def body() -> None:
        async with serving(GrpcConnectionTable(**limits)) as server:
            await test(server)

    run(body())


class Transport:
    """The bytes that a connection writes."""

    def get_extra_info(self, name: str) -> None:
        """There is no socket."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def frames(self) -> list[tuple[h2.FrameHeader, bytes]]:
        found, at = [], 0
        while at < len(self.written):
            head = h2.read_frame_header(self.written, at)
            found.append((head, self.written[at + 9 : at + 9 + head.length]))
            at += 9 + head.length
        return found


def connected(server: EchoServer) -> tuple[GrpcConnection, Transport]:
    connection, transport = server.connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def opening(path: str = ECHO, stream_id: int = 1, flags: int = h2.END_HEADERS) -> bytes:
    return h2.make_frame(h2.HEADERS, flags, stream_id, _first_block(path))


@cache
def _first_block(path: str) -> bytes:
    """Return the headers of a connection's first call; the tests of floods send the same ten thousand times."""
    return hpack.Encoder().encode([(":method", "POST"), (":path", path), ("te", "trailers")])


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4) + data
