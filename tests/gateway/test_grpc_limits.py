"""All that a gRPC client controls is bounded: connections, calls, bytes of messages, and frames without a message."""

import asyncio

import grpc
import grpc.aio
import hpack
import pytest
from gateway.grpc_harness import ECHO, EchoServer, connected, message, opening, with_server
from server.harness import until

from headstart.gateway.picker import grpc_calls, grpc_connection
from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.grpc_calls import BURST, ConnectionFrameBudget
from headstart.gateway.picker.grpc_stream import STREAM_WINDOW, GrpcStatusCode

COUNT = 3 * BURST
NO_SETTINGS = h2.make_frame(h2.SETTINGS, 0, 0, (b"\0\x09" + bytes(4)) * 2_000)


def unknown(stream_id: int) -> bytes:
    return opening("/no/such", stream_id, h2.END_HEADERS | h2.END_STREAM)


def reset(stream_id: int) -> bytes:
    return opening(stream_id=stream_id) + h2.make_frame(h2.RST_STREAM, 0, stream_id, bytes(4))


IDS = range(3, 2 * COUNT, 2)
FLOODS = {
    "pings": h2.make_frame(h2.PING, 0, 0, bytes(8)) * COUNT,
    "settings": h2.settings_frame(window=70_000) * COUNT,
    "long settings": NO_SETTINGS * 8,
    "acknowledged settings": h2.make_frame(h2.SETTINGS, h2.ACK, 0) * COUNT,
    "windows": h2.window_update_frame(0, 1) * COUNT,
    "priorities": h2.make_frame(h2.PRIORITY, 0, 1, bytes(5)) * COUNT,
    "unknown frames": h2.make_frame(99, 0, 0) * COUNT,
    "empty data": h2.make_frame(h2.DATA, 0, 1) * COUNT,
    "padding": h2.make_frame(h2.DATA, h2.PADDED, 1, b"\x05" + bytes(5)) * COUNT,
    "data of ended calls": unknown(3) + h2.make_frame(h2.DATA, 0, 3, b"x") * COUNT,
    "resets": b"".join(map(reset, IDS)),
    "resets of nothing": h2.make_frame(h2.RST_STREAM, 0, 1, bytes(4)) * COUNT,
    "calls of no method": b"".join(map(unknown, IDS)),
    "calls without a message": b"".join(opening(stream_id=n) for n in IDS),
    "headers that differ": b"".join(  # RFC 7541, 6.2.2: a field that is not indexed, with a value of 260 bytes
        h2.make_frame(h2.HEADERS, h2.END_HEADERS, n, b"\0\x01a\x7f\x85\x01" + b"%0260d" % n) for n in IDS
    ),
    "continuations of nothing": opening(stream_id=3, flags=0) + h2.make_frame(h2.CONTINUATION, 0, 3) * COUNT,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_frames_that_no_call_needs_close_the_connection(flood: bytes) -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE + opening() + flood)
        await until(lambda: transport.is_closed)
        head, payload = transport.frames()[-1]
        assert head.kind == h2.GOAWAY and int.from_bytes(payload[4:]) == h2.TOO_MUCH
        assert len(transport.written) < 128 * BURST and not server.errors
        connection.connection_lost(None)
        assert server.callers.num_calls == server.callers.held_bytes == 0

    with_server(test)


def test_calls_with_messages_are_not_counted_as_a_flood() -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE)
        for stream_id in range(1, 2 * BURST, 2):
            data = h2.make_frame(h2.DATA, h2.END_STREAM, stream_id, message(b"x"))
            window = (
                h2.window_update_frame(0, 6)
                + h2.window_update_frame(stream_id, 6)
                + h2.make_frame(h2.PING, 0, 0, bytes(8))
            )
            connection.data_received(opening(stream_id=stream_id) + data + window)
            if stream_id % 256 == 1:
                await until(lambda: not server.callers.num_calls)
        assert not transport.is_closed

    with_server(test)


def test_time_refills_the_budget_of_frames_up_to_a_burst() -> None:
    budget = ConnectionFrameBudget(0.0)
    assert budget.spend_frames(BURST) and not budget.spend_frames(1)
    budget.refill(1.0)
    assert budget.spend_frames(grpc_calls.REFILL - 1) and not budget.spend_frames(1)
    budget.refill(1e6)
    assert budget.spend_frames(BURST) and not budget.spend_frames(1)


