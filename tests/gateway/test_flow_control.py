"""Flow control: requests are held in the router, sent fairly between tenants, and not at all after their deadline."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Replica, front, run, two
from server.harness import until

from headstart.config.options import RouterOptions, ServerOptions, TenantEntry
from headstart.core.errors import ConfigError

PROMPT = "x" * 4_000
TENANTS = {"tenants": (TenantEntry("big", ("key-big",)), TenantEntry("small", ("key-small",)))}


def holding(replica: Replica) -> tuple[list[str], asyncio.Semaphore]:
    """Let the replica keep every request until the semaphore is released; return the prompts that arrive."""
    prompts, may_answer = list[str](), asyncio.Semaphore(0)

    async def hold(request: web.Request, body: dict[str, Any]) -> None:
        prompts.append(body["prompt"])
        await may_answer.acquire()

    replica.script = hold
    return prompts, may_answer


def test_without_the_option_every_request_is_sent_at_once() -> None:
    async def go() -> None:
        replica = Replica()
        prompts, may_answer = holding(replica)
        async with front(replica) as router:
            await router.up(1)
            sent = [asyncio.create_task(router.complete(stream=True)) for _ in range(5)]
            await until(lambda: len(prompts) == 5)
            for _ in sent:
                may_answer.release()
            assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * 5

    run(go())


def test_a_tenant_with_twenty_clients_does_not_delay_another_by_more_than_a_request() -> None:
    """One replica, which gets one request at a time: a request of the small tenant begins after the one that runs."""

    async def go() -> None:
        replica, begun = Replica(), list[str]()

        async def compute(request: web.Request, body: dict[str, Any]) -> None:
            begun.append(request.headers["authorization"].removeprefix("Bearer key-"))
            await asyncio.sleep(0.002)

        replica.script = compute
        async with front(replica, server=TENANTS, flow_control=1) as router:
            await router.up(1)
            is_over = False

            async def ask(key: str, number: int) -> None:
                headers = {"authorization": f"Bearer key-{key}"}
                answer = await router.complete(f"{number} {PROMPT}", stream=True, headers=headers)
                assert answer.status_code == 200

            async def big(number: int) -> None:
                while not is_over:
                    await ask("big", number)

            clients = [asyncio.create_task(big(number)) for number in range(20)]
            await until(lambda: router.state.flow.queue.num_waiting >= 15)
            places = list[int]()
            for number in range(9):
                before = len(begun)
                await ask("small", 100 + number)
                places.append(begun[before:].index("small"))
            is_over = True
            await asyncio.gather(*clients)
            assert sorted(places)[4] <= 2, places  # one may have run when it came, and one may have been released

    run(go())


def test_a_request_whose_deadline_passes_is_never_computed() -> None:
    async def go() -> None:
        replica = Replica()
        prompts, may_answer = holding(replica)
        async with front(replica, flow_control=1) as router:
            await router.up(1)
            first = asyncio.create_task(router.complete("first", stream=True))
            await until(lambda: prompts == ["first"])
            late = [
                router.complete(f"late {number}", headers={"x-headstart-timeout-ms": str(20 * number)})
                for number in range(4)
            ]
            for answer in await asyncio.gather(*late):
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "deadline_exceeded"
                assert answer.headers["x-should-retry"] == "false"
            patient = asyncio.create_task(
                router.complete("patient", stream=True, headers={"x-headstart-timeout-ms": "600000"})
            )
            await until(lambda: router.state.flow.queue.num_waiting == 1)
            text = (await router.client.get("/metrics")).text
            assert "headstart:router_expired_total 4.0" in text and "headstart:router_held 1.0" in text
            may_answer.release()
            may_answer.release()
            assert (await first).status_code == (await patient).status_code == 200
            assert prompts == ["first", "patient"]
            assert "x-headstart-timeout-ms" not in replica.heads[-1]

    run(go())


def test_a_request_that_waits_for_a_replica_may_expire_too() -> None:
    async def go() -> None:
        replicas = two()
        async with front(*replicas, queue_timeout=0.05, replica_wait=30.0) as router:
            await router.up(2)
            for replica in replicas:
                replica.health = (503, {"error": {"code": "loading"}})
            await until(lambda: all(one.health.absent for one in router.state.router.endpoints.values()))
            answer = asyncio.create_task(router.complete())
            await until(lambda: router.state.num_under_way == 1 or answer.done())
            await asyncio.sleep(0.1)
            for replica in replicas:
                replica.health = (200, {"status": "ok"})
            assert (await answer).json()["error"]["code"] == "deadline_exceeded"
            assert not replicas[0].bodies and not replicas[1].bodies

    run(go())


def test_urgent_requests_go_first_and_those_of_clients_that_left_not_at_all() -> None:
    async def go() -> None:
        replica = Replica()
        prompts, may_answer = holding(replica)
        async with front(replica, flow_control=1) as router:
            await router.up(1)
            sent: dict[str, asyncio.Task[Any]] = {}
            for name, priority in (("first", "0"), ("gone", "0"), ("later", "junk"), ("urgent", "-1")):
                headers = {"x-headstart-priority": priority}
                sent[name] = asyncio.create_task(router.complete(name, stream=True, headers=headers))
                await until(lambda: len(prompts) + router.state.flow.queue.num_waiting == len(sent))
            sent.pop("gone").cancel()
            await until(lambda: router.state.flow.queue.num_waiting == 2)
            for _ in sent:
                may_answer.release()
            await asyncio.gather(*sent.values())
            assert prompts == ["first", "urgent", "later"]

    run(go())


def test_it_needs_the_routers_own_front() -> None:
    from headstart.cli.route import envoy_fronts_of_options

    with pytest.raises(ConfigError, match="own HTTP front"):
        envoy_fronts_of_options(RouterOptions(envoy="auto", flow_control=1), ServerOptions())
