"""The table of fields, tools, items and parts: one request for each row, sent to a server, and the engine's prompt.

MARK is what a prompt must contain, SECRET what it must not.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import FOLDER
from server.asking import Asked, asking, write_model

from headstart.openai.forms.skipped import SKIPPED_HEADER
from headstart.openai.forms.treatments import TREATMENTS, UNREADABLE, ApiName, NameKind, NameTreatment, TreatmentEntry

CHAT, RESPONSES, MESSAGES = ApiName
FIELD, TOOL, ITEM, PART = NameKind
F = {"name": "f", "parameters": {"type": "object", "properties": {}}}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [{"type": "function", "function": F}],
        "max_tokens": 1,
    },
    RESPONSES: {
        "input": [{"role": "user", "content": "Go"}],
        "tools": [{"type": "function", **F}],
        "store": False,
        "max_output_tokens": 1,
    },
    MESSAGES: {
        "messages": [{"role": "user", "content": "Go"}],
        "tools": [{"name": "f", "input_schema": F["parameters"]}],
        "max_tokens": 1,
    },
}
B64 = "SECRET" + "A" * 2000


def output(kind: str, call: dict[str, Any], result: Any) -> list[dict[str, Any]]:
    """A call of `kind` and its output."""
    sent = {"type": f"{kind}_call", "id": "SECRET", "call_id": "c", "status": "completed", **call}
    return [sent, {"type": f"{kind}_call_output", "call_id": "c", "output": result}]


def result(kind: str, content: Any) -> list[dict[str, Any]]:
    """A use of a server's tool and its result, in one message of the assistant."""
    use = {"type": "server_tool_use", "id": "SECRET", "name": kind, "input": {}}
    return [use, {"type": f"{kind}_tool_result", "tool_use_id": "SECRET", "content": content}]


IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{B64}"}
SHELL = {"commands": ["MARK"], "timeout_ms": None}
TURN = [{"type": "text", "text": "MARK"}]
SAMPLES: dict[tuple[str, str, str], Any] = {
    (CHAT, FIELD, "prediction"): {"type": "content", "content": "x"},
    (CHAT, FIELD, "store"): True,
    (CHAT, FIELD, "metadata"): {"a": "b"},
    (CHAT, FIELD, "service_tier"): "flex",
    (CHAT, FIELD, "verbosity"): "low",
    (CHAT, FIELD, "prompt_cache_retention"): "24h",
    (CHAT, FIELD, "web_search_options"): {"search_context_size": "low"},
    (CHAT, FIELD, "audio"): {"voice": "x"},
    (CHAT, FIELD, "documents"): [{"text": "x"}],
    (CHAT, TOOL, "function"): {"type": "function", "function": {"name": "MARK"}},
    (CHAT, TOOL, "custom"): {"type": "custom", "custom": {"name": "c"}},
    **{(CHAT, TOOL, name): {"type": name} for name in ("web_search", "web_search_preview", "mcp")},
    (CHAT, PART, "image_url"): {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{B64}"}},
    (CHAT, PART, "input_audio"): {"type": "input_audio", "input_audio": {"data": B64, "format": "wav"}},
    (CHAT, PART, "video_url"): {"type": "video_url", "video_url": {"url": "SECRET"}},
    (CHAT, PART, "file"): {"type": "file", "file": {"file_data": B64, "filename": "MARK"}},
    (RESPONSES, FIELD, "service_tier"): "priority",
    (RESPONSES, FIELD, "max_tool_calls"): 3,
    (RESPONSES, FIELD, "stream_options"): {"include_obfuscation": False},
    (RESPONSES, FIELD, "client_metadata"): {"a": "b"},
    (RESPONSES, FIELD, "access_programs"): ["x"],
    (RESPONSES, FIELD, "include"): ["reasoning.encrypted_content", "web_search_call.action.sources"],
    (RESPONSES, FIELD, "prompt_cache_retention"): "24h",
    (RESPONSES, FIELD, "truncation"): "auto",
    (RESPONSES, FIELD, "context_management"): [{"type": "compaction", "compact_threshold": 1000}],
    (RESPONSES, FIELD, "background"): True,
    (RESPONSES, FIELD, "conversation"): "conv_1",
    (RESPONSES, FIELD, "prompt"): {"id": "pmpt_1"},
    (RESPONSES, FIELD, "moderation"): {"model": "m"},
    (RESPONSES, TOOL, "function"): {"type": "function", "name": "MARK", "parameters": None, "strict": None},
    (RESPONSES, TOOL, "custom"): {
        "type": "custom",
        "name": "edit",
        "format": {"type": "grammar", "definition": "MARK"},
    },
    (RESPONSES, TOOL, "namespace"): {
        "type": "namespace",
        "name": "ns",
        "description": "MARK",
        "tools": [{"type": "function", "name": "g"}],
    },
    (RESPONSES, TOOL, "local_shell"): {"type": "local_shell"},
    (RESPONSES, TOOL, "shell"): {"type": "shell", "environment": {"type": "local"}},
    (RESPONSES, TOOL, "apply_patch"): {"type": "apply_patch"},
    (RESPONSES, TOOL, "tool_search"): {"type": "tool_search", "execution": "client", "description": "MARK"},
    (RESPONSES, TOOL, "web_search"): {"type": "web_search", "external_web_access": False},
    (RESPONSES, TOOL, "web_search_preview"): {"type": "web_search_preview_2025_03_11"},
    (RESPONSES, TOOL, "file_search"): {"type": "file_search", "vector_store_ids": ["v"]},
    (RESPONSES, TOOL, "code_interpreter"): {"type": "code_interpreter", "container": {"type": "auto"}},
    (RESPONSES, TOOL, "image_generation"): {"type": "image_generation"},
    (RESPONSES, TOOL, "mcp"): {"type": "mcp", "server_label": "l", "server_url": "http://example.invalid"},
    (RESPONSES, TOOL, "programmatic_tool_calling"): {"type": "programmatic_tool_calling"},
    (RESPONSES, TOOL, "computer"): {"type": "computer"},
    (RESPONSES, TOOL, "computer_use_preview"): {"type": "computer_use_preview", "environment": "browser"},
    (RESPONSES, ITEM, "message"): [{"type": "message", "role": "developer", "content": "MARK"}],
    (RESPONSES, ITEM, "function_call"): output("function", {"name": "f", "arguments": '{"a": "MARK"}'}, "ok"),
    (RESPONSES, ITEM, "function_call_output"): output("function", {"name": "f", "arguments": ""}, "MARK"),
    (RESPONSES, ITEM, "custom_tool_call"): output("custom_tool", {"name": "edit", "input": "MARK"}, "ok"),
    (RESPONSES, ITEM, "custom_tool_call_output"): output("custom_tool", {"name": "edit", "input": ""}, "MARK"),
    (RESPONSES, ITEM, "local_shell_call"): [
        {"type": "local_shell_call", "id": "c", "action": {"type": "exec", "command": ["MARK"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c", "output": "ok"},
    ],
    (RESPONSES, ITEM, "local_shell_call_output"): output("local_shell", {"action": {"command": ["ls"]}}, "MARK"),
    (RESPONSES, ITEM, "shell_call"): output("shell", {"action": SHELL}, [{"stdout": "ok", "stderr": ""}]),
    (RESPONSES, ITEM, "shell_call_output"): output(
        "shell", {"action": {"commands": ["ls"]}}, [{"stdout": "MARK", "outcome": {"type": "exit", "exit_code": 1}}]
    ),
    (RESPONSES, ITEM, "apply_patch_call"): output(
        "apply_patch", {"operation": {"type": "delete_file", "path": "MARK"}}, None
    ),
    (RESPONSES, ITEM, "apply_patch_call_output"): output("apply_patch", {"operation": {"type": "x"}}, "MARK"),
    (RESPONSES, ITEM, "tool_search_call"): [
        {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "MARK"}, "execution": "client"}
    ],
    (RESPONSES, ITEM, "tool_search_output"): [
        {"type": "tool_search_call", "call_id": "c", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "MARK"}]},
    ],
    (RESPONSES, ITEM, "reasoning"): [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "MARK"}], "encrypted_content": "SECRET"}
    ],
    (RESPONSES, ITEM, "item_reference"): None,  # test_item_references.py
    (RESPONSES, ITEM, "web_search_call"): [
        {"type": "web_search_call", "id": "SECRET", "action": {"type": "search", "query": "MARK"}}
    ],
    (RESPONSES, ITEM, "file_search_call"): [
        {"type": "file_search_call", "queries": ["q"], "results": [{"file_id": "SECRET", "text": "MARK"}]}
    ],
    (RESPONSES, ITEM, "code_interpreter_call"): [
        {"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "MARK"}]}
    ],
    (RESPONSES, ITEM, "image_generation_call"): [
        {"type": "image_generation_call", "revised_prompt": "MARK", "result": B64}
    ],
    (RESPONSES, ITEM, "mcp_call"): [{"type": "mcp_call", "name": "n", "arguments": "{}", "output": "MARK"}],
    (RESPONSES, ITEM, "mcp_list_tools"): [{"type": "mcp_list_tools", "server_label": "l", "tools": [{"name": "MARK"}]}],
    (RESPONSES, ITEM, "mcp_approval_request"): [{"type": "mcp_approval_request", "name": "MARK", "arguments": "{}"}],
    (RESPONSES, ITEM, "mcp_approval_response"): [{"type": "mcp_approval_response", "approve": True, "reason": "MARK"}],
    (RESPONSES, ITEM, "program"): [{"type": "program", "code": "MARK", "fingerprint": "SECRET"}],
    (RESPONSES, ITEM, "program_output"): [{"type": "program_output", "result": "MARK"}],
    (RESPONSES, ITEM, "computer_call"): [{"type": "computer_call", "action": {"type": "type", "keys": "MARK"}}],
    (RESPONSES, ITEM, "computer_call_output"): [
        {
            "type": "computer_call_output",
            "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{B64}", "filename": "MARK"},
        }
    ],
    (RESPONSES, ITEM, "additional_tools"): [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "MARK"}]}
    ],
    (RESPONSES, ITEM, "compaction"): [{"type": "compaction", "encrypted_content": "SECRET"}],
    (RESPONSES, ITEM, "configuration_update"): [{"type": "configuration_update", "reasoning": {"effort": "low"}}],
    (RESPONSES, ITEM, "compaction_trigger"): [{"type": "compaction_trigger"}],
    (RESPONSES, PART, "input_image"): IMAGE,
    (RESPONSES, PART, "input_file"): {"type": "input_file", "file_data": B64, "filename": "MARK"},
    (RESPONSES, PART, "input_audio"): {"type": "input_audio", "input_audio": {"data": B64}},
    (MESSAGES, FIELD, "betas"): ["context-management-2025-06-27"],
    (MESSAGES, FIELD, "service_tier"): "auto",
    (MESSAGES, FIELD, "speed"): "fast",
    (MESSAGES, FIELD, "inference_geo"): "eu",
    (MESSAGES, FIELD, "fallbacks"): [{"model": "x"}],
    (MESSAGES, FIELD, "billing_policy"): {"type": "billing_policy"},
    (MESSAGES, FIELD, "user_profile_id"): "u",
    (MESSAGES, FIELD, "workspace_id"): "w",
    (MESSAGES, FIELD, "fallback_credit_token"): "t",
    (MESSAGES, FIELD, "metadata"): {"user_id": "u" * 400},
    (MESSAGES, FIELD, "context_management"): {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    (MESSAGES, FIELD, "mcp_servers"): [{"type": "url", "url": "http://example.invalid", "name": "n"}],
    (MESSAGES, FIELD, "container"): "c",
    (MESSAGES, FIELD, "thread"): {"type": "create"},
    (MESSAGES, FIELD, "compaction"): {"type": "enabled"},
    (MESSAGES, TOOL, "custom"): {"type": "custom", "name": "MARK", "input_schema": {"type": "object"}},
    (MESSAGES, TOOL, "bash"): {"type": "bash_20250124", "name": "bash"},
    (MESSAGES, TOOL, "text_editor"): {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    (MESSAGES, TOOL, "memory"): {"type": "memory_20250818", "name": "memory"},
    (MESSAGES, TOOL, "web_search"): {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    (MESSAGES, TOOL, "web_fetch"): {"type": "web_fetch_20260318", "name": "web_fetch"},
    (MESSAGES, TOOL, "code_execution"): {"type": "code_execution_20250825", "name": "code_execution"},
    (MESSAGES, TOOL, "advisor"): {"type": "advisor_20260301", "name": "advisor", "model": "m"},
    (MESSAGES, TOOL, "mcp_toolset"): {"type": "mcp_toolset", "mcp_server_name": "n"},
    (MESSAGES, TOOL, "tool_search_tool_bm25"): {"type": "tool_search_tool_bm25_20251119", "name": "s"},
    (MESSAGES, TOOL, "tool_search_tool_regex"): {"type": "tool_search_tool_regex", "name": "s"},
    (MESSAGES, TOOL, "computer"): {"type": "computer_20251124", "name": "computer", "display_width_px": 1},
    (MESSAGES, TOOL, "computer_toolset"): {"type": "computer_toolset_20260801"},
    (MESSAGES, TOOL, "browser_toolset"): {"type": "browser_toolset_20260801"},
    (MESSAGES, ITEM, "text"): TURN,
    (MESSAGES, ITEM, "thinking"): [{"type": "thinking", "thinking": "MARK", "signature": "SECRET"}],
    (MESSAGES, ITEM, "tool_use"): [{"type": "tool_use", "id": "SECRET", "name": "f", "input": {"a": "MARK"}}],
    (MESSAGES, ITEM, "tool_result"): {"type": "tool_result", "tool_use_id": "SECRET", "content": TURN},
    (MESSAGES, ITEM, "server_tool_use"): [{"type": "server_tool_use", "name": "s", "input": {"query": "MARK"}}],
    (MESSAGES, ITEM, "mcp_tool_use"): [{"type": "mcp_tool_use", "id": "SECRET", "name": "MARK", "input": {}}],
    (MESSAGES, ITEM, "mcp_tool_listing"): [{"type": "mcp_tool_listing", "tools": [{"name": "MARK"}]}],
    (MESSAGES, ITEM, "web_search_tool_result"): result(
        "web_search", [{"type": "web_search_result", "title": "MARK", "encrypted_content": "SECRET"}]
    ),
    (MESSAGES, ITEM, "web_fetch_tool_result"): result(
        "web_fetch", {"content": {"type": "document", "source": {"type": "text", "data": "MARK"}}}
    ),
    (MESSAGES, ITEM, "code_execution_tool_result"): result("code_execution", {"stdout": "MARK", "return_code": 0}),
    (MESSAGES, ITEM, "bash_code_execution_tool_result"): result("bash_code_execution", {"stdout": "MARK"}),
    (MESSAGES, ITEM, "text_editor_code_execution_tool_result"): result("text_editor_code_execution", {"lines": "MARK"}),
    (MESSAGES, ITEM, "tool_search_tool_result"): result("tool_search", {"tool_references": [{"tool_name": "MARK"}]}),
    (MESSAGES, ITEM, "advisor_tool_result"): result("advisor", {"type": "advisor_result", "text": "MARK"}),
    (MESSAGES, ITEM, "mcp_tool_result"): result("mcp", TURN),
    (MESSAGES, ITEM, "compaction"): [{"type": "compaction", "content": "MARK", "encrypted_content": "SECRET"}],
    (MESSAGES, ITEM, "search_result"): {"type": "search_result", "source": "s", "title": "t", "content": TURN},
    (MESSAGES, ITEM, "tool_addition"): {"type": "tool_addition", "tool": {"name": "MARK"}},
    (MESSAGES, ITEM, "tool_removal"): {"type": "tool_removal", "tool": {"name": "MARK"}},
    (MESSAGES, ITEM, "document"): {"type": "document", "source": {"type": "text", "data": "MARK"}, "title": "t"},
    (MESSAGES, ITEM, "redacted_thinking"): [{"type": "redacted_thinking", "data": "SECRET"}],
    (MESSAGES, ITEM, "fallback"): [{"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}],
    (MESSAGES, PART, "image"): {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}},
    (MESSAGES, PART, "container_upload"): {"type": "container_upload", "file_id": "SECRET"},
    (MESSAGES, PART, "tool_reference"): {"type": "tool_reference", "tool_name": "MARK"},
    (MESSAGES, PART, "browser_state"): {"type": "browser_state", "tabs": [{"title": "MARK"}]},
}
ITEMS_KEY = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}
ROWS = [row for row in TREATMENTS if SAMPLES.get(row[:3], ...) is not None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("treatments"))


def body(row: TreatmentEntry, *, has: bool) -> dict[str, Any]:
    """The request for a row, with or without what the row is about."""
    base, sample = BASE[row.api], SAMPLES[row[:3]]
    key = ITEMS_KEY[row.api]
    if row.place is FIELD:
        return {**base, row.name: sample} if has else base
    if row.place is TOOL:
        return {**base, "tools": [*base["tools"], sample] if has else base["tools"]}
    if row.place is PART or isinstance(sample, dict):
        kind = "input_text" if row.api is RESPONSES else "text"
        parts = [{"type": kind, "text": "look"}, *([sample] if has else [])]
        return {**base, key: [*base[key], {"role": "user", "content": parts}]}
    if row.api is RESPONSES:
        return {**base, key: [*base[key], *(sample if has else []), {"role": "user", "content": "look"}]}
    blocks = [{"type": "text", "text": "say"}, *(sample if has else [])]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "look"}]
    return {**base, key: [*base[key], *turns]}


