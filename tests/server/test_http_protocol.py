"""BoundedHttpProtocol on real sockets: everything beside the body of a request is bounded, in bytes and in time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from server.harness import PATIENCE, Server, fake_server
from server.test_bad_input import Raw

from headstart.http.lifecycle import UvicornWithoutSignals, open_listener, uvicorn_config
from headstart.http.protocol import http_protocol, write_watch
from headstart.http.protocol.body_writer import writer_of_scope
from headstart.http.protocol.connections import ConnectionTable

MANY = 200  # times 1 MB, which a server that keeps or takes it all would be sent
CHUNKED = b"host: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
ALLOWED = 40e6  # bytes sent until the closed connection is noticed: the buffers of both sockets, and what lingers
KEY = "secret"


@pytest.fixture(scope="module")
def keyed(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that wants a key."""
    with fake_server(folder, tmp_path_factory.mktemp("keyed") / "log", api_key=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that answers anyone."""
    with fake_server(folder, tmp_path_factory.mktemp("open") / "log") as running:
        yield running


def push(server: Server, head: bytes, piece: bytes) -> tuple[int, str, int]:
    """Sends a head and then one piece again and again; the status, the answer, and how much could be sent."""
    raw = Raw(server)
    raw.say(head)
    for _ in range(MANY):
        if not raw.say(piece):
            break
    status, text = raw.answer()
    return status, text, raw.sent


TRAILERS = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 990) for i in range(1000))
EXCESSES = {
    "trailers": (CHUNKED + b"0\r\n", TRAILERS),
    "trailers of one field": (CHUNKED + b"2\r\n{}\r\n0\r\nx-long: ", b"a" * 1_000_000),
    "trailers without a name's end": (CHUNKED + b"0\r\n", b"a" * 1_000_000),
    "chunk extensions": (CHUNKED + b"5;ext=", b"a" * 1_000_000),
    "a chunk size without end": (CHUNKED, b"0" * 1_000_000),
    "extensions of small chunks": (CHUNKED, (b"1;" + b"a" * 994 + b"\r\n \r\n") * 1000),
}


@pytest.mark.parametrize("name", EXCESSES)
def test_what_frames_a_body_is_bounded_and_then_the_connection_closes(open_server: Server, name: str) -> None:
    head, piece = EXCESSES[name]
    status, text, sent = push(open_server, b"POST /v1/completions HTTP/1.1\r\n" + head, piece)
    assert status in (400, 431) and '"error":' in text and sent < ALLOWED


@pytest.mark.parametrize("name", EXCESSES)
def test_without_a_key_nothing_more_is_taken(keyed: Server, name: str) -> None:
    head, piece = EXCESSES[name]
    status, text, sent = push(keyed, b"POST /v1/completions HTTP/1.1\r\n" + head, piece)
    assert status in (400, 401, 431) and "connection: close" in text and sent < ALLOWED


@pytest.mark.parametrize("path", [b"/v1/completions", b"/livez", b"/unknown"])
def test_an_answer_before_the_end_of_the_body_closes_the_connection(keyed: Server, path: bytes) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
    status, text, sent = push(keyed, head, b"a" * 1_000_000)
    assert status in (401, 404, 405) and "connection: close" in text and sent < ALLOWED


def test_a_key_in_a_trailer_is_no_key(keyed: Server) -> None:
    raw = Raw(keyed)
    body = b'{"prompt": "a", "max_tokens": 1}'
    raw.say(b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + CHUNKED + b"%x\r\n%s\r\n" % (len(body), body))
    raw.say(b"0\r\nauthorization: Bearer " + KEY.encode() + b"\r\n\r\n")
    assert raw.answer()[0] == 401


def test_trailers_are_dropped_and_the_request_is_answered(open_server: Server) -> None:
    raw = Raw(open_server)
    body = b'{"prompt": "a", "max_tokens": 1}'
    raw.say(b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + CHUNKED + b"%x\r\n%s\r\n" % (len(body), body))
    raw.say(b"0\r\nx-request-id: of-the-trailer\r\ncontent-type: text/plain\r\n\r\n")
    status, text = raw.answer()
    assert status == 200 and "of-the-trailer" not in text


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_in_small_chunks_is_read(open_server: Server, size: int) -> None:
    raw = Raw(open_server)
    body = b'{"prompt": "a", "max_tokens": 1, "user": "' + b"u" * 200 + b'"}' + b" " * 200_000
    raw.say(b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + CHUNKED)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    raw.say(b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
    assert raw.answer()[0] == 200


def test_more_headers_than_any_client_sends_are_431(open_server: Server) -> None:
    raw = Raw(open_server)
    raw.say(b"GET /livez HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(300)) + b"\r\n")
    status, text = raw.answer()
    assert status == 431 and "more than 256 headers" in text


def test_a_request_to_upgrade_is_answered_and_the_connection_closes(open_server: Server) -> None:
    raw = Raw(open_server)
    raw.say(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    status, text = raw.answer()
    assert status == 200 and "connection: close" in text


@pytest.mark.parametrize(
    "frame", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_the_body_of_a_request_to_upgrade_is_not_lost_unnoticed(open_server: Server, frame: bytes) -> None:
    raw = Raw(open_server)
    raw.say(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + frame)
    status, text = raw.answer()
    assert status == 400 and "without Upgrade" in text


# ------------------------------------------------------------------------------- one protocol, in this process

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /p%d HTTP/1.1\r\n\r\n"


class Served:
    """A server in this process around an application that is a coroutine function of scope, receive and send."""

    def __init__(self, port: int, table: ConnectionTable, http: UvicornWithoutSignals) -> None:
        self.port, self.table, self.http = port, table, http

    async def connect(self, say: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(say)
        return reader, writer

    async def connections(self, count: int) -> None:
        """Waits until so many are open."""
        async with asyncio.timeout(PATIENCE):
            while len(self.http.server_state.connections) != count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(app: Any, cap: int = 100) -> AsyncIterator[Served]:
    listener, table = open_listener("127.0.0.1", 0), ConnectionTable(cap)
    http = UvicornWithoutSignals(uvicorn_config(app, table))
    running = asyncio.create_task(http.serve(sockets=[listener]))
    async with asyncio.timeout(PATIENCE):
        while not http.started:
            await asyncio.sleep(0.01)
    try:
        yield Served(listener.getsockname()[1], table, http)
    finally:
        http.should_exit = http.force_exit = True
        await running


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), PATIENCE))  # type: ignore[arg-type]


async def answer(send: Any, body: bytes) -> None:
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path, at once."""
    await answer(send, scope["path"].encode())


async def rest(client: Client) -> bytes:
    """Everything that comes until the connection is closed."""
    try:
        return await client[0].read()
    except ConnectionError:
        return b""


class Gated:
    """An application that answers once its gate is open, and notes what it was asked and which clients went."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.gone: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.asked.append(path)
        opened = asyncio.create_task(self.gate.wait())
        left = asyncio.create_task(self._until_gone(receive))
        await asyncio.wait([opened, left], return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not opened.done():
            opened.cancel()
            self.gone.append(path)
            return
        await answer(send, path.encode())

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.asked) < count:
                await asyncio.sleep(0.01)


async def streamed(scope: Any, receive: Any, send: Any) -> None:
    """Answers in parts, without a length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"data: 1\n\n", b"data: 2\r\n5\r\n\n\n", b""):
        await send({"type": "http.response.body", "body": part, "more_body": bool(part)})