def test_other_work_is_done_between_slices_of_frames() -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        messages = h2.make_frame(h2.DATA, 0, 1, message(b"") * 3_000)  # many in one frame
        connection.data_received(h2.PREFACE + opening() + messages * 20)
        turns = 0
        while not transport.is_reading:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 20 * 3_000 / (grpc_connection.SLICE + 3_000) - 2

    with_server(test)


def test_incomplete_messages_of_all_connections_are_bounded_and_the_largest_call_ends() -> None:
    async def test(server: EchoServer) -> None:
        part = b"\0" + (1_000_000).to_bytes(4) + bytes(16_000)
        pairs = [connected(server) for _ in range(3)]
        for connection, _ in pairs:
            connection.data_received(h2.PREFACE)
        small, answers = pairs[0]
        small.data_received(opening(stream_id=1) + h2.make_frame(h2.DATA, 0, 1, b"\0\0\0\0\x02h"))
        for stream_id in range(3, 300, 2):
            for connection, transport in pairs:
                frames = opening(stream_id=stream_id) + h2.make_frame(h2.DATA, 0, stream_id, part)
                connection.data_received(frames + h2.make_frame(h2.DATA, 0, stream_id, bytes(16_000)))
                assert server.callers.held_bytes <= 1 << 20 and not transport.is_closed
        small.data_received(h2.make_frame(h2.DATA, h2.END_STREAM, 1, b"i"))
        await until(lambda: any(head.kind == h2.DATA and head.stream_id == 1 for head, _ in answers.frames()))
        ended = [payload for head, payload in answers.frames() if head.kind == h2.HEADERS]
        assert any(str(int(GrpcStatusCode.RESOURCE_EXHAUSTED)).encode() in payload for payload in ended)
        for connection, _ in pairs:
            connection.connection_lost(None)
        await until(lambda: not server.callers.num_calls)
        assert server.callers.held_bytes == 0

    with_server(test, max_held_bytes=1 << 20)


def test_tiny_messages_are_charged_with_what_they_take() -> None:
    async def test(server: EchoServer) -> None:
        server.gate.clear()
        connection, _ = connected(server)
        connection.data_received(h2.PREFACE + opening() + h2.make_frame(h2.DATA, 0, 1, message(b"") * 3_000))
        await until(lambda: server.num_open == 1)
        assert server.callers.held_bytes >= 2_999 * 64

    with_server(test)


def test_a_running_call_that_holds_too_much_is_cancelled() -> None:
    async def test(server: EchoServer) -> None:
        server.gate.clear()
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE + opening() + h2.make_frame(h2.DATA, 0, 1, message(b"x")))
        await until(lambda: server.num_open == 1)
        connection.data_received(h2.make_frame(h2.DATA, 0, 1, message(bytes(10_000))) * 2)
        await until(lambda: server.cancelled == 1 and not connection._late)
        assert f"{int(GrpcStatusCode.RESOURCE_EXHAUSTED)}".encode() in transport.frames()[-1][1]
        assert server.callers.held_bytes == 0

    with_server(test, max_held_bytes=15_000)


