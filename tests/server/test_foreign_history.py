"""Conversations that began elsewhere: what messages of other servers and older clients carry is in the prompt or named.

MARK is what a prompt must contain, SECRET what it must not.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server.asking import asking, write_model
from server.test_treatments import CHAT, MESSAGES, RESPONSES

from headstart.openai.forms.skipped import SKIPPED_HEADER

OLLAMA = "/api/chat"
USER = {"role": "user", "content": "Go"}
LONG = "SECRET" + "x" * 3000  # as of those who keep a signature in the id of a call
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN = [USER, {"role": "assistant", "tool_calls": [CALL]}]


ONE_TOKEN: dict[str, Any] = {RESPONSES: {"max_output_tokens": 1}, OLLAMA: {"options": {"num_predict": 1}}}
Send = Callable[[str, dict[str, Any]], tuple[str, str]]


@pytest.fixture(scope="module")
def send(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Send a body to a server that answers it; return the prompt, and the header of what it lacks."""
    with asyncio.Runner() as runner:
        server = asking(write_model(tmp_path_factory.mktemp("history")))
        ask = runner.run(server.__aenter__())

        def send(path: str, body: dict[str, Any]) -> tuple[str, str]:
            answer, prompt = runner.run(ask(path, {**body, **ONE_TOKEN.get(path, {"max_tokens": 1})}))
            assert answer.status_code == 200, answer.text
            return prompt, answer.headers.get(SKIPPED_HEADER, "")

        yield send
        runner.run(server.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("message", "expected", "skipped"),
    [
        ({"content": None, "refusal": "MARK"}, "assistant: MARK", ""),
        ({"content": "Well.", "refusal": "MARK"}, "assistant: Well.\nMARK", ""),
        (
            {"content": None, "refusal": None, "function_call": None, "audio": None, "annotations": []},
            "assistant: ",
            "",
        ),
        (
            {"content": None, "function_call": {"name": "f", "arguments": '{"a": "MARK'}},
            'assistant: CALL {"name": "f", "arguments": {"a": "MARK"}}',
            "",
        ),
        (
            {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "edit", "input": "MARK"}}]},
            'assistant: CALL {"name": "edit", "arguments": {"input": "MARK"}}',
            "",
        ),
        (
            {"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "MARK", "signature": "SECRET"}]},
            "assistant: MARKx",
            "",
        ),
        (
            {"content": "x", "reasoning_details": [{"type": "reasoning.text", "text": "MARK", "signature": "SECRET"}]},
            "assistant: MARKx",
            "",
        ),
        (
            {"content": "x", "reasoning_details": [{"type": "reasoning.summary", "summary": "MARK"}]},
            "assistant: MARKx",
            "",
        ),
        (
            {"content": "x", "reasoning_details": [{"type": "reasoning.encrypted", "data": "SECRET"}]},
            "assistant: x",
            "item.reasoning=1",
        ),
        (
            {"content": "x", "reasoning": "MARK", "reasoning_details": [{"type": "reasoning.text", "text": "MARK"}]},
            "assistant: MARKx",
            "",
        ),
        ({"content": None, "audio": {"id": "SECRET", "transcript": "MARK"}}, "assistant: MARK", ""),
        ({"content": None, "audio": {"id": "SECRET"}}, "assistant: [audio", "part.audio=1"),
        (
            {"content": "x", "images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,SECRET"}}]},
            "assistant: x\n[image",
            "part.image=1",
        ),
    ],
)
def test_all_that_an_answer_of_another_server_says_is_history(
    send: Send, message: dict[str, Any], expected: str, skipped: str
) -> None:
    prompt, header = send(CHAT, {"messages": [USER, {"role": "assistant", **message}, USER]})
    assert expected in prompt and "SECRET" not in prompt and prompt.count("MARK") <= 1
    assert header == skipped


def test_the_result_of_a_function_is_that_of_a_tool(send: Send) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    prompt, _ = send(CHAT, {"messages": [USER, called, {"role": "function", "name": "f", "content": "MARK"}]})
    assert prompt.index("CALL") < prompt.index("tool: MARK")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_null_is_an_empty_text_in_every_role(send: Send, role: str) -> None:
    prompt, _ = send(CHAT, {"messages": [*TURN, {"role": role, "content": None}, USER]})
    assert prompt.endswith(f"{role}: user: Go")


RESULTS = [
    (None, ""),
    ({"a": ["MARK", 1]}, '{"a":["MARK",1]}'),
    ([1, {"a": "MARK"}], '[1,{"a":"MARK"}]'),
    (["MARK"], '["MARK"]'),
    (7.5, "7.5"),
    (False, "false"),
]


@pytest.mark.parametrize(("sent", "expected"), RESULTS)
def test_a_result_that_is_no_text_is_its_json_in_every_api(send: Send, sent: Any, expected: str) -> None:
    chat = [*TURN, {"role": "tool", "tool_call_id": "c", "content": sent}]
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": sent},
    ]
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": sent}]},
    ]
    bodies = {
        CHAT: {"messages": chat},
        RESPONSES: {"input": [USER, *items]},
        MESSAGES: {"messages": [USER, *blocks]},
        OLLAMA: {"messages": chat, "stream": False},
    }
    for path, body in bodies.items():
        assert send(path, body)[0].endswith(f"tool: {expected}"), path


def test_ids_of_any_length_are_history_in_every_api(send: Send) -> None:
    call = {**CALL, "id": LONG}
    chat = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": LONG, "content": "MARK"},
    ]
    items = [
        {"type": "reasoning", "id": LONG, "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "id": LONG + "1", "call_id": LONG, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": LONG, "output": "MARK"},
    ]
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": LONG, "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": LONG, "content": "MARK"}]},
    ]
    for path, body in (
        (CHAT, {"messages": chat}),
        (RESPONSES, {"input": [USER, *items]}),
        (MESSAGES, {"messages": [USER, *blocks]}),
    ):
        assert "tool: MARK" in send(path, body)[0], path


def test_a_choice_among_functions_and_hosted_tools_is_one_among_the_functions(send: Send) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    allowed = {"mode": "auto", "tools": [function, {"type": "web_search"}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [USER], "tools": [function, {"type": "web_search"}], "tool_choice": choice}
    assert send(CHAT, body)[1] == "tool.web_search=1"
