"""Requests that wait for the engine hold what their answers need: no messages, and what is kept beside is charged."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from server.fake_engine import Gate
from server.harness import Inside, inside, until

from headstart.config.options import ServerOptions

MILLION = 1 << 20
UNSEEN = "a thought that the template drops. " * (MILLION // 35)  # characters that are no token of the prompt


@asynccontextmanager
async def waiting(server: Inside, asks: "list[Awaitable[httpx.Response]]") -> AsyncIterator[int]:
    """Sends requests, and gives the bytes by which this process has grown once all of them wait for the engine."""
    gc.collect()
    tracemalloc.start()
    try:
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        await until(lambda: server.state.num_jobs == len(tasks))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    yield grown
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def post(server: Inside, path: str, body: bytes) -> Awaitable[httpx.Response]:
    return server.client.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("share", [0.0, ServerOptions().doctor_share])
def test_chats_that_wait_hold_no_messages(folder: str, gate: Gate, share: float) -> None:
    thinking = {"role": "assistant", "content": "b", "reasoning_content": UNSEEN * 2}
    messages = [{"role": "user", "content": "a"}, thinking, {"role": "user", "content": "c"}]
    body = json.dumps({"messages": messages, "max_tokens": 40}).encode()

    async def run() -> None:
        async with inside(gate.holds(folder, 1), doctor_share=share) as server:
            asks = [post(server, "/v1/chat/completions", body) for _ in range(12)]
            async with waiting(server, asks) as grown:
                assert grown < 4 * MILLION  # of 24

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_parameters_of_any_length_are_charged(folder: str, gate: Gate, path: str) -> None:
    """Names of unknown fields are kept for the log."""
    field = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    sent = [{"role": "user", "content": "a"}] if field == "messages" else "a"
    body = json.dumps({field: sent, "x" * MILLION: 1, "é" * MILLION: 2}, ensure_ascii=False).encode()

    async def run() -> None:
        async with inside(gate.holds(folder, 1)) as server:
            asks = [post(server, path, body) for _ in range(4)]
            async with waiting(server, asks) as grown:
                assert server.state._held.held_bytes >= grown - MILLION

    asyncio.run(run())


def test_continued_responses_hold_no_conversation_and_charge_what_they_keep_alive(folder: str, gate: Gate) -> None:
    async def run() -> None:
        async with inside(gate.holds(folder, 1)) as server:
            gate.open()
            last = None
            for _ in range(3):
                thought = {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": UNSEEN}],
                }
                items: Any = [thought, {"role": "user", "content": "a"}]
                body = {"input": items, "max_output_tokens": 1, "previous_response_id": last}
                answer = await server.client.post("/v1/responses", json=body)
                assert answer.status_code == 200, answer.text
                last = answer.json()["id"]
            gate.close()
            short = json.dumps({"input": "b", "previous_response_id": last, "max_output_tokens": 40}).encode()
            async with waiting(server, [post(server, "/v1/responses", short) for _ in range(10)]) as grown:
                assert grown < 3 * MILLION  # of 30
                assert server.state._held.held_bytes > 10 * 3 * len(UNSEEN)

    asyncio.run(run())


def test_long_conversations_are_continued_one_at_a_time(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            thought = {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": UNSEEN}],
            }
            items: Any = [thought, {"role": "user", "content": "a"}]
            answer = await server.client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
            sizes: list[int] = []
            original = server.state.long_work.run

            async def noted(num_bytes: int, work: Any, **options: Any) -> Any:
                sizes.append(num_bytes)
                return await original(num_bytes, work, **options)

            monkeypatch.setattr(server.state.long_work, "run", noted)
            body = {"input": "b", "previous_response_id": answer.json()["id"], "max_output_tokens": 1}
            assert (await server.client.post("/v1/responses", json=body)).status_code == 200
            assert max(sizes) > len(UNSEEN)

    asyncio.run(run())
