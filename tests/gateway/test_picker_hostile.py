"""Messages that no Envoy sends: they end their call with a status, and are no error of the picker."""

import asyncio
from typing import Any

import pytest
from gateway.grpc_harness import Transport, message, opening
from gateway.harness import Replica
from gateway.test_picker_stream import (
    BODY,
    Picker,
    answer_head,
    header_map,
    place,
    request_body,
    request_head,
    with_picker,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.harness import until

from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.ext_proc_messages import MAX_HEAD_BYTES, MAX_HEADERS, SUBSET
from headstart.gateway.picker.grpc_stream import GrpcStatusCode
from headstart.gateway.picker.picker_fronts import HEALTH, MAX_WATCHERS, SERVICE, PickerServer

PROCESS = f"/{SERVICE}/Process"


class Caller:
    """A call of a picker, without a socket."""

    def __init__(self, picker: Picker, *, trusts_address: bool = False) -> None:
        self._server = PickerServer(picker.state, picker.addresses, trusts_address=trusts_address)
        self._connection, self._transport = self._server._connection(), Transport()
        self._connection.connection_made(self._transport)  # type: ignore[arg-type]
        self._connection.data_received(h2.PREFACE + opening(PROCESS))

    def say(self, *messages: bytes, ends: bool = False) -> None:
        data = b"".join(map(message, messages))
        frames = [
            h2.make_frame(h2.DATA, 0, 1, data[at : at + h2.FRAME_BYTES]) for at in range(0, len(data), h2.FRAME_BYTES)
        ]
        last = h2.make_frame(h2.DATA, h2.END_STREAM, 1) if ends else b""
        self._connection.data_received(b"".join([*frames, last]))

    @property
    def status(self) -> int | None:
        """The status of the call; None: it has not ended."""
        for head, payload in self._transport.frames():
            if head.kind == h2.HEADERS and head.flags & h2.END_STREAM:
                return int(payload.partition(b"grpc-status")[2][1:].split(b"\0")[0])
        return None

    def answers(self) -> list[pb.ProcessingResponse]:
        data = b"".join(payload for head, payload in self._transport.frames() if head.kind == h2.DATA)
        found = []
        while data:
            size = int.from_bytes(data[1:5])
            found.append(pb.ProcessingResponse.FromString(data[5 : 5 + size]))
            data = data[5 + size :]
        return found

    def close(self) -> None:
        self._connection.connection_lost(None)


def headers_of(number: int) -> pb.ProcessingRequest:
    head = request_head()
    head.request_headers.headers.headers.extend([pb.HeaderValue(key="a")] * number)
    return head


def with_subset(value: Any) -> pb.ProcessingRequest:
    head = request_head()
    head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: value})
    return head


def in_streamed_mode() -> pb.ProcessingRequest:
    head = request_head()
    head.protocol_config.request_body_mode = 1
    head.protocol_config.send_body_without_waiting_for_header_response = True
    return head


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers(trailers=header_map(x="y")))
ODD_KEY = request_head()
ODD_KEY.request_headers.headers.headers.append(pb.HeaderValue(key="\u20ac", raw_value=b"x"))
ENDED = {
    "an undecodable first message": ([b"\xff"], GrpcStatusCode.INVALID_ARGUMENT),
    "an undecodable body": ([request_head().SerializeToString(), b"\xff"], GrpcStatusCode.INVALID_ARGUMENT),
    "an undecodable rest of a body": (
        [request_head().SerializeToString(), request_body(BODY[:5], ends=False).SerializeToString(), b"\x0a\xff"],
        GrpcStatusCode.INVALID_ARGUMENT,
    ),
    "an undecodable head of an answer": (
        [request_head().SerializeToString(), request_body(BODY).SerializeToString(), b"\xff"],
        GrpcStatusCode.INVALID_ARGUMENT,
    ),
    "too many headers": ([headers_of(MAX_HEADERS).SerializeToString()], GrpcStatusCode.RESOURCE_EXHAUSTED),
    "a head that is too long": (
        [request_head(x="y" * MAX_HEAD_BYTES).SerializeToString()],
        GrpcStatusCode.RESOURCE_EXHAUSTED,
    ),
    "a head of a million parts": ([b"\x12\x00" * 1_000_000], GrpcStatusCode.RESOURCE_EXHAUSTED),
    "a body with a long head": (
        [(request_body(BODY).SerializeToString() + headers_of(MAX_HEAD_BYTES).SerializeToString())],
        GrpcStatusCode.RESOURCE_EXHAUSTED,
    ),
    "a later message that is too long": (
        [request_head().SerializeToString(), headers_of(MAX_HEAD_BYTES).SerializeToString()],
        GrpcStatusCode.RESOURCE_EXHAUSTED,
    ),
}


