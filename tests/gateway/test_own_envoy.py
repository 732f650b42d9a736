"""The protocol of our own Envoy: bodies stay there, and the head of an answer comes on a stream of its own."""

import json
from itertools import pairwise
from typing import Any

import hpack
import pytest
from gateway.grpc_harness import Transport
from gateway.harness import Front, Replica, front, run
from server.harness import until

from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.ext_proc_messages import ANSWER_HEADERS, CALL, DESTINATION, LB, SERVED, STREAMED
from headstart.gateway.picker.picker_fronts import SERVICE, PickerServer
from headstart.http.answer_report import UsageReportHeader

OPENING = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/Process", "content-type": "application/grpc"}


def header_map(headers: dict[str, str]) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values))


class OwnEnvoy:
    """The connection of our own Envoy to a picker."""

    def __init__(self, router: Front, replica: Replica) -> None:
        addresses = ReplicaIpAddresses()
        addresses.on_replicas_changed([replica.address])
        self._connection = PickerServer(router.state, addresses, trusts_address=True)._connection()
        self._transport = Transport()
        self._connection.connection_made(self._transport)  # type: ignore[arg-type]
        self._connection.data_received(h2.PREFACE + h2.settings_frame())
        self._encoder = hpack.Encoder()
        self._last = -1

    def open(self, *messages: pb.ProcessingRequest) -> int:
        """Opens a stream, whose messages arrive together, and returns its id."""
        self._last += 2
        self.say(
            h2.make_frame(h2.HEADERS, h2.END_HEADERS, self._last, self._encoder.encode(OPENING.items())), *messages
        )
        return self._last

    def say(self, frames: bytes, *messages: pb.ProcessingRequest) -> None:
        for message in messages:
            data = message.SerializeToString()
            frames += h2.make_frame(h2.DATA, 0, self._last, b"\0" + len(data).to_bytes(4) + data)
        self._connection.data_received(frames)

    def request(self, *pieces: bytes, stream: bool = True) -> int:
        body = list(pieces) or [json.dumps({"prompt": "Hello", "stream": stream}).encode()]
        head = header_map({":path": "/v1/completions", ":method": "POST", ":scheme": "http", ":authority": "x"})
        config = pb.ProtocolConfiguration(
            request_body_mode=STREAMED, send_body_without_waiting_for_header_response=True
        )
        first = pb.ProcessingRequest(request_headers=head, protocol_config=config)
        parts = [pb.HttpBody(body=piece, end_of_stream=number == len(body) - 1) for number, piece in enumerate(body)]
        return self.open(first, *[pb.ProcessingRequest(request_body=part) for part in parts])

    def answer(self, call: str, served: str, status: int = 200, *, waits: bool = False) -> pb.ProcessingRequest:
        report = UsageReportHeader("cmpl-1", 20, 10, 5.0).encode().decode()
        kind = "text/event-stream" if status == 200 else "application/json"
        head = {":status": str(status), "content-type": kind, "x-headstart-report": report, "via": "x"}
        message = pb.ProcessingRequest(response_headers=header_map(head), observability_mode=not waits)
        message.metadata_context.filter_metadata[LB].update({SERVED: served, CALL: call})
        return message

    def replies(self, stream_id: int) -> list[pb.ProcessingResponse]:
        data = b"".join(
            payload
            for head, payload in self._transport.frames()
            if head.kind == h2.DATA and head.stream_id == stream_id
        )
        found, at = list[pb.ProcessingResponse](), 0
        while at < len(data):
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5])
            found.append(pb.ProcessingResponse.FromString(data[at + 5 : end]))
            at = end
        return found

    def has_ended(self, stream_id: int) -> bool:
        return any(head.stream_id == stream_id and head.flags & h2.END_STREAM for head, _ in self._transport.frames())


def with_envoy(test: Any) -> None:
    async def body() -> None:
        replica = Replica()
        async with front(replica, tokenizer="none") as router:
            await test(OwnEnvoy(router, replica), router, replica.url.removeprefix("http://"))

    run(body())