def problems(row: TreatmentEntry, asked: Asked, base: Asked) -> Iterator[str]:
    """Differences between an answer of the server and its row of the table."""
    answer, prompt = asked
    header = answer.headers.get(SKIPPED_HEADER, "")
    if row.treatment is NameTreatment.REFUSED:
        error = answer.json()["error"]
        at = {FIELD: row.name, TOOL: "tools[1]", ITEM: "input[1]"}[row.place]
        if answer.status_code != 400 or error["param"] != at or row.note not in error["message"]:
            yield f"answered {answer.status_code} {error}"
        return
    if answer.status_code != 200:
        yield f"answered {answer.status_code} {answer.text}"
        return
    if "SECRET" in prompt:
        yield "the prompt has what no model reads"
    if row.treatment in (NameTreatment.IGNORED, NameTreatment.SKIPPED) or row.place is FIELD:
        if prompt != base.prompt:
            yield f"the prompt changed to {prompt}"
    elif row.place is PART and row.name in UNREADABLE:
        kind = UNREADABLE[row.name]
        if f"[{kind}" not in prompt or header != f"part.{kind}=1":
            yield f"no placeholder: {header} {prompt}"
        return
    elif (
        "MARK" if "MARK" in str(SAMPLES[row[:3]]) else f'"name": "{SAMPLES[row[:3]].get("name", row.name)}"'
    ) not in prompt:
        yield f"not in the prompt: {prompt}"
    expected = f"{row.place}.{row.name}=1" if row.treatment is NameTreatment.SKIPPED else ""
    if header != expected and not header.startswith("part."):
        yield f"the header is {header!r}"