@pytest.mark.parametrize(("messages", "status"), ENDED.values(), ids=ENDED)
def test_a_message_that_cannot_be_read_ends_its_call_with_a_status(
    messages: list[bytes], status: GrpcStatusCode, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(picker: Picker) -> None:
        caller = Caller(picker)
        caller.say(*messages)
        await until(lambda: caller.status is not None)
        assert caller.status == status
        assert not any(answer.HasField("immediate_response") for answer in caller.answers())
        assert not picker.state.num_under_way and not picker.state.num_awaiting_first_token

    with_picker(test, Replica())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "messages",
    [
        [ODD_KEY, request_body(BODY)],
        [in_streamed_mode(), TRAILERS],
        [with_subset([[[["x"]]], 5, None, {"a": {}}]), request_body(BODY)],
        [with_subset(5), request_body(BODY)],
        [request_head("/%ff%00\u20ac?\u20ac"), request_body(BODY)],
        [request_head("", ""), request_body(BODY)],
        [request_head(content_length="9" * 5_000), request_body(BODY)],
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_odd_values_are_no_error_of_the_picker(
    messages: list[pb.ProcessingRequest], is_own: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(picker: Picker) -> None:
        caller = Caller(picker, trusts_address=is_own)
        caller.say(*[one.SerializeToString() for one in messages], ends=True)
        await until(lambda: caller.status is not None)
        assert caller.status in (GrpcStatusCode.OK, GrpcStatusCode.INVALID_ARGUMENT)

    with_picker(test, Replica(), replica_wait=0.0)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("status", ["", "abc", "-1", "9" * 5_000, "\u0662\u0660\u0660"])
def test_an_answer_whose_status_is_no_number_is_none(status: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def test(picker: Picker) -> None:
        head = answer_head(place(replica))
        for header in head.response_headers.headers.headers:
            header.raw_value = status.encode() if header.key == ":status" else header.raw_value
        caller = Caller(picker)
        caller.say(*[one.SerializeToString() for one in (request_head(), request_body(BODY), head)], ends=True)
        await until(lambda: caller.status is not None)
        assert caller.answers()[-1].immediate_response.status.code == 502

    replica = Replica()
    with_picker(test, replica)
    assert "Traceback" not in capfd.readouterr().err


VALID = [request_head(), request_head("/v1/models", "GET", ends=True), request_body(BODY), TRAILERS, in_streamed_mode()]


def test_no_messages_are_an_error_of_the_picker(capfd: pytest.CaptureFixture[str]) -> None:
    async def test(picker: Picker) -> None:
        valid = [one.SerializeToString() for one in (*VALID, answer_head(place(replica)))]

        @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
        @given(st.data())
        def attack(data: st.DataObject) -> None:
            caller = Caller(picker, trusts_address=data.draw(st.booleans()))
            for _ in range(data.draw(st.integers(1, 5))):
                one = bytearray(data.draw(st.sampled_from(valid)))
                for _ in range(data.draw(st.integers(0, 3))):
                    at = data.draw(st.integers(0, len(one)))
                    one[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
                caller.say(bytes(one))
            callers.append(caller)

        callers: list[Caller] = []
        attack()
        for caller in callers:
            caller.say(ends=True)
        await asyncio.sleep(0.2)
        for caller in callers:
            codes = [one.immediate_response.status.code for one in caller.answers()]
            assert not {500, 501, 504} & set(codes)
            caller.close()
        await until(lambda: not picker.state.num_under_way and not picker.state.num_awaiting_first_token)

    replica = Replica()
    with_picker(test, replica, replica_wait=0.0)
    assert "Traceback" not in capfd.readouterr().err


def test_clients_that_watch_the_health_are_bounded() -> None:
    async def test(picker: Picker) -> None:
        server, transport = PickerServer(picker.state, picker.addresses), Transport()
        connection = server._connection()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(h2.PREFACE)
        for stream_id in range(1, 2 * MAX_WATCHERS + 2, 2):
            watch = opening(f"/{HEALTH}/Watch", stream_id) + h2.make_frame(
                h2.DATA, h2.END_STREAM, stream_id, message(b"")
            )
            connection.data_received(watch)
        ended: list[tuple[int, bytes]] = []
        while not ended:
            await asyncio.sleep(0.01)
            frames = transport.frames()
            ended = [
                (head.stream_id, payload) for head, payload in frames if head.flags & 1 and head.kind == h2.HEADERS
            ]
        assert [stream_id for stream_id, _ in ended] == [2 * MAX_WATCHERS + 1] and b"too many" in ended[0][1]
        connection.connection_lost(None)

    with_picker(test, Replica())
