"""Replicas that fail at random, clients that hang up at random: every request ends, and the books are even."""

import asyncio
from random import Random
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway.harness import Replica, chunk, cut, front, streaming, usage
from server.harness import parse_events, until

from headstart.router.index.approximate_index import ApproximateIndex

ENDS = {200, 429, 500, 502, 503}


def fickle(rng: Random, replica: Replica) -> Any:
    """A script that answers half of the requests and fails the others in every way there is."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        what = rng.random()
        await asyncio.sleep(rng.random() * 0.003)
        if what < 0.1:
            cut(request)
            await asyncio.Event().wait()
        if what < 0.2:
            status, code = rng.choice([(503, "draining"), (503, "x"), (502, "x"), (429, "queue_full"), (500, "x")])
            return web.json_response({"error": {"message": "no", "code": code}}, status=status)
        if what < 0.35 and body.get("stream"):
            response = await streaming(request)
            await response.write(b": ping\n\n")
            for _ in range(rng.randrange(3)):
                await response.write(chunk("a"))
            if rng.random() < 0.5:
                await asyncio.sleep(0.001)
            cut(request)
            await asyncio.Event().wait()
        if what < 0.45 and not body.get("stream"):
            response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            cut(request)
            await asyncio.Event().wait()
        replica.cached = rng.choice([0, 0, 16, 64, len(body["prompt"])])
        if not body.get("stream"):
            return None
        response = await streaming(request)
        for text in "abc":
            await response.write(chunk(text))
            await asyncio.sleep(rng.random() * 0.002)
        await response.write(chunk("", usage=usage(len(body["prompt"]), replica.cached)) + b"data: [DONE]\n\n")
        return response

    return script


async def ask(client: httpx.AsyncClient, rng: Random) -> str:
    """One request and its outcome."""
    prompt = [rng.randrange(4)] * rng.randrange(1, 120)
    body = {"prompt": prompt, "stream": rng.random() < 0.6, "max_tokens": 3}
    patience = rng.random() * 0.02 if rng.random() < 0.2 else None
    try:
        async with asyncio.timeout(patience):
            answer = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "hung up"
    assert answer.status_code in ENDS, answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"], answer.text
        return "refused"
    if not body["stream"]:
        assert answer.json()["choices"], answer.text
        return "answered"
    events = parse_events(answer.text)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1, answer.text
    if "error" in events[-2]:
        return "lost" if events[-2]["error"].get("code") == "replica_lost" else "refused"
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "abc", "pieces of two answers are in one"
    return "answered"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["cost", "weighted"])
def test_every_request_ends_and_nothing_is_left_of_it(seed: int, policy: str) -> None:
    async def go() -> None:
        rng = Random(seed)
        replicas = [Replica() for _ in range(4)]
        for replica in replicas:
            replica.script = fickle(rng, replica)
        async with front(*replicas, routing_policy=policy, shadow_policy=("round-robin",)) as router:
            await router.up(4)
            waiting = asyncio.Semaphore(24)

            async def one() -> str:
                async with waiting:
                    return await ask(router.client, rng)

            ends = await asyncio.gather(*(one() for _ in range(250)))
            assert ends.count("answered") > 100 and "lost" in ends and "hung up" in ends
            state = router.state
            await until(lambda: state.num_under_way == 0)
            assert (state.num_awaiting_first_token, state.budget.num_active, state.budget.num_retrying) == (0, 0, 0)
            for endpoint in state.router.endpoints.values():
                load, index = endpoint.load, endpoint.index
                assert (load.num_requests, load.num_awaiting_first_token, load.inflight_tokens) == (0, 0, 0)
                assert isinstance(index, ApproximateIndex)
                index.check()
            assert state.router.regrets["round-robin"].decisions >= 250 - ends.count("hung up")

    asyncio.run(go())
