"""SmolLM2-135M-Instruct with schemas and tools: what ends is valid, and the model still knows its facts."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from server.harness import Server, parse_events, spawn

pytestmark = pytest.mark.long

CHAT = "/v1/chat/completions"
STRING: dict[str, Any] = {"type": "string", "maxLength": 40}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "capital": ("What is the capital of France?", closed(country=STRING, capital=STRING)),
    "person": (
        "Ada Lovelace was born in London in 1815.",
        closed(name=STRING, born=closed(city=STRING, year={"type": "integer", "minimum": 1000, "maximum": 2100})),
    ),
    "list": ("Name three colours.", {"type": "array", "items": STRING, "minItems": 3, "maxItems": 3}),
    "enum": ("Is the sky green?", closed(answer={"enum": ["yes", "no", "unknown"]}, sure={"type": "boolean"})),
    "formats": (
        "The meeting is on the 3rd of May 2024 at 10 o'clock.",
        closed(day={"type": "string", "format": "date"}, at={"type": "string", "format": "time"}),
    ),
    "recursive": (
        "A folder with two files in it.",
        {
            "$defs": {
                "node": closed(name=STRING, inner={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2})
            }
            | {"leaf": {"anyOf": [{"type": "null"}, closed(name=STRING)]}},
            "$ref": "#/$defs/node",
        },
    ),
    "numbers": (
        "A temperature of 21.5 degrees and a level of 40 percent.",
        closed(
            degrees={"type": "number", "multipleOf": 0.5, "minimum": -50, "maximum": 50},
            level={"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 101},
        ),
    ),
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": closed(city=STRING)}},
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "parameters": closed(
                room={"enum": ["kitchen", "hall"]}, level={"type": "integer", "minimum": 0, "maximum": 9}
            ),
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("real") / "log"
    command = [sys.executable, "-m", "headstart", "serve", str(smollm2), "--port", "0", "--tool-call-parser", "hermes"]
    with spawn(command, log) as process:
        yield process.wait_ready()


def ask(server: Server, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices; checks that the joined stream of the same request is the same."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "temperature": 0, **fields}
    response = server.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    events = parse_events(server.post(CHAT, json={**body, "stream": True}).text)[:-1]
    pieces = [piece for event in events for piece in event["choices"]]
    for choice in choices:
        deltas = [piece["delta"] for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        whole = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        for field in ("name", "arguments"):
            assert "".join(call.get(field) or "" for call in calls) == "".join(call[field] for call in whole)
    return choices


def check(choice: dict[str, Any], schema: dict[str, Any]) -> Any:
    assert choice["finish_reason"] == "stop", choice
    value = json.loads(choice["message"]["content"])
    jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)
    return value


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_values_of_the_schema_greedy_and_drawn(server: Server, name: str) -> None:
    text, schema = SCHEMAS[name]
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
    (greedy,) = ask(server, text, response_format=form)
    found = check(greedy, schema)
    for drawn in ask(server, text, response_format=form, n=4, seed=1, temperature=1.0):
        check(drawn, schema)
    if name == "capital":
        assert found["capital"].startswith("Paris")
    if name == "person":
        assert "Ada" in found["name"]


@pytest.mark.parametrize("choice", ["required", "weather", "set_light"])
def test_a_required_or_named_tool_is_called_with_valid_arguments(server: Server, choice: str) -> None:
    chosen: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    text = "How is the weather in Paris?" if choice != "set_light" else "Set the light in the kitchen to 7."
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 4}):
        for answer in ask(server, text, tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False, **sampling):
            (call,) = answer["message"]["tool_calls"]
            name = call["function"]["name"]
            assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
            assert name in PARAMETERS and choice in ("required", name)
            jsonschema_rs.validate(PARAMETERS[name], json.loads(call["function"]["arguments"]))


def test_a_tool_round_trip_ends_in_text(server: Server) -> None:
    question = {"role": "user", "content": "How is the weather in Paris?"}
    (first,) = ask(server, question["content"], tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    call = first["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains in Paris."}
    messages = [question, first["message"], result]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 40, "temperature": 0}
    answer = server.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_choices_regexes_and_grammars(server: Server) -> None:
    def one(text: str, **form: Any) -> str:
        (choice,) = ask(server, text, structured_outputs=form)
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"]

    assert one("Is Paris in France?", choice=["yes", "no"]) in ("yes", "no")
    assert one("When was Ada Lovelace born?", regex="18[0-9]{2}-[01][0-9]-[0-3][0-9]").startswith("18")
    assert one("Add two numbers.", grammar='start: NUM " + " NUM\nNUM: /[0-9]{1,3}/').count(" + ") == 1
