"""CallbackReader on real connections: pieces are taken in the callback, and all else is as with the client's reader."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import aiohttp
import pytest
import trustme
import uvloop

from headstart.http.protocol.callback_reader import CallbackReader

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
SILENCE = 0.05  # seconds
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


@asynccontextmanager
async def answered(script: Script, *, timeout: float | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
    """A response whose head has arrived, and whose body the script writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline() not in (b"\r\n", b""):
            pass
        writer.write(HEAD)
        await script(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = aiohttp.ClientTimeout(total=None, sock_read=timeout)
    async with server, aiohttp.ClientSession(timeout=limits) as session:
        response = await session.get(f"http://127.0.0.1:{port}/")
        yield response
        response.close()


def run(test: Awaitable[None]) -> None:
    async def wait() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(wait())


def test_pieces_are_taken_without_waking_the_reading_task_and_the_others_are_returned() -> None:
    async def test() -> None:
        taken, may_go_on = list[bytes](), asyncio.Event()

        async def script(writer: asyncio.StreamWriter) -> None:
            for piece in (b"one", b"two", b"not this", b"three"):
                await may_go_on.wait()
                may_go_on.clear()
                writer.write(chunk(piece))
            writer.write(END)

        def take(piece: bytes) -> bool:
            may_go_on.set()
            if piece.startswith(b"not"):
                return False
            taken.append(piece)
            return True

        async with answered(script) as response:
            reader = CallbackReader(response, take)
            asyncio.get_running_loop().call_soon(may_go_on.set)
            assert await reader.read_untaken() == b"not this"
            assert taken == [b"one", b"two"]
            assert await reader.read_untaken() == b""
            assert b"".join(taken) == b"onetwothree"
            reader.close()

    run(test())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_pieces_over_tls_are_taken_and_the_connection_serves_the_next_request(
    loop: Callable[[Coroutine[None, None, None]], None],
) -> None:
    pieces = [b"piece %d" % number for number in range(20)]
    connections = list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            writer.write(HEAD)
            for piece in pieces:
                writer.write(chunk(piece))
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(END)

    async def test() -> None:
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority, trusted = trustme.CA(), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(ours)
        authority.configure_trust(trusted)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=ours)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, aiohttp.ClientSession() as session:
            for _ in range(2):
                taken, returned = list[bytes](), list[bytes]()
                async with session.get(url, ssl=trusted) as response:
                    reader = CallbackReader(response, lambda piece, taken=taken: not taken.append(piece))
                    while piece := await reader.read_untaken():
                        returned.append(piece)
                    reader.close()
                assert b"".join(returned + taken) == b"".join(pieces) and len(taken) > 10
            assert len(connections) == 1

    loop(test())


def test_what_take_raises_is_raised_by_read() -> None:
    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.01)
            writer.write(chunk(b"piece"))

        def take(piece: bytes) -> bool:
            raise ValueError(piece)

        async with answered(script) as response:
            reader = CallbackReader(response, take)
            with pytest.raises(ValueError, match="piece"):
                await reader.read_untaken()
            reader.close()

    run(test())


def test_pieces_that_arrive_while_nothing_reads_are_returned_later_in_order() -> None:
    pieces = [bytes([65 + index % 26]) * 100_000 for index in range(30)]  # more than the client's reader keeps

    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(chunk(piece))
                await writer.drain()
            writer.write(END)

        async with answered(script) as response:
            reader, found = CallbackReader(response, lambda piece: False), list[bytes]()
            while True:
                await asyncio.sleep(0.01)
                if not (piece := await reader.read_untaken()):
                    break
                found.append(piece)
            assert b"".join(found) == b"".join(pieces)
            reader.close()

    run(test())


def test_a_silent_replica_ends_the_wait_with_a_timeout() -> None:
    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            writer.write(chunk(b"piece"))
            await asyncio.sleep(10)

        async with answered(script, timeout=SILENCE) as response:
            reader = CallbackReader(response, lambda piece: False)
            assert await reader.read_untaken() == b"piece"
            with pytest.raises(TimeoutError):
                await reader.read_untaken()
            reader.close()

    run(test())


def test_time_in_which_nothing_reads_is_no_silence_of_the_replica() -> None:
    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            writer.write(chunk(b"one"))
            await asyncio.sleep(5 * SILENCE)
            writer.write(chunk(b"two") + END)

        async with answered(script, timeout=4 * SILENCE) as response:
            reader = CallbackReader(response, lambda piece: False)
            assert await reader.read_untaken() == b"one"
            await asyncio.sleep(3 * SILENCE)
            assert await reader.read_untaken() == b"two"
            assert await reader.read_untaken() == b""
            reader.close()

    run(test())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("ending", [b"", b"5\r\nab", b"no chunk size\r\n"])
def test_a_stream_that_breaks_off_raises_an_error_of_the_client(ending: bytes, waits: bool) -> None:
    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.01)
            writer.write(chunk(b"piece"))
            await asyncio.sleep(0.01)
            writer.write(ending)
            await asyncio.sleep(0.01)
            writer.close()

        async with answered(script) as response:
            reader = CallbackReader(response, lambda piece: True)
            await asyncio.sleep(0 if waits else 0.1)
            with pytest.raises(aiohttp.ClientError):
                while await reader.read_untaken():
                    pass
            reader.close()

    run(test())


def test_the_connection_serves_further_requests_after_the_stream() -> None:
    ports = set[int]()

    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ports.add(writer.get_extra_info("peername")[1])
            while await reader.readline():
                while await reader.readline() not in (b"\r\n", b""):
                    pass
                writer.write(HEAD)
                await asyncio.sleep(0.01)
                writer.write(chunk(b"piece"))
                await asyncio.sleep(0.01)
                writer.write(END)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, aiohttp.ClientSession() as session:
            for _ in range(3):
                async with session.get(url) as response:
                    reader = CallbackReader(response, lambda piece: True)
                    assert await reader.read_untaken() == b""
                    reader.close()
            async with session.get(url) as response:
                assert await response.read() == b"piece"

    run(test())
    assert len(ports) == 1
