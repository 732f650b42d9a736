"""Bodies of /v1/responses as chat requests, and errors in the words of the Responses API."""

from typing import Any

import pytest

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.responses import Json
from headstart.openai.responses_api.responses_request import parse_responses, responses_to_chat_request

BOUNDS = RequestBounds(vocab_size=100, max_model_len=1000, max_messages=20)
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
CHOICE: Json = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
ALLOWED: Json = {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}], "tool_choice": CHOICE}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}


def chat(history: list[Json] | None = None, **values: Any) -> Json:
    """The values of the chat request."""
    return responses_to_chat_request(parse_responses(values, BOUNDS), values, history or ()).values


def refusal(**values: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        fields = parse_responses(values, BOUNDS)
        responses_to_chat_request(fields, values).to_chat_body(BOUNDS)
    return caught.value


def test_a_text_is_a_user_message_behind_the_instructions() -> None:
    assert chat(input="Hello", instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    items = [{"role": "user", "content": "Go"}, reasoning, said, CALL, {**CALL, "call_id": "c2"}, OUTPUT]
    messages = chat(input=items)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    turn = messages[1]
    assert turn["reasoning_content"] == "Hm." and turn["content"] == [{"type": "text", "text": "I look."}]
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "7"}


def test_the_history_comes_first_and_knows_its_calls() -> None:
    before = parse_responses({"input": [{"role": "user", "content": "Go"}, CALL]}, BOUNDS).input
    messages = chat(before, input=[OUTPUT])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert refusal(input=[OUTPUT]).param == "input[0].call_id"


def test_options_have_their_meaning_in_a_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    values = chat(
        input="x",
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
        max_output_tokens=9,
        temperature=0.5,
        top_k=3,
        seed=4,
        prompt_cache_key="k",
        user="u",
        unknown=1,
    )
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert values["tools"] == [{"type": "function", "function": function}]
    assert values["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert values["parallel_tool_calls"] is False and values["max_completion_tokens"] == 9
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert values["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert values["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    assert [values[name] for name in ("temperature", "top_k", "seed", "prompt_cache_key", "user")] == [
        *(0.5, 3, 4, "k", "u")
    ]
    assert "unknown" not in values and "text" not in values


def test_a_choice_among_some_tools_is_that_of_a_chat() -> None:
    fields = parse_responses({"input": "x", **ALLOWED}, BOUNDS)
    assert fields.tool_choice == CHOICE
    tools = responses_to_chat_request(fields, {"input": "x", **ALLOWED}).to_chat_body(BOUNDS).params.tools
    assert tools is not None and [tool.name for tool in tools.callable_tools] == ["f"]
    assert tools.choice.mode == "required" and len(tools.definitions) == 2


def test_the_clients_template_variables_take_precedence() -> None:
    values = chat(input="x", reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert values["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "none", "a": 1}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": 5}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0]"),
        ({"input": [{"type": "shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "x"}] * 21}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools[0]"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0]",
        ),
        ({"input": "x", "tools": [{"type": "web_search"}, {"type": "function", "name": "?"}]}, "tools[1].name"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"input": "x", **ALLOWED, "tool_choice": {**CHOICE, "mode": "any"}}, "tool_choice.mode"),
        ({"input": "x", **ALLOWED, "tool_choice": {**CHOICE, "tools": []}}, "tool_choice"),
        ({"input": "x", **ALLOWED, "tool_choice": {**CHOICE, "tools": [{"name": "f"}]}}, "tool_choice.tools[0]"),
        ({"input": "x", "tools": [], "tool_choice": CHOICE | {"mode": 1}}, "tool_choice.mode"),
        ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata"),
        ({"input": "x", "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"input": "x", "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(values: dict[str, Any], param: str) -> None:
    error = refusal(**values)
    assert error.param == param and str(error).startswith(param.split("[")[0].split(".")[0]), str(error)


@pytest.mark.parametrize(
    "values",
    [
        {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
        {"service_tier": "flex", "truncation": "disabled", "background": False, "store": False},
        {"tools": [], "metadata": None, "text": {"verbosity": "low"}, "previous_response_id": None},
        {"stream_options": {"include_obfuscation": False}, "max_tool_calls": 3},
    ],
)
def test_what_changes_no_answer_is_accepted(values: dict[str, Any]) -> None:
    sent = {"input": "x", **values}
    assert (
        responses_to_chat_request(parse_responses(sent, BOUNDS), sent).to_chat_body(BOUNDS).messages[0]["content"]
        == "x"
    )
