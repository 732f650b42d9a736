"""The requests that may wait at a router, and the connections for them: both follow the number of replicas."""

import asyncio
import resource
import socket
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import front, run, two
from server.harness import until

from headstart.gateway.http_front import HttpFront
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.protocol.connections import OWN_FILES, raise_connection_limit


def test_the_queue_is_as_many_times_longer_as_there_are_replicas_that_serve() -> None:
    async def go() -> None:
        replicas = two()
        held = asyncio.Event()

        async def hold(request: web.Request, body: dict[str, Any]) -> None:
            await held.wait()

        async with front(*replicas, server={"max_num_queued_reqs": 2}) as router:
            await router.up(2)
            for replica in replicas:
                replica.script = hold
            waiting = [asyncio.create_task(router.complete(stream=True)) for _ in range(4)]
            await until(lambda: router.state.num_awaiting_first_token == 4)
            assert (await router.complete()).status_code == 429
            leaving = replicas[0]
            leaving.health = (503, {"error": {"code": "draining"}})  # what every later probe finds as well
            await until(lambda: router.state.router.endpoints[leaving.url].health.draining)
            held.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
            held.clear()
            waiting = [asyncio.create_task(router.complete(stream=True)) for _ in range(2)]
            await until(lambda: router.state.num_awaiting_first_token == 2)
            assert (await router.complete()).status_code == 429
            held.set()
            await asyncio.gather(*waiting)

    run(go())


def test_no_more_wait_than_half_of_the_connections_that_open_files_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (OWN_FILES + 40, OWN_FILES + 40))  # 20 connections

    async def go() -> None:
        async with front(*two(), server={"max_num_queued_reqs": 1000}) as router:
            await router.up(2)
            for num, is_full in ((9, False), (10, True)):
                router.state.proxy.relay.num_pending = num
                assert (await router.complete()).status_code == (429 if is_full else 200)

    run(go())


def test_the_cap_on_connections_follows_the_number_of_replicas() -> None:
    async def go() -> None:
        async with front(*two(), server={"max_num_queued_reqs": 1024}) as router:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                here = HttpFront(listener)
                await here.start(router.state)
                table = here.connections
                most = raise_connection_limit(files_each=2)
                for num, cap in ((1, 4096), (2, 4096), (6, 12_288), (1000, most), (3, 6144), (0, 4096)):
                    here.on_replicas_changed([ReplicaAddress(f"http://r{i}") for i in range(num)])
                    assert table.max_connections == min(cap, most)
                await here.stop(at_once=True)

    run(go())
