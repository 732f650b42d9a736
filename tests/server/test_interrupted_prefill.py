"""Clients that disconnect in the middle of a prefill and come back: only the rest is computed.

The real engine with a tiny model, over sockets, with chunks of 16 tokens.
"""

import json
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from server.harness import PATIENCE, Server, spawn, wait_for

from headstart.model.weights.init_model import write_random_model

BLOCK = 16
LENGTH = 960  # tokens
ENOUGH = 200  # tokens that are computed before the client disconnects
SIZES = ["--num-blocks", "512", "--max-model-len", "1024", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"]


class Stop(NamedTuple):
    """An interrupted prefill: its prompt, and the number of its tokens that were computed."""

    prompt: list[int]
    num_computed: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("interrupted")
    return write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Server]:
    fixed = ["--port", "0", *SIZES, "--heartbeat-timeout", "600"]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *fixed, *options], log) as running:
        yield running.wait_ready()


def num_prefilled(server: Server) -> int:
    return int(server.metric("headstart:prefill_tokens_total"))


def interrupt(server: Server, seed: int, *, stream: bool) -> Stop:
    """Send a prompt and disconnect in the middle of its prefill; prompts that were too fast are followed by others."""
    address = urlsplit(server.url)
    rng = random.Random(seed)
    for _ in range(20):
        prompt = [rng.randrange(5, 250) for _ in range(LENGTH)]
        before = num_prefilled(server)
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "stream": stream}).encode()
        with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_for(lambda before=before: num_prefilled(server) - before >= ENOUGH)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
        num_computed = num_prefilled(server) - before
        if num_computed < LENGTH:
            return Stop(prompt, num_computed)
    raise AssertionError("every prefill ended before its client could disconnect")


def retry(server: Server, prompt: list[int]) -> dict[str, Any]:
    """Send the prompt again; return the details of its prompt tokens."""
    answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


def test_a_retry_computes_only_what_was_not_computed(model: Path, tmp_path: Path) -> None:
    """Before and after a restart with a store, of interrupted requests for whole and for streamed answers."""
    with serving(model, tmp_path / "log", "--kv-store", str(tmp_path / "kv")) as server:
        for seed, stream in ((1, False), (2, True)):
            first = interrupt(server, seed, stream=stream)
            before = num_prefilled(server)
            details = retry(server, first.prompt)
            assert details["cached_tokens"] == details["shared_tokens"] == first.num_computed // BLOCK * BLOCK >= ENOUGH
            assert num_prefilled(server) - before == LENGTH - details["cached_tokens"]
        interrupted = [interrupt(server, seed, stream=stream) for seed, stream in ((3, False), (4, True))]
        assert server.stop() == 0
    with serving(model, tmp_path / "log2", "--kv-store", str(tmp_path / "kv")) as server:
        for second in interrupted:
            before = num_prefilled(server)
            details = retry(server, second.prompt)
            assert details["cached_tokens"] == details["store_tokens"] == second.num_computed // BLOCK * BLOCK >= ENOUGH
            assert num_prefilled(server) - before == LENGTH - details["cached_tokens"]
