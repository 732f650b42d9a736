"""An OpenAI replica that computes nothing, as a process: tokens are timed by the clock, the prefix cache is a real one.

`python -m headstart_lab.runners.fake_replica --port 0` prints its URL. It also serves the endpoints that routers
request from vLLM and SGLang replicas. It shares the machine with the measured process, so it is cheap: raw sockets,
responses formatted by hand.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from array import array
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import uvloop

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash, extend_block_hashes, pack_tokens_as_int32, root_hash
from headstart.http.answer_report import UsageReportHeader
from headstart_lab.runners.fake_connection import JSON, Connection

_EVENTS = {"completion": ("text_completion", '"text":%s'), "chat": ("chat.completion.chunk", '"delta":{"content":%s}')}
_WHOLE = {
    "completion": ("text_completion", '"text":%s'),
    "chat": ("chat.completion", '"message":{"role":"assistant","content":%s}'),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Behaviour of a fake replica."""

    model: str = "fake"
    tokens: int = 16  # of an answer, unless the request sets it
    ttft_ms: float = 20.0  # from the end of the request to the first token
    token_ms: float = 10.0  # between tokens
    num_blocks: int = 4096
    block_size: int = 16
    steps: bool = False  # all answers get their tokens at the same moments, as from the steps of an engine
    stamps: bool = False  # tokens are timestamps: the request's arrival (first token only), the token's write


class Cache:
    """An engine's prefix cache without KV: block hashes and their eviction."""

    def __init__(self, settings: Settings) -> None:
        self.block_size = settings.block_size
        self._pool = BlockPool(settings.num_blocks + 1, history_pools=1)
        self._root = root_hash(settings.model.encode())

    def take(self, tokens: "array[int]") -> tuple[int, list[int]]:
        """Return (cached tokens of a prompt, its blocks, held until `release`). The prompt is cached from now on."""
        pool, hashes = self._pool, list[BlockHash]()
        extend_block_hashes(hashes, tokens, self.block_size, self._root)
        found = [entry[0] for entry in takewhile(bool, map(pool.published_entry, hashes)) if entry]
        cached = max(min(len(found) * self.block_size, len(tokens) - 1), 0)
        if len(hashes) - len(found) > pool.num_available_after_acquire(found):
            return cached, []  # all blocks are in use: this prompt is not cached
        pool.acquire(found)
        blocks = found + pool.allocate(len(hashes) - len(found))
        for index in range(len(found), len(hashes)):
            pool.publish(blocks[index], hashes[index], hashes[index - 1] if index else self._root, b"")
        return cached, blocks

    def release(self, blocks: list[int]) -> None:
        self._pool.release(blocks)

    @property
    def usage(self) -> float:
        """Return the share of blocks in use."""
        return 1 - self._pool.num_free / self._pool.usable_capacity