def test_every_row_has_a_sample() -> None:
    names = [row[:3] for row in TREATMENTS]
    assert len(names) == len(set(names)) and set(names) == set(SAMPLES)


def test_the_server_does_what_the_table_says(model: str) -> None:
    async def go() -> list[str]:
        found: list[str] = []
        async with asking(model) as ask:
            for row in ROWS:
                asked, base = await ask(row.api, body(row, has=True)), await ask(row.api, body(row, has=False))
                found += [f"{row.api} {row.place} {row.name}: {problem}" for problem in problems(row, asked, base)]
                if row.treatment in (NameTreatment.PLACED, NameTreatment.SKIPPED):
                    again = await ask(row.api, body(row, has=True))
                    assert again.prompt == asked.prompt, "the next turn would share no prefix"
        return found

    found = asyncio.run(go())
    assert ROWS and not found, "\n".join(found)


def thought(turn: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"answer {turn}", "reasoning_content": f"thought {turn}"}


def block(turn: int) -> dict[str, Any]:
    parts = [{"type": "thinking", "thinking": f"thought {turn}"}, {"type": "text", "text": f"answer {turn}"}]
    return {"role": "assistant", "content": parts}


def items(turn: int) -> list[dict[str, Any]]:
    summary = [{"type": "summary_text", "text": f"thought {turn}"}]
    return [{"type": "reasoning", "summary": summary}, {"role": "assistant", "content": f"answer {turn}"}]


