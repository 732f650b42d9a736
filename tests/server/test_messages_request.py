"""Bodies of /v1/messages as chat requests, cache breakpoints, and errors in the words of the Messages API."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import BYTE_LEVEL, write

from headstart.anthropic.messages_request import (
    MessagesRequest,
    num_tokens_to_cache_breakpoint,
    translate_messages_body,
)
from headstart.common_prefix import common_prefix_length
from headstart.core.errors import InvalidRequestError
from headstart.core.request import RetentionHint
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import encode_chat
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tokenizer import Tokenizer

BOUNDS = RequestBounds(vocab_size=100_000, max_model_len=10_000, max_messages=20)
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
MARK = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write(tmp_path_factory.mktemp("model") / "m", BYTE_LEVEL))


def body(**values: Any) -> Json:
    return {"max_tokens": 5, "messages": HELLO, **values}


def chat(**values: Any) -> Json:
    return translate_messages_body(MessagesRequest, body(**values), BOUNDS).chat.values


def refusal(**values: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        translate_messages_body(MessagesRequest, body(**values), BOUNDS).chat.to_chat_body(BOUNDS)
    return caught.value


def test_blocks_are_messages_of_a_chat() -> None:
    messages = chat(
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Go"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "redacted_thinking", "data": "xx"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )["messages"]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Go"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]


def test_options_have_their_meaning_in_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    values = chat(
        tools=[{"name": "f", "description": "d", "input_schema": schema}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"},
        metadata={"user_id": "u"},
        stop_sequences=["END"],
        top_k=5,
        temperature=0,
    )
    function = {"name": "f", "parameters": schema, "description": "d"}
    assert values["tools"] == [{"type": "function", "function": function}]
    assert (values["tool_choice"], values["parallel_tool_calls"]) == ("required", False)
    assert values["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "high"}
    shape = {"name": "output", "schema": schema, "strict": True}
    assert values["response_format"] == {"type": "json_schema", "json_schema": shape}
    assert [values[name] for name in ("user", "stop", "top_k", "temperature", "max_completion_tokens")] == [
        *("u", ["END"], 5, 0, 5)
    ]
    named = chat(tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "tool", "name": "f"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("values", "ttl"),
    [
        ({}, 0.0),
        ({"system": [{"type": "text", "text": "x", "cache_control": MARK}]}, 300.0),
        ({"cache_control": {**MARK, "ttl": "1h"}}, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": MARK}]}]}, 300.0),
        (
            {"cache_control": MARK, "system": [{"type": "text", "text": "x", "cache_control": {**MARK, "ttl": "1h"}}]},
            3600.0,
        ),
    ],
)
def test_the_longest_lifetime_of_a_breakpoint_is_a_retention_hint(values: dict[str, Any], ttl: float) -> None:
    params = translate_messages_body(MessagesRequest, body(**values), BOUNDS).chat.to_chat_body(BOUNDS).params
    assert params.retention == (RetentionHint(75, ttl) if ttl else RetentionHint())


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 21}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"diagnostics": {"previous_message_id": 5}}, "diagnostics.previous_message_id"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"type": "bash_20250124", "name": "?"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_fetch_20260318"}, {"name": "?", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(values: dict[str, Any], param: str) -> None:
    error = refusal(**values)
    assert error.param == param and param.split("[")[0].split(".")[0] in str(error), str(error)


def marked(tokenizer: Tokenizer, **values: Any) -> tuple[int, str, str]:
    """The number of marked tokens, the text that they are, and the text behind."""
    read = translate_messages_body(MessagesRequest, body(**values), BOUNDS)
    prompt = encode_chat(read.chat.to_chat_body(BOUNDS), tokenizer, BOUNDS)
    number = num_tokens_to_cache_breakpoint(read, prompt, tokenizer, BOUNDS)
    return number, tokenizer.decode(prompt[:number]), tokenizer.decode(prompt[number:])


def block(text: str, *, mark: bool = False) -> Json:
    return {"type": "text", "text": text, **({"cache_control": MARK} if mark else {})}


def test_a_breakpoint_is_where_the_prompt_depends_on_what_is_behind(tokenizer: Tokenizer) -> None:
    assert marked(tokenizer)[0] == 0
    _, before, behind = marked(tokenizer, system=[block("Be brief.", mark=True)])
    assert before.rstrip().endswith("user") and behind.startswith("Hello")
    parts = [block("one two", mark=True), block("three")]
    _, before, behind = marked(tokenizer, messages=[{"role": "user", "content": parts}])
    assert before.endswith("one two\n") and behind.startswith("three")
    number, _, behind = marked(tokenizer, messages=[{"role": "user", "content": [block("one", mark=True)]}])
    assert number > 0 and behind == ""
    assert marked(tokenizer, cache_control=MARK)[2] == ""
    two = [{"role": "user", "content": [block("a", mark=True)]}, *HELLO, {"role": "user", "content": "end"}]
    _, before, behind = marked(tokenizer, messages=two)
    assert before.rstrip().endswith("user") and behind.startswith("Hello")


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_the_common_length_is_that_of_the_common_beginning(one: list[int], other: list[int]) -> None:
    differing = (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    expected = next(differing, min(len(one), len(other)))
    assert common_prefix_length(array("i", one), array("i", other)) == expected
