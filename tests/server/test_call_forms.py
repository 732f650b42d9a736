"""Calls of tools that are no plain functions: as items of a response and its stream, and back as history."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server.chat_deltas import USAGE, deltas_of

from headstart.core.request import SamplingParams
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.responses import Json
from headstart.openai.responses_api.call_forms import special_tools_by_function
from headstart.openai.responses_api.response_events import ResponseEventBuilder
from headstart.openai.responses_api.response_objects import ResponseTemplate, echoed_request_fields, response_usage
from headstart.openai.responses_api.responses_request import parse_responses, responses_to_chat_request

EVENT: Any = TypeAdapter(ResponseStreamEvent)
BOUNDS = RequestBounds(vocab_size=100, max_model_len=1000)
SPAWN: Json = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
CASES: dict[str, tuple[Json, str, Json, Json]] = {
    # tool; the function that the model calls, its arguments; the item's own fields
    "function": (SPAWN, "spawn", {"a": 1}, {"type": "function_call", "name": "spawn", "arguments": '{"a": 1}'}),
    "namespace": (
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN]},
        "agents__spawn",
        {"a": 1},
        {"type": "function_call", "namespace": "agents", "name": "spawn", "arguments": '{"a": 1}'},
    ),
    "custom": (
        {"type": "custom", "name": "edit", "description": "Edit", "format": {"type": "text"}},
        "edit",
        {"input": 'say "hi"\n'},
        {"type": "custom_tool_call", "name": "edit", "input": 'say "hi"\n'},
    ),
    "local_shell": (
        {"type": "local_shell"},
        "local_shell",
        {"command": ["ls", "-l"]},
        {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}},
    ),
    "shell": (
        {"type": "shell"},
        "shell",
        {"commands": ["ls"], "timeout_ms": 5},
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5}},
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        "apply_patch",
        {"type": "delete_file", "path": "a.txt"},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.txt"}},
    ),
    "tool_search": (
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
        "tool_search",
        {"query": "weather"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "weather"}},
    ),
}
OF_NO_MODEL = ("shell_call",)  # the models demand the environment of a hosted shell


def answered(tool: Json, name: str, texts: list[str]) -> tuple[list[Json], Json]:
    """The events of a stream with one call, and the whole response."""
    fields = parse_responses({"input": "Go", "tools": [tool]}, BOUNDS)
    shape = ResponseTemplate(
        "resp_0123", 1, "m", echoed_request_fields(fields, SamplingParams()), special_tools_by_function(fields.tools)
    )
    calls = [ToolCallDelta(0, "call_1", name, texts[0]), *(ToolCallDelta(0, arguments=text) for text in texts[1:])]
    deltas = deltas_of([ChatDelta(tool_calls=(call,)) for call in calls])
    events, whole = ResponseEventBuilder(shape), ResponseEventBuilder(shape)
    found = events.opening_events()
    for delta in deltas:
        found += events.add(delta)
        whole.parts.add_delta(delta)
    usage = response_usage(USAGE, whole.parts)
    found += events.closing_events_and_response(usage)[0]
    return found, whole.finished_response(usage)


@pytest.mark.parametrize("kind", CASES)
def test_a_call_is_an_item_of_its_tools_type_and_comes_back_as_the_same_call(kind: str) -> None:
    tool, name, arguments, item = CASES[kind]
    text = json.dumps(arguments)
    events, response = answered(tool, name, [text[:4], text[4:]])
    [sent] = response["output"]
    assert sent == {**item, "id": sent["id"], "call_id": "call_1", "status": "completed"}
    assert events[-2]["item"] == sent and events[-1]["response"]["output"] == [sent]
    if sent["type"] not in OF_NO_MODEL:
        Response.model_validate(response, strict=True)
        for event in events:
            EVENT.validate_python(event, strict=True)
    said = {"type": "text", "text": "Go"}
    values = {"input": [{"role": "user", "content": [said]}, sent]}
    chat = responses_to_chat_request(parse_responses(values, BOUNDS), values).values
    [call] = chat["messages"][-1]["tool_calls"]
    assert call["function"]["name"] == name and json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize("kind", CASES)
def test_a_call_that_is_cut_short_anywhere_comes_back(kind: str) -> None:
    tool, name, arguments, _ = CASES[kind]
    text = json.dumps(arguments)
    for end in range(len(text)):
        [sent] = answered(tool, name, [text[:end]])[1]["output"]
        values = {"input": [{"role": "user", "content": "Go"}, sent]}
        chat = responses_to_chat_request(parse_responses(values, BOUNDS), values).values
        assert chat["messages"][-1]["tool_calls"][0]["function"]["name"] == name


def test_the_input_of_a_custom_tool_streams_as_text_and_never_as_json() -> None:
    tool, name, arguments, _ = CASES["custom"]
    events, _ = answered(tool, name, [json.dumps(arguments)])
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == [arguments["input"]]
    assert not [event for event in events if "function_call_arguments" in event["type"]]


def test_a_function_that_is_called_as_a_tool_of_another_type_is_refused() -> None:
    tools = [{"type": "shell"}, {"type": "function", "name": "shell"}]
    values = {"input": "Go", "tools": tools}
    with pytest.raises(Exception, match="tools contains 'shell' twice"):
        responses_to_chat_request(parse_responses(values, BOUNDS), values).to_chat_body(BOUNDS)
