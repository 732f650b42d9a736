"""The front over real sockets: what clients get when replicas answer, fail, stall, drain and come back."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from fleet.harness import Replica, chunk, cut, front, streaming, unused_url, usage
from server.harness import parse_events, until

from headstart.fleet.address import ReplicaAddress
from headstart.router.shadow import Shadow

TEXTS = ["a", "b", "c"]


def texts(body: str) -> list[str]:
    return [event["choices"][0]["text"] for event in parse_events(body) if event != "[DONE]" and event.get("choices")]


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def two() -> list[Replica]:
    return [Replica("m"), Replica("m")]


# ------------------------------------------------------------------------------------------------------------ answers


def test_a_whole_answer_comes_as_the_replica_gave_it() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            answer = await router.complete([1, 2, 3], max_tokens=3)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abc"
            assert answer.headers["x-headstart-replica"] == replica.url
            assert replica.bodies == [{"prompt": [1, 2, 3], "max_tokens": 3}]
            assert router.state.router.num_reported == 1 and router.state.num_pending == 0

    run(go())


def test_a_stream_is_passed_on_as_it_comes_and_hides_the_usage_only_the_router_asked_for() -> None:
    async def go() -> None:
        replica = Replica()
        replica.gate.clear()
        async with front(replica) as router:
            body = {"prompt": [1] * 40, "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                pieces = answer.aiter_text()
                first = await anext(pieces)
                assert texts(first) == ["a"], "the first token must not wait for the next"
                replica.gate.set()
                rest = "".join([piece async for piece in pieces])
            assert texts(first + rest) == TEXTS and "usage" not in first + rest and rest.endswith("[DONE]\n\n")
            assert replica.bodies[0]["stream_options"] == {"include_usage": True}
            assert router.state.router.num_reported == 1

    run(go())


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "chunk_include_usage": False}])
def test_who_asks_for_usage_gets_it_and_the_body_is_sent_on_as_it_was(options: dict[str, Any]) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            raw = json.dumps({"prompt": "Hello", "stream": True, "stream_options": options}, indent=3).encode()
            headers = {"content-type": "application/json"}
            answer = await router.client.post("/v1/completions", content=raw, headers=headers)
            assert parse_events(answer.text)[-2]["usage"]["completion_tokens"] == 3
            assert replica.raw == [raw]

    run(go())


def test_what_a_replica_says_is_wrong_is_the_clients_and_is_asked_once() -> None:
    async def go() -> None:
        replicas = two()

        async def wrong(request: web.Request, body: dict[str, Any]) -> web.Response:
            return web.json_response({"error": {"message": "no", "code": "x"}}, status=400, headers={"x-own": "kept"})

        for replica in replicas:
            replica.script = wrong
        async with front(*replicas) as router:
            answer = await router.complete()
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "x"
            assert answer.headers["x-own"] == "kept"
            assert sum(len(replica.bodies) for replica in replicas) == 1
            assert all(endpoint.load.num_requests == 0 for endpoint in router.state.router.endpoints.values())

    run(go())


def test_request_ids_keys_and_sessions_reach_the_replica_and_hop_by_hop_headers_do_not() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            headers = {"x-request-id": "mine", "authorization": "Bearer k", "te": "trailers", "x-more": "1"}
            answer = await router.complete(headers=headers)
            head = replica.heads[0]
            assert answer.headers["x-request-id"] == "mine" and head["x-request-id"] == "mine"
            assert head["authorization"] == "Bearer k" and head["x-more"] == "1" and "te" not in head
            assert head["host"] == replica.url.removeprefix("http://")

    run(go())


def test_prompts_of_one_prefix_go_where_it_is_and_the_explanation_says_so() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router:
            await router.up(2)
            for number in range(6):
                await router.complete([1] * 320 + [number])
            assert sorted(len(replica.bodies) for replica in replicas) == [0, 6]
            answer = await router.complete([1] * 320 + [9], headers={"x-headstart-explain": "1"})
            told = json.loads(answer.headers["x-headstart-route"])
            assert told["endpoint"] == answer.headers["x-headstart-replica"]
            assert told["candidates"][0]["cached_tokens"] == 320 and len(told["candidates"]) == 2
            assert "x-headstart-route" not in (await router.complete()).headers

    run(go())


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/prefixes",
            "/v1/x/../prefixes",
            "/v1/x/%2e%2e/prefixes",
            "/v1/%70refixes",
            "/v1//prefixes",
            "/v1/prefixes/a",
        ),
        *(
            "/reset_prefix_cache",
            "/v1/../reset_prefix_cache",
            "/v1/x%3fy",
            "/v1/x%23y",
            "/v1/",
            "/v1/a%20b",
            "/v1/cache/x",
        ),
    ],
)
def test_a_stranger_administers_no_replica_whatever_the_path(path: str) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            url = router.client.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)  # clients tidy paths, this does not
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 10.0.0.1\r\ncontent-length: 2\r\n"
            writer.write(f"{head}connection: close\r\n\r\n{{}}".encode())
            status = (await reader.read()).split()[1]
            writer.close()
            assert status in (b"403", b"404") and not replica.bodies

    run(go())


def test_what_an_administrator_asks_is_asked_of_every_replica() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas, server={"api_key": ("user",), "admin_api_key": ("root",)}) as router:
            await router.up(2)
            user, root = ({"authorization": f"Bearer {key}"} for key in ("user", "root"))
            for path in ("/v1/prefixes", "/reset_prefix_cache?pinned=true"):
                assert (await router.client.post(path, json={"name": "p"}, headers=user)).status_code == 403
            await router.complete([1] * 64, headers=user)
            shadows = [router.state.router.endpoints[replica.url].contents for replica in replicas]
            assert sum(len(shadow) for shadow in shadows if isinstance(shadow, Shadow)) == 4
            for path in ("/v1/prefixes", "/reset_prefix_cache?pinned=true"):
                assert (await router.client.post(path, json={"name": "p"}, headers=root)).status_code == 200
                assert all(replica.bodies[-1] == {"name": "p"} for replica in replicas)
                assert all("x-forwarded-for" not in replica.heads[-1] for replica in replicas)
            assert sum(len(shadow) for shadow in shadows if isinstance(shadow, Shadow)) == 0
            replicas[0].script = _status(409, "exists")
            answer = await router.client.post("/v1/prefixes", json={"name": "p"}, headers=root)
            assert answer.status_code == 409 and answer.json()["error"]["code"] == "exists"
            replicas[0].script = _reset
            answer = await router.client.post("/v1/prefixes", json={"name": "p"}, headers=root)
            assert answer.status_code == 502 and "1 of 2 replicas" in answer.text

    run(go())


def test_without_keys_only_this_machine_administers() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            assert (await router.client.post("/v1/prefixes", json={})).status_code == 200
            passed_on = {"x-forwarded-for": "10.0.0.1"}
            assert (await router.client.post("/v1/prefixes", json={}, headers=passed_on)).status_code == 403
            assert len(replica.bodies) == 1

    run(go())


def test_replicas_are_told_whom_a_request_comes_from() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.complete()
            await router.complete(headers={"x-forwarded-for": "10.1.2.3"})
            told = [head["x-forwarded-for"] for head in replica.heads]
            assert told == ["127.0.0.1", "10.1.2.3, 127.0.0.1"]

    run(go())


# ----------------------------------------------------------------------------------------------------------- failures


async def _reset(request: web.Request, body: dict[str, Any]) -> None:
    cut(request)
    await asyncio.Event().wait()


async def _reset_later(request: web.Request, body: dict[str, Any]) -> None:
    response = await streaming(request)
    await response.write(chunk("a"))
    cut(request)
    await asyncio.Event().wait()


async def _reset_behind_pings(request: web.Request, body: dict[str, Any]) -> None:
    response = await streaming(request)
    await response.write(b": ping\n\n")
    await asyncio.sleep(0)
    cut(request)
    await asyncio.Event().wait()


def _status(status: int, code: str) -> Any:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "not now", "code": code}}, status=status)

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "counted"),
    [
        (_reset, "lost"),
        (_reset_behind_pings, "lost"),
        (_status(503, "draining"), "draining"),
        (_status(503, "loading"), "loading"),
        (_status(502, "bad"), "broken"),
        (_status(429, "queue_full"), "busy"),
    ],
)
def test_what_fails_before_the_first_token_is_answered_by_another(script: Any, counted: str, stream: bool) -> None:
    if script is _reset_behind_pings and not stream:
        pytest.skip("only streams have comments")

    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router:
            await router.up(2)
            first = await router.complete([1] * 64)
            at = next(replica for replica in replicas if replica.url == first.headers["x-headstart-replica"])
            at.script = script
            answer = await router.complete([1] * 64, stream=stream)
            assert answer.status_code == 200
            assert (texts(answer.text) == TEXTS) if stream else (answer.json()["choices"][0]["text"] == "abc")
            assert answer.text.count("[DONE]") == stream
            other = next(replica for replica in replicas if replica is not at)
            if script is not _reset_behind_pings or not stream:
                assert answer.headers["x-headstart-replica"] == other.url
            assert len(other.bodies) == 1
            metrics = (await router.client.get("/metrics")).text
            assert f'headstart:router_failures_total{{reason="{counted}"}} 1.0' in metrics
            assert router.state.budget.num_retrying == router.state.budget.num_active == 0
            assert all(endpoint.load.num_requests == 0 for endpoint in router.state.router.endpoints.values())

    run(go())


def test_a_stream_that_breaks_in_the_middle_ends_with_a_typed_error() -> None:
    async def go() -> None:
        replicas = two()
        for replica in replicas:
            replica.script = _reset_later
        async with front(*replicas) as router:
            answer = await router.complete(stream=True)
            events = parse_events(answer.text)
            assert answer.status_code == 200 and texts(answer.text.split("event: error")[0]) == ["a"]
            assert events[-2]["error"]["code"] == "replica_lost" and events[-1] == "[DONE]"
            assert sum(len(replica.bodies) for replica in replicas) == 1, "half an answer is not begun again"
            metrics = (await router.client.get("/metrics")).text
            assert 'outcome="lost"' in metrics

    run(go())


def test_a_stream_that_ends_without_done_is_lost_too() -> None:
    async def short(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await streaming(request)
        await response.write(chunk("a"))
        return response

    async def go() -> None:
        replica = Replica()
        replica.script = short
        async with front(replica) as router:
            events = parse_events((await router.complete(stream=True)).text)
            assert events[-2]["error"]["code"] == "replica_lost"

    run(go())


def test_when_all_refuse_the_client_gets_the_last_word_of_a_replica() -> None:
    async def go() -> None:
        replicas = two()
        for replica in replicas:
            replica.script = _status(429, "queue_full")
        async with front(*replicas) as router:
            await router.up(2)
            answer = await router.complete()
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
            assert [len(replica.bodies) for replica in replicas] == [1, 1]

    run(go())


def test_when_all_are_lost_the_client_is_told_and_attempts_are_bounded() -> None:
    async def go() -> None:
        replicas = [Replica() for _ in range(5)]
        for replica in replicas:
            replica.script = _reset
        async with front(*replicas, max_attempts=3) as router:
            await router.up(5)
            answer = await router.complete()
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_unreachable"
            assert sum(len(replica.bodies) for replica in replicas) == 3

    run(go())


def test_a_lost_connection_to_the_only_replica_is_tried_once_more() -> None:
    async def go() -> None:
        replica = Replica()
        seen = 0

        async def once(request: web.Request, body: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                await _reset(request, body)

        replica.script = once
        async with front(replica) as router:
            assert (await router.complete()).status_code == 200 and seen == 2

    run(go())


def test_retries_of_sick_replicas_are_few_and_those_of_dead_ones_are_not() -> None:
    async def go() -> None:
        sick, well = two()
        async with front(sick, well, retry_budget=0.0) as router:
            await router.up(2)
            first = await router.complete([1] * 64)
            at = next(replica for replica in (sick, well) if replica.url == first.headers["x-headstart-replica"])
            at.script = _status(502, "bad")
            assert (await router.complete([1] * 64)).status_code == 502
            at.script = _reset
            assert (await router.complete([1] * 64)).status_code == 200
            assert "headstart:router_retries_refused_total 1.0" in (await router.client.get("/metrics")).text

    run(go())


def test_nobody_there_is_said_at_once() -> None:
    async def go() -> None:
        async with front() as router:
            answer = await router.complete()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replicas"
            assert answer.headers["retry-after"] == "1"
            router.state.members.changed([ReplicaAddress(unused_url())])
            await until(lambda: all(m.state == "absent" for m in router.state.members.members.values()))
            answer = await router.complete()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replicas"
            assert (await router.client.get("/health")).status_code == 503
            assert (await router.client.get("/livez")).status_code == 200

    run(go())


def test_a_client_that_hangs_up_ends_the_work_at_the_replica_and_harms_nobodys_health() -> None:
    async def go() -> None:
        replica = Replica()
        replica.gate.clear()
        async with front(replica) as router:
            body = {"prompt": "Hello", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_text())
            await until(lambda: replica.gone == 1)
            await until(lambda: router.state.num_under_way == 0)
            endpoint = router.state.router.endpoints[replica.url]
            assert endpoint.load.num_requests == 0 and endpoint.health.num_ejections == 0
            assert router.state.num_pending == 0

    run(go())


def test_a_client_that_hangs_up_behind_the_last_event_has_had_its_answer() -> None:
    async def go() -> None:
        replica, still_open = Replica(), asyncio.Event()

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await streaming(request)
            await response.write(chunk("a") + chunk("", usage=usage(64, 32)) + b"data: [DONE]\n\n")
            await still_open.wait()
            return response

        replica.script = answer
        async with front(replica) as router:
            body = {"prompt": [1] * 64, "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        break
            await until(lambda: router.state.num_under_way == 0)
            assert router.state.router.num_reported == 1
            assert 'outcome="ok"' in (await router.client.get("/metrics")).text
            still_open.set()

    run(go())


# -------------------------------------------------------------------------------------------------------------- bounds


def test_more_than_may_wait_get_429_and_those_that_have_a_token_do_not_count() -> None:
    async def go() -> None:
        replica = Replica()
        held = asyncio.Event()

        async def hold(request: web.Request, body: dict[str, Any]) -> None:
            await held.wait()

        async with front(replica, server={"max_num_queued_reqs": 2}) as router:
            replica.gate.clear()
            streaming_one = asyncio.create_task(router.complete(stream=True))
            await until(lambda: router.state.num_under_way == 1 and router.state.num_pending == 0)
            replica.script = hold
            waiting = [asyncio.create_task(router.complete()) for _ in range(2)]
            await until(lambda: router.state.num_pending == 2)
            refused = await router.complete()
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            held.set()
            replica.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting, streaming_one)] == [200] * 3

    run(go())


def test_bodies_are_read_chunked_and_no_longer_than_allowed() -> None:
    async def go() -> None:
        replica = Replica()

        async def pieces() -> Any:
            for piece in (b'{"prompt": "He', b'llo", "max_', b'tokens": 2}'):
                yield piece

        async with front(replica, server={"max_body_bytes": 4096}) as router:
            headers = {"content-type": "application/json"}
            answer = await router.client.post("/v1/completions", content=pieces(), headers=headers)
            assert answer.status_code == 200 and replica.bodies == [{"prompt": "Hello", "max_tokens": 2}]
            assert (await router.complete("x" * 5000)).status_code == 413
            assert (await router.client.post("/v1/completions", content=b"[1", headers=headers)).status_code == 400
            assert len(replica.bodies) == 1

    run(go())


def test_draining_admits_nothing_new_and_answers_what_is_under_way() -> None:
    async def go() -> None:
        replica = Replica()
        replica.gate.clear()
        async with front(replica) as router:
            under_way = asyncio.create_task(router.complete(stream=True))
            await until(lambda: router.state.num_under_way == 1)
            router.state.draining = True
            refused = await router.complete()
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            replica.gate.set()
            assert texts((await under_way).text) == TEXTS
            await router.state.idle.wait()

    run(go())


# ---------------------------------------------------------------------------------------------------- models and keys


def test_models_of_all_replicas_are_one_list_and_each_request_goes_to_one_that_serves_its_model() -> None:
    async def go() -> None:
        one, other = Replica("one"), Replica("other")
        async with front(one, other) as router:
            await router.up(2)
            listed = (await router.client.get("/v1/models")).json()["data"]
            assert sorted(model["id"] for model in listed) == ["one", "other"]
            assert (await router.client.get("/v1/models/other")).json()["id"] == "other"
            assert (await router.client.get("/v1/models/none")).status_code == 404
            for _ in range(3):
                assert (await router.complete(model="other")).json()["who"] == "other"
            answer = await router.complete(model="third")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
            assert len(one.bodies) == 0 and len(other.bodies) == 3

    run(go())


def test_adapters_have_prefixes_of_their_own() -> None:
    async def go() -> None:
        replica = Replica()
        replica.models = [{"id": "m"}, {"id": "tuned", "parent": "m"}]
        async with front(replica) as router:
            for model in ("m", "tuned", "m", "tuned"):
                await router.complete([1] * 64, model=model)
            shadow = router.state.router.endpoints[replica.url].contents
            assert isinstance(shadow, Shadow) and len(shadow) == 2 * 4

    run(go())


def test_tenants_of_the_router_share_no_prefix_and_a_salt_says_so_to_replicas_that_see_one_key() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, server={"api_key": ("one", "two")}, replica_api_key="inner") as router:
            assert (await router.complete()).status_code == 401
            for key in ("one", "two", "one"):
                replica.cached = 63 if len(replica.bodies) == 2 else 0
                answer = await router.complete([1] * 64, headers={"authorization": f"Bearer {key}"}, cache_salt="s")
                assert answer.status_code == 200
            salts = [body["cache_salt"] for body in replica.bodies]
            assert salts[0] == salts[2] != salts[1] and salts[0].endswith(":s")
            assert all(head["authorization"] == "Bearer inner" for head in replica.heads)
            shadow = router.state.router.endpoints[replica.url].contents
            assert isinstance(shadow, Shadow) and len(shadow) == 2 * 4
            assert (await router.client.get("/v1/fleet")).status_code == 401

    run(go())


def test_other_routes_go_to_a_replica_and_unknown_ones_are_said_to_be() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            assert (await router.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
            assert (await router.client.post("/v1/embeddings", json={"input": "x"})).status_code == 200
            assert (await router.client.get("/v1/completions")).status_code == 405
            assert (await router.client.post("/health")).status_code == 405
            assert (await router.client.get("/nothing")).json()["error"]["code"] == "unknown_route"
            assert len(replica.bodies) == 2

    run(go())


def test_what_made_two_prompts_part_is_told_to_their_tenant_alone() -> None:
    async def go() -> None:
        replica = Replica()

        async def named(request: web.Request, body: dict[str, Any]) -> web.Response:
            return web.json_response({"id": f"cmpl-{len(replica.bodies)}", "choices": []})

        replica.script = named
        preamble = "You are a helpful assistant. " * 40
        async with front(replica, server={"api_key": ("one", "two")}) as router:
            key, stranger = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
            for minute in (1, 2):
                text = preamble + f"It is 12:0{minute}. " + "Rules follow. " * 40
                answer = await router.complete(text, headers={**key, "x-request-id": f"own-{minute}"})
                assert answer.status_code == 200
            for request_id in ("cmpl-2", "own-2"):
                path = f"/v1/cache/explain?request_id={request_id}"
                told = (await router.client.get(path, headers=key)).json()
                assert told["request_id"] == request_id and told["reason"] == "diverged", told
                assert told["near_match"]["common_chars"] == len(preamble) + len("It is 12:0")
                assert "12:0" in told["message"]
                assert (await router.client.get(path, headers=stranger)).status_code == 404
            body = {"prompt": preamble + "It is 12:03."}
            told = (await router.client.post("/v1/cache/explain", json=body, headers=key)).json()
            assert told["near_match"]["common_chars"] == len(preamble) + len("It is 12:0")
            told = (await router.client.post("/v1/cache/explain", json=body, headers=stranger)).json()
            assert told["near_match"] is None and "12:0" not in json.dumps(told)
            assert (await router.client.get("/v1/cache/explain", headers=key)).status_code == 400

    run(go())


# ------------------------------------------------------------------------------------------------------------ members


def test_a_replica_that_was_started_again_is_found_out_its_cache_too() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.complete([1] * 64)
            endpoint = router.state.router.endpoints[replica.url]
            assert isinstance(endpoint.contents, Shadow) and len(endpoint.contents) == 4
            await replica.stop()
            await until(lambda: endpoint.health.absent)
            replica.block_size, replica.num_blocks = 32, 77
            await replica.start()
            await router.up(1)
            await until(lambda: endpoint.block_size == 32)
            assert len(endpoint.contents) == 0 and endpoint.contents.capacity == 77
            assert (await router.complete([1] * 64)).status_code == 200 and len(endpoint.contents) == 2

    run(go())


def test_a_replica_that_drains_gets_nothing_new_until_it_is_well() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas) as router:
            await router.up(2)
            first = await router.complete([1] * 64)
            at = next(replica for replica in replicas if replica.url == first.headers["x-headstart-replica"])
            at.health = (503, {"error": {"code": "draining"}})
            await until(lambda: router.state.router.endpoints[at.url].health.draining)
            for _ in range(3):
                assert (await router.complete([1] * 64)).headers["x-headstart-replica"] != at.url
            told = (await router.client.get("/v1/fleet")).json()
            assert sorted(replica["state"] for replica in told["replicas"]) == ["draining", "up"]
            at.health = (200, {})
            await router.up(2)

    run(go())


def test_replicas_come_and_go_while_requests_are_served() -> None:
    async def go() -> None:
        one, other = [await replica.start() for replica in two()]
        async with front(one) as router:
            router.state.members.changed([ReplicaAddress(one.url), ReplicaAddress(other.url)])
            await router.up(2)
            router.state.members.changed([ReplicaAddress(other.url)])
            assert (await router.complete()).headers["x-headstart-replica"] == other.url
            assert list(router.state.router.endpoints) == [other.url]
        await other.stop()

    run(go())


def test_without_metrics_and_models_a_replica_is_used_all_the_same() -> None:
    async def go() -> None:
        app = web.Application()

        async def answer(request: web.Request) -> web.Response:
            return web.json_response({"choices": []})

        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with front() as router:
            router.state.members.changed([ReplicaAddress(f"http://127.0.0.1:{runner.addresses[0][1]}")])
            await router.up(1)
            assert (await router.complete(model="anything")).status_code == 200
        await runner.cleanup()

    run(go())


def test_what_a_replica_says_of_its_queue_reaches_the_policy() -> None:
    async def go() -> None:
        replica = Replica()
        replica.waiting = 7
        async with front(replica) as router:
            endpoint = router.state.router.endpoints[replica.url]
            await until(lambda: endpoint.reported is not None and endpoint.reported.waiting == 7)
            assert (await router.client.get("/v1/fleet")).json()["replicas"][0]["cache"][
                "capacity"
            ] == replica.num_blocks

    run(go())


def test_streams_beside_each_other_do_not_mix() -> None:
    async def go(count: int) -> None:
        replicas = two()

        async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await streaming(request)
            for number in range(5):
                await response.write(chunk(f"{body['prompt']}-{number}"))
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
            return response

        for replica in replicas:
            replica.script = echo
        async with front(*replicas) as router, asyncio.TaskGroup() as group:
            await router.up(2)
            tasks = {i: group.create_task(router.complete(f"p{i}", stream=True)) for i in range(count)}
            await asyncio.wait(tasks.values())
            for i, task in tasks.items():
                assert texts(task.result().text) == [f"p{i}-{number}" for number in range(5)]

    run(go(60))
