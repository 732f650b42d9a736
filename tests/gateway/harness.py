"""Replicas that do as they are told, and a router in front of them over real sockets, all on the test's own loop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
from aiohttp import web
from server.harness import PATIENCE, parse_events, until

from headstart.config.options import RouterOptions, ServerOptions
from headstart.gateway.gateway_app import build_gateway_app
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.proxy.proxy import Placed, place_by_own_router
from headstart.gateway.proxy.replies import client_session_options
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.lifecycle import UvicornWithoutSignals, open_listener, uvicorn_config
from headstart.http.logs import ServerLog

WHOLE = {"/v1/responses": "output", "/v1/messages": "content"}  # where an answer's text is
BLOCK = 16
BLOCKS = 1000


def chunk(text: str, **fields: Any) -> bytes:
    """One event of a stream of completions."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}], **fields}).encode() + b"\n\n"


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int = 3) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Replica:
    """An OpenAI server of one model that answers "abc", and remembers what it was asked.

    `script` is asked first: a coroutine function of the request that returns a response, or None to answer as usual.
    """

    def __init__(self, name: str = "m", *, block_size: int = BLOCK, num_blocks: int = BLOCKS) -> None:
        self.name = name
        self.block_size, self.num_blocks = block_size, num_blocks
        self.script: Callable[[web.Request, dict[str, Any]], Any] | None = None
        self.health: tuple[int, Any] = (200, {"status": "ok"})
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.gone = 0  # clients that hung up in the middle
        self.waiting = 0
        self.cached = 0
        self.models: list[dict[str, Any]] = [{"id": name, "object": "model"}]
        self.gate = asyncio.Event()  # behind the first event of a stream
        self.gate.set()
        self.url = ""
        self.engine = "vllm"
        self.events: str | None = None  # where its KV events are published
        self.replay: str | None = None
        self.ranks = 1
        self.port = 0
        self.middleware: Any = None  # around every handler, as aiohttp's
        self._runner: web.AppRunner | None = None

    async def start(self) -> "Replica":
        app = web.Application(middlewares=[self._around], client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    @property
    def address(self) -> ReplicaAddress:
        return ReplicaAddress(self.url, self.events, self.replay, self.ranks)

    async def stop(self) -> None:
        """Stop listening; a later start uses the same address."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _around(self, request: web.Request, handler: Any) -> web.StreamResponse:
        return await (handler(request) if self.middleware is None else self.middleware(request, handler))

    async def _health(self, request: web.Request) -> web.Response:
        status, body = self.health
        return web.json_response(body, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _metrics(self, request: web.Request) -> web.Response:
        config = f'block_size="{self.block_size}",num_gpu_blocks="{self.num_blocks}"'
        lines = [
            f"vllm:cache_config_info{{{config}}} 1.0",
            f'vllm:num_requests_waiting{{model_name="m"}} {self.waiting}',
        ]
        lines.append(f"{self.engine}:steps_total 1")
        return web.Response(text="\n".join(lines) + "\n")

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.raw.append(raw)
        self.bodies.append(body)
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        if self.script is not None:
            answer = await self.script(request, body)
            if answer is not None:
                return answer
        told = usage(len(body.get("prompt") or []), self.cached)
        if not body.get("stream"):
            answer = {WHOLE.get(request.path, "choices"): [{"index": 0, "text": "abc"}], "usage": told}
            return web.json_response({**answer, "who": self.name})
        return await self._stream(request, body, told)

    async def _stream(self, request: web.Request, body: dict[str, Any], told: dict[str, Any]) -> web.StreamResponse:
        response = await streaming(request)
        try:
            await response.write(chunk("a"))
            await self.gate.wait()
            for text in "bc":
                await response.write(chunk(text))
            if (body.get("stream_options") or {}).get("include_usage"):
                await response.write(b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        return response


class RealReplica(Replica):
    """A server that is started and stopped elsewhere."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url


async def streaming(request: web.Request) -> web.StreamResponse:
    """The head of a stream of events, sent."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


def cut(request: web.Request) -> None:
    """Ends the connection as the end of a process would."""
    assert request.transport is not None
    request.transport.abort()


class Front:
    """A running router: its state, its address and a client."""

    def __init__(self, state: GatewayState, client: httpx.AsyncClient) -> None:
        self.state = state
        self.client = client

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)

    async def up(self, count: int) -> None:
        """Waits until so many replicas are up."""
        members = self.state.members.members
        await until(lambda: sum(member.state == "up" for member in members.values()) == count)


@asynccontextmanager
async def front(
    *replicas: Replica,
    server: dict[str, Any] | None = None,
    reader: RequestParser | None = None,
    placed: Placed = place_by_own_router,
    **options: Any,
) -> AsyncIterator[Front]:
    """A router in front of replicas, which are started and stopped with it."""
    for replica in replicas:
        if not replica.url:
            await replica.start()
    router_options = RouterOptions(**{"health_interval": 0.05, "scrape_interval": 0.05, "tokenizer": "none", **options})
    server_options = ServerOptions(**{"access_log": "none", **(server or {})})
    connector = aiohttp.TCPConnector(limit=0)  # as run_gateway.py
    async with aiohttp.ClientSession(connector=connector, **client_session_options()) as session:
        state = GatewayState(
            router_options, server_options, session, reader or RequestParser(), ServerLog(), placed=placed
        )
        listener = open_listener("127.0.0.1", 0)
        http = UvicornWithoutSignals(uvicorn_config(build_gateway_app(state)))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        try:
            state.members.on_replicas_changed([replica.address for replica in replicas])
            await state.members.seen.wait()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits
            ) as client:
                yield Front(state, client)
        finally:
            http.should_exit = http.force_exit = True
            await serving
            await state.close()
            for replica in replicas:
                await replica.stop()


def unused_url() -> str:
    """An address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


TEXTS = ["a", "b", "c"]


def texts(body: str) -> list[str]:
    """Return the texts of a stream of completions, event by event."""
    return [event["choices"][0]["text"] for event in parse_events(body) if event != "[DONE]" and event.get("choices")]


def run(coroutine: Any) -> Any:
    """Runs a test's coroutine on a loop of its own."""
    return asyncio.run(coroutine)


def two() -> list[Replica]:
    """Two of one model."""
    return [Replica("m"), Replica("m")]


async def reset(request: web.Request, body: dict[str, Any]) -> None:
    """A script: the connection ends without an answer."""
    cut(request)
    await asyncio.Event().wait()


def refusing(status: int, code: str) -> Any:
    """A script: an error of that status and code."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "not now", "code": code}}, status=status)

    return answer
