"""/v1/responses and /v1/messages through a router, with two real servers or two scripted replicas behind it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from gateway.harness import Front, RealReplica, Replica, cut, front, run, streaming, two
from server.harness import Server, fake_server, parse_events

from headstart.gateway.proxy.replies import ResponseReplicas
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.http.http_errors import HttpError
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer

SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from the big bad bear. " * 3
RIVERS = "a river is a natural stream of fresh water that flows towards another body of water. " * 3
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def servers(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two real servers around fake engines."""
    room = tmp_path_factory.mktemp("apis")
    with fake_server(folder, room / "a") as a, fake_server(folder, room / "b") as b:
        yield [a, b]


def replicas(servers: list[Server]) -> list[Replica]:
    return [RealReplica(server.url) for server in servers]


def address(router: Front) -> str:
    return str(router.client.base_url).rstrip("/")


async def respond(router: Front, text: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    body = {"input": text, "max_output_tokens": 2, **fields}
    return await router.client.post("/v1/responses", json=body, headers=headers)


def test_both_clients_work_through_a_router(servers: list[Server]) -> None:
    async def go() -> None:
        async with front(*replicas(servers)) as router:
            await router.up(2)
            async with openai.AsyncOpenAI(base_url=f"{address(router)}/v1", api_key="none", max_retries=0) as client:
                whole = await client.responses.create(model="fake", input="Hello", max_output_tokens=5)
                texts, last = "", None
                async for event in await client.responses.create(
                    model="fake", input="Hello", max_output_tokens=5, stream=True
                ):
                    texts += event.delta if event.type == "response.output_text.delta" else ""
                    last = event
                assert texts == whole.output_text != "" and last is not None and last.type == "response.incomplete"
                assert (await client.responses.retrieve(whole.id)).to_dict() == whole.to_dict()
                assert len((await client.responses.input_items.list(whole.id)).data) == 1
                await client.responses.delete(whole.id)
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(whole.id)
            async with anthropic.AsyncAnthropic(base_url=address(router), api_key="none", max_retries=0) as claude:
                options: Any = {"model": "fake", "max_tokens": 5, "messages": HELLO}
                message = await claude.messages.create(**options)
                async with claude.messages.stream(**options) as stream:
                    assert await stream.get_final_text() == message.content[0].text != ""  # type: ignore[union-attr]
                assert (await claude.messages.count_tokens(model="fake", messages=HELLO)).input_tokens > 5

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_at_the_replica_that_holds_it(servers: list[Server], stream: bool) -> None:
    async def go() -> None:
        async with front(*replicas(servers), routing_policy="round-robin") as router:
            await router.up(2)
            used: set[str] = set()
            for number in range(6):
                answer = await respond(router, f"{number}", stream=stream)
                used.add(answer.headers["x-headstart-replica"])
                first = parse_events(answer.text)[0]["response"]["id"] if stream else answer.json()["id"]
                for _ in range(2):
                    again = await respond(router, "more", previous_response_id=first)
                    assert again.status_code == 200, again.text
                    assert again.headers["x-headstart-replica"] == answer.headers["x-headstart-replica"]
                    first = again.json()["id"]
            assert used == {server.url for server in servers}  # so chance alone would have failed

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_only_prewarm_pass_a_router(servers: list[Server], stream: bool) -> None:
    async def go() -> None:
        async with front(*replicas(servers)) as router:
            await router.up(2)
            answer = await respond(router, RIVERS, stream=stream, prompt_cache_options={"prewarm": True})
            warm = parse_events(answer.text)[-1]["response"] if stream else answer.json()
            assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
            body = {"model": "fake", "max_tokens": 0, "messages": HELLO, "stream": stream}
            answer = await router.client.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            if stream:
                names = [event["type"] for event in parse_events(answer.text)]
                assert names == ["message_start", "message_delta", "message_stop"]
            else:
                assert (answer.json()["content"], answer.json()["stop_reason"]) == ([], "max_tokens")

    run(go())


def test_a_comparison_is_made_by_the_replica_that_serves_the_request(servers: list[Server]) -> None:
    """An answer of another replica is not found there; the request is routed as without a comparison."""

    async def go() -> None:
        async with front(*replicas(servers), routing_policy="round-robin") as router:
            await router.up(2)
            first = await respond(router, RIVERS)
            told: dict[bool, set[str]] = {True: set(), False: set()}
            for _ in range(4):
                options = {"comparison_response_id": first.json()["id"]}
                again = await respond(router, "Now: " + RIVERS, prompt_cache_options=options)
                same = again.headers["x-headstart-replica"] == first.headers["x-headstart-replica"]
                told[same].add(again.json()["prompt_cache_diagnostics"]["type"])
            assert told[False] == {"comparison_response_not_found"}
            assert "cache_miss" in told[True] and "comparison_response_not_found" not in told[True]

    run(go())


def test_an_item_is_referred_to_at_the_replica_that_holds_it(servers: list[Server]) -> None:
    async def go() -> None:
        async with front(*replicas(servers), routing_policy="round-robin") as router:
            await router.up(2)
            for number in range(4):
                answer = await respond(router, f"{number}")
                for _ in range(2):
                    [said] = answer.json()["output"]
                    items = [*HELLO, {"type": "item_reference", "id": said["id"]}, *HELLO]
                    again = await router.client.post("/v1/responses", json={"input": items, "max_output_tokens": 2})
                    assert again.status_code == 200, again.text
                    assert again.headers["x-headstart-replica"] == answer.headers["x-headstart-replica"]
                    answer = again
            lost = await router.client.post("/v1/responses", json={"input": [{**items[1], "id": "msg_" + "0" * 34}]})
            assert (lost.status_code, lost.json()["error"]["param"]) == (404, "input")

    run(go())


def test_a_tenants_response_is_not_found_by_another_behind_one_replica_key(servers: list[Server]) -> None:
    async def go() -> None:
        keys = {"api_key": ("one", "two")}
        async with front(*replicas(servers), server=keys, replica_api_key="inner") as router:
            await router.up(2)
            one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
            made = (await respond(router, "Hello", headers=one)).json()["id"]

            async def statuses(headers: dict[str, str], response_id: str) -> list[tuple[int, str]]:
                path = f"/v1/responses/{response_id}"
                answers = [
                    await router.client.get(path, headers=headers),
                    await router.client.get(f"{path}/input_items", headers=headers),
                    await respond(router, "x", previous_response_id=response_id, headers=headers),
                    await router.client.delete(path, headers=headers),
                ]
                return [(answer.status_code, answer.text.replace(response_id, "ID")) for answer in answers]

            unknown = await statuses(two, "resp_unknown")
            assert [status for status, _ in unknown] == [404] * 4
            assert await statuses(two, made) == unknown
            assert [status for status, _ in await statuses(one, made)] == [200] * 4

    run(go())


def test_when_the_replica_is_gone_its_responses_are_not_found() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"id": "resp_1", "output": [], "usage": None})

    async def go() -> None:
        both = two()
        for replica in both:
            replica.script = answer
        async with front(*both, replica_wait=0.0) as router:
            await router.up(2)
            first = await respond(router, "x")
            holder = next(replica for replica in both if replica.bodies)
            assert first.json()["id"] == "resp_1"
            assert (await respond(router, "x", previous_response_id="resp_1")).status_code == 200
            await holder.stop()
            await router.up(1)
            gone = await respond(router, "x", previous_response_id="resp_1")
            assert gone.status_code == 404 and "is gone" in gone.text
            assert gone.json()["error"]["param"] == "previous_response_id"
            assert (await router.client.get("/v1/responses/resp_1")).status_code == 404

    run(go())


