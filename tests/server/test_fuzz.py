"""10,000 requests from a generator of nonsense: never a 5xx, and the server is as good as before."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from server.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE
from server.harness import PATIENCE, Server, inside, until

NUM_REQUESTS = 10_000
PATHS = ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
NUMBERS = (0, 1, -1, 2, 5, 16, 17, 20, 21, 0.5, 1e-9, -0.1, 2.0001, 1e308, 2**31, 2**63, -(2**63) - 1, 10**400)
TEXTS = (
    "",
    "a",
    "the quick brown fox",
    "é東京👋🏽",
    "\u0000",
    "x" * 300,
    "../../etc/passwd",
    "<|im_end|>",
    "{{ 7*7 }}",
    "\n",
)
NAMES = (
    *("model", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream", "stream_options", "stop"),
    *("stop_token_ids", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "echo", "ignore_eos", "priority", "cache_salt"),
    *("user", "metadata", "response_format", "tools", "tool_choice", "suffix", "add_generation_prompt", "unheard_of"),
    *("continue_final_message", "return_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    *("cache", "cache_priority", "cache_ttl", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("chat_template_kwargs", "add_special_tokens", "prompt_logprobs", "return_token_strs", "tokens", "prompt"),
)
VALID: dict[str, Any] = {
    "max_tokens": (1, 2, 7, MAX_MODEL_LEN, None),
    "n": (1, 2, 3),
    "stream": (True, False),
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "logprobs": (0, 1, 5, True),
    "top_logprobs": (0, 2),
    "stop": ("a", ["the", "x"], None),
    "echo": (True, False),
    "seed": (0, -5, 2**62),
    "logit_bias": ({"3": 5.0}, {}),
    "stream_options": ({"include_usage": True}, None),
    "cache_salt": ("abc", None),
    "cache": ("read-write", "read-only", "bypass", None),
    "cache_priority": (0, 50, 100),
    "cache_ttl": (0, 0.001, 86400),
    "prompt_cache_key": ("k", None),
    "prompt_cache_options": ({"mode": "explicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": 5}, None),
    "prompt_cache_retention": ("24h", "in_memory"),
    "min_tokens": (0, 1),
}


def value(rng: random.Random, depth: int = 0) -> Any:
    """Returns any JSON value, preferring the ones at the edge."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind in (5, 6):
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice((*NAMES, "type", "role", "content", "mode", "ttl", "prompt_cache_breakpoint", "5")): value(
            rng, depth + 1
        )
        for _ in range(rng.randrange(3))
    }


def prompt(rng: random.Random) -> Any:
    text = rng.choice((*TEXTS, "the quick brown"))
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
    return rng.choice((text, [text, "b"], ids, [ids, ids[:1]], [VOCAB_SIZE], [ids, text], [[]], value(rng)))


def messages(rng: random.Random) -> Any:
    roles = ("user", "system", "assistant", "tool", "robot", None)
    contents = (
        rng.choice(TEXTS),
        [{"type": "text", "text": "a", "prompt_cache_breakpoint": value(rng)}],
        [{"type": "image_url"}],
        None,
        value(rng),
    )
    made = [{"role": rng.choice(roles[:4]), "content": rng.choice(contents)} for _ in range(rng.randrange(4))]
    return rng.choice((made, made, made, value(rng), [{"role": rng.choice(roles)}]))


def body(rng: random.Random, path: str) -> bytes:
    """Returns a body for `path`: mostly an object with a few odd fields, sometimes broken bytes."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.95:
        fields["messages" if "chat" in path else "tokens" if "detok" in path else "prompt"] = (
            messages(rng) if "chat" in path else prompt(rng)
        )
    for name in rng.sample(NAMES, rng.choice((0, 0, 1, 1, 2, 4))):
        fields[name] = value(rng)
    for name in rng.sample(tuple(VALID), rng.choice((0, 1, 2, 3))):
        fields[name] = rng.choice(VALID[name])
    fields.setdefault("max_tokens", 3)
    data = json.dumps(fields).encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(data))
        data = rng.choice((data[:at], data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], data + data))
    return data


async def bombard(client: httpx.AsyncClient, seeds: range, statuses: "Counter[int]") -> None:
    for seed in seeds:
        rng = random.Random(seed)
        path = rng.choice(PATHS)
        data = body(rng, path)
        answer = await client.post(path, content=data, headers={"content-type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), f"seed {seed}: {answer.status_code} for {data!r}"
        if answer.status_code == 200:
            assert "event: error" not in answer.text, f"seed {seed}"
        else:
            assert (
                isinstance(answer.json()["error"]["code"], str | None) and "0x" not in answer.json()["error"]["message"]
            )


def test_fuzzed_requests_never_get_a_5xx_and_leave_the_server_as_it_was(
    folder: str, capfd: pytest.CaptureFixture
) -> None:
    async def run() -> "Counter[int]":
        statuses: Counter[int] = Counter()
        async with inside(folder) as server:
            share = NUM_REQUESTS // 20
            await asyncio.gather(
                *(bombard(server.client, range(i * share, (i + 1) * share), statuses) for i in range(20))
            )
            answer = await server.complete([3, 4], max_tokens=4, return_token_ids=True)
            assert answer.json()["choices"][0]["token_ids"] == [3, 4, 3, 4]
            await until(lambda: server.engine.stats.num_running == 0)
            assert server.engine.stats.pool.num_free == server.engine.stats.pool.num_blocks
            assert server.state.num_jobs == server.engine.num_awaiting_first_token == 0
            assert server.engine.stats.counters.num_row_errors == 0
        return statuses

    statuses = asyncio.run(run())
    assert sum(statuses.values()) == NUM_REQUESTS
    assert statuses[200] > NUM_REQUESTS // 20 and statuses[400] > NUM_REQUESTS // 20  # both sides are exercised
    assert "Traceback" not in capfd.readouterr().err


def test_the_real_engine_survives_a_share_of_them(real_server: Server) -> None:
    async def run() -> "Counter[int]":
        statuses: Counter[int] = Counter()
        async with httpx.AsyncClient(base_url=real_server.url, timeout=PATIENCE) as client:
            await asyncio.gather(*(bombard(client, range(i * 100, (i + 1) * 100), statuses) for i in range(10)))
        return statuses

    def answer() -> dict[str, Any]:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        return real_server.post("/v1/completions", json=body).json()["choices"]

    before = answer()
    assert asyncio.run(run())[200] > 50
    assert answer() == before
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:corrupted_requests_total"):
        assert real_server.metric(name) == 0
    assert "Traceback" not in real_server.log and "internal_error" not in real_server.log
