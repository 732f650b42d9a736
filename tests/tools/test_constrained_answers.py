"""Constrained tool calls of the real engine: a random model writes calls whose arguments match their schema."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from server.harness import Server, parse_events, spawn

from headstart.model.weights.init_model import write_random_model

TOOL = {
    "type": "function",
    "function": {
        "name": "light",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"enum": ["kitchen", "hall"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["room", "level"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(
    scope="module",
    params=[
        "hermes",
        "pythonic",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama3_json", "mistral")),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real")
    model = write_random_model("tiny", folder / "tiny", std=0.2, dtype="float32", progress=False)
    options = ["--port", "0", "--num-blocks", "256", "--max-model-len", "1024", "--heartbeat-timeout", "600"]
    options += ["--tool-call-parser", request.param, "--enable-auto-tool-choice"]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], folder / "log") as running:
        yield running.wait_ready()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "light"}}])
def test_a_random_model_calls_a_tool_with_valid_arguments(server: Server, choice: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "light"}], "tools": [TOOL], "tool_choice": choice}
    body |= {"max_tokens": 200, "parallel_tool_calls": False}
    for seed in range(4):
        response = server.post("/v1/chat/completions", json=body | {"seed": seed})
        assert response.status_code == 200, response.text
        [answer] = response.json()["choices"]
        [call] = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        assert arguments["room"] in ("kitchen", "hall") and 0 <= arguments["level"] <= 9 and len(arguments) == 2
        events = parse_events(server.post("/v1/chat/completions", json=body | {"seed": seed, "stream": True}).text)[:-1]
        deltas = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(delta["function"].get("arguments", "") for delta in deltas) == call["function"]["arguments"]