def test_a_client_of_http_1_0_gets_a_stream_without_chunks_until_the_end_of_the_connection() -> None:
    async def test() -> None:
        async with serving(streamed) as served:
            for keep in (b"", b"connection: keep-alive\r\n"):
                old = await rest(await served.connect(b"GET /a HTTP/1.0\r\n" + keep + b"\r\n"))
                head, _, body = old.partition(b"\r\n\r\n")
                assert b"transfer-encoding" not in head.lower()
                assert body == b"data: 1\n\ndata: 2\r\n5\r\n\n\n"
            new = await rest(await served.connect(b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"))
            assert b"transfer-encoding: chunked" in new
        async with serving(echo) as served:
            answered = await rest(await served.connect(b"GET /a HTTP/1.0\r\n\r\n"))
            assert answered.endswith(b"content-length: 2\r\nconnection: close\r\n\r\n/a")

    run(test)


def test_a_client_that_ended_its_half_gets_its_answer() -> None:
    """As `nc -N` and `socat` do after the request."""

    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            client = await served.connect(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
            await app.until_asked(1)
            client[1].write_eof()
            await asyncio.sleep(0.05)
            app.gate.set()
            answered = await rest(client)
            assert answered.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and answered.endswith(b"/a")
            assert app.gone == []

    run(test)


def test_a_client_that_is_gone_is_told_from_one_that_ended_its_half() -> None:
    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            client = await served.connect(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
            await app.until_asked(1)
            client[1].close()
            async with asyncio.timeout(PATIENCE):
                while app.gone != ["/a"]:
                    await asyncio.sleep(0.01)

    run(test)


def test_a_half_of_a_request_has_no_answer() -> None:
    async def test() -> None:
        async with serving(echo) as served:
            client = await served.connect(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-le")
            client[1].write_eof()
            assert await rest(client) == b""

    run(test)


def test_requests_sent_ahead_are_held_unparsed_and_all_answered_in_order() -> None:
    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            reader, writer = client = await served.connect()
            number = 20_000
            writer.write(b"".join(GET % i for i in range(number)))
            await app.until_asked(1)
            await asyncio.sleep(0.3)
            (connection,) = served.http.server_state.connections
            assert app.asked == ["/p0"] and len(connection.pipeline) < 100  # type: ignore[union-attr]
            app.gate.set()
            for i in range(number):
                head = await reader.readuntil(b"\r\n\r\n")
                path = b"/p%d" % i
                assert b"content-length: %d\r\n" % len(path) in head and await reader.readexactly(len(path)) == path
            client[1].close()

    run(test)


def test_a_client_that_goes_with_requests_sent_ahead_is_gone_for_the_one_under_way() -> None:
    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            _, writer = await served.connect(GET % 1 + GET % 2)
            await app.until_asked(1)
            writer.transport.abort()
            await served.connections(0)
            await asyncio.sleep(0.05)
            assert app.gone == ["/p1"] and app.asked == ["/p1"]

    run(test)


def test_what_is_no_http_behind_a_request_never_gets_into_its_answer() -> None:
    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            client = await served.connect(GET % 1)
            await app.until_asked(1)
            client[1].write(b"no http\r\n\r\n")
            await asyncio.sleep(0.1)
            app.gate.set()
            text = await rest(client)
            assert text.startswith(b"HTTP/1.1 200") and text.endswith(b"/p1") and b"400" not in text

    run(test)


def test_half_a_head_behind_a_request_waits_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)

    async def test() -> None:
        app = Gated()
        async with serving(app) as served:
            client = await served.connect(GET % 1 + b"GET /2 HT")
            await app.until_asked(1)
            await asyncio.sleep(0.5)
            app.gate.set()
            text = await rest(client)
            assert text.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in text

    run(test)


@pytest.mark.parametrize("begin", [b"", GET % 1])
def test_a_connection_that_says_only_empty_lines_is_closed(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)

    async def test() -> None:
        async with serving(echo) as served:
            _, writer = await served.connect(begin)
            await served.connections(1)
            while served.http.server_state.connections:
                writer.write(b"\r\n")
                await asyncio.sleep(0.05)

    run(test)


def test_empty_lines_between_requests_are_bounded_in_bytes() -> None:
    async def test() -> None:
        async with serving(echo) as served:
            client = await served.connect(GET % 1 + b"\r\n" * 500_000)
            assert (await rest(client)).startswith(b"HTTP/1.1 200")  # and the connection is closed

    run(test)


@pytest.mark.parametrize("size", [1_000, 50_000_000])
def test_a_client_that_does_not_read_its_answer_is_cut(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(write_watch, "WRITE_SECONDS", 0.3)

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answer(send, b"a" * size)

        async with serving(app) as served:
            reader, writer = await served.connect()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(GET % 1 * 100)
                    await asyncio.wait_for(writer.drain(), PATIENCE)
                    await asyncio.sleep(0.001)
                    if not served.http.server_state.connections:
                        raise ConnectionError
            await served.connections(0)

    run(test)


def test_a_body_that_the_application_does_not_read_is_not_received() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()
            await answer(send, b"x")

        async with serving(app) as served:
            client = await served.connect(b"POST / HTTP/1.1\r\ncontent-length: 100000000\r\n\r\n" + b"a" * 20_000_000)
            await served.connections(1)
            await asyncio.sleep(0.3)
            (connection,) = served.http.server_state.connections
            assert len(connection.cycle.body) < 1_000_000  # type: ignore[union-attr]
            gate.set()
            assert b"connection: close" in await client[0].readuntil(b"\r\n\r\n")
            await served.connections(0)

    run(test)


def test_at_the_cap_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    async def test() -> None:
        app = Gated()
        async with serving(app, cap=3) as served:
            silent = [await served.connect() for _ in range(3)]
            await served.connections(3)
            busy = [await served.connect(GET % i) for i in range(3)]
            assert [await rest(client) for client in silent] == [b"", b"", b""]
            await app.until_asked(3)
            refused = await rest(await served.connect(GET % 4))
            assert refused.startswith(b"HTTP/1.1 503") and b'"code":"too_many_connections"' in refused
            app.gate.set()
            for i, (reader, _) in enumerate(busy):
                assert (await reader.readuntil(b"/p%d" % i)).startswith(b"HTTP/1.1 200")
            last = await served.connect(b"GET /5 HTTP/1.1\r\nconnection: close\r\n\r\n")  # in the place of an idle one
            assert (await rest(last)).endswith(b"/5") and len(served.table) == 2

    run(test)


def test_as_many_requests_as_connections_are_answered_at_once() -> None:
    async def test() -> None:
        app, number = Gated(), 400
        async with serving(app, cap=number) as served:
            clients = [await served.connect(b"GET /a HTTP/1.1\r\nconnection: close\r\n\r\n") for _ in range(number)]
            await app.until_asked(number)
            app.gate.set()
            for client in clients:
                assert (await rest(client)).endswith(b"/a")

    run(test)


def test_parts_of_a_body_can_be_written_in_plain_calls() -> None:
    ready = list[bool | None]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        writer = writer_of_scope(scope)
        if writer is None:
            ready.append(None)
        else:
            ready.append(writer.is_ready)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if writer is not None:
            ready.append(writer.is_ready)
            writer.write(b"one")
            writer.write(b"two")
        await send({"type": "http.response.body", "body": b"three"})
        if writer is not None:
            ready.append(writer.is_ready)

    async def ask(method: str) -> bytes:
        listener = open_listener("127.0.0.1", 0)
        server = UvicornWithoutSignals(uvicorn_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"{method} / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        listener.close()
        return answer

    assert asyncio.run(ask("GET")).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
    assert ready == [False, True, False]
    assert asyncio.run(ask("HEAD")).endswith(b"\r\n\r\n")
    assert ready[3:] == [None]


def test_a_writer_is_not_ready_while_the_client_does_not_read() -> None:
    num_written = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_written
        writer = writer_of_scope(scope)
        assert writer is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while writer.is_ready and num_written < MANY:
            writer.write(bytes(1_000_000))
            num_written += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        listener = open_listener("127.0.0.1", 0)
        server = UvicornWithoutSignals(uvicorn_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while not num_written:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        num_unread = num_written
        assert 0 < num_unread < MANY
        assert len(await reader.read()) > num_unread * 1_000_000
        writer.close()
        server.should_exit = True
        await serving
        listener.close()

    asyncio.run(ask())
