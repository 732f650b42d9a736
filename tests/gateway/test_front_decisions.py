"""One recorded stream of requests and reports makes the same decisions through every front, byte by byte."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from aiohttp import web
from gateway.envoy_harness import envoy_binary, envoy_front
from gateway.harness import Replica, chunk, run, usage
from gateway.harness import front as http_front
from server.harness import until

from headstart.gateway.picker import endpoint_picker
from headstart.gateway.proxy import proxy, relay
from headstart.http.answer_report import UsageReportHeader
from headstart.router.decision_log import DecisionRecord
from headstart.router.policies.rendezvous import key_digest

NUM_REQUESTS = 60


class Clock:
    """The time that all parts of a router see, moved by the test alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def recorded(seed: int) -> Iterator[tuple[dict[str, Any], int, float]]:
    """Requests of conversations, the share of the prompt that the replica reports as cached, and its prefill time."""
    rng = Random(seed)
    texts = [f"conversation {number}: " + "words in common, " * rng.randrange(10, 60) for number in range(8)]
    for _ in range(NUM_REQUESTS):
        number = rng.randrange(len(texts))
        texts[number] += "and a turn more, " * rng.randrange(1, 12)
        body = {"prompt": texts[number], "max_tokens": rng.choice((2, 20)), "stream": rng.random() < 0.6}
        yield body, rng.choice((0, 50, 100)), rng.uniform(0.002, 0.3)


async def decisions(kind: str, seed: int, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The decision log of the stream through one kind of front."""
    clock, log = Clock(), list[DecisionRecord]()
    for module in (proxy, relay, endpoint_picker):
        monkeypatch.setattr(module, "time", clock)
    report: list[float] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        percent, seconds = report
        clock.now += seconds
        tokens = len(body["prompt"]) // 4
        told = UsageReportHeader("cmpl-1", tokens, tokens * int(percent) // 100, seconds * 1e3)
        used = usage(tokens, told.cached_tokens, completion_tokens=0)  # its length is in no header
        head = {"x-headstart-report": told.encode().decode()} if "x-headstart-report" in request.headers else {}
        if not body["stream"]:
            return web.json_response({"choices": [{"index": 0, "text": "abc"}], "usage": used}, headers=head)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **head})
        await response.prepare(request)
        await response.write(chunk("a") + b"data: " + json.dumps({"choices": [], "usage": used}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    for replica in replicas:
        await replica.start()
        replica.script = answer
    start = {"http": http_front, "envoy": envoy_front}[kind]
    async with start(*replicas, health_interval=600.0, scrape_interval=0.0) as front:
        router = front.state.router
        monkeypatch.setattr(router, "_log", log.append)
        assert {replica.url for replica in replicas} == router.endpoints.keys()
        for place, replica in enumerate(replicas):  # ports are drawn; where a new prompt goes is not
            router.endpoints[replica.url].digest = key_digest(b"%d" % place)
        for number, (body, percent, seconds) in enumerate(recorded(seed)):
            report[:] = [percent, seconds]
            response = await front.client.post("/v1/completions", json=body)
            assert response.status_code == 200
            await until(lambda number=number: len(log) == number + 1 and not front.state.num_under_way)
            clock.now += 0.05
    return [json.dumps(record.as_dict(), sort_keys=True).encode() for record in log]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_fronts_decide_alike(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    envoy_binary()

    async def test() -> tuple[list[bytes], list[bytes]]:
        replicas = [Replica(num_blocks=200) for _ in range(3)]
        found = [await decisions(kind, seed, replicas, monkeypatch) for kind in ("http", "envoy")]
        return found[0], found[1]

    front, envoy = run(test())
    assert len(front) == NUM_REQUESTS and len({json.loads(line)["endpoint"] for line in front}) == 3
    for one, other in zip(front, envoy, strict=True):
        both = json.loads(one), json.loads(other)
        assert {name: (both[0][name], both[1][name]) for name in both[0] if both[0][name] != both[1][name]} == {}
    assert front == envoy
