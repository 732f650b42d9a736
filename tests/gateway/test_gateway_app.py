"""The front over real sockets: what clients get, who may ask for what, and what goes where."""

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import (
    TEXTS,
    Replica,
    chunk,
    front,
    refusing,
    reset,
    run,
    streaming,
    texts,
    two,
)
from server.harness import gone_at_once, parse_events, turns, until

from headstart.gateway.gateway_app import build_gateway_app
from headstart.router.index.approximate_index import ApproximateIndex


def test_a_whole_answer_comes_as_the_replica_gave_it() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            answer = await router.complete([1, 2, 3], max_tokens=3)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abc"
            assert answer.headers["x-headstart-replica"] == replica.url
            assert replica.bodies == [{"prompt": [1, 2, 3], "max_tokens": 3}]
            assert router.state.router.num_reported == 1 and router.state.num_awaiting_first_token == 0

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


def test_the_router_sees_the_steps_of_a_replica_in_the_tokens_of_its_streams() -> None:
    """Three streams of 21 tokens, one in 40 ms; each step writes its three 1 ms apart."""

    async def go() -> None:
        replica, steps = Replica(), asyncio.Condition()

        async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await streaming(request)
            for number in range(21):
                async with steps:
                    await steps.wait()
                await asyncio.sleep(0.001 * body["prompt"][0])
                await response.write(b": comment\n\n" * (number == 5))
                await response.write(chunk(str(number)))
            await response.write(b"data: [DONE]\n\n")
            return response

        async def compute() -> None:
            while True:
                await asyncio.sleep(0.04)
                async with steps:
                    steps.notify_all()

        replica.script = stream
        async with front(replica) as router:
            step = asyncio.create_task(compute())
            answers = [router.complete([number], stream=True, max_tokens=21) for number in range(3)]
            assert all([parse_events(answer.text) for answer in await asyncio.gather(*answers)])
            step.cancel()
            (endpoint,) = router.state.router.endpoints.values()
            assert 20 <= endpoint.load.num_observed_steps <= 22

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
            return web.json_response(
                {"error": {"message": "no", "code": "x"}}, status=400, headers={"x-ratelimit-limit-requests": "kept"}
            )

        for replica in replicas:
            replica.script = wrong
        async with front(*replicas) as router:
            answer = await router.complete()
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "x"
            assert answer.headers["x-ratelimit-limit-requests"] == "kept"
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


def test_a_long_answer_in_one_piece_makes_no_replica_look_late() -> None:
    async def go() -> None:
        replica, held = Replica(), asyncio.Event()

        async def hold(request: web.Request, body: dict[str, Any]) -> None:
            await held.wait()

        replica.script = hold
        async with front(replica) as router:
            answer = asyncio.create_task(router.complete([1] * 64))
            await until(lambda: len(replica.bodies) == 1)
            endpoint = router.state.router.endpoints[replica.url]
            before = endpoint.load.rates
            await until(lambda: endpoint.load.num_awaiting_first_token == 0)
            assert endpoint.load.num_streams == 1 and endpoint.slowdown_versus_fleet(time.monotonic() + 60) == 1.0
            assert router.state.num_awaiting_first_token == 0 and router.state.num_under_way == 1
            held.set()
            assert (await answer).status_code == 200
            assert endpoint.load.num_requests == 0 and endpoint.load.rates == before

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


@pytest.mark.parametrize(("size", "explained"), [(1 << 20, [200, 200]), (6_000, [404, 200]), (0, [404, 404])])
def test_the_router_remembers_as_many_bytes_of_prompts_as_its_option_says(size: int, explained: list[int]) -> None:
    async def go() -> None:
        async with front(Replica(), server={"diagnostics_size": size}) as router:
            asked = [await router.complete("x" * 3_000 + tail) for tail in "ab"]
            ids = [answer.headers["x-request-id"] for answer in asked]
            answers = [await router.client.get(f"/v1/cache/explain?request_id={one}") for one in ids]
            assert [answer.status_code for answer in answers] == explained

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
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-forwarded-for: 10.0.0.1\r\ncontent-length: 2\r\n"
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
            shadows = [router.state.router.endpoints[replica.url].index for replica in replicas]
            assert sum(len(shadow) for shadow in shadows if isinstance(shadow, ApproximateIndex)) == 4
            for path in ("/v1/prefixes", "/reset_prefix_cache?pinned=true"):
                assert (await router.client.post(path, json={"name": "p"}, headers=root)).status_code == 200
                assert all(replica.bodies[-1] == {"name": "p"} for replica in replicas)
                assert all("x-forwarded-for" not in replica.heads[-1] for replica in replicas)
            assert sum(len(shadow) for shadow in shadows if isinstance(shadow, ApproximateIndex)) == 0
            replicas[0].script = refusing(409, "exists")
            answer = await router.client.post("/v1/prefixes", json={"name": "p"}, headers=root)
            assert answer.status_code == 409 and answer.json()["error"]["code"] == "exists"
            replicas[0].script = reset
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
            shadow = router.state.router.endpoints[replica.url].index
            assert isinstance(shadow, ApproximateIndex) and len(shadow) == 2 * 4

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
            assert salts[0] == salts[2] != salts[1] and all(len(salt) == 64 and salt.isalnum() for salt in salts)
            assert all(head["authorization"] == "Bearer inner" for head in replica.heads)
            shadow = router.state.router.endpoints[replica.url].index
            assert isinstance(shadow, ApproximateIndex) and len(shadow) == 2 * 4
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


def test_a_large_body_whose_client_is_gone_is_not_parsed() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.up(1)
            app: Any = build_gateway_app(router.state)
            read: list[bytes] = []
            original = router.state.reader.read_spooled
            router.state.reader.read_spooling_if_large = lambda *given: read.append(b"") or original(*given)  # type: ignore
            body = json.dumps({"prompt": "a" * (2 << 20)}).encode()
            async with app._app._long_work._huge.turn("another"):
                asks = [asyncio.create_task(gone_at_once(app, "/v1/completions", body)) for _ in range(4)]
                await turns(200)  # all of them wait, and their clients disconnect
            assert await asyncio.gather(*asks) == [499] * 4 and read == []
            assert router.state.bodies.total_held_bytes == 0 and router.state.proxy.held.held_bytes == 0

    run(go())