def test_data_beyond_the_window_of_a_stream_closes_the_connection() -> None:
    async def test(server: EchoServer) -> None:
        server.gate.clear()
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE + opening())
        frame = h2.make_frame(h2.DATA, 0, 1, message(bytes(1_000)) * 16)
        for _ in range(STREAM_WINDOW // len(frame) + 2):
            connection.data_received(frame)
        await until(lambda: transport.is_closed)
        assert int.from_bytes(transport.frames()[-1][1][4:]) == h2.FLOW_CONTROL_ERROR

    with_server(test)


def test_calls_beyond_the_limit_of_all_connections_are_refused_until_others_end() -> None:
    async def test(server: EchoServer) -> None:
        (first, one), (second, two) = connected(server), connected(server)
        first.data_received(h2.PREFACE + opening(stream_id=1) + opening(stream_id=3))
        second.data_received(h2.PREFACE + opening(stream_id=1))
        refused = h2.make_frame(h2.RST_STREAM, 0, 1, h2.REFUSED.to_bytes(4))
        assert refused in two.written and refused not in one.written
        first.data_received(h2.make_frame(h2.RST_STREAM, 0, 1, bytes(4)))
        second.data_received(opening(stream_id=3) + h2.make_frame(h2.DATA, h2.END_STREAM, 3, message(b"x")))
        await until(lambda: any(head.kind == h2.DATA for head, _ in two.frames()))

    with_server(test, max_calls=2)


def test_a_connection_too_many_takes_the_place_of_an_idle_one_or_is_refused() -> None:
    async def test(server: EchoServer) -> None:
        (busy, one), (_, two), (_, three) = connected(server), connected(server), connected(server)
        assert two.is_closed is False and one.is_closed  # idle, and longest
        busy.connection_lost(None)
        (other, four) = connected(server)
        assert two.is_closed and not three.is_closed
        for connection, transport in ((server.connections[2], three), (other, four)):
            connection.data_received(h2.PREFACE + opening())
            assert not transport.is_closed
        _, five = connected(server)
        assert five.is_closed and not three.is_closed and not four.is_closed

    with_server(test, max_connections=2)


def test_calls_and_connections_that_do_not_go_on_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "WAITING_SECONDS", 0.01)
    monkeypatch.setattr(grpc_connection, "WAITING_SECONDS", 0.02)

    async def test(server: EchoServer) -> None:
        (_, mute), (slow, transport) = connected(server), connected(server)
        slow.data_received(h2.PREFACE + opening() + h2.make_frame(h2.DATA, 0, 1, b"\0\0\0\0\x05x"))
        await until(lambda: mute.is_closed and not server.callers.num_calls and not slow._late)
        assert str(int(GrpcStatusCode.DEADLINE_EXCEEDED)).encode() in transport.frames()[-1][1]
        assert not transport.is_closed

    with_server(test)


def test_a_client_that_does_not_read_an_answer_loses_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "WRITE_SECONDS", 0.02)

    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        data = h2.make_frame(h2.DATA, 0, 1, message(bytes(100)))
        connection.data_received(h2.PREFACE + h2.settings_frame(window=10) + opening() + data)
        await until(lambda: server.cancelled == 1 and not connection._late)
        assert not server.callers.num_calls and not transport.is_closed and not server.errors

    with_server(test)


def test_a_connection_whose_replies_are_not_read_is_not_read() -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.pause_writing()
        assert not transport.is_reading
        connection.resume_writing()
        assert transport.is_reading

    with_server(test)


def test_a_client_may_change_its_window_while_many_calls_are_open() -> None:
    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        opened = b"".join(opening(stream_id=n) for n in range(1, 200, 2))
        connection.data_received(h2.PREFACE + h2.settings_frame(window=0) + opened)
        connection.data_received(h2.make_frame(h2.DATA, h2.END_STREAM, 1, message(b"x")))
        connection.data_received(h2.window_update_frame(1, 2) + h2.settings_frame(window=3))
        sent = b""
        for _ in range(20):
            await asyncio.sleep(0)
            sent = b"".join(payload for head, payload in transport.frames() if head.kind == h2.DATA)
        assert sent == message(b"x")[:5]

    with_server(test)


def test_a_call_of_a_client_of_grpc_passes_beside_floods() -> None:
    async def test(server: EchoServer) -> None:
        async def flood(data: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(h2.PREFACE + opening() + data)
                while await reader.read(65_536):
                    pass
            except ConnectionError:
                pass
            finally:
                writer.close()

        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            floods = asyncio.gather(*map(flood, FLOODS.values()))
            call = channel.stream_stream(ECHO)()
            for number in range(20):
                await call.write(b"%d" % number)
                assert await call.read() == b"%d" % number
            await floods

    with_server(test)


def test_a_header_block_is_charged_by_its_length() -> None:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    blocks = [encoder.encode([(":path", f"/{n:03d}" + "y" * 16_000)], huffman=True) for n in range(40)]
    frames = [h2.make_frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, block) for n, block in enumerate(blocks)]

    async def test(server: EchoServer) -> None:
        connection, transport = connected(server)
        connection.data_received(h2.PREFACE + b"".join(frames))
        await until(lambda: transport.is_closed)

    with_server(test)
