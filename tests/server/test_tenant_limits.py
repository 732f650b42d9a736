"""Limits between tenants: of the queue, of bytes, and of processes that check grammars."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.fake_engine import Gate
from server.harness import Inside, inside, until

from headstart.core.errors import QueueFullError
from headstart.http.byte_budget import ByteBudget, ByteLease, may_tenant_hold_more
from headstart.http.long_work import TenantFairSlots
from headstart.openai.sandbox import sandbox_pool
from headstart.openai.sandbox.sandbox_pool import SandboxLostError, SandboxPool, SandboxSpec

KEYS = {"hog": "key-of-the-hog", "one": "key-of-another"}


async def ask(server: Inside, tenant: str, number: int) -> int:
    """Return the status of a request of a tenant."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    body = {"prompt": [number % 60, number % 60 + 1], "max_tokens": 1}
    return (await server.client.post("/v1/completions", json=body, headers=headers)).status_code


def test_a_tenant_that_fills_the_queue_takes_no_share_of_another(folder: str, gate: Gate) -> None:
    async def run() -> None:
        async with inside(gate.holds(folder, 0), max_num_queued_reqs=64, api_key=tuple(KEYS.values())) as server:
            hog = [asyncio.create_task(ask(server, "hog", number)) for number in range(120)]
            await until(lambda: server.engine.num_awaiting_first_token == 64 and sum(task.done() for task in hog) == 56)
            one = [asyncio.create_task(ask(server, "one", number)) for number in range(40)]
            await until(lambda: sum(task.done() for task in one) == 8)  # 32 are its share
            assert await ask(server, "hog", 0) == 429
            gate.open()
            assert sorted(await asyncio.gather(*one)) == [200] * 32 + [429] * 8
            assert sorted(await asyncio.gather(*hog)) == [200] * 64 + [429] * 56

    asyncio.run(run())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=80), st.integers(1, 40))
def test_what_is_held_is_bounded_and_a_share_is_never_refused(asked: list[tuple[int, int]], limit: int) -> None:
    held: dict[int, int] = {}
    for tenant, more in asked:
        own, shares = held.get(tenant, 0), len(held.keys() | {tenant})
        taken = may_tenant_hold_more(sum(held.values()), own, more, limit, shares)
        assert taken or own + more > limit // shares
        if shares == 1:
            assert taken == (own + more <= limit)  # one tenant: as if there were no shares
        if taken:
            held[tenant] = own + more
        assert sum(held.values()) <= limit * sum(1 / number for number in range(1, 7))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 1000))
def test_a_budget_is_never_exceeded_and_leaves_bytes_for_a_further_tenant(seed: int, limit: int) -> None:
    rng, budget = Random(seed), ByteBudget(limit, "things")
    leases: list[ByteLease] = []
    for _ in range(200):
        if leases and rng.random() < 0.3:
            leases.pop(rng.randrange(len(leases))).release()
        try:
            leases.append(budget.lease(rng.randint(1, max(limit // 50, 1)), rng.choice("ab")))
        except QueueFullError:
            continue
        tenants = {lease.tenant for lease in leases}
        held = {name: [lease.num_bytes for lease in leases if lease.tenant == name] for name in tenants}
        assert budget.held_bytes == sum(map(sum, held.values())) <= limit
        if all(len(sizes) > 1 for sizes in held.values()):
            assert budget.held_bytes <= limit * 6 / 7 + 2 * max(limit // 50, 1)
    for lease in leases:
        lease.release()
    assert budget.held_bytes == 0


def test_a_tenant_that_holds_all_it_may_leaves_another_room() -> None:
    budget = ByteBudget(100, "things")
    hog = [budget.lease(5, "hog") for _ in range(15)]
    with pytest.raises(QueueFullError):
        budget.lease(5, "hog")
    assert [budget.lease(5, "one").num_bytes for _ in range(3)] == [5] * 3
    for lease in hog:
        lease.release()
    assert ByteBudget(100, "things").lease(100, "hog").num_bytes == 100  # alone


def test_work_of_a_tenant_waits_for_one_piece_of_another_not_for_all() -> None:
    async def run() -> str:
        turns, order = TenantFairSlots(1), ""

        async def work(tenant: str) -> None:
            nonlocal order
            async with turns.turn(tenant):
                order += tenant
                await asyncio.sleep(0)

        hog = [asyncio.create_task(work("h")) for _ in range(6)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(work(tenant)) for tenant in "aab"]
        await asyncio.gather(*hog, *others)
        return order

    assert asyncio.run(run()) == "hhhabhahh"  # the second h had the place when the others came


def test_places_survive_waiters_that_are_cancelled_or_late() -> None:
    async def run() -> None:
        turns = TenantFairSlots(1)
        async with turns.turn("h"):
            contexts = [turns.turn("a") for _ in range(3)]
            waiting = [asyncio.create_task(context.__aenter__()) for context in contexts]
            await asyncio.sleep(0)
            waiting[0].cancel()
            with pytest.raises(QueueFullError):
                async with turns.turn("b", 0.0):
                    raise AssertionError
        waiting[1].cancel()  # in the moment in which it gets the place
        await waiting[2]
        await asyncio.gather(*waiting, return_exceptions=True)
        assert turns._num_free == 0 and not turns._waiting
        await contexts[2].__aexit__(None, None, None)
        assert turns._num_free == 1

    asyncio.run(run())


def test_requests_that_kill_their_processes_pause_their_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_pool, "PAUSE_SECONDS", 3600.0)
    limits = {"max_setup_seconds": 60.0, "max_seconds": 0.1, "max_bytes": 64 << 20, "max_answer_bytes": 4096}
    pool = SandboxPool(SandboxSpec("server.busy_process", 0.0, "the sum", "sums", **limits))  # type: ignore[arg-type]
    for _ in range(sandbox_pool.MAX_FAILURES):
        with pytest.raises(SandboxLostError):
            pool.ask(30.0, "hog")
        assert pool.ask(0.0, "one") == "computed 0.0"  # another's success does not count for it
    with pytest.raises(QueueFullError):
        pool.ask(0.0, "hog")
    assert pool.ask(0.0, "one") == "computed 0.0"
    pool.close()
