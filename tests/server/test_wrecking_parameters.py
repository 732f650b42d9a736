"""Legal requests cannot cost others the blocks of a shared prefix: wrecking parameters, and prompts that overflow."""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from server.checked_engine import build_checked
from server.harness import Server, inside, spawn

from headstart.model.weights.init_model import write_random_model

NUM_REQUESTS = 95  # as many as the audit sent
SYSTEM = "You are a careful assistant. Answer in one short sentence. " * 8
FIXED = list(range(2, 42))  # ten blocks
WRECKING: list[dict[str, Any]] = [
    {"repetition_penalty": 1e-38, "temperature": 1},
    {"repetition_penalty": 1e-38, "temperature": 0, "logprobs": 5},
    {"repetition_penalty": 5e-324, "temperature": 1e-5, "min_p": 1},
    {"repetition_penalty": 3.4e38, "temperature": 2, "top_p": 1e-300},
    {"repetition_penalty": 1e-38, "presence_penalty": -2, "frequency_penalty": 2, "top_k": 1, "logprobs": 20},
    {"temperature": 2, "min_tokens": 4, "logit_bias": {str(token): -100 for token in range(100)}},
]


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own with a public pinned prefix, since the tests count what it has lost."""
    room = tmp_path_factory.mktemp("pinned")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    options = ["--port", "0", "--num-blocks", "512", "--max-model-len", "1024"]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], room / "log") as running:
        server = running.wait_ready()
        answer = server.post("/v1/prefixes", json={"name": "system", "text": SYSTEM})
        assert answer.status_code == 201, answer.text
        yield server


def lost(server: Server) -> float:
    """Blocks that were given up because of failed rows."""
    text = server.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("headstart:evictions") and 'cause="failed"' in line]
    assert lines, text
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def cached(server: Server) -> int:
    answer = server.post("/v1/completions", json={"prompt": SYSTEM + "And now?", "max_tokens": 1, "temperature": 0})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_wrecking_parameters_are_answered_and_cost_a_pinned_prefix_no_block(pinned: Server) -> None:
    before = cached(pinned)
    assert before > 64
    with pinned.client() as client:
        for number in range(NUM_REQUESTS):
            body = {"prompt": f"{SYSTEM}{number}", "max_tokens": 6, **WRECKING[number % len(WRECKING)]}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, (body, answer.text)
            json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert lost(pinned) == 0 and pinned.metric("vllm:corrupted_requests_total") == 0
    assert cached(pinned) >= before


def test_a_wrecking_stream_ends_as_any_other(pinned: Server) -> None:
    for parameters in WRECKING:
        body = {"prompt": SYSTEM, "max_tokens": 4, "stream": True, "ignore_eos": True, **parameters}
        answer = pinned.post("/v1/completions", json=body)
        assert answer.status_code == 200 and "error" not in answer.text, answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")


def test_prompts_that_make_the_model_overflow_cost_a_pinned_prefix_no_block(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            added = await server.client.post("/v1/prefixes", json={"name": "fixed", "token_ids": FIXED})
            assert added.status_code == 201, added.text
            bad = [server.complete([*FIXED, 60 + number, 449], max_tokens=2) for number in range(NUM_REQUESTS)]
            assert {answer.status_code for answer in await asyncio.gather(*bad)} == {500}
            answer = await server.complete([*FIXED, 50], max_tokens=1)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(FIXED)
            stats = server.engine.stats
            assert (stats.pool.evictions_by_cause["failed"], stats.counters.num_row_errors) == (0, NUM_REQUESTS)

    asyncio.run(run())
