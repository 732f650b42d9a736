"""Context overflow: every refusal has the phrases by which clients and agents recognise one, and a remedy."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checking import CheckingExecutor, make_engine, make_request
from server.checked_engine import build_checked
from server.harness import Server, fake_server, inside

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import RequestTooLargeError
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig

CONTEXT = 512  # of the fake engine
RECOGNISED = {
    "LiteLLM, OpenHands, Cline, Letta": "This model's maximum context length is",
    "LangChain and pi, of events of a stream": "exceeds the context window",
}
RECOGNISED_PROMPT = {
    "LiteLLM, LangChain for both of its providers": "prompt is too long",
    "Claude Code, which reads the numbers": r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
}
LONG, LONGER = "fox " * 600, "fox jumps over the dog " * 40_000  # a little too long, and too long to be tokenized
IDS = [5] * 600
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": prompt}) for prompt in (LONG, LONGER, IDS, [[5], IDS], ["a", LONG])),
    *(("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}) for text in (LONG, LONGER)),
    *(("/v1/responses", {"input": text}) for text in (LONG, LONGER)),
    *(("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": text}]}) for text in (LONG, LONGER)),
]
SHORT = [{"role": "user", "content": "fox"}]
OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "fox"}),
    ("/v1/chat/completions", {"messages": SHORT}),
]


def check(message: str, phrases: dict[str, str]) -> None:
    for client, phrase in phrases.items():
        assert re.search(phrase, message), f"{client}: {message}"
    assert re.search("shorten|lower", message), message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PROMPTS)
def test_a_prompt_beyond_the_context_is_recognised(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    refused = server.post(path, json=body | {"stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    check(error["message"], RECOGNISED | RECOGNISED_PROMPT)
    has, may_have = map(int, re.findall(r"(\d+) tokens > (\d+) maximum", error["message"])[0])
    assert has > may_have == CONTEXT - 1


@pytest.mark.parametrize("max_tokens", [CONTEXT - 1, CONTEXT + 1, 10**9])
@pytest.mark.parametrize(("path", "body"), OUTPUTS)
def test_max_tokens_beyond_the_context_is_recognised(
    server: Server, path: str, body: dict[str, Any], max_tokens: int
) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        refused = server.post(path, json=body | {name: max_tokens})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        check(error["message"], RECOGNISED)


def test_a_sequence_beyond_the_pool_is_recognised() -> None:
    engine = make_engine(num_blocks=9, max_model_len=200)
    with pytest.raises(RequestTooLargeError) as caught:
        engine.add_request(make_request("big", [1] * 30, 20))
    check(str(caught.value), RECOGNISED)
    with pytest.raises(RequestTooLargeError) as caught:
        engine.add_request(make_request("long", [1] * 200, 1))
    check(str(caught.value), RECOGNISED | RECOGNISED_PROMPT)


def test_a_server_that_clamps_lowers_max_tokens_to_what_fits(folder: str, tmp_path: Path) -> None:
    with fake_server(f"{folder}?step=0.001", tmp_path / "log", clamp_max_tokens=True) as server:
        for path, body in (*OUTPUTS, ("/v1/responses", {"input": "fox"})):
            name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            for max_tokens in (CONTEXT - 1, 10**9):
                answered = server.post(path, json=body | {name: max_tokens})
                assert answered.status_code == 200, answered.text
        refused = server.post("/v1/completions", json={"prompt": LONG, "max_tokens": 10**9})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def build_short_pool(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """16 usable blocks of 4 tokens for contexts of 256."""
    limits = Limits(max_batched_tokens=256, max_seqs=4, max_model_len=256)
    _, info = build_checked(options)
    engine = Engine(Scheduler(SchedulerConfig(17, 4, limits, policy="lpm")), CheckingExecutor(17, 4))
    return engine, replace(info, num_blocks=16)


def test_without_max_tokens_an_answer_ends_with_the_pool_in_every_api(folder: str) -> None:
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "fox"},
        "/v1/chat/completions": {"messages": SHORT},
        "/v1/responses": {"input": "fox"},
        "/v1/messages": {"messages": SHORT, "max_tokens": 250, "model": "checked"},
        "/api/chat": {"messages": SHORT, "stream": False},
        "/api/generate": {"prompt": "fox", "stream": False},
    }

    async def run() -> None:
        async with inside(folder, build=build_short_pool) as server:
            (card,) = (await server.client.get("/v1/models")).json()["data"]
            assert card["max_model_len"] == 16 * 4 + 1
            for path, body in asked.items():
                answer = await server.client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
            refused = await server.client.post("/v1/completions", json={"prompt": [5] * 65})
            assert refused.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(run())


def test_a_sequence_that_fills_the_pool_is_answered_in_process() -> None:
    engine, info = build_short_pool(EngineOptions(model="none"))
    engine.add_request(make_request("full", [1] * 5, info.max_sequence_len - 5))
    with pytest.raises(RequestTooLargeError):
        engine.add_request(make_request("more", [1] * 5, info.max_sequence_len - 4))