def test_the_second_equal_prompt_goes_where_the_first_one_is_cached(servers: list[Server], folder: str) -> None:
    async def go() -> None:
        reader = RequestParser(SegmentedTokenizer(Tokenizer.from_folder(Path(folder))))
        async with front(*replicas(servers), reader=reader) as router:
            await router.up(2)
            tale = [{"role": "user", "content": "A tale. " + SENTENCE}]
            for path, body in (
                ("/v1/responses", {"input": SENTENCE, "max_output_tokens": 2}),
                ("/v1/messages", {"messages": tale, "max_tokens": 2}),
            ):
                used = set[str]()
                for stream in (False, True, False):
                    answer = await router.client.post(path, json={**body, "stream": stream})
                    assert answer.status_code == 200, answer.text
                    used.add(answer.headers["x-headstart-replica"])
                assert len(used) == 1, path
            assert router.state.router.num_reported == 6  # each answer's usage was understood
            assert router.state.router.prediction_error == 0

    run(go())


def events_of(path: str, *, ends: bool) -> list[bytes]:
    """A short stream of one of the two APIs, with or without its last event."""
    if path == "/v1/responses":
        first, last = b'{"type":"response.created","response":{"id":"resp_1"}}', b'{"type":"response.completed"}'
        names = (b"response.created", b"response.completed")
    else:
        first, last = b'{"type":"message_start","message":{"id":"msg_1"}}', b'{"type":"message_stop"}'
        names = (b"message_start", b"message_stop")
    made = [b"event: " + name + b"\ndata: " + data + b"\n\n" for name, data in zip(names, (first, last), strict=True)]
    return made if ends else made[:1]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5, "stream": True},
}


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_ends_with_its_own_last_event(path: str, ends: bool) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert "stream_options" not in body
        response = await streaming(request)
        for event in events_of(path, ends=ends):
            await response.write(event)
        return response

    async def go() -> None:
        replica = Replica()
        replica.script = script
        async with front(replica) as router:
            await router.up(1)
            answer = await router.client.post(path, json=BODIES[path])
            assert answer.content.startswith(b"".join(events_of(path, ends=ends))) and "[DONE]" not in answer.text
            if ends:
                assert answer.content == b"".join(events_of(path, ends=True))
                return
            last = parse_events(answer.text)[-1]
            assert last["type"] == "error" and "event: error\n" in answer.text
            if path == "/v1/responses":
                assert (last["code"], last["sequence_number"]) == ("replica_lost", 1)
            else:
                assert last["error"]["code"] == "replica_lost" and last["request_id"] == answer.headers["request-id"]

    run(go())