def ollamas(turn: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"answer {turn}", "thinking": f"thought {turn}"}


def test_reasoning_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    """Qwen3's template shows the reasoning behind the last user message only."""
    model = write_model(tmp_path, (FOLDER / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8"))
    user = {"role": "user", "content": "Go"}
    turns: dict[str, Any] = {
        CHAT: {"messages": [user, thought(1), user, thought(2), user, thought(3)], "max_tokens": 1},
        MESSAGES: {"messages": [user, block(1), user, block(2), user, block(3)], "max_tokens": 1},
        RESPONSES: {
            "input": [user, *items(1), user, *items(2), user, *items(3)],
            "store": False,
            "max_output_tokens": 1,
        },
        "/api/chat": {
            "messages": [user, ollamas(1), user, ollamas(2), user, ollamas(3)],
            "options": {"num_predict": 1},
            "stream": False,
        },
    }

    async def go() -> None:
        async with asking(model) as ask:
            for path, body in turns.items():
                asked = await ask(path, {**body, "temperature": 0})
                assert asked.answer.status_code == 200, asked.answer.text
                shown = [turn for turn in (1, 2, 3) if f"thought {turn}" in asked.prompt]
                assert (shown, asked.answer.headers.get(SKIPPED_HEADER)) == ([3], "item.reasoning=2"), path
            asked = await ask(CHAT, {"messages": [user, thought(1)], "max_tokens": 1})
            assert "thought 1" in asked.prompt and SKIPPED_HEADER not in asked.answer.headers
            metrics = (await ask("/metrics", None)).answer.text
            assert re.search(r'headstart:skipped_total\{.*kind="item\.reasoning".*\} 8\.0', metrics), metrics

    asyncio.run(go())
