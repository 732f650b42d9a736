"""Replicas that accept requests and go silent: what waits there is sent elsewhere; slow work is left alone."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway.harness import TEXTS, Front, Replica, chunk, front, run, streaming, texts, two
from server.harness import parse_events, until

from headstart.gateway.proxy import silence
from headstart.gateway.replicas import replica_monitor as members
from headstart.router import health

SECONDS = 60.0  # until what hangs fails its test
SILENT = (503, {"error": {"message": "not heard", "code": "engine_silent"}})
OPTIONS: dict[str, Any] = {"routing_policy": "round-robin", "retry_budget": 0.0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks are given up soon."""
    monkeypatch.setattr(members, "LOOK_SECONDS", 0.3)
    yield


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is late soon."""
    for name in ("MIN_LATE", "MIN_LATE_YOUNG"):
        monkeypatch.setattr(silence, name, 0.5)
    monkeypatch.setattr(silence, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(silence, "LATE", 0.0)


class Stop:
    """Stops a replica as SIGSTOP does: of its engine, or of its front too."""

    def __init__(self, replica: Replica, *, front_too: bool = False) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.num_waiting = 0
        self._replica, self._front_too = replica, front_too
        replica.script = self._script
        replica.middleware = self._middleware

    def stop(self) -> None:
        self.goes_on.clear()

    def resume(self) -> None:
        self._replica.health = (200, {"status": "ok"})
        self.goes_on.set()

    async def _script(self, request: web.Request, body: dict[str, Any]) -> None:
        self.num_waiting += 1
        try:
            await self.goes_on.wait()
        finally:
            self.num_waiting -= 1

    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._front_too:
            await self.goes_on.wait()
        return await handler(request)


def ask_many(router: Front, count: int = 20, **fields: Any) -> "list[asyncio.Task[httpx.Response]]":
    return [asyncio.create_task(router.complete(f"{n} hello", stream=n % 4 < 2, **fields)) for n in range(count)]


def is_whole(answer: httpx.Response) -> bool:
    stream = answer.headers["content-type"].startswith("text/event-stream")
    return texts(answer.text) == TEXTS if stream else answer.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("way", ["front hangs", "engine hangs and health says so", "engine hangs and health does not"])
def test_a_silent_replica_loses_no_request_and_comes_back(way: str, early: None) -> None:
    async def go() -> None:
        replica, other = two()
        stop = Stop(replica, front_too=way == "front hangs")
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            stop.stop()
            asked = ask_many(router, max_tokens=3)
            await until(lambda: sum(task.done() for task in asked) >= 10)
            if way == "engine hangs and health says so":
                replica.health = SILENT
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200} and all(map(is_whole, answers))
            assert {answer.headers["x-headstart-replica"] for answer in answers} == {other.url}
            endpoint = router.state.router.endpoints[replica.url]
            assert endpoint.health.num_ejections >= 1 and endpoint.load.num_requests == 0
            metrics = (await router.client.get("/metrics")).text
            assert 'router_failures_total{reason="hung"}' in metrics
            stop.resume()
            await router.up(2)
            served = len(replica.bodies)
            while len(replica.bodies) == served:
                assert (await router.complete("back?")).status_code == 200
                await asyncio.sleep(0.05)
            await until(lambda: endpoint.health.is_up(asyncio.get_running_loop().time()))

    run(go())


def test_work_is_left_where_it_is_while_others_there_make_progress(early: None) -> None:
    """It says that it is not ready, and its tokens still come."""

    async def go() -> None:
        replica, other = two()
        done = asyncio.Event()

        async def script(request: web.Request, body: dict[str, Any]) -> Any:
            if body["prompt"] == "slow":
                await done.wait()
                return None
            response = await streaming(request)
            while not done.is_set():
                await response.write(chunk("a"))
                await asyncio.sleep(0.02)
            await response.write(b"data: [DONE]\n\n")
            return response

        replica.script = script
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            endpoint = router.state.router.endpoints[other.url]
            endpoint.health.absent = True
            asked = [asyncio.create_task(router.complete(p, stream=True)) for p in ("fast", "slow")]
            await until(lambda: len(replica.bodies) == 2)
            replica.health = SILENT
            member = router.state.members.members[replica.url]
            await until(lambda: member.num_unready > 10)
            assert len(other.bodies) == 0
            done.set()
            assert {(await task).headers["x-headstart-replica"] for task in asked} == {replica.url}

    run(go())


def test_without_another_replica_requests_wait_for_the_only_one(early: None) -> None:
    async def go() -> None:
        replica = Replica()
        stop = Stop(replica)
        async with front(replica) as router, asyncio.timeout(SECONDS):
            stop.stop()
            asked = ask_many(router, 4)
            await until(lambda: stop.num_waiting == 4)
            replica.health = SILENT
            member = router.state.members.members[replica.url]
            await until(lambda: member.num_unready > 5)
            stop.resume()
            assert all(map(is_whole, await asyncio.gather(*asked)))
            assert len(replica.bodies) == 4

    run(go())


@pytest.mark.parametrize("says", [(503, {"error": {"code": "draining"}}), (503, {"error": {"code": "loading"}})])
def test_a_replica_that_drains_or_loads_keeps_its_requests(says: tuple[int, Any]) -> None:
    async def go() -> None:
        replica, other = two()
        stop = Stop(replica)
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            stop.stop()
            asked = ask_many(router, 8)
            await until(lambda: stop.num_waiting == 4)
            replica.health = says
            seen = router.state.members.members[replica.url]
            await until(lambda: seen.state in ("draining", "loading"))
            await asyncio.sleep(0.5)
            assert stop.num_waiting == 4
            stop.goes_on.set()
            assert all(map(is_whole, await asyncio.gather(*asked)))

    run(go())


def test_a_stream_that_has_begun_is_left_to_its_replica(early: None) -> None:
    async def go() -> None:
        replica, other = two()
        replica.gate.clear()
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            asked = ask_many(router, 2, max_tokens=3)
            await until(lambda: router.state.num_awaiting_first_token == 0)
            replica.health = SILENT
            member = router.state.members.members[replica.url]
            await until(lambda: member.num_unready > 5)
            replica.gate.set()
            assert all(map(is_whole, await asyncio.gather(*asked)))
            assert len(other.bodies) + len(replica.bodies) == 2

    run(go())


def test_requests_of_unknown_length_are_never_late(early: None) -> None:
    """An answer in one piece that may be of any length shows nothing until its end."""

    async def go() -> None:
        replica, other = two()
        stop = Stop(replica)
        async with front(replica, other, routing_policy="least-load") as router, asyncio.timeout(SECONDS):
            await router.up(2)
            stop.stop()
            chat = {"messages": [{"role": "user", "content": "hello"}]}
            asked = [asyncio.create_task(router.client.post("/v1/chat/completions", json=chat)) for _ in range(2)]
            await until(lambda: stop.num_waiting == 1)
            for n in range(20):
                assert (await router.complete(str(n), max_tokens=3)).headers["x-headstart-replica"] == other.url
                await asyncio.sleep(0.05)
            assert stop.num_waiting == 1 and router.state.router.endpoints[replica.url].health.num_ejections == 0
            stop.resume()
            await asyncio.gather(*asked)

    run(go())


def test_a_request_is_taken_from_a_late_replica_once_and_left_at_the_second(early: None) -> None:
    """Both are slow, not silent: it is answered by the second one, however long that takes."""

    async def go() -> None:
        replicas = [Replica() for _ in range(3)]
        stops = [Stop(replica) for replica in replicas]
        async with front(*replicas, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(3)
            for stop in stops[:2]:
                stop.stop()
            asked = [asyncio.create_task(router.complete(f"{n}", stream=True)) for n in range(2)]
            await until(lambda: stops[0].num_waiting + stops[1].num_waiting >= 1)

            async def others() -> None:
                while True:
                    await router.complete("other", stream=True, user="other")

            load = asyncio.create_task(others())
            endpoints = router.state.router.endpoints
            await until(lambda: sum(endpoint.health.num_ejections for endpoint in endpoints.values()) >= 1)
            await asyncio.sleep(1.0)
            for stop in stops:
                stop.resume()
            load.cancel()
            assert all(map(is_whole, await asyncio.gather(*asked)))

    run(go())


def test_of_a_replica_on_trial_one_request_is_at_stake(monkeypatch: pytest.MonkeyPatch, early: None) -> None:
    monkeypatch.setattr(health, "TRIAL_SECONDS", 600.0)
    monkeypatch.setattr(silence, "MIN_LATE_YOUNG", 0.3)

    async def go() -> None:
        replica, other = two()
        stop = Stop(replica)
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            stop.stop()
            assert all(map(is_whole, await asyncio.gather(*ask_many(router, 8, max_tokens=3))))
            ejected = router.state.router.endpoints[replica.url].health
            assert ejected.num_ejections == 1
            monkeypatch.setattr(silence, "MIN_LATE", 600.0)
            monkeypatch.setattr(silence, "MIN_LATE_YOUNG", 600.0)
            await until(lambda: ejected.is_up(asyncio.get_running_loop().time()))
            asked = ask_many(router, 12, max_tokens=3)
            await until(lambda: stop.num_waiting == 1)
            await until(lambda: sum(task.done() for task in asked) == 11)
            stop.resume()
            assert all(map(is_whole, await asyncio.gather(*asked)))
            assert ejected.is_up(asyncio.get_running_loop().time())

    run(go())


def test_two_silent_replicas_under_one_request_are_its_last() -> None:
    async def go() -> None:
        replicas = [Replica() for _ in range(4)]
        stops = [Stop(replica) for replica in replicas]
        async with front(*replicas, max_attempts=4, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(4)

            async def kills() -> httpx.Response:
                return await router.complete("kills", stream=True)

            for stop in stops:
                stop.stop()
            asked = asyncio.create_task(kills())
            for _ in range(2):
                await until(lambda: any(stop.num_waiting for stop in stops))
                at = next(i for i, stop in enumerate(stops) if stop.num_waiting)
                replicas[at].health = SILENT
                await until(lambda at=at: not stops[at].num_waiting)
            answer = await asked
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
            assert sum(len(replica.bodies) for replica in replicas) == 2

    run(go())


def test_pings_of_a_front_whose_engine_is_silent_are_no_progress() -> None:
    async def go() -> None:
        replica, other = two()

        async def pings(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await streaming(request)
            while True:
                await response.write(b": ping\n\n")
                await asyncio.sleep(0.02)

        replica.script = pings
        async with front(replica, other, **OPTIONS) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            asked = [asyncio.create_task(router.complete(str(n), stream=True)) for n in range(4)]
            await until(lambda: len(replica.bodies) == 2)
            replica.health = SILENT
            answers = await asyncio.gather(*asked)
            assert all(texts(answer.text) == TEXTS for answer in answers)
            assert not any("error" in event for answer in answers for event in parse_events(answer.text))

    run(go())
