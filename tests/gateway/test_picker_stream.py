"""The endpoint picker protocol, message by message, without an Envoy."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway.harness import Front, Replica, chunk, front, run, two, usage
from hypothesis import given, settings
from hypothesis import strategies as st
from server.harness import until

from headstart.gateway.gateway_app import build_gateway_app
from headstart.gateway.picker import ext_proc_messages
from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.endpoint_picker import EndpointPicker
from headstart.gateway.picker.ext_proc_messages import (
    CHUNK_BYTES,
    DESTINATION,
    FULL_DUPLEX,
    SERVED,
    SUBSET,
)
from headstart.gateway.picker.ext_proc_stream import ExtProcStream
from headstart.gateway.picker.picker_fronts import HEALTH, SERVICE, PickerServer
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.http.answer_report import UsageReportHeader, decode_report_header

BODY = b'{"prompt": "Hello", "max_tokens": 3}'
LONG = "a shared beginning of many words, " * 40


def header_map(**headers: str) -> pb.HeaderMap:
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])


def request_head(
    path: str = "/v1/completions", method: str = "POST", *, ends: bool = False, mode: int = 0, **headers: str
) -> pb.ProcessingRequest:
    pseudo = {":path": path, ":method": method, ":authority": "front", ":scheme": "http"}
    head = pb.HttpHeaders(headers=header_map(**pseudo, **headers), end_of_stream=ends)
    config = pb.ProtocolConfiguration(request_body_mode=FULL_DUPLEX, response_body_mode=mode)
    return pb.ProcessingRequest(request_headers=head, protocol_config=config)


def request_body(body: bytes, *, ends: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


def answer_head(served: str, status: int = 200, **headers: str) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(
        response_headers=pb.HttpHeaders(headers=header_map(**{":status": str(status)}, **headers))
    )
    message.metadata_context.filter_metadata["envoy.lb"].update({SERVED: served})
    return message


class FakeEnvoy:
    """The other end of one stream. What the picker wrote is in `written`."""

    def __init__(self, *messages: pb.ProcessingRequest) -> None:
        self._messages: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue()
        self.written: list[pb.ProcessingResponse] = []
        for message in messages:
            self.say(message)

    def say(self, message: pb.ProcessingRequest | None) -> None:
        self._messages.put_nowait(message)

    async def read(self) -> pb.ProcessingRequest | None:
        return await self._messages.get()

    async def write(self, *responses: pb.ProcessingResponse) -> None:
        self.written += responses

    def treat_cancel_as_end(self) -> None:
        """Nothing: `say(None)` is always gentle."""

    @property
    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("response") for response in self.written]

    def headers(self, number: int = 0) -> dict[str, str]:
        """The headers that a message sets."""
        response = self.written[number]
        kind = response.WhichOneof("response")
        assert kind is not None
        part = getattr(response, kind)
        mutation = part.headers if kind == "immediate_response" else part.response.header_mutation
        return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}

    @property
    def body(self) -> bytes:
        """The body that is sent on."""
        parts = [
            r.request_body.response.body_mutation.streamed_response for r in self.written if r.HasField("request_body")
        ]
        assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(len(part.body) <= CHUNK_BYTES for part in parts)
        return b"".join(part.body for part in parts)


class Picker:
    """An endpoint picker in front of replicas."""

    def __init__(self, router: Front, replicas: Sequence[Replica]) -> None:
        self.state = router.state
        self.addresses = ReplicaIpAddresses()
        self.addresses.on_replicas_changed([replica.address for replica in replicas])
        self._app = build_gateway_app(self.state, EndpointPicker(self.state, self.addresses).forward)

    async def serve(self, envoy: FakeEnvoy) -> None:
        first = await envoy.read()
        assert first is not None
        await ExtProcStream(envoy, first).run_app(self._app)

    async def until_written(self, envoy: FakeEnvoy, count: int) -> "asyncio.Task[None]":
        """Serves a request until so many messages were written."""
        task = asyncio.create_task(self.serve(envoy))
        await until(lambda: len(envoy.written) >= count or task.done())
        return task


def place(replica: Replica) -> str:
    return replica.url.removeprefix("http://")


def with_picker(test: Any, *replicas: Replica, **options: Any) -> None:
    async def body() -> None:
        async with front(*replicas, **options) as router:
            await test(Picker(router, replicas))

    run(body())


def test_header_and_metadata_name_the_same_replicas_best_first() -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head(), request_body(BODY), None)
        await picker.serve(envoy)
        assert envoy.kinds == ["request_headers", "request_body"] and envoy.body == BODY
        picked = envoy.headers()[DESTINATION]
        assert envoy.written[0].dynamic_metadata["envoy.lb"][DESTINATION] == picked
        assert sorted(picked.split(",")) == sorted(map(place, replicas))
        assert envoy.written[0].request_headers.response.clear_route_cache

    replicas = two()
    with_picker(test, *replicas)


def test_at_most_as_many_replicas_are_named_as_may_be_tried() -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head(), request_body(BODY), None)
        await picker.serve(envoy)
        assert len(envoy.headers()[DESTINATION].split(",")) == 2

    with_picker(test, Replica(), Replica(), Replica(), max_attempts=2)


def test_rules_for_prompts_change_the_body_that_is_sent_on_and_are_stated() -> None:
    system = {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."}
    sent: dict[str, Any] = {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 1.5}

    async def test(picker: Picker) -> None:
        data = json.dumps(sent).encode()
        envoy = FakeEnvoy(request_head("/v1/chat/completions"), request_body(data))
        task = await picker.until_written(envoy, 2)
        read = json.loads(envoy.body)
        assert read == sent | {"messages": [system | {"content": "Be brief."}, *sent["messages"][1:]]}
        envoy.say(answer_head(place(replica), content_type="application/json"))
        await until(lambda: len(envoy.written) >= 3 or task.done())
        assert envoy.headers(2)["x-headstart-prompt-rules"] == "billing_header=1"
        envoy.say(None)
        await task

    replica = Replica()
    with_picker(test, replica, reader=RequestParser(rules=frozenset({"billing_header"})))


@pytest.mark.parametrize("pieces", [[BODY], [BODY, b""], [BODY[:5], BODY[5:]], [b"", BODY]])
def test_a_body_in_any_pieces_is_sent_on_whole(pieces: list[bytes]) -> None:
    async def test(picker: Picker) -> None:
        last = len(pieces) - 1
        messages = [request_body(piece, ends=number == last) for number, piece in enumerate(pieces)]
        envoy = FakeEnvoy(request_head(), *messages, None)
        await picker.serve(envoy)
        assert envoy.body == BODY

    with_picker(test, Replica())


@pytest.mark.parametrize("size", [CHUNK_BYTES - 14, CHUNK_BYTES, 3 * CHUNK_BYTES, 2_000_000])
def test_a_long_body_is_sent_on_in_chunks(size: int) -> None:
    async def test(picker: Picker) -> None:
        body = b'{"prompt": "%s"}' % (b"x" * size)
        envoy = FakeEnvoy(request_head(), request_body(body), None)
        await picker.serve(envoy)
        assert envoy.body == body

    with_picker(test, Replica())


def test_trailers_end_a_body() -> None:
    async def test(picker: Picker) -> None:
        trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers(trailers=header_map(x="y")))
        envoy = FakeEnvoy(request_head(), request_body(BODY, ends=False), trailers, None)
        await picker.serve(envoy)
        assert envoy.kinds == ["request_headers", "request_body", "request_trailers"]
        assert not envoy.written[1].request_body.response.body_mutation.streamed_response.end_of_stream

    with_picker(test, Replica())


def test_a_subset_hint_is_kept_to() -> None:
    async def test(picker: Picker) -> None:
        for hint in ([place(one)], place(one), f"{place(one)}, 10.9.9.9:1"):
            head = request_head()
            head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: hint})
            envoy = FakeEnvoy(head, request_body(BODY), None)
            await picker.serve(envoy)
            assert envoy.headers()[DESTINATION] == place(one)

    one, other = two()
    with_picker(test, one, other)


@pytest.mark.parametrize("hint", [[], ["10.9.9.9:1"], ""])
def test_a_subset_without_a_replica_is_answered_with_503(hint: Any) -> None:
    async def test(picker: Picker) -> None:
        head = request_head()
        head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: hint})
        envoy = FakeEnvoy(head, request_body(BODY), None)
        await picker.serve(envoy)
        assert envoy.kinds == ["immediate_response"]
        assert envoy.written[0].immediate_response.status.code == 503

    with_picker(test, Replica(), replica_wait=0.0)


def test_a_request_without_a_body_is_answered_by_the_router() -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head("/v1/models", "GET", ends=True), None)
        await picker.serve(envoy)
        answer = envoy.written[0].immediate_response
        assert answer.status.code == 200 and b'"id":"m"' in answer.body
        assert envoy.headers()["content-type"] == "application/json"

    with_picker(test, Replica())


def test_a_request_is_sent_to_the_replica_that_served_it() -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head(), request_body(b'{"prompt": "%s"}' % LONG.encode()))
        task = await picker.until_written(envoy, 2)
        first, second = envoy.headers()[DESTINATION].split(",")
        report = UsageReportHeader("cmpl-1", 20, 0, 5.0).encode().decode()
        envoy.say(answer_head(second, content_type="text/event-stream", x_headstart_report=report))
        await until(lambda: len(envoy.written) == 3)
        urls = {place: picker.addresses.url(place) for place in (first, second)}
        endpoints = picker.state.router.endpoints
        assert endpoints[urls[first]].load.num_requests == 0
        assert endpoints[urls[second]].load.num_streams == 1
        envoy.say(None)
        await task
        assert endpoints[urls[second]].load.num_requests == 0
        again = FakeEnvoy(request_head(), request_body(b'{"prompt": "%s and more"}' % LONG.encode()), None)
        await picker.serve(again)
        assert again.headers()[DESTINATION].split(",")[0] == second

    with_picker(test, *two())


def test_a_report_in_the_head_corrects_the_index() -> None:
    async def test(picker: Picker) -> None:
        for cached in (0, 160):
            envoy = FakeEnvoy(request_head(), request_body(b'{"prompt": "%s"}' % LONG.encode()))
            task = await picker.until_written(envoy, 2)
            report = UsageReportHeader("cmpl-1", 340, cached, 5.0).encode().decode()
            served = envoy.headers()[DESTINATION]
            envoy.say(answer_head(served, content_type="text/event-stream", x_headstart_report=report))
            await until(lambda envoy=envoy: len(envoy.written) == 3)
            assert "x-headstart-report" in envoy.written[2].response_headers.response.header_mutation.remove_headers
            envoy.say(None)
            await task
        assert picker.state.router.num_reported == 2
        assert picker.state.router.prediction_error > 0

    with_picker(test, Replica())


def test_bodies_of_answers_are_passed_on_and_read_where_envoy_sends_them() -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head(mode=FULL_DUPLEX), request_body(b'{"prompt": "Hello", "stream": true}'))
        task = await picker.until_written(envoy, 2)
        envoy.say(answer_head(envoy.headers()[DESTINATION], content_type="text/event-stream"))
        pieces = [chunk("a"), chunk("", choices=[], usage=usage(5, 2)), b"data: [DONE]\n\n", b""]
        for number, piece in enumerate(pieces):
            body = pb.HttpBody(body=piece, end_of_stream=number == 3)
            envoy.say(pb.ProcessingRequest(response_body=body))
        envoy.say(None)
        await task
        passed = [r.response_body.response.body_mutation.streamed_response for r in envoy.written[3:]]
        assert [part.body for part in passed] == pieces
        assert [part.end_of_stream for part in passed] == [False, False, False, True]
        assert picker.state.router.num_reported == 1

    with_picker(test, Replica())


def test_from_an_answer_that_is_cut_off_nothing_is_learned() -> None:
    async def test(picker: Picker) -> None:
        for _ in range(3):
            envoy = FakeEnvoy(request_head(mode=FULL_DUPLEX), request_body(b'{"prompt": "Hello", "stream": true}'))
            task = await picker.until_written(envoy, 2)
            envoy.say(answer_head(envoy.headers()[DESTINATION], content_type="text/event-stream"))
            envoy.say(pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk("a"))))
            envoy.say(None)
            await task
        (endpoint,) = picker.state.router.endpoints.values()
        assert endpoint.health.num_ejections == 0 and endpoint.load.num_requests == 0
        assert picker.state.router.num_reported == 0

    with_picker(test, Replica(), health_interval=60.0)


@pytest.mark.parametrize("status", [302, 407, 199])
def test_an_answer_that_is_none_becomes_an_error(status: int) -> None:
    async def test(picker: Picker) -> None:
        envoy = FakeEnvoy(request_head(), request_body(BODY))
        task = await picker.until_written(envoy, 2)
        envoy.say(answer_head(envoy.headers()[DESTINATION], status, location="http://elsewhere"))
        envoy.say(None)
        await task
        assert envoy.kinds[-1] == "immediate_response"
        assert envoy.written[-1].immediate_response.status.code == 502

    with_picker(test, Replica())


def test_a_stream_that_ends_early_is_the_clients_doing() -> None:
    async def test(picker: Picker) -> None:
        (endpoint,) = picker.state.router.endpoints.values()
        for messages in ((request_body(BODY[:5], ends=False), None), (request_body(BODY), None)):
            await picker.serve(FakeEnvoy(request_head(), *messages))
        task = await picker.until_written(FakeEnvoy(request_head(), request_body(BODY)), 2)
        assert endpoint.load.num_requests == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert endpoint.load.num_requests == 0 and endpoint.health.num_ejections == 0
        assert not picker.state.num_under_way and not picker.state.num_awaiting_first_token

    with_picker(test, Replica())


def test_headers_for_the_replica_are_set_and_those_that_mislead_it_removed() -> None:
    async def test(picker: Picker) -> None:
        head = request_head(x_original_url="/admin", x_api_key="theirs", authorization="Bearer theirs")
        envoy = FakeEnvoy(head, request_body(BODY), None)
        await picker.serve(envoy)
        assert envoy.headers()["authorization"] == "Bearer ours"
        removed = envoy.written[0].request_headers.response.header_mutation.remove_headers
        assert {"x-original-url", "x-api-key"} <= set(removed)

    with_picker(test, Replica(), replica_api_key="ours")


def test_repeated_headers_of_the_router_are_kept() -> None:
    mutation = ext_proc_messages.header_mutation([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
    assert [option.append_action for option in mutation.set_headers] == [2, 2, 0]


@settings(max_examples=50, deadline=None)
@given(st.from_regex(r"[A-Za-z0-9._:-]{1,40}", fullmatch=True), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_report_is_read_as_it_was_written(answer_id: str, prompt: int, cached: int) -> None:
    report = UsageReportHeader(answer_id, prompt, cached, 12.5)
    assert decode_report_header([(b"a", b"b"), (b"x-headstart-report", report.encode())]) == report


@pytest.mark.parametrize("text", ["", "id=a", "id=a; prompt_tokens=-1; cached_tokens=0; prefill_ms=1.0", "x" * 9000])
def test_an_invalid_report_is_none(text: str) -> None:
    assert decode_report_header([(b"x-headstart-report", text.encode())]) is None


def test_the_compiled_messages_are_those_of_the_proto_file() -> None:
    text = Path(ext_proc_messages.__file__).with_name("ext_proc.proto").read_text(encoding="utf-8")
    for name, block in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        told = {field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", block)}
        fields = getattr(pb, name).DESCRIPTOR.fields
        assert told == {field.name: field.number for field in fields}, name


def test_health_services_follow_the_replicas_and_the_drain() -> None:
    async def test(picker: Picker) -> None:
        server = PickerServer(picker.state, picker.addresses)
        port = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            encode, decode = pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
            check = channel.unary_unary(f"/{HEALTH}/Check", encode, decode)
            watch = channel.unary_stream(f"/{HEALTH}/Watch", encode, decode)

            async def status(name: str) -> int:
                return (await check(pb.HealthCheckRequest(service=name))).status

            names = ("", "liveness", "readiness", SERVICE)
            assert [await status(name) for name in names] == [1, 1, 1, 1]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await status("nothing")
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
            watching = watch(pb.HealthCheckRequest(service="readiness"))
            assert (await watching.read()).status == 1
            picker.state.start_draining()
            assert [await status(name) for name in names] == [2, 1, 2, 2]
            assert (await watching.read()).status == 2
            watching.cancel()
        await server.close()

    with_picker(test, Replica())


def test_another_body_mode_is_refused() -> None:
    async def test(picker: Picker) -> None:
        server = PickerServer(picker.state, picker.addresses)
        port = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            encode, decode = pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
            for first in (request_body(BODY), request_head()):
                first.protocol_config.request_body_mode = 2
                call = channel.stream_stream(f"/{SERVICE}/Process", encode, decode)()
                await call.write(first)
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        await server.close()

    with_picker(test, Replica())


def test_names_of_hosts_are_resolved() -> None:
    async def test() -> None:
        replica = await Replica().start()
        found: list[Any] = []
        addresses = ReplicaIpAddresses(found.append)
        named = replica.url.replace("127.0.0.1", "localhost")
        addresses.on_replicas_changed([type(replica.address)(named), type(replica.address)("http://[::1]:80")])
        await until(lambda: addresses.address(named) is not None)
        assert addresses.url(addresses.address(named) or "") == named
        assert found[-1] == sorted([place(replica), "[::1]:80"])
        addresses.close()
        await replica.stop()

    run(test())
