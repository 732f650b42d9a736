"""Memory of a router with many large requests under way: counted, bounded, and freed as soon as it is not needed."""

import asyncio
import contextlib
import json
import os
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from gateway.harness import Front, Replica, front, run, streaming
from server.harness import until

from headstart.core.errors import QueueFullError
from headstart.gateway import held_bytes
from headstart.gateway.held_bytes import HeldBytesBudget

MIB = 1 << 20
SECONDS = 60.0


def resident_bytes() -> int:
    """Memory of this process, as the kernel counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Holding:
    """A script that answers when it is told to; it remembers nothing of what it was asked."""

    def __init__(self, replica: Replica) -> None:
        self.goes_on = asyncio.Event()
        self.num_asked = 0
        replica.middleware = self._answer

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        async for _ in request.content.iter_any():
            pass
        self.num_asked += 1
        await self.goes_on.wait()
        return web.json_response({"choices": [{"index": 0, "text": "abc"}]})


async def post(router: Front, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    return (await router.client.post("/v1/completions", content=body, headers=headers)).status_code


BODIES = {
    "text": json.dumps({"prompt": "x" * (4 * MIB - 1000)}).encode(),
    "a stream of text": json.dumps({"prompt": "x" * (4 * MIB - 1000), "stream": True}).encode(),
    "tokens": json.dumps({"prompt": [12345] * (4 * MIB // 7 - 1000)}).encode(),
    "wide text": json.dumps({"prompt": "\U0001f600" * (MIB - 1000)}, ensure_ascii=False).encode(),
    "nothing of use": json.dumps({"prompt": "x", "extra": [0] * (MIB - 1000)}).encode(),
}


@pytest.mark.parametrize("kind", BODIES)
def test_pending_bodies_of_four_megabytes_are_bounded(kind: str) -> None:
    count = 60 if "text" in kind else 12  # the others take half a second each to parse

    async def go() -> None:
        replica = Replica()
        holding = Holding(replica)
        async with front(replica) as router, asyncio.timeout(SECONDS):
            held = router.state.proxy.held
            held.max_bytes = held.max_bytes * count // 60 // (4 if kind == "nothing of use" else 1)
            warm = asyncio.create_task(post(router, BODIES[kind]))
            await until(lambda: holding.num_asked == 1)
            before = resident_bytes()
            asked = [asyncio.create_task(post(router, BODIES[kind])) for _ in range(count - 1)]
            await until(lambda: holding.num_asked + held.num_refused == count)
            peak = resident_bytes() - before
            assert 0 < held.held_bytes <= held.max_bytes
            # Clients and replica are in this process too, with copies of their own.
            assert peak < 800 * MIB, f"{peak // MIB} MiB for {holding.num_asked} requests"
            holding.goes_on.set()
            codes = [await warm, *await asyncio.gather(*asked)]
            assert codes.count(200) == holding.num_asked >= count // 8
            assert codes.count(429) == held.num_refused > 0
            assert held.held_bytes == 0

    run(go())


def test_small_requests_are_not_refused() -> None:
    async def go() -> None:
        replica = Replica()
        holding = Holding(replica)
        async with front(replica) as router, asyncio.timeout(SECONDS):
            body = json.dumps({"prompt": "hello " * 1000, "stream": False}).encode()
            asked = [asyncio.create_task(post(router, body)) for _ in range(100)]
            await until(lambda: holding.num_asked == 100)
            assert 100 * len(body) < router.state.proxy.held.held_bytes < 100 * 5 * len(body)
            holding.goes_on.set()
            assert set(await asyncio.gather(*asked)) == {200}
            assert router.state.proxy.held.held_bytes == 0

    run(go())


def test_a_body_is_freed_when_its_stream_has_begun() -> None:
    async def go() -> None:
        replica = Replica()
        replica.gate.clear()
        async with front(replica) as router, asyncio.timeout(SECONDS):
            held = router.state.proxy.held
            asked = asyncio.create_task(router.complete("x" * 2 * MIB, stream=True))
            await until(lambda: router.state.num_under_way == 1 and router.state.num_awaiting_first_token == 0)
            assert 0 < held.held_bytes < 4 * MIB, "the hashes of its blocks are left"
            replica.gate.set()
            assert (await asked).status_code == 200 and held.held_bytes == 0

    run(go())


def test_a_large_body_is_sent_whole_to_a_second_replica() -> None:
    async def go() -> None:
        replicas = [Replica(), Replica()]
        num_cut = 0

        async def once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
            nonlocal num_cut
            num_cut += 1
            if num_cut == 1:
                return web.Response(body=b"<html>")
            return None

        for replica in replicas:
            replica.script = once
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            assert (await router.complete("x" * 2 * MIB, stream=True)).status_code == 200
            assert {len(body["prompt"]) for replica in replicas for body in replica.bodies} == {2 * MIB}

    run(go())


def test_a_large_body_waits_in_a_file_and_reaches_each_replica_with_its_length() -> None:
    async def go() -> None:
        replicas = [Replica(), Replica()]
        lengths: list[str | None] = []

        async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
            lengths.append(request.headers.get("content-length"))
            return web.Response(body=b"<html>") if len(lengths) == 1 else None

        for replica in replicas:
            replica.script = broken
        async with front(*replicas) as router, asyncio.timeout(SECONDS):
            await router.up(2)
            before = open_files()
            body = json.dumps({"prompt": "x y " * (MIB // 2)}).encode()
            assert await post(router, body) == 200
            assert lengths == [str(len(body))] * 2
            assert {reply["prompt"] for replica in replicas for reply in replica.bodies} == {"x y " * (MIB // 2)}
            await until(lambda: open_files() <= before)

    run(go())


def open_files() -> Counter[str]:
    """The targets of this process's open files; connections are kept, so those are not counted."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return Counter({target: count for target, count in found.items() if not target.startswith("socket:")})


