"""`headstart serve` with SmolLM2-135M-Instruct answers chats sensibly, streamed or not, and reuses the conversation."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.harness import Server, spawn

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("real") / "log"
    with spawn([sys.executable, "-m", "headstart", "serve", str(smollm2), "--port", "0"], log) as process:
        yield process.wait_ready()


def ask(server: Server, messages: list[dict[str, str]]) -> dict[str, object]:
    body = {"messages": messages, "max_tokens": 48, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def test_server_answers_a_question_and_reuses_the_conversation(server: Server) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = ask(server, [question])["choices"][0]  # type: ignore[index]
    assert "Paris" in answer["message"]["content"] and answer["finish_reason"] == "stop"
    later = [question, answer["message"], {"role": "user", "content": "In which country is that city?"}]
    second = ask(server, later)
    assert "France" in second["choices"][0]["message"]["content"]  # type: ignore[index]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32  # type: ignore[index]


def test_stream_joins_to_the_same_text(server: Server) -> None:
    messages = [{"role": "user", "content": "Name three colours. 🎨"}]
    whole = ask(server, messages)["choices"][0]["message"]["content"]  # type: ignore[index]
    body = {"messages": messages, "max_tokens": 48, "temperature": 0, "stream": True}
    pieces = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole and len(pieces) > 3
