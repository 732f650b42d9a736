"""The rule `plain_items`: bodies of agents with nothing that only a vendor's server reads, and of the same prompt."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from server.asking import asking, write_model
from server.test_agent_turns import AGENTS, CUT, TURNS

from headstart.openai.canonical.canonical_body import CHAT, MESSAGES, RESPONSES, canonical_body
from headstart.openai.canonical.plain_items import replace_unsupported_items

PLAIN = frozenset({"plain_items"})
READ = {  # by vLLM and llama.cpp: items, and blocks of messages
    RESPONSES: {"message", "function_call", "function_call_output", "reasoning"},
    MESSAGES: {"text", "thinking", "tool_use", "tool_result"},
}
Json = dict[str, Any]


def plain(path: str, body: Json) -> Json:
    """Return the body after the rule, which changes nothing the second time."""
    found = canonical_body(path, json.dumps(body).encode(), body, PLAIN)
    again = canonical_body(path, found.data, json.loads(found.data), PLAIN)
    assert again.data is found.data and not again.applied, again.applied
    return json.loads(found.data)


def kinds_of(path: str, body: Json) -> set[str]:
    if path == RESPONSES:
        return {item.get("type", "message") for item in body["input"]}
    blocks = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return {block["type"] for content in blocks for block in content}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("agent", AGENTS)
def test_our_server_makes_the_same_prompt_of_the_plain_body(agent: str, model: str) -> None:
    path, request, _ = AGENTS[agent]

    async def go() -> None:
        async with asking(model) as ask:
            for turns in (1, 7, TURNS):
                sent = request(turns)
                if "tools" in sent:  # a shell is no tool that other engines call, so the rule drops it
                    sent["tools"] = [tool for tool in sent["tools"] if tool.get("type") != "local_shell"]
                (answer, prompt), (_, other) = await ask(path, sent), await ask(path, plain(path, sent))
                assert answer.status_code == 200, answer.text
                assert prompt == other

    asyncio.run(go())


@pytest.mark.parametrize("agent", ["claude code", "codex"])
def test_only_kinds_that_other_engines_read_are_left_and_turns_extend_each_other(agent: str) -> None:
    path, request, _ = AGENTS[agent]
    before: list[Json] = []
    for turns in range(1, TURNS + 1):
        body = plain(path, request(turns))
        assert kinds_of(path, body) <= READ[path]
        assert {tool.get("type", "function") for tool in body["tools"]} <= {"function", "custom", "namespace"}
        assert "encrypted" not in json.dumps(body["input" if path == RESPONSES else "messages"])
        rows = body["input" if path == RESPONSES else "messages"]
        if before and rows[len(before) - 1] != before[-1]:  # text that more text is joined to
            text, more = before.pop()["content"][0]["text"], rows[len(before)]["content"][0]["text"]
            assert more.startswith(text) and "[web_search_call]" in text
        assert rows[: len(before)] == before
        before = rows


def test_calls_of_custom_tools_and_shells_are_calls_of_functions_and_cut_arguments_are_closed() -> None:
    counts: Counter[str] = Counter()
    sent: list[Json] = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'say "x"'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "call_id": "b", "output": "src"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": CUT},
        {"type": "function_call", "call_id": "d", "name": "read", "arguments": '{"a": 1}'},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}, "status": "completed"},
        {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "local_shell_call", "call_id": "e", "action": 3},
    ]
    found = replace_unsupported_items(sent, counts)
    assert found == [
        {"type": "function_call", "call_id": "a", "name": "patch", "arguments": '{"input": "say \\"x\\""}'},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call", "call_id": "b", "name": "local_shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "b", "output": "src"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"path":"src/ma"}'},
        sent[5],
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": '[web_search_call] {"action":{"query":"q"}}\n'}],
        },
        {
            "type": "reasoning",
            "id": "s",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
        },
        sent[9],  # invalid: for the engine to refuse
    ]
    assert found[5] is sent[5] and found[-1] is sent[9]
    assert counts == {"plain_items": 8}


def test_a_chat_without_what_the_rule_changes_stays_the_same_bytes() -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {}}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "custom", "name": "a"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ):
        data = json.dumps(body).encode()
        assert canonical_body(path, data, body, PLAIN).data is data
    cut = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": CUT}}]}
    assert plain(CHAT, {"messages": [cut]})["messages"][0]["tool_calls"][0]["function"]["arguments"] == (
        '{"path":"src/ma"}'
    )
