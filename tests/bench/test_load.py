"""The load client against a stub server that speaks just enough of OpenAI's API, each fault on demand."""

import asyncio
import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from headstart.bench.load import LoadConfig, Target, run_load
from headstart.core.errors import ConfigError
from headstart.workload.synthetic import Shape

CONFIG = LoadConfig(groups=2, prompts=3, shape=Shape(32, 8, 4), vocab_size=100, concurrency=2)
KEYS = {"requests", "errors", "seconds", "cached_share", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms"}
Handler = Callable[[web.Request], "asyncio.Future[web.StreamResponse]"]


def usage(body: dict, cached: int = 16) -> dict:
    return {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Stub:
    """Streams `max_tokens` tokens; `fault` breaks every reply in one way. Keeps the bodies and how many at a time."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0

    async def models(self, request: web.Request) -> web.Response:
        if self.fault == "loading":
            return web.json_response({"error": {"message": "still loading"}}, status=503)
        return web.json_response({"data": [] if self.fault == "no models" else [{"id": "stub"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.fault == "status":
            return web.json_response({"error": {"message": "no room"}}, status=429)
        self.now += 1
        self.most = max(self.most, self.now)
        reply = web.StreamResponse()
        await reply.prepare(request)
        for event in self.events(body):
            await asyncio.sleep(0.002)
            await reply.write(f"data: {event}\n\n".encode())
        self.now -= 1
        return reply

    def events(self, body: dict) -> Iterator[str]:
        for index in range(body["max_tokens"]):
            finish = "length" if index == body["max_tokens"] - 1 else None
            yield json.dumps({"choices": [{"text": "x", "finish_reason": finish}], "usage": None})
            if self.fault == "error in mid stream":
                yield json.dumps({"error": {"message": "broken"}})
        counted = usage(body)
        if self.fault == "wrong usage":
            counted["completion_tokens"] -= 1
        yield json.dumps({"choices": [], "usage": counted})
        if self.fault != "torn stream":
            yield "[DONE]"


@contextmanager
def serving(stub: Stub) -> Generator[str, None, None]:
    """The stub in a thread of its own; gives its URL."""
    ready, ports = threading.Event(), list[int]()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/v1/models", stub.models)
        application.router.add_post("/v1/completions", stub.completions)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def test_closed_loop_reports_latencies_and_the_servers_cached_tokens() -> None:
    stub = Stub()
    with serving(stub) as url:
        report = run_load(Target(url + "/v1/"), CONFIG)
    assert report.values.keys() >= KEYS and report.problems == []
    assert (report.model, report.values["requests"], report.values["errors"]) == ("stub", 6, 0)
    assert report.values["cached_share"] == pytest.approx(16 / 40)
    assert stub.most == 2
    assert all(body["stream"] and len(body["prompt"]) == 40 and body["max_tokens"] == 4 for body in stub.bodies)
    assert len({tuple(body["prompt"][:32]) for body in stub.bodies}) == 2
    latency = {name: report.values[f"{name}_ms"]["p50"] for name in ("ttft", "tpot", "e2e")}
    assert latency["e2e"] == pytest.approx(latency["ttft"] + 3 * latency["tpot"], rel=0.5)


def test_open_loop_sends_everything_and_the_key() -> None:
    stub = Stub()
    with serving(stub) as url:
        report = run_load(
            Target(url, model="mine", api_key="secret"), LoadConfig(1, 5, Shape(8, 8, 2), 100, rate=200.0)
        )
    assert report.problems == [] and report.model == "mine"
    assert stub.keys == ["Bearer secret"] * 5


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "HTTP 429"),
        ("error in mid stream", "broken"),
        ("torn stream", r"without \[DONE\]"),
        ("wrong usage", "usage says"),
    ],
)
def test_every_failure_of_the_server_invalidates_the_run(fault: str, message: str) -> None:
    with serving(Stub(fault)) as url:
        report = run_load(Target(url), CONFIG)
    assert report.values["errors"] == 6
    assert len(report.problems) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report.problems[0])


@pytest.mark.parametrize("url", ["ftp://example", "nonsense"])
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http"):
        run_load(Target(url), CONFIG)


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot reach"):
        run_load(Target("http://127.0.0.1:9"), CONFIG)


def test_a_server_that_is_not_ready_is_quoted() -> None:
    with serving(Stub("loading")) as url, pytest.raises(ConfigError, match=r"HTTP 503.*still loading"):
        run_load(Target(url), CONFIG)


def test_a_server_without_models_asks_for_a_name() -> None:
    with serving(Stub("no models")) as url, pytest.raises(ConfigError, match="--model"):
        run_load(Target(url), CONFIG)
