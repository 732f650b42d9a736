"""The gRPC server against grpcio's client, and against bytes that no client sends."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import hpack
import pytest
from gateway.grpc_harness import ECHO, EchoServer, connected, message, opening, with_server
from hypothesis import given, settings
from hypothesis import strategies as st
from server.harness import until

from headstart.gateway.picker import grpc_stream
from headstart.gateway.picker import http2_frames as h2


def channel_to(server: EchoServer, *options: Any) -> Any:
    sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=[*sizes, *options])


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_536, 1_000_000, 6_000_000])
def test_messages_of_any_size_pass_both_ways(size: int) -> None:
    async def test(server: EchoServer) -> None:
        async with channel_to(server) as channel:
            call = channel.stream_stream(ECHO)()
            message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            for _ in range(3):
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK
        assert not server.errors

    with_server(test)


def test_many_calls_at_once_keep_their_messages_apart() -> None:
    async def test(server: EchoServer) -> None:
        async with channel_to(server) as channel:

            async def one(number: int) -> None:
                call = channel.stream_stream(ECHO)()
                for turn in range(3):
                    message = f"{number}/{turn}/".encode() * (1 + 3_000 * (number % 7))
                    await call.write(message)
                    assert await call.read() == message
                await call.done_writing()
                assert await call.code() == grpc.StatusCode.OK

            await asyncio.gather(*(one(number) for number in range(60)))
        assert server.num_open == 0

    with_server(test)


def test_a_cancelled_call_is_cancelled_here() -> None:
    async def test(server: EchoServer) -> None:
        async with channel_to(server) as channel:
            call = channel.stream_stream(ECHO)()
            await call.write(b"x")
            await call.read()
            call.cancel()
            await until(lambda: server.cancelled == 1)
            other = channel.stream_stream(ECHO)()
            await other.write(b"still here")
            assert await other.read() == b"still here"
        await until(lambda: server.cancelled == 2)

    with_server(test)


def test_a_client_that_is_not_read_is_slowed_down() -> None:
    async def test(server: EchoServer) -> None:
        server.gate.clear()
        async with channel_to(server) as channel:
            call = channel.stream_stream(ECHO)()

            async def send() -> None:
                for _ in range(100):
                    await call.write(b"x" * 500_000)
                await call.done_writing()

            sending = asyncio.create_task(send())
            await until(lambda: server.num_open == 1)
            await asyncio.sleep(0.3)
            (connection,) = server.connections
            (stream,) = connection._calls.open.values()
            assert stream.held_bytes <= grpc_stream.STREAM_WINDOW + (grpc_stream.MAX_QUEUED + 1) * 500_005
            server.gate.set()
            count = 0
            while await call.read() is not grpc.aio.EOF:
                count += 1
            await sending
            assert count == 100

    with_server(test)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/test/Nothing", grpc.StatusCode.UNIMPLEMENTED),
        ("/test/Fail", grpc.StatusCode.INTERNAL),
        ("/test/Refuse", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_a_call_that_fails_has_a_status(path: str, status: grpc.StatusCode) -> None:
    async def test(server: EchoServer) -> None:
        async with channel_to(server) as channel:
            call = channel.stream_stream(path)()
            if path != "/test/Nothing":  # whose call ends before a message: grpcio calls a write to it INTERNAL
                await call.write(b"")
            assert await call.code() == status
        assert len(server.errors) == (path == "/test/Fail")

    with_server(test)


def test_compressed_and_endless_messages_are_refused() -> None:
    async def test(server: EchoServer) -> None:
        async with channel_to(server) as channel:
            call = channel.stream_stream(ECHO)(compression=grpc.Compression.Gzip)
            await call.write(b"x" * 10_000)
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            call = channel.stream_stream(ECHO)()
            await call.write(b"x" * (grpc_stream.MAX_MESSAGE_BYTES + 1))
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    with_server(test)


# ---------------------------------------------------------------------------------------------------------- bare frames


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6), st.data())
def test_a_call_is_the_same_however_its_bytes_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    async def test(server: EchoServer) -> None:
        packed = b"".join(map(message, messages))
        cut = data.draw(st.integers(0, len(packed)))
        frames = [h2.make_frame(h2.DATA, 0, 1, packed[:cut]), h2.make_frame(h2.DATA, h2.END_STREAM, 1, packed[cut:])]
        sent = h2.PREFACE + h2.settings_frame() + opening() + b"".join(frames)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
        connection, transport = connected(server)
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            connection.data_received(sent[start:end])
        await until(lambda: server.num_open == 0 and not connection._calls._tasks and not connection._late)
        answered = b"".join(payload for head, payload in transport.frames() if head.kind == h2.DATA)
        assert answered == packed and not transport.is_closed
        last, trailers = transport.frames()[-1]
        assert last.flags & h2.END_STREAM and b"grpc-status" in trailers

    with_server(test)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 500), st.lists(st.integers(1, 900), max_size=30))
def test_no_more_is_sent_than_the_windows_allow(size: int, window: int, updates: list[int]) -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        data = message(b"x" * size)
        frames = [h2.make_frame(h2.DATA, 0, 1, data[at : at + 16_384]) for at in range(0, len(data), 16_384)]
        connection.data_received(h2.PREFACE + h2.settings_frame(window=window) + opening() + b"".join(frames))
        allowed = window
        for update in updates:
            connection.data_received(h2.window_update_frame(1, update))
            allowed += update
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        sent = sum(head.length for head, _ in transport.frames() if head.kind == h2.DATA)
        assert sent == min(allowed, len(data))

    with_server(test)


BOMB = b"\x40\x01a\x7f\x81\x1e" + b"b" * 4_000 + b"\xbe" * 9_000  # one long field, 9,000 times by reference
HOSTILE = {
    "no preface": b"GET / HTTP/1.1\r\n\r\n",
    "a long frame": h2.PREFACE + b"\xff\xff\xff" + bytes(6),
    "data of no stream": h2.PREFACE + h2.make_frame(h2.DATA, 0, 1, b"x"),
    "an even stream": h2.PREFACE + opening(stream_id=2),
    "a stream again": h2.PREFACE + opening(stream_id=3) + opening(stream_id=1),
    "interrupted headers": h2.PREFACE + opening(flags=0) + h2.make_frame(h2.PING, 0, 0, bytes(8)),
    "a continuation of nothing": h2.PREFACE + h2.make_frame(h2.CONTINUATION, h2.END_HEADERS, 1),
    "endless headers": h2.PREFACE + opening(flags=0) + h2.make_frame(h2.CONTINUATION, 0, 1, bytes(16_000)) * 5,
    "headers of another": h2.PREFACE + opening(flags=0) + h2.make_frame(h2.CONTINUATION, 0, 3),
    "no headers": h2.PREFACE
    + h2.make_frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    "a header bomb": h2.PREFACE
    + h2.make_frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x40\x01a\x7f\x81\x1e" + b"b" * 4_000 + b"\xbe" * 9_000),
    "too much padding": h2.PREFACE + opening() + h2.make_frame(h2.DATA, h2.PADDED, 1, b"\x05x"),
    "an odd setting": h2.PREFACE + h2.make_frame(h2.SETTINGS, 0, 0, b"x"),
    "a window too large": h2.PREFACE + h2.window_update_frame(0, h2.MAX_WINDOW),
    "a window of nothing": h2.PREFACE + h2.window_update_frame(0, 0),
    "a push": h2.PREFACE + h2.make_frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_violation_of_the_protocol_closes_the_connection(data: bytes) -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.data_received(data)
        assert transport.is_closed and transport.frames()[-1][0].kind == h2.GOAWAY
        connection.connection_lost(None)
        await until(lambda: not connection._calls._tasks and server.num_open == 0)

    with_server(test)


FRAMES = st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40)), max_size=20)
)
def test_no_frames_raise_or_leave_calls_behind(frames: list[tuple[int, int, int, bytes]]) -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE + opening())
        for kind, flags, stream_id, payload in frames:
            if not transport.is_closed:
                connection.data_received(h2.make_frame(kind, flags, stream_id, payload))
                await asyncio.sleep(0)
        connection.connection_lost(None)
        await until(lambda: not connection._calls._tasks and server.num_open == 0)
        assert not server.errors and server.callers.num_calls == server.callers.held_bytes == 0

    with_server(test)


def test_pings_are_answered_and_padding_is_removed() -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        padded = b"\x03" + message(b"hi") + bytes(3)
        data = h2.make_frame(h2.DATA, h2.PADDED | h2.END_STREAM, 1, padded)
        connection.data_received(h2.PREFACE + h2.make_frame(h2.PING, 0, 0, b"12345678") + opening() + data)
        await until(lambda: server.num_open == 0 and not connection._calls._tasks)
        frames = transport.frames()
        assert any(head.kind == h2.PING and head.flags == h2.ACK and payload == b"12345678" for head, payload in frames)
        assert b"".join(payload for head, payload in frames if head.kind == h2.DATA) == message(b"hi")

    with_server(test)


def test_headers_are_remembered_only_while_they_mean_the_same() -> None:
    async def test(server: EchoServer) -> None:
        def literal(path: str) -> bytes:  # RFC 7541, 6.2.2: not added to the table
            return b"\x04" + bytes((len(path),)) + path.encode()

        def added(path: str) -> bytes:  # 6.2.1: the first entry of the table from now on, index 62
            return b"\x44" + bytes((len(path),)) + path.encode()

        connection, _ = connected(server)
        assert connection._path_in(literal("/a")) == "/a" and len(connection._paths) == 1
        assert connection._path_in(literal("/a")) == "/a"
        assert connection._path_in(added("/a")) == "/a" and not connection._paths
        assert connection._path_in(b"\xbe") == "/a" and len(connection._paths) == 1
        assert connection._path_in(b"\xbe") == "/a"
        assert connection._path_in(added("/b")) == "/b" and not connection._paths
        assert connection._path_in(b"\xbe") == "/b"
        assert connection._path_in(b"\x3f\x01") == "" and not connection._paths  # 6.3: a table of 32 bytes

    with_server(test)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"te", b"x-a", b"x-b"]), st.integers(0, 3), st.booleans()), max_size=60))
def test_paths_are_those_of_a_decoder_that_remembers_nothing(fields: list[tuple[bytes, int, bool]]) -> None:
    async def test(server: EchoServer) -> None:
        encoder = hpack.Encoder()
        encoder.header_table_size = 100  # entries are evicted
        connection, _ = connected(server)
        for name, value, is_added in fields:
            path = f"/{value}"
            pair = (name, str(value)) if is_added else hpack.NeverIndexedHeaderTuple(name, str(value))
            block = encoder.encode([(":path", path), pair])
            assert connection._path_in(block) == path

    with_server(test)
