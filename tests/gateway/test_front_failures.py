"""The front when replicas fail, stall and refuse, and when there is too much to do."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import (
    TEXTS,
    Replica,
    chunk,
    cut,
    front,
    refusing,
    reset,
    run,
    streaming,
    texts,
    two,
    unused_url,
    usage,
)
from server.harness import parse_events, until

from headstart.core.errors import QueueFullError
from headstart.gateway.held_bytes import HeldBytesBudget
from headstart.gateway.replicas.replica_address import ReplicaAddress


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


@pytest.mark.parametrize(
    ("script", "counted", "stream"),
    [
        *((reset, "lost", stream) for stream in (False, True)),
        *((refusing(503, "draining"), "draining", stream) for stream in (False, True)),
        *((refusing(503, "loading"), "loading", stream) for stream in (False, True)),
        *((refusing(502, "bad"), "broken", stream) for stream in (False, True)),
        *((refusing(429, "queue_full"), "busy", stream) for stream in (False, True)),
        (_reset_behind_pings, "lost", True),  # only streams have comments
    ],
)
def test_what_fails_before_the_first_token_is_answered_by_another(script: Any, counted: str, stream: bool) -> None:
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
            replica.script = refusing(429, "queue_full")
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
            replica.script = reset
        async with front(*replicas, max_attempts=3) as router:
            await router.up(5)
            answer = await router.complete()
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
            assert sum(len(replica.bodies) for replica in replicas) == 2

    run(go())


def test_a_lost_connection_to_the_only_replica_is_tried_once_more() -> None:
    async def go() -> None:
        replica = Replica()
        seen = 0

        async def once(request: web.Request, body: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                await reset(request, body)

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
            at.script = refusing(502, "bad")
            assert (await router.complete([1] * 64)).status_code == 502
            at.script = reset
            assert (await router.complete([1] * 64)).status_code == 200
            assert "headstart:router_retries_refused_total 1.0" in (await router.client.get("/metrics")).text

    run(go())


def test_an_unreachable_replica_is_reported_at_once() -> None:
    async def go() -> None:
        async with front() as router:
            answer = await router.complete()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replicas"
            assert answer.headers["retry-after"] == "1"
            router.state.members.on_replicas_changed([ReplicaAddress(unused_url())])
            await until(lambda: all(m.state == "absent" for m in router.state.members.members.values()))
            answer = await router.complete()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replicas"
            assert (await router.client.get("/health")).status_code == 503
            assert (await router.client.get("/livez")).status_code == 200

    run(go())


def test_a_client_that_hangs_up_ends_the_work_at_the_replica_and_not_its_health() -> None:
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
            assert router.state.num_awaiting_first_token == 0

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


def test_more_than_may_wait_get_429_and_those_that_have_a_token_do_not_count() -> None:
    async def go() -> None:
        replica = Replica()
        held = asyncio.Event()

        async def hold(request: web.Request, body: dict[str, Any]) -> None:
            await held.wait()

        async with front(replica, server={"max_num_queued_reqs": 2}) as router:
            replica.gate.clear()
            streaming_one = asyncio.create_task(router.complete(stream=True))
            await until(lambda: router.state.num_under_way == 1 and router.state.num_awaiting_first_token == 0)
            replica.script = hold
            waiting = [asyncio.create_task(router.complete(stream=True)) for _ in range(2)]
            await until(lambda: router.state.num_awaiting_first_token == 2)
            refused = await router.complete()
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            held.set()
            replica.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting, streaming_one)] == [200] * 3

    run(go())


def test_a_tenant_that_fills_the_queue_takes_no_share_of_another() -> None:
    async def go() -> None:
        replica = Replica()
        held = asyncio.Event()

        async def hold(request: web.Request, body: dict[str, Any]) -> None:
            await held.wait()

        async with front(replica, server={"max_num_queued_reqs": 8, "api_key": ("hog", "one")}) as router:
            replica.script = hold

            async def ask(tenant: str) -> int:
                body = {"prompt": "Hello", "stream": True}
                headers = {"authorization": f"Bearer {tenant}"}
                return (await router.client.post("/v1/completions", json=body, headers=headers)).status_code

            hog = [asyncio.create_task(ask("hog")) for _ in range(12)]
            await until(lambda: sum(task.done() for task in hog) == 4)
            one = [asyncio.create_task(ask("one")) for _ in range(6)]
            await until(lambda: sum(task.done() for task in one) == 2)  # 4 of 8 are its share
            assert await ask("hog") == 429
            held.set()
            assert sorted(await asyncio.gather(*hog, *one)) == [200] * 12 + [429] * 6
            assert not router.state.proxy.relay.pending_of

    run(go())


def test_what_a_tenant_holds_leaves_bytes_for_another() -> None:
    held = HeldBytesBudget(1000)
    hog = [held.open_reservation("hog") for _ in range(2)]
    hog[0].set(600)
    with pytest.raises(QueueFullError):
        hog[1].set(200)
    hog[1].set(100)
    held.open_reservation("one").set(200)


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