@pytest.mark.parametrize("path", list(BODIES))
def test_before_the_first_event_another_replica_is_tried(path: str) -> None:
    async def lose(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await streaming(request)
        await response.write(b": ping\n\n")
        cut(request)
        return response

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await streaming(request)
        await response.write(b"".join(events_of(path, ends=True)))
        return response

    async def go() -> None:
        first, second = both = two()
        num_lost = 0

        async def lose_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal num_lost
            num_lost += 1
            return await (lose if num_lost == 1 else answer)(request, body)

        first.script = second.script = lose_once
        async with front(*both) as router:
            await router.up(2)
            found = await router.client.post(path, json=BODIES[path])
            assert num_lost == 2 and found.content.endswith(b"".join(events_of(path, ends=True)))

    run(go())


@pytest.mark.parametrize("path", list(BODIES))
def test_errors_of_the_router_have_the_form_of_the_api(path: str) -> None:
    async def go() -> None:
        async with front(server={"api_key": ("right",)}) as router:
            answer = await router.client.post(path, json=BODIES[path])
            assert answer.status_code == 401
            refused = await router.client.post(path, json=BODIES[path], headers={"authorization": "Bearer right"})
            assert refused.status_code == 503
            body = refused.json()
            assert body["error"]["code"] == "no_replicas"
            assert (body.get("type"), body["error"]["type"]) == (
                ("error", "overloaded_error") if path == "/v1/messages" else (None, "server_error")
            )

    run(go())


def test_the_clients_key_in_x_api_key_does_not_reach_replicas_behind_one_key() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, server={"api_key": ("right",)}, replica_api_key="inner") as router:
            await router.up(1)
            body = {**BODIES["/v1/messages"], "stream": False}
            answer = await router.client.post("/v1/messages", json=body, headers={"x-api-key": "right"})
            assert answer.status_code == 200, answer.text
            assert replica.heads[-1]["authorization"] == "Bearer inner" and "x-api-key" not in replica.heads[-1]

    run(go())


def test_the_table_of_owners_is_bounded_and_by_tenant() -> None:
    owners = ResponseReplicas(max_responses=2)
    for number in range(3):
        owners.add(f"r{number}", "http://a", b"tenant")
    assert owners.find("r2", b"tenant", "response_id") == "http://a"
    for response_id, domain in (("r0", b"tenant"), ("r2", b"other")):
        with pytest.raises(HttpError) as caught:
            owners.find(response_id, domain, "response_id")
        assert caught.value.status == 404
