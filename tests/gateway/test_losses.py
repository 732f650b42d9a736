"""Requests that kill, hang or crash the replica they are sent to: the second loss under one request is the last."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway.harness import Replica, chunk, front, refusing, reset, run, streaming
from server.harness import parse_events, until

REQUEST_ID = "req-that-kills"


async def _reset_behind_pings(request: web.Request, body: dict[str, Any]) -> None:
    response = await streaming(request)
    await response.write(b": ping\n\n")
    await reset(request, body)


async def _half_an_answer(request: web.Request, body: dict[str, Any]) -> None:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    await asyncio.sleep(0.05)
    await reset(request, body)


async def _dead_in_an_event(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await streaming(request)
    error = {"error": {"message": "the engine has stopped", "type": "server_error", "code": "engine_dead"}}
    await response.write(b": ping\n\nevent: error\ndata: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
    return response


def only(deadly: Any) -> Any:
    """A script: requests that ask for it get `deadly`, others are answered."""

    async def script(request: web.Request, body: dict[str, Any]) -> Any:
        return await deadly(request, body) if body.get("user") == "deadly" else None

    return script


WAYS = {
    "reset": reset,
    "reset behind pings": _reset_behind_pings,
    "half an answer": _half_an_answer,
    "engine dead": refusing(503, "engine_dead"),
    "engine dead in an event": _dead_in_an_event,
    "bad gateway": refusing(502, "x"),
    "gateway timeout": refusing(504, "x"),
}


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_request_under_which_two_replicas_are_lost_is_sent_to_no_third(way: str, is_warm: bool) -> None:
    stream = way in ("reset behind pings", "engine dead in an event")

    async def go() -> None:
        replicas = [Replica() for _ in range(5)]
        for replica in replicas:
            replica.script = only(WAYS[way])
        async with front(*replicas, max_attempts=5, routing_policy="round-robin") as router:
            await router.up(5)
            if is_warm:  # every replica has an open connection
                await asyncio.gather(*(router.complete(str(n)) for n in range(5)))
            before = sum(len(replica.bodies) for replica in replicas)
            answer = await router.complete(user="deadly", stream=stream, headers={"x-request-id": REQUEST_ID})
            assert sum(len(replica.bodies) for replica in replicas) - before == 2
            has_begun = answer.status_code == 200  # with pings
            error = parse_events(answer.text)[-2]["error"] if has_begun else answer.json()["error"]
            assert has_begun == (way == "reset behind pings") and answer.status_code in (200, 502)
            assert error["code"] == "replica_lost" and REQUEST_ID in error["message"]
            assert has_begun or answer.headers["x-should-retry"] == "false", "clients would send it again by themselves"
            assert router.state.budget.num_retrying == router.state.budget.num_active == 0

    run(go())


def test_one_loss_is_answered_by_another_replica_without_the_budget() -> None:
    async def go() -> None:
        replicas = [Replica() for _ in range(3)]
        async with front(*replicas, retry_budget=0.0) as router:
            await router.up(3)
            lost = 0

            async def once(request: web.Request, body: dict[str, Any]) -> None:
                nonlocal lost
                lost += 1
                if lost == 1:
                    await reset(request, body)

            for replica in replicas:
                replica.script = once
            assert (await router.complete()).status_code == 200 and lost == 2

    run(go())


def test_idle_connections_that_all_replicas_closed_lose_no_request() -> None:
    """As behind a gateway that forgets idle connections: whatever is sent over a used one is reset."""

    async def go() -> None:
        replicas = [Replica() for _ in range(3)]
        used: set[Any] = set()
        num_resets = 0

        async def script(request: web.Request, body: dict[str, Any]) -> None:
            nonlocal num_resets
            if request.transport in used:
                num_resets += 1
                await reset(request, body)

        async def remember(request: web.Request, handler: Any) -> Any:
            answer = await handler(request)
            used.add(request.transport)
            return answer

        for replica in replicas:
            replica.script, replica.middleware = script, remember
        async with front(*replicas, routing_policy="round-robin", health_interval=30.0) as router:
            await router.up(3)
            for n in range(6):
                assert (await router.complete(str(n))).status_code == 200
            assert num_resets, "no request was sent over a used connection"

    run(go())


@pytest.mark.parametrize("first", [0, 1])
def test_a_closed_idle_connection_and_a_dead_replica_lose_no_request(first: int) -> None:
    """In either order: the one loss may be that of the connection alone, since no other replica was left to ask."""

    async def go() -> None:
        well, dead = Replica(), Replica()
        used: set[Any] = set()

        async def script(request: web.Request, body: dict[str, Any]) -> None:
            if request.transport in used:
                await reset(request, body)

        async def remember(request: web.Request, handler: Any) -> Any:
            answer = await handler(request)
            used.add(request.transport)
            return answer

        well.middleware = remember
        options = {"routing_policy": "round-robin", "health_interval": 30.0, "retry_budget": 0.0}
        async with front(well, dead, **options) as router:
            await router.up(2)
            for n in range(2 + first):
                assert (await router.complete(str(n))).status_code == 200
            await dead.stop()
            well.script = script
            num_asked = len(well.bodies)
            assert (await router.complete("both fail once")).status_code == 200
            assert len(well.bodies) == num_asked + 2, "no request was sent over a used connection"

    run(go())


def test_a_connection_that_took_too_long_and_a_dead_replica_lose_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that had no processor for a while takes its own slowness for that of a replica."""
    connect = aiohttp.TCPConnector.connect
    slow = list[int]()

    async def connect_late(self: aiohttp.TCPConnector, request: Any, **rest: Any) -> Any:
        if request.url.port in slow:
            slow.remove(request.url.port)
            raise aiohttp.ConnectionTimeoutError("planted")
        return await connect(self, request, **rest)

    async def go() -> None:
        well, dead = Replica(), Replica()
        async with front(well, dead, health_interval=30.0, retry_budget=0.0) as router:
            await router.up(2)
            await dead.stop()
            slow.append(well.port)
            monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect_late)
            assert (await router.complete()).status_code == 200
            assert not slow, "no connection took too long"

    run(go())


