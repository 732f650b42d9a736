"""The front when replicas answer with garbage: nothing of it is passed on, and it counts against the replica."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway.harness import TEXTS, Front, Replica, chunk, front, refusing, run, streaming, texts, two
from server.harness import parse_events

from headstart.gateway.proxy import replies
from headstart.gateway.proxy import sse_reader as sse

ANSWER = json.dumps({"choices": [{"index": 0, "text": "abc"}]}).encode()
HTML = b"<html>http://10.0.0.7:8000/internal</html>"
SECONDS = 60.0  # until a request that hangs fails its test


def head(status: str, *lines: str, length: int | None = None, kind: str = "application/json") -> bytes:
    """The head of a response."""
    sized = [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([f"HTTP/1.1 {status}", f"content-type: {kind}", *sized, *lines, "", ""]).encode()


def whole(status: str, body: bytes, *lines: str, kind: str = "application/json") -> bytes:
    return head(status, *lines, length=len(body), kind=kind) + body


def events(*pieces: bytes) -> bytes:
    return whole("200 OK", b"".join(pieces), kind="text/event-stream")


def raw(data: bytes, *, closes: bool = True) -> Any:
    """A script: these bytes instead of an answer."""

    async def write(request: web.Request, body: dict[str, Any]) -> None:
        assert request.transport is not None
        request.transport.write(data)
        if closes:
            request.transport.close()
        await asyncio.Event().wait()

    return write


GARBAGE = {
    "html": whole("200 OK", HTML, kind="text/html"),
    "html that says it is JSON": whole("200 OK", HTML),
    "nothing": whole("200 OK", b""),
    "a list": whole("200 OK", b"[1]"),
    "half an object": whole("200 OK", ANSWER[:-1]),
    "an object and more": whole("200 OK", ANSWER + b"x"),
    "an object without choices": whole("200 OK", b"{}"),
    "no UTF-8": whole("200 OK", b'{"choices": [{"text": "\xff"}]}'),
    "compressed": whole("200 OK", gzip.compress(ANSWER), "content-encoding: gzip"),
    "201": whole("201 Created", ANSWER),
    "204": head("204 No Content"),
    "304": head("304 Not Modified"),
    "307": head("307 Temporary Redirect", "location: http://10.0.0.7/x", "set-cookie: a=b", length=0),
    "407": whole("407 Proxy Authentication Required", b"{}"),
    "600": whole("600 X", ANSWER),
    "999": whole("999 X", ANSWER),
    "101": head("101 Switching Protocols", "connection: upgrade", "upgrade: x"),
    "events of HTML": events(b"data: " + HTML + b"\n\n", b"data: [DONE]\n\n"),
    "events that are lists": events(b"data: [1]\n\n", b"data: [DONE]\n\n"),
    "no event but the end": events(b"data: [DONE]\n\n"),
    "no event at all": events(b""),
    "an empty event": events(b"data:\n\ndata: [DONE]\n\n"),
    "compressed events": whole("200 OK", gzip.compress(chunk("a")), "content-encoding: gzip", kind="text/event-stream"),
    "a line without end": head("200 OK", kind="text/event-stream") + b"data: " + b"x" * (3 << 20),
    "comments without end": head("200 OK", kind="text/event-stream") + b": ping\n\n" * (1 << 18),
    "JSON without end": head("200 OK") + b'{"choices": [' + b" " * (3 << 20),
    "no HTTP": b"\x00\x01\x02",
}


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test reaches soon."""
    monkeypatch.setattr(replies, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(sse, "KEPT_EVENT_BYTES", 1 << 18)
    monkeypatch.setattr(sse, "MAX_COMMENT_BYTES", 1 << 20)


async def garbling(router: Front, replicas: list[Replica], script: Any) -> Replica:
    """Makes the replica that the next request of this prompt goes to answer by `script`."""
    first = await router.complete([1] * 64)
    assert first.status_code == 200
    chosen = max(replicas, key=lambda replica: len(replica.bodies))
    chosen.script = script
    return chosen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_by_another_replica_and_counts_against_the_first(name: str, stream: bool) -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            garbler = await garbling(router, replicas, raw(GARBAGE[name], closes="without end" not in name))
            answer = await router.complete([1] * 64, stream=stream)
            assert answer.status_code == 200
            assert (texts(answer.text) == TEXTS) if stream else (answer.json()["choices"][0]["text"] == "abc")
            assert sorted(len(replica.bodies) for replica in replicas) == [1, 2] and len(garbler.bodies) == 2
            assert router.state.router.endpoints[garbler.url].load.num_requests == 0
            for _ in range(2):
                assert (await router.complete([1] * 64, stream=stream)).status_code == 200
            health = router.state.router.endpoints[garbler.url].health
            assert health.num_ejections == 1 or len(garbler.bodies) < 4

    run(go())


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_of_all_replicas_is_a_502_without_a_word_of_it(name: str) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            replica.script = raw(GARBAGE[name], closes="without end" not in name)
            answer = await router.complete()
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] in ("bad_replica_answer", "replica_lost", "replica_unreachable")
            assert "10.0.0.7" not in answer.text and "location" not in answer.headers
            assert "set-cookie" not in answer.headers
            metrics = (await router.client.get("/metrics")).text
            assert 'outcome="ok"' not in metrics

    run(go())


