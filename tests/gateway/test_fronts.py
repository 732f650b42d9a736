"""One suite for all fronts of a router: its own HTTP proxy, the real Envoy with the endpoint picker, a real Ray."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from gateway.envoy_harness import envoy_front
from gateway.harness import TEXTS, Front, Replica, front, refusing, reset, run, streaming, texts, two, usage
from gateway.ray_harness import ray_front
from server.harness import until

from headstart.config.options import TenantEntry
from headstart.http.answer_report import UsageReportHeader

LONG = "a shared beginning of many words, " * 40
KINDS = pytest.mark.parametrize("kind", ["http", "envoy", pytest.param("ray", marks=pytest.mark.long)])


def start(kind: str, *replicas: Replica, **options: Any) -> Any:
    """A router with the front of that kind: "http", "envoy" or "ray"."""
    return {"http": front, "envoy": envoy_front, "ray": ray_front}[kind](*replicas, **options)


def counts(*replicas: Replica) -> list[int]:
    return [len(replica.bodies) for replica in replicas]


def loads(router: Front) -> list[int]:
    return [endpoint.load.num_requests for endpoint in router.state.router.endpoints.values()]


@KINDS
def test_prompts_with_a_common_prefix_go_to_one_replica(kind: str) -> None:
    async def test() -> None:
        one, other = two()
        async with start(kind, one, other) as router:
            for number in range(4):
                assert (await router.complete(f"{LONG} question {number}")).status_code == 200
            assert sorted(counts(one, other)) == [0, 4]

    run(test())


@KINDS
def test_a_stream_passes_event_by_event(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            replica.gate.clear()
            body = {"prompt": "Hello", "stream": True}
            async with router.client.stream("POST", "/v1/completions", json=body) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                pieces = response.aiter_text()
                read = await anext(pieces)
                assert texts(read) == ["a"]
                replica.gate.set()
                read += "".join([piece async for piece in pieces])
            assert texts(read) == TEXTS and read.endswith("data: [DONE]\n\n")
            await until(lambda: loads(router) == [0])

    run(test())


@KINDS
@pytest.mark.parametrize("size", [1, 150_000, 1_500_000])
def test_a_body_arrives_unchanged(kind: str, size: int) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            body = json.dumps({"prompt": "x" * size, "max_tokens": 3}).encode()

            async def chunks() -> AsyncIterator[bytes]:
                for at in range(0, len(body), 50_021):
                    yield body[at : at + 50_021]

            for content in (body, chunks()):
                head = {"content-type": "application/json"}
                response = await router.client.post("/v1/completions", content=content, headers=head)
                assert response.status_code == 200
            assert replica.raw == [body, body]

    run(test())


@KINDS
def test_a_replica_that_does_not_answer_is_replaced(kind: str) -> None:
    async def test() -> None:
        one, other = two()
        async with start(kind, one, other, health_interval=60.0) as router:
            await router.complete(LONG)
            used, spare = (one, other) if one.bodies else (other, one)
            used.script = reset
            for stream in (False, True):
                response = await router.complete(LONG, stream=stream)
                assert response.status_code == 200
            assert len(spare.bodies) == 2
            await used.stop()
            assert (await router.complete(LONG)).status_code == 200
            await until(lambda: loads(router) == [0, 0])

    run(test())


@KINDS
@pytest.mark.parametrize(("status", "code"), [(503, "draining"), (503, "loading"), (429, "queue_full")])
def test_a_refusal_is_tried_elsewhere(kind: str, status: int, code: str) -> None:
    async def test() -> None:
        one, other = two()
        async with start(kind, one, other) as router:
            one.script = refusing(status, code)
            for number in range(3):
                assert (await router.complete(f"{number} {LONG}")).status_code == 200
            other.script = refusing(status, code)
            response = await router.complete("none left", headers={"x-request-id": "mine"})
            assert response.status_code == status and response.json()["error"]["code"] == code
            assert response.headers["x-request-id"] == "mine"

    run(test())


@KINDS
def test_without_a_replica_requests_are_refused_at_once(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica, replica_wait=0.0) as router:
            await replica.stop()
            await router.up(0)
            response = await router.complete()
            assert response.status_code == 503 and response.json()["error"]["code"] == "no_replicas"
            assert response.headers["retry-after"] == "1"

    run(test())


@KINDS
def test_a_full_queue_refuses_more(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        held = asyncio.Event()

        async def wait(request: Any, body: dict[str, Any]) -> None:
            await held.wait()

        async with start(kind, replica, server={"max_num_queued_reqs": 1}) as router:
            replica.script = wait
            first = asyncio.create_task(router.complete(stream=True))
            await until(lambda: router.state.num_awaiting_first_token == 1)
            response = await router.complete(stream=True)
            assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
            held.set()
            assert (await first).status_code == 200

    run(test())


@pytest.mark.parametrize("kind", ["http", "envoy"])  # Ray drains its actors itself: test_ray_cluster.py
def test_a_draining_router_admits_no_request_and_finishes_those_it_has(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            replica.gate.clear()
            first = asyncio.create_task(router.complete(stream=True))
            await until(lambda: len(replica.bodies) == 1)
            router.state.start_draining()
            response = await router.complete()
            assert response.status_code == 503 and response.json()["error"]["code"] == "draining"
            assert router.state.num_under_way == 1
            replica.gate.set()
            assert texts((await first).text) == TEXTS
            await until(lambda: not router.state.num_under_way)

    run(test())


@KINDS
def test_tenants_need_keys_and_share_nothing(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        tenants = (TenantEntry("red", ("r",)), TenantEntry("blue", ("b",)))
        server = {"tenants": tenants, "admin_api_key": ("boss",)}
        async with start(kind, replica, server=server, replica_api_key="inner") as router:
            assert (await router.complete(LONG)).status_code == 401
            assert (await router.complete(LONG, headers={"authorization": "Bearer wrong"})).status_code == 401
            assert not replica.bodies
            for key in "rb":
                response = await router.complete(LONG, headers={"authorization": f"Bearer {key}"})
                assert response.status_code == 200 and "x-headstart-replica" not in response.headers
            assert [head["authorization"] for head in replica.heads] == ["Bearer inner"] * 2
            assert len({body["cache_salt"] for body in replica.bodies}) == 2
            assert (await router.client.get("/v1/fleet", headers={"authorization": "Bearer r"})).status_code == 403
            fleet = await router.client.get("/v1/fleet", headers={"authorization": "Bearer boss"})
            assert fleet.json()["replicas"][0]["url"] == replica.url

    run(test())


@KINDS
def test_a_request_with_tools_arrives_unchanged(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
            messages = [{"role": "user", "content": "1 + 1"}]
            body = {"messages": messages, "tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
            assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
            assert replica.bodies == [body]

    run(test())


@KINDS
def test_a_request_has_one_id_everywhere(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            response = await router.complete(headers={"x-request-id": "given"})
            assert response.headers.get_list("x-request-id") == ["given"]
            assert replica.heads[-1]["x-request-id"] == "given"
            response = await router.complete()
            assert response.headers["x-request-id"] == replica.heads[-1]["x-request-id"] != "given"

    run(test())


@KINDS
def test_a_client_that_leaves_ends_its_request(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            replica.gate.clear()
            async with router.client.stream(
                "POST", "/v1/completions", json={"prompt": "x", "stream": True}
            ) as response:
                await anext(response.aiter_text())
                assert router.state.num_under_way == 1
            await until(lambda: not router.state.num_under_way and loads(router) == [0])
            replica.gate.set()
            await until(lambda: replica.gone == 1)
            assert router.state.router.endpoints[replica.url].health.num_ejections == 0

    run(test())


@KINDS
def test_a_client_that_leaves_before_the_head_ends_its_request(kind: str) -> None:
    async def test() -> None:
        replica = Replica()

        async def never(request: Any, body: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        async with start(kind, replica) as router:
            replica.script = never
            request = asyncio.create_task(router.complete())
            await until(lambda: len(replica.bodies) == 1)
            request.cancel()
            await until(lambda: not router.state.num_under_way and loads(router) == [0])

    run(test())


@KINDS
def test_headers_of_replicas_stay_inside(kind: str) -> None:
    async def test() -> None:
        replica = Replica()

        async def answer(request: Any, body: dict[str, Any]) -> Any:
            response = await streaming(request)
            await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
            return response

        async def leak(request: Any, handler: Any) -> Any:
            response = await handler(request)
            if request.method == "POST":
                response.headers.update({"set-cookie": "a=b", "server": "secret", "x-ratelimit-limit": "7"})
            return response

        async with start(kind, replica) as router:
            replica.middleware = leak
            response = await router.complete()
            assert response.headers["x-ratelimit-limit"] == "7"
            assert "set-cookie" not in response.headers and "secret" not in response.headers.values()
            assert not any(name.startswith(("x-envoy", "x-gateway", "x-headstart-report")) for name in response.headers)

    run(test())


@KINDS
@pytest.mark.parametrize(
    ("status", "kind_of_body", "seen"),
    [
        (200, "text/html", 502),
        (200, "application/octet-stream", 502),
        (404, "text/html; charset=utf-8", 404),
        (500, "text/plain", 500),
    ],
)
def test_a_page_of_another_program_does_not_reach_clients(kind: str, status: int, kind_of_body: str, seen: int) -> None:
    async def page(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b"<html>10.1.2.3", status=status, headers={"content-type": kind_of_body})

    async def test() -> None:
        replica = Replica()
        replica.script = page
        async with start(kind, replica) as router:
            response = await router.complete("Hello")
            assert response.status_code == seen and response.headers["content-type"] == "application/json"
            assert response.json()["error"]["message"] and "10.1.2.3" not in response.text
            (endpoint,) = router.state.router.endpoints.values()
            assert endpoint.load.num_requests == 0

    run(test())


@KINDS
def test_a_replica_is_not_told_of_others(kind: str) -> None:
    async def test() -> None:
        one, other = two()
        async with start(kind, one, other) as router:
            for number in range(4):
                named = {"x-gateway-destination-endpoint": "10.1.2.3:1"}
                assert (await router.complete(f"{number} " * 40, headers=named)).status_code == 200
            for replica, address in ((one, other), (other, one)):
                for head in replica.heads:
                    assert not [value for value in head.values() if str(address.port) in value or "10.1.2.3" in value]

    run(test())


@KINDS
def test_reported_tokens_are_counted_as_the_replica_counts_them(kind: str) -> None:
    async def test() -> None:
        replica = Replica()

        async def answer(request: Any, body: dict[str, Any]) -> Any:
            head = {"x-headstart-report": UsageReportHeader("cmpl-1", 20, 16, 1.0).encode().decode()}
            return web.json_response({"choices": [{"index": 0, "text": "a"}], "usage": usage(20, 16)}, headers=head)

        async with start(kind, replica) as router:
            replica.script = answer
            assert (await router.client.post("/v1/completions", json={"prompt": "x" * 400})).status_code == 200
            await until(lambda: not router.state.num_under_way)
            lines = router.state.metrics.expose(with_replicas=True).decode().splitlines()
            found = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines if "replica=" in line}
            assert float(found["headstart:router_cached_tokens_total"]) == 16
            assert float(found["headstart:router_reported_prompt_tokens_total"]) == 20

    run(test())


@KINDS
def test_the_routers_own_paths_are_answered(kind: str) -> None:
    async def test() -> None:
        replica = Replica()
        async with start(kind, replica) as router:
            client = router.client
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/v1/fleet")).json()["replicas"][0]["state"] == "up"
            assert "headstart:router_replicas" in (await client.get("/metrics")).text
            assert (await client.get("/v1/completions")).status_code == 405
            assert (await client.get("/nowhere")).status_code == 404
            spoofed = await client.get("/v1/fleet", headers={"x-forwarded-for": "127.0.0.1"})
            assert spoofed.status_code == 403
            bad = await client.post("/v1/completions", content=b"[]", headers={"content-type": "application/json"})
            assert bad.status_code == 400
            assert not replica.bodies

    run(test())
