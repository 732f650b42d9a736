"""The front while replicas come, go, drain and come back."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import (
    Replica,
    chunk,
    front,
    run,
    streaming,
    texts,
    two,
)
from server.harness import until

from headstart.gateway.replicas.probes import ScrapedMetrics
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.gateway.replicas.replica_monitor import MonitoredReplica
from headstart.router.index.approximate_index import ApproximateIndex


def test_a_replica_that_was_started_again_is_found_out_its_cache_too() -> None:
    async def go() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.complete([1] * 64)
            endpoint = router.state.router.endpoints[replica.url]
            assert isinstance(endpoint.index, ApproximateIndex) and len(endpoint.index) == 4
            await replica.stop()
            await until(lambda: endpoint.health.absent)
            replica.block_size, replica.num_blocks = 32, 77
            await replica.start()
            await router.up(1)
            await until(lambda: endpoint.block_size == 32)
            assert len(endpoint.index) == 0 and endpoint.index.estimated_capacity == 77
            assert (await router.complete([1] * 64)).status_code == 200 and len(endpoint.index) == 2

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
            router.state.members.on_replicas_changed([ReplicaAddress(one.url), ReplicaAddress(other.url)])
            await router.up(2)
            router.state.members.on_replicas_changed([ReplicaAddress(other.url)])
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
            router.state.members.on_replicas_changed([ReplicaAddress(f"http://127.0.0.1:{runner.addresses[0][1]}")])
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


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "events", "modelled"),
    [
        (1, 16_000, None, (16, 1_000)),
        (3, 600, None, (18, 100)),
        (16, 100, None, (16, 100)),
        (32, 100, None, (32, 100)),
        (0, 0, None, (0, 0)),
        (1, 16_000, "tcp://10.0.0.1:5557", (1, 16_000)),
    ],
)
def test_small_blocks_are_modelled_together_unless_events_name_them(
    block_size: int, num_blocks: int, events: str | None, modelled: tuple[int, int]
) -> None:
    member = MonitoredReplica(ReplicaAddress("http://10.0.0.1:8000", events))
    member.metrics = ScrapedMetrics(block_size=block_size, num_blocks=num_blocks)
    assert member.modelled_block_size_and_count == modelled


def test_a_replica_with_blocks_of_one_token_costs_no_more_than_others() -> None:
    async def go() -> None:
        replica = Replica("m", block_size=1, num_blocks=16_000)
        async with front(replica) as router:
            await router.complete("x" * 64_000)
            (endpoint,) = router.state.router.endpoints.values()
            assert endpoint.block_size == 16 and len(endpoint.index) <= 1_000  # type: ignore[arg-type]

    run(go())