def test_a_flood_of_interim_responses_is_not_read_for_ever() -> None:
    async def flood(request: web.Request, body: dict[str, Any]) -> None:
        assert request.transport is not None
        while not request.transport.is_closing():
            request.transport.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            await garbling(router, replicas, flood)
            assert (await router.complete([1] * 64)).status_code == 200

    run(go())


def test_only_known_headers_of_a_replica_are_passed_back() -> None:
    lines = (
        *("set-cookie: a=b", "server: nginx/1.1 10.0.0.7", "location: http://10.0.0.7/", "x-internal: 10.0.0.7"),
        *("via: 1.1 10.0.0.7", "retry-after: 3", "x-ratelimit-limit-requests: 7", "openai-version: 1"),
        *("content-type: text/html", "cache-control: no-cache"),
    )

    async def go() -> None:
        replica = Replica()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            for data, stream in ((whole("200 OK", ANSWER, *lines), False), (events_with(*lines), True)):
                replica.script = raw(data)
                answer = await router.complete(stream=stream)
                assert answer.status_code == 200
                assert "10.0.0.7" not in str(answer.headers) and "set-cookie" not in answer.headers
                assert answer.headers["retry-after"] == "3" and answer.headers["openai-version"] == "1"
                assert answer.headers["x-ratelimit-limit-requests"] == "7"
                assert answer.headers.get_list("content-type") == [
                    "text/event-stream; charset=utf-8" if stream else "application/json"
                ]

    run(go())


def events_with(*lines: str) -> bytes:
    body = chunk("a") + b"data: [DONE]\n\n"
    return whole("200 OK", body, *lines, kind="text/event-stream")


@pytest.mark.parametrize("status", [400, 404, 429, 500, 502, 503])
@pytest.mark.parametrize(
    "body", [HTML, b"", b"[1]", b'{"error": 7}', b'{"x": "10.0.0.7"}', b'{"error": {"message": "\xff"}}']
)
def test_errors_that_are_no_error_objects_keep_their_status_only(status: int, body: bytes) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            replica.script = raw(whole(f"{status} X", body, kind="text/html"))
            answer = await router.complete()
            assert answer.status_code == status
            assert answer.json()["error"]["message"] and "10.0.0.7" not in answer.text
            assert answer.headers["content-type"] == "application/json"

    run(go())


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {"error": "too long"},
        {"object": "error", "message": "too long", "code": 400},
        {"detail": "too long"},
    ],
)
def test_error_objects_of_every_engine_are_passed_back_as_they_are(body: dict[str, Any]) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            replica.script = raw(whole("400 Bad Request", json.dumps(body).encode()))
            answer = await router.complete()
            assert answer.status_code == 400 and answer.json() == body

    run(go())