@pytest.mark.parametrize("body", [b'{"prompt":"' + b"x" * MIB + b'"', b"[" + b"1," * MIB + b"1]"])
def test_a_large_body_that_is_refused_leaves_no_file(body: bytes) -> None:
    async def go() -> None:
        async with front(Replica()) as router, asyncio.timeout(SECONDS):
            before = open_files()
            assert await post(router, body) == 400
            assert router.state.proxy.held.held_bytes == 0
            await until(lambda: open_files() <= before)

    run(go())


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_of_many_long_answers_few_bytes_are_kept_and_all_arrive_whole(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "MAX_KEPT_BYTES", MIB)
    most = 0
    text = json.dumps({"choices": [{"index": 0, "text": "x" * 3 * MIB}], "usage": {"prompt_tokens": 1}})

    async def go() -> None:
        nonlocal most
        replica = Replica()

        async def long(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(text=text, content_type="application/json")

        replica.script = long
        async with front(replica) as router, asyncio.timeout(SECONDS):
            held = router.state.proxy.held
            grow = held_bytes.ByteReservation.reserve_answer_bytes

            def watched(reservation: held_bytes.ByteReservation, num_bytes: int) -> bool:
                nonlocal most
                kept = grow(reservation, num_bytes)
                most = max(most, held.num_answer_bytes)
                return kept

            monkeypatch.setattr(held_bytes.ByteReservation, "reserve_answer_bytes", watched)
            answers = await asyncio.gather(*(router.client.post(path, json={"prompt": "a"}) for _ in range(8)))
            assert {answer.text for answer in answers} == {text}
            # Each may have a piece more than the bound, and the first MIN_KEPT_BYTES.
            assert MIB < most < MIB + 8 * (held_bytes.MIN_KEPT_BYTES + MIB // 2)
            assert held.held_bytes == held.num_answer_bytes == 0

    run(go())


def test_answers_in_one_piece_are_counted_while_they_are_read() -> None:
    async def go() -> None:
        replica = Replica()

        async def long(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            text = json.dumps({"choices": [{"index": 0, "text": "x" * 8 * MIB}]})
            return web.Response(text=text, content_type="application/json")

        replica.script = long
        async with front(replica) as router, asyncio.timeout(SECONDS):
            held = router.state.proxy.held
            assert (await router.complete()).status_code == 200 and held.held_bytes == 0
            held.max_bytes = 4 * MIB
            answer = await router.complete()
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert held.held_bytes == 0 and router.state.num_awaiting_first_token == 0

    run(go())


def test_events_without_an_end_are_counted_too() -> None:
    async def go() -> None:
        replica = Replica()

        async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await streaming(request)
            while True:
                await response.write(b"data: " + b"x" * MIB)

        replica.script = endless
        async with front(replica) as router, asyncio.timeout(SECONDS):
            held = router.state.proxy.held
            held.max_bytes = MIB // 2
            assert (await router.complete(stream=True)).status_code in (429, 502)
            assert held.held_bytes == 0 and held.num_refused == 1

    run(go())


def test_the_budget_counts_what_is_held_and_refuses_only_growth() -> None:
    held = HeldBytesBudget(100)
    with held.open_reservation() as one, held.open_reservation() as other:
        one.set(60)
        with pytest.raises(QueueFullError, match="60"):
            other.set(41)
        assert (held.held_bytes, other.num_bytes, held.num_refused) == (60, 0, 1)
        other.grow(40)
        one.set(10)
        held.max_bytes = 20
        one.set(5)
        assert held.held_bytes == 45
    assert held.held_bytes == 0
