"""A server that speaks just enough of OpenAI's API and caches whole blocks of 16 tokens; each fault on demand."""

import asyncio
import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from aiohttp import web

BLOCK = 16


class Stub:
    """Streams `max_tokens` tokens; `damage_of_value` breaks replies in one way. Keeps the bodies and how many at a
    time.

    Faults: loading, no models, no token ids, no ignore_eos, small vocabulary, key, no completions (all refusals);
    status, error in mid stream, torn stream, wrong usage, no usage, all cached (from the first measured request on);
    silent (no cached tokens in usage), silent when none (told only if there are some).
    """

    def __init__(self, fault: str = "", seconds_per_token: float = 0.001, probes: int = 1, together: int = 1) -> None:
        self.fault = fault
        self.seconds_per_token = seconds_per_token
        self.probes = probes  # requests before faults of measured ones begin
        self.together = together  # no measured reply begins before so many requests were there at once
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.now = self.most = self.gone = 0
        self.known: set[tuple[int, ...]] = set()

    async def models(self, request: web.Request) -> web.Response:
        if self.fault == "loading":
            return web.json_response({"error": {"message": "still loading"}}, status=503)
        card = {"id": "stub", "max_model_len": 2048}
        return web.json_response({"data": [] if self.fault == "no models" else [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.append(request.headers.get("Authorization"))
        refusal = self.refusal(body)
        if refusal is not None:
            return web.json_response({"error": {"message": refusal[1]}}, status=refusal[0])
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            reply = web.StreamResponse()
            await reply.prepare(request)
            while len(self.bodies) > self.probes and self.most < self.together:
                await asyncio.sleep(0.001)
            for event in self.events(body):
                await asyncio.sleep(self.seconds_per_token)
                await reply.write(f"data: {event}\n\n".encode())
            return reply
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        finally:
            self.now -= 1

    def refusal(self, body: dict) -> tuple[int, str] | None:
        """(status, message) of what this server does not take."""
        ids = body["prompt"] if isinstance(body["prompt"], list) else []
        return {
            "status": (429, "no room") if len(self.bodies) >= self.probes else None,
            "key": (401, "who are you"),
            "no completions": (404, "not found"),
            "no token ids": (400, "prompt must be a string") if ids else None,
            "no ignore_eos": (422, "unknown field") if "ignore_eos" in body else None,
            "small vocabulary": (400, "token id out of range") if ids and max(ids) >= 40 else None,
            "crash": (500, "it broke"),
        }.get(self.fault)

    def events(self, body: dict) -> Iterator[str]:
        is_measured = len(self.bodies) > self.probes
        for index in range(body["max_tokens"]):
            finish = "length" if index == body["max_tokens"] - 1 else None
            yield json.dumps({"choices": [{"text": "", "finish_reason": finish}], "usage": None})
            if self.fault == "error in mid stream" and is_measured:
                yield json.dumps({"error": {"message": "broken"}})
        usage = self.usage(body, is_measured)
        if self.fault != "no usage":
            yield json.dumps({"choices": [], "usage": usage})
        if self.fault != "torn stream" or not is_measured:
            yield "[DONE]"

    def usage(self, body: dict, is_measured: bool) -> dict:
        tokens = tuple(body["prompt"]) if isinstance(body["prompt"], list) else (1,)
        names = [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        hit = next((i for i, name in enumerate(names) if name not in self.known), len(names))
        self.known.update(names)
        cached = min(hit * BLOCK, len(tokens) - 1)
        if self.fault == "all cached" and is_measured:
            cached = len(tokens) - 1
        usage = {"prompt_tokens": len(tokens), "completion_tokens": body["max_tokens"]}
        if self.fault == "wrong usage" and is_measured:
            usage["completion_tokens"] -= 1
        if self.fault == "silent" or (self.fault == "silent when none" and not cached):
            return usage | {"prompt_tokens_details": None}
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}


@contextmanager
def serving(stub: Stub) -> Generator[str, None, None]:
    """The stub in a thread of its own; gives its URL."""
    ready, ports = threading.Event(), list[int]()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        application = web.Application(client_max_size=2**26)
        application.router.add_get("/v1/models", stub.models)
        application.router.add_post("/v1/completions", stub.completions)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
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
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