@pytest.mark.parametrize("told", [{"cached_tokens": -5}, {"cached_tokens": 10**12}, {"cached_tokens": "x"}])
@pytest.mark.parametrize("stream", [False, True])
def test_absurd_counts_of_cached_tokens_are_not_believed(told: dict[str, Any], stream: bool) -> None:
    usage = {"prompt_tokens": 64, "completion_tokens": -1, "prompt_tokens_details": told}
    document = {"choices": [{"index": 0, "text": "abc"}], "usage": usage}

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            return web.json_response(document)
        response = await streaming(request)
        await response.write(chunk("abc") + b"data: " + json.dumps({**document, "choices": []}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def go() -> None:
        replica = Replica()
        replica.script = answer
        async with front(replica) as router:
            assert (await router.complete([1] * 64, stream=stream)).status_code == 200
            assert router.state.router.num_reported == 0
            assert 'outcome="ok"' in (await router.client.get("/metrics")).text

    run(go())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech"])
def test_other_routes_may_answer_with_anything_but_redirects(path: str) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            replica.script = raw(whole("200 OK", b"\x00RIFF", "set-cookie: a=b", kind="audio/wav"))
            answer = await router.client.post(path, json={"input": "x"})
            assert answer.status_code == 200 and answer.content == b"\x00RIFF"
            assert answer.headers["content-type"] == "audio/wav" and "set-cookie" not in answer.headers
            replica.script = raw(GARBAGE["307"])
            assert (await router.client.post(path, json={"input": "x"})).status_code == 502

    run(go())


def test_an_error_that_comes_as_the_first_event_is_no_success() -> None:
    async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await streaming(request)
        error = {"error": {"message": "no", "code": "request_failed"}}
        await response.write(b": ping\n\n")
        await response.write(b"event: error\ndata: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def go() -> None:
        replica = Replica()
        replica.script = fails
        async with front(replica) as router:
            answer = await router.complete(stream=True)
            assert parse_events(answer.text)[0]["error"]["code"] == "request_failed"
            metrics = (await router.client.get("/metrics")).text
            assert 'outcome="ok"' not in metrics and 'outcome="error"' in metrics

    run(go())


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_looks_at_replicas_follow_no_redirect_and_survive_what_is_no_answer(path: str) -> None:
    asked: list[str] = []

    async def strange(request: web.Request, handler: Any) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == path:
            if len(asked) % 2:
                raise web.HTTPTemporaryRedirect("/internal")
            return web.Response(body=b"x" * (1 << 20))
        return await handler(request)

    async def go() -> None:
        replica, other = two()
        replica.middleware = strange
        async with front(replica, other) as router, asyncio.timeout(SECONDS):
            assert (await router.complete()).status_code == 200
            while len(asked) < 12:
                await asyncio.sleep(0.02)
            assert "/internal" not in asked

    run(go())


def test_a_replica_that_says_busy_in_html_is_still_busy() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router:
            await router.up(2)
            await garbling(router, replicas, refusing(429, "queue_full"))
            assert (await router.complete([1] * 64)).status_code == 200

    run(go())


def long_answer(num_bytes: int) -> bytes:
    """A generated answer of about so many bytes, whose end tells its usage."""
    usage = {"prompt_tokens": 64, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 48}}
    return json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": "a" * num_bytes}], "usage": usage}).encode()


def test_a_long_answer_is_passed_on_as_it_comes_and_its_end_is_read() -> None:
    body = long_answer(5 << 20)

    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            sender = await garbling(router, replicas, raw(whole("200 OK", body), closes=False))
            before = router.state.router.num_reported
            answer = await router.complete([1] * 64)
            assert answer.status_code == 200 and answer.content == body
            assert router.state.router.num_reported == before + 1, "its cached_tokens were read"
            endpoint = router.state.router.endpoints[sender.url]
            assert endpoint.health.is_up(0.0) and endpoint.load.num_requests == 0
            assert router.state.proxy.held.held_bytes == 0
            assert 'outcome="lost"' not in (await router.client.get("/metrics")).text

    run(go())


def test_a_long_answer_that_is_cut_cuts_the_clients_connection() -> None:
    body = long_answer(5 << 20)

    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            await garbling(router, replicas, raw(head("200 OK", length=len(body)) + body[: 3 << 20]))
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await router.complete([1] * 64)
            assert sum(len(replica.bodies) for replica in replicas) == 2, "it is sent to no other"
            assert 'outcome="lost"' in (await router.client.get("/metrics")).text

    run(go())


def long_event(num_bytes: int) -> bytes:
    return b"data: " + long_answer(num_bytes) + b"\n\n"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_long_event_is_passed_on_as_it_comes_and_is_not_kept(is_first: bool) -> None:
    body = b"".join([b"" if is_first else chunk("a"), long_event(3 << 20), chunk("b"), b"data: [DONE]\n\n"])

    async def go() -> None:
        replica = Replica()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            replica.script = raw(head("200 OK", length=len(body), kind="text/event-stream") + body, closes=False)
            before, most = router.state.router.num_reported, 0
            sent = b""
            async with router.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                async for piece in answer.aiter_raw():
                    sent += piece
                    most = max(most, router.state.proxy.held.held_bytes)
            assert sent == body and most < 1 << 20
            assert router.state.router.num_reported == before + 1, "its cached_tokens were read"
        assert not router.state.proxy.held.held_bytes

    run(go())


def test_a_long_event_that_is_cut_cuts_the_clients_connection() -> None:
    body = chunk("a") + long_event(3 << 20)

    async def go() -> None:
        replica = Replica()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            start = head("200 OK", length=len(body), kind="text/event-stream")
            replica.script = raw(start + body[: 2 << 20])
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await router.complete(stream=True)
            assert 'outcome="lost"' in (await router.client.get("/metrics")).text

    run(go())
