"""Requests wait for a replica while the last one is being restarted, and no longer."""

import asyncio
import time
from typing import Any

import pytest
from gateway.harness import Front, Replica, front, refusing, run, texts, two
from server.harness import until

from headstart.gateway.replicas.replica_address import ReplicaAddress


async def absent(router: Front, replica: Replica) -> None:
    """Stop a replica and wait until the router has noticed."""
    await replica.stop()
    await until(lambda: router.state.members.members[replica.url].state == "absent")


async def waiting(router: Front, count: int) -> None:
    await until(lambda: router.state.proxy.replica_wait.num_waiting == count)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_wait_while_the_only_replica_is_restarted(stream: bool) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, replica_wait=60.0) as router:
            await router.up(1)
            await absent(router, replica)
            tasks = [asyncio.create_task(router.complete(str(n), stream=stream)) for n in range(8)]
            await waiting(router, 8)
            await replica.start()
            for task in tasks:
                answer = await task
                assert answer.status_code == 200
                assert texts(answer.text) == list("abc") if stream else answer.json()["choices"][0]["text"] == "abc"
            assert router.state.num_awaiting_first_token == router.state.proxy.replica_wait.num_waiting == 0

    run(go())


def test_a_request_waits_whose_replica_refused_before_a_probe_noticed_it() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, replica_wait=60.0, health_interval=0.5) as router:
            await router.up(1)
            await replica.stop()
            assert router.state.members.members[replica.url].state == "up"
            task = asyncio.create_task(router.complete())
            await waiting(router, 1)
            await replica.start()
            assert (await task).status_code == 200 and len(replica.bodies) == 1

    run(go())


def test_requests_wait_while_one_replica_drains_and_the_other_is_away() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas, replica_wait=60.0) as router:
            await router.up(2)
            await absent(router, replicas[0])
            replicas[1].script = refusing(503, "draining")
            replicas[1].health = (503, {"error": {"code": "draining"}})
            task = asyncio.create_task(router.complete())
            await waiting(router, 1)
            await replicas[0].start()
            answer = await task
            assert answer.status_code == 200 and answer.headers["x-headstart-replica"] == replicas[0].url

    run(go())


def test_a_replica_that_is_replaced_by_one_elsewhere_is_waited_for() -> None:
    async def go() -> None:
        old, new = two()
        await new.start()
        async with front(old, replica_wait=60.0) as router:
            await router.up(1)
            router.state.members.on_replicas_changed([])
            task = asyncio.create_task(router.complete())
            await waiting(router, 1)
            router.state.members.on_replicas_changed([ReplicaAddress(new.url)])
            assert (await task).headers["x-headstart-replica"] == new.url
        await new.stop()

    run(go())


def test_a_fleet_that_stays_down_refuses_at_once_again() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, replica_wait=0.5) as router:
            await router.up(1)
            await absent(router, replica)
            answer = await router.complete()
            left_at = router.state.router.endpoints[replica.url].health.left_at
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replicas"
            assert time.monotonic() - left_at >= 0.5
            router.state.proxy.replica_wait.wait_until_replica_up = None  # type: ignore[assignment,method-assign]  # it is not called
            assert (await router.complete()).json()["error"]["code"] == "no_replicas"

    run(go())


@pytest.mark.parametrize("what", ["busy", "broken", "another model"])
def test_what_waiting_does_not_mend_is_answered_at_once(what: str) -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, replica_wait=600.0) as router:
            await router.up(1)
            model = "m"
            if what == "another model":
                await absent(router, replica)
                model = "other"
            else:
                replica.script = refusing(429, "queue_full") if what == "busy" else refusing(502, "bad")
            answer = await router.complete(model=model)
            assert answer.status_code == {"busy": 429, "broken": 502, "another model": 404}[what]
            assert router.state.proxy.replica_wait.num_waiting == 0

    run(go())


def test_waiting_requests_count_as_pending_and_leave_with_their_clients() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica, server={"max_num_queued_reqs": 2}, replica_wait=600.0) as router:
            await router.up(1)
            await absent(router, replica)
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(router.complete()) for _ in range(2)]
            await waiting(router, 2)
            assert (await router.complete()).status_code == 429
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await waiting(router, 0)
            assert router.state.num_awaiting_first_token == 0

    run(go())


def test_a_replica_that_is_up_but_keeps_refusing_gets_the_attempts_allowed() -> None:
    async def go() -> None:
        replica = Replica()
        replica.script = refusing(503, "loading")  # while /health says that it is up
        async with front(replica, replica_wait=600.0, max_attempts=3) as router:
            await router.up(1)
            answer = await router.complete()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            assert len(replica.bodies) == 3

    run(go())