class Replica:
    """The state shared by all connections: settings, cache, counters and the times of steps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = Cache(settings)
        self.loop = asyncio.get_running_loop()
        self.running: set[Answer] = set()
        self.num_requests = self.prompt_tokens = self.cached_tokens = 0
        self._unknown: set[str] = set()
        self._born = self.loop.time()

    def schedule(self, answer: "Answer", due: float) -> asyncio.TimerHandle:
        """Schedule the next token at `due`, or in the first step after it."""
        if self.settings.steps:
            step = self.settings.token_ms / 1e3
            due = self._born + (int((due - self._born) / step) + 1) * step
        return self.loop.call_at(due, answer.advance)

    def serve(self, connection: Connection, method: str, path: str, body: bytes) -> "Answer | None":
        """Respond at once, or start a response that takes time."""
        kind = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}.get(path)
        if method != "POST":
            connection.respond(*self._look(path))
            return None
        try:
            if kind is not None:
                return Answer(self, connection, kind, body)
            if path == "/tokenize":
                tokens = tokens_of(json.loads(body)).tolist()
                connection.respond(200, JSON, json.dumps({"count": len(tokens), "tokens": tokens}).encode())
            else:
                connection.respond(*self._nothing(f"POST {path}"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            connection.respond(400, JSON, _error(f"{type(error).__name__}: {error}"))
        return None

    def _look(self, path: str) -> tuple[int, bytes, bytes]:
        """Return (status, content type, body) of a GET."""
        settings = self.settings
        found: dict[str, object] = {
            "/v1/models": {"object": "list", "data": [{"id": settings.model, "object": "model", "owned_by": "fake"}]},
            "/version": {"version": "0.0.0"},
            "/get_model_info": {"model_path": settings.model, "is_generation": True},
            "/model_info": {"model_path": settings.model, "is_generation": True},
            "/get_server_info": {"model_path": settings.model, "served_model_name": settings.model, "version": "0.0.0"},
            "/server_info": {"model_path": settings.model, "served_model_name": settings.model, "version": "0.0.0"},
            "/get_load": [{"dp_rank": 0, "num_reqs": len(self.running), "num_waiting_reqs": 0, "num_tokens": 0}],
        }
        if path in ("/health", "/health_generate", "/ping", "/livez", "/readyz"):
            return 200, b"text/plain", b""
        if path == "/metrics":
            return 200, b"text/plain; version=0.0.4", self._metrics().encode()
        if path in found:
            return 200, JSON, json.dumps(found[path]).encode()
        return self._nothing(f"GET {path}")

    def _nothing(self, what: str) -> tuple[int, bytes, bytes]:
        """Respond with 404, and log once on stderr which path is missing."""
        if what not in self._unknown:
            self._unknown.add(what)
            print(f"not there: {what}", file=sys.stderr, flush=True)
        return 404, JSON, _error(f"there is nothing like {what}")

    def _metrics(self) -> str:
        settings, label = self.settings, f'{{model_name="{self.settings.model}"}}'
        blocks = f'block_size="{settings.block_size}",num_gpu_blocks="{settings.num_blocks}"'
        lines = (
            f"vllm:cache_config_info{{{blocks}}} 1.0",
            f"vllm:num_requests_running{label} {len(self.running)}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:kv_cache_usage_perc{label} {self.cache.usage:.6f}",
            f"vllm:request_success_total{label} {self.num_requests - len(self.running)}",
            f"vllm:prefix_cache_queries_total{label} {self.prompt_tokens}",
            f"vllm:prefix_cache_hits_total{label} {self.cached_tokens}",
        )
        return "\n".join(lines) + "\n"


class Answer:
    """One request in flight. Raises ValueError, KeyError or TypeError for an invalid body."""

    def __init__(self, replica: Replica, connection: "Connection", kind: str, body: bytes) -> None:
        asked: dict[str, Any] = json.loads(body)
        settings, self.received = replica.settings, time.monotonic()
        prompt = tokens_of(asked)
        self.replica, self.connection, self.kind = replica, connection, kind
        self.num_tokens = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or settings.tokens)
        if self.num_tokens < 1:
            raise ValueError(f"{self.num_tokens} tokens cannot be generated")
        self.is_streamed = bool(asked.get("stream"))
        self.with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        cached, self._blocks = replica.cache.take(prompt)
        self.usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": self.num_tokens,
            "total_tokens": len(prompt) + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        replica.num_requests += 1
        replica.prompt_tokens += len(prompt)
        replica.cached_tokens += cached
        replica.running.add(self)
        self._head = f'"id":"{kind}-{replica.num_requests}","created":{int(time.time())},"model":"{settings.model}"'
        self._written = 0
        self._due = replica.loop.time() + settings.ttft_ms / 1e3
        if not self.is_streamed:
            self._due += (self.num_tokens - 1) * settings.token_ms / 1e3
        self._timer = replica.schedule(self, self._due)

    def advance(self) -> None:
        """Write the next token, or the whole response."""
        if not self.is_streamed:
            self.leave()
            self.connection.respond(200, JSON, self._whole())
            return
        if self._written == 0:
            self.connection.open_stream(self._report if self.connection.wants_report else b"")
        name, form = _EVENTS[self.kind]
        self._written += 1
        is_last = self._written == self.num_tokens
        finish = '"length"' if is_last else "null"
        choice = f'{{"index":0,{form % self._text()},"logprobs":null,"finish_reason":{finish}}}'
        event = f'data: {{{self._head},"object":"{name}","choices":[{choice}],"usage":null}}\n\n'
        if not is_last:
            self.connection.write_chunk(event.encode())
            self._due += self.replica.settings.token_ms / 1e3
            self._timer = self.replica.schedule(self, self._due)
            return
        if self.with_usage:
            event += f'data: {{{self._head},"object":"{name}","choices":[],"usage":{json.dumps(self.usage)}}}\n\n'
        self.leave()
        self.connection.write_chunk(f"{event}data: [DONE]\n\n".encode(), is_last=True)

    @property
    def _report(self) -> bytes:
        usage, settings = self.usage, self.replica.settings
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return UsageReportHeader(f"{self.kind}-1", usage["prompt_tokens"], cached, settings.ttft_ms).encode()

    def leave(self) -> None:
        """Release the resources, at the end or after a disconnect. Idempotent."""
        self._timer.cancel()
        if self in self.replica.running:
            self.replica.running.remove(self)
            self.replica.cache.release(self._blocks)

    def _text(self) -> str:
        if not self.replica.settings.stamps:
            return '" token"'
        now = f"{time.monotonic():.6f}"
        return f'" {self.received:.6f} {now}"' if self._written == 1 else f'" {now}"'

    def _whole(self) -> bytes:
        name, form = _WHOLE[self.kind]
        text = form % json.dumps(" token" * self.num_tokens)
        choice = f'{{"index":0,{text},"logprobs":null,"finish_reason":"length"}}'
        return f'{{{self._head},"object":"{name}","choices":[{choice}],"usage":{json.dumps(self.usage)}}}'.encode()


def tokens_of(asked: dict[str, Any]) -> "array[int]":
    """Return the tokens of a request: ids unchanged, a text as its UTF-8 bytes. Raises KeyError."""
    if "messages" in asked:
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in asked["messages"])
    else:
        text = asked["prompt"]
    return pack_tokens_as_int32(list(text.encode()) if isinstance(text, str) else text)


async def serve(settings: Settings, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve until a signal; the URL is the first line on stdout."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    replica = Replica(settings)
    server = await loop.create_server(lambda: Connection(replica.serve), host, port, backlog=4096)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(f"http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="fake_replica", description="An OpenAI replica that computes nothing.")
    default = Settings()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--tokens", type=int, default=default.tokens, help="of an answer, unless the request sets it")
    parser.add_argument("--ttft-ms", type=float, default=default.ttft_ms)
    parser.add_argument("--token-ms", type=float, default=default.token_ms)
    parser.add_argument("--num-blocks", type=int, default=default.num_blocks)
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument("--steps", action="store_true", help="all answers get their tokens at the same moments")
    parser.add_argument("--stamps", action="store_true", help="tokens are the times at which they were written")
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    uvloop.run(serve(Settings(**given), host, port))


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}}).encode()


if __name__ == "__main__":
    main()