@pytest.mark.parametrize("num_pieces", [1, 2, 5])
def test_each_piece_of_a_body_gets_one_reply_behind_the_head(num_pieces: int) -> None:
    async def test(envoy: OwnEnvoy, router: Front, address: str) -> None:
        body = b'{"prompt": "%s"}' % (b"x" * 203)
        size = len(body) // num_pieces
        cuts = [*range(0, size * num_pieces, size), len(body)]
        call = envoy.request(*[body[start:end] for start, end in pairwise(cuts)])
        await until(lambda: len(envoy.replies(call)) == 1 + num_pieces)
        head, *pieces = envoy.replies(call)
        told = head.dynamic_metadata[LB]
        assert told[DESTINATION] == address and told[CALL] and told[ANSWER_HEADERS]["x-request-id"]
        assert b"".join(piece.request_body.response.body_mutation.body for piece in pieces) == body
        envoy.say(h2.make_frame(h2.RST_STREAM, 0, call, h2.CANCEL.to_bytes(4)))

    with_envoy(test)


def test_an_answer_that_ends_at_once_counts_as_answered() -> None:
    async def test(envoy: OwnEnvoy, router: Front, address: str) -> None:
        call = envoy.request()
        await until(lambda: len(envoy.replies(call)) == 2)
        told = envoy.replies(call)[0].dynamic_metadata[LB]
        reset = h2.make_frame(h2.RST_STREAM, 0, call, h2.CANCEL.to_bytes(4))
        observed = envoy.open(envoy.answer(told[CALL], address))
        envoy.say(reset)  # in the same turn of the event loop
        await until(lambda: not router.state.num_under_way)
        endpoint = next(iter(router.state.router.endpoints.values()))
        assert endpoint.load.num_requests == 0 and not envoy.replies(observed)
        await until(lambda: envoy.has_ended(observed))
        assert b'outcome="ok"' in router.state.metrics.expose(with_replicas=True)

    with_envoy(test)


def test_an_answer_for_which_envoy_waits_is_checked() -> None:
    async def test(envoy: OwnEnvoy, router: Front, address: str) -> None:
        call = envoy.request()
        await until(lambda: len(envoy.replies(call)) == 2)
        told = envoy.replies(call)[0].dynamic_metadata[LB]
        checker = envoy.open(envoy.answer(told[CALL], address, 500, waits=True))
        await until(lambda: len(envoy.replies(checker)) == 1)
        mutation = envoy.replies(checker)[0].response_headers.response.header_mutation
        assert {"via", "x-headstart-report"} <= set(mutation.remove_headers)
        assert len(envoy.replies(call)) == 2
        await until(lambda: envoy.has_ended(checker))
        envoy.say(h2.make_frame(h2.RST_STREAM, 0, call, h2.CANCEL.to_bytes(4)))

    with_envoy(test)


def test_a_redirect_is_replaced_by_an_error_of_ours() -> None:
    async def test(envoy: OwnEnvoy, router: Front, address: str) -> None:
        call = envoy.request()
        await until(lambda: len(envoy.replies(call)) == 2)
        told = envoy.replies(call)[0].dynamic_metadata[LB]
        checker = envoy.open(envoy.answer(told[CALL], address, 307, waits=True))
        await until(lambda: len(envoy.replies(checker)) == 1)
        assert envoy.replies(checker)[0].immediate_response.status.code == 502

    with_envoy(test)


def test_the_head_of_an_answer_to_an_unknown_request_is_ignored() -> None:
    async def test(envoy: OwnEnvoy, router: Front, address: str) -> None:
        for waits in (False, True):
            observed = envoy.open(envoy.answer("9999", address, waits=waits))
            await until(lambda observed=observed: envoy.has_ended(observed))
            assert not envoy.replies(observed)

    with_envoy(test)