def test_without_any_live_replica_a_request_ends_after_its_attempts() -> None:
    async def go() -> None:
        dead = [Replica() for _ in range(2)]
        async with front(*dead, health_interval=30.0, max_attempts=9, replica_wait=0.0) as router:
            await router.up(2)
            for replica in dead:
                await replica.stop()
            answer = await router.complete()
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_unreachable"
            assert "attempt 4 " in answer.json()["error"]["message"]

    run(go())


def test_a_router_behind_a_router_has_the_last_word() -> None:
    async def go() -> None:
        replicas = [Replica() for _ in range(3)]
        for replica in replicas:
            replica.script = refusing(502, "replica_lost")
        async with front(*replicas) as router:
            await router.up(3)
            answer = await router.complete()
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
            assert sum(len(replica.bodies) for replica in replicas) == 1

    run(go())


def test_an_engine_that_died_loses_no_request_of_many() -> None:
    """A front that outlives its engine says so to all it had, pings or not; none of them is a retry of the budget."""

    async def go() -> None:
        dead, well = Replica(), Replica()
        arrived = asyncio.Event()

        async def dies(request: web.Request, body: dict[str, Any]) -> Any:
            await arrived.wait()
            way = _dead_in_an_event if body.get("stream") else refusing(503, "engine_dead")
            return await way(request, body)

        async with front(dead, well, retry_budget=0.0, routing_policy="round-robin") as router:
            await router.up(2)
            dead.script = dies
            asked = [asyncio.create_task(router.complete(str(n), stream=n % 4 < 2)) for n in range(20)]
            await until(lambda: len(dead.bodies) + len(well.bodies) == 20)
            arrived.set()
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
            assert not any("error" in answer.text for answer in answers) and chunk("a").decode() in answers[0].text

    run(go())
