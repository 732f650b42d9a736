"""Requests in the shapes of coding agents, 20 turns each: none is refused, each prompt begins with the one before it.

The shapes are those of released clients and of public issues; the words are ours. Each turn has texts with marks, which
the prompt must have once and in order, and things that no prompt has: images, encrypted items, tools of a vendor.
"""

import ast
import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import FOLDER
from server.asking import asking, write_model

from headstart.common_prefix import common_prefix_length
from headstart.openai.forms.skipped import SKIPPED_HEADER

TURNS = 20
PNG = "data:image/png;base64," + "iVBOR" * 500
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CUT = '{"path": "src/ma'  # arguments that max_tokens has cut
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
Json = dict[str, Any]


def mark(turn: int, part: str) -> str:
    return f"mark-{turn:02d}-{part}"


def claude_code(turns: int) -> Json:
    """Blocks, a moving cache breakpoint, thinking, images in results, parallel calls, system messages in between."""
    said = [
        {"type": "text", "text": "<system-reminder>context</system-reminder>"},
        {"type": "text", "text": mark(0, "a"), "cache_control": {"type": "ephemeral"}},
    ]
    messages: list[Json] = [{"role": "user", "content": said}, {"role": "system", "content": "Agent types: one."}]
    for n in range(1, turns):
        use = {"type": "tool_use", "id": f"t{n}", "name": ("Bash", "mcp__a.b__read", "Gone")[n % 3], "input": {}}
        blocks: list[Json] = [
            {"type": "thinking", "thinking": mark(n, "a"), "signature": "s"},
            {"type": "text", "text": mark(n, "b")},
            use,
        ]
        if n % 5 == 1:
            blocks.insert(0, {"type": "redacted_thinking", "data": "x"})
        if n % 5 == 2:
            blocks.insert(1, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}})
            blocks.insert(2, {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "t"}]})
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG[22:]}}
        content: list[Json] = [{"type": "text", "text": mark(n, "c")}, *([image] if n % 4 == 0 else [])]
        result: Json = {"type": "tool_result", "tool_use_id": f"t{n}", "is_error": n % 3 == 0, "content": content}
        user: list[Json] = [result, {"type": "text", "text": mark(n, "d")}]
        if n % 6 == 3:
            blocks.append({"type": "tool_use", "id": f"u{n}", "name": "Bash", "input": {"command": "ls"}})
            user.insert(1, {"type": "tool_result", "tool_use_id": f"u{n}", "content": "src"})
        user[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": user}]
        if n % 6 == 4:
            messages.append({"role": "system", "content": mark(n, "e")})
    tools: list[Json] = [
        {"name": name, "description": "d", "input_schema": SCHEMA} for name in ("Bash", "mcp__a.b__read")
    ]
    tools += [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    return {
        "model": "fake",
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": tools,
        "metadata": {"user_id": "{" + "d" * 300 + "}"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}},
    }


def codex(turns: int) -> Json:
    """Developer messages, a namespace, a custom tool, parallel calls, encrypted reasoning, shells, web searches."""
    items: list[Json] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": mark(0, "a")}]},
    ]
    for n in range(1, turns):
        items.append({"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "x" * 99})
        items.append(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": mark(n, "a")}]}
        )
        call_id, text = f"c{n}", mark(n, "b")
        output: Any = text
        match n % 6:
            case 0:
                call = {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"}
            case 1:
                call = {"type": "function_call", "name": "exec", "arguments": CUT}
            case 2:
                call = {"type": "function_call", "namespace": "agents", "name": "spawn", "arguments": "{}"}
            case 3:
                call = {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}}
            case 4:
                call = {"type": "function_call", "name": "view_image", "arguments": "{}"}
                output = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": PNG}]
            case _:
                call = {"type": "web_search_call", "action": {"type": "search", "query": text}, "status": "completed"}
        items.append({**call, "call_id": call_id, "id": f"i{n}", "status": "completed"})
        if n % 6 == 2:
            items.append({"type": "function_call", "name": "exec", "arguments": "{}", "call_id": f"p{n}"})
        if call["type"] != "web_search_call":
            items.append({"type": f"{call['type']}_output", "call_id": call_id, "output": output})
        if n % 6 == 2:
            items.append({"type": "function_call_output", "call_id": f"p{n}", "output": "0"})
            items.append({"type": "message", "role": "developer", "content": mark(n, "c")})
        if n == 9:
            items.append({"type": "compaction", "encrypted_content": "x" * 99})
    functions: list[Json] = [
        {"type": "function", "name": name, "parameters": SCHEMA} for name in ("exec", "view_image")
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    spawn = {"type": "function", "name": "spawn", "strict": False, "parameters": SCHEMA}
    return {
        "input": items,
        "max_output_tokens": 1,
        "tools": [
            *functions,
            {"type": "custom", "name": "apply_patch", "description": "d", "format": grammar},
            {"type": "namespace", "name": "agents", "description": "d", "tools": [spawn]},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s"},
        "text": {"verbosity": "low"},
    }


def cline(turns: int) -> Json:
    """Tools as tags in the text, screenshots as parts; an answer may end in the middle of a tag."""
    messages: list[Json] = [{"role": "system", "content": "Use <read_file>."}]
    for n in range(turns):
        parts: list[Json] = [{"type": "text", "text": mark(n, "a")}]
        if n % 4 == 1:
            parts.append({"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}})
        messages.append({"role": "user", "content": parts})
        if n < turns - 1:
            messages.append({"role": "assistant", "content": f"{mark(n, 'b')} <read_file><path>src/ma"})
    return {"messages": messages, "max_tokens": 1, "temperature": 0, "usage": {"include": True}, "transforms": ["x"]}


def openhands(turns: int) -> Json:
    """LiteLLM's chats: parts with cache_control, 150 tools, calls that are cut, results with images."""
    system = [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Json] = [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": [{"type": "text", "text": mark(0, "a")}]})
    for n in range(1, turns):
        call = {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": f"tool_{n}", "arguments": CUT if n % 3 else "{}"},
        }
        content = None if n % 2 else [{"type": "text", "text": mark(n, "a")}]
        messages.append({"role": "assistant", "content": content, "tool_calls": [call], "function_call": None})
        parts: list[Json] = [{"type": "text", "text": mark(n, "b"), "cache_control": {"type": "ephemeral"}}]
        if n % 5 == 0:
            parts.append({"type": "image_url", "image_url": {"url": PNG}})
        messages.append({"role": "tool", "tool_call_id": f"c{n}", "name": f"tool_{n}", "content": parts})
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "parameters": SCHEMA}} for n in range(150)]
    extra = {"metadata": {"session_id": "s"}, "seed": 1, "reasoning_effort": "high", "prompt_cache_key": "k"}
    return {"messages": messages, "tools": tools, "max_completion_tokens": 1, **extra}


def aider(turns: int) -> Json:
    """Text only, with examples, answers of one word, and a prediction of the file that is edited."""
    messages: list[Json] = [{"role": "system", "content": "Edit with blocks."}]
    for n in range(turns):
        messages.append({"role": "user", "content": mark(n, "a")})
        if n < turns - 1:
            messages.append({"role": "assistant", "content": f"{mark(n, 'b')}\n<<<<<<< SEARCH\nx = 1\n"})
    prediction = {"type": "content", "content": "x = 1"}
    return {"messages": messages, "max_tokens": 1, "prediction": prediction, "num_ctx": 8192, "think": False}


def goose(turns: int) -> Json:
    """Tools with prefixes and dots, images of results in messages of the user, reasoning that comes back."""
    messages: list[Json] = [{"role": "system", "content": "You are goose."}, {"role": "user", "content": mark(0, "a")}]
    long = "extension__" + "n" * 79  # 90 characters
    for n in range(1, turns):
        function = {"name": ("developer__shell", "web.scrape", long)[n % 3], "arguments": '{"path": "a"}'}
        call = {"id": f"c{n}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "reasoning_content": mark(n, "a"), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": mark(n, "b")})
        if n % 4 == 0:
            messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]})
    names = ("developer__shell", "web.scrape", long)
    tools: list[Json] = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
    return {"messages": messages, "tools": [*tools, {"type": "web_search"}], "max_tokens": 1, "store": False}


AGENTS: dict[str, tuple[str, Callable[[int], Json], str]] = {
    # path; the request of a turn; what the answer to the last turn says was left out
    "claude code": (
        MESSAGES,
        claude_code,
        "field.context_management=1, item.redacted_thinking=4, part.image=4, tool.web_search=1",
    ),
    "codex": (
        RESPONSES,
        codex,
        "item.compaction=1, item.reasoning=19, part.image=3, tool.image_generation=1, tool.web_search=1",
    ),
    "cline": (CHAT, cline, "part.image=5"),
    "openhands": (CHAT, openhands, "part.image=3"),
    "aider": (CHAT, aider, ""),
    "goose": (CHAT, goose, "part.image=4, tool.web_search=1"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("agent", AGENTS)
def test_twenty_turns_are_answered_and_each_prompt_begins_with_the_one_before(agent: str, model: str) -> None:
    path, request, left_out = AGENTS[agent]

    async def go() -> None:
        async with asking(model) as ask:
            before = ""
            for turns in range(1, TURNS + 1):
                answer, prompt = await ask(path, request(turns))
                assert answer.status_code == 200, answer.text
                assert prompt.startswith(before), f"turn {turns} shares {len(before)} characters less"
                marks = re.findall(r"mark-\d\d-\w", prompt)
                assert marks == sorted(set(marks)) and marks[-1].startswith(f"mark-{turns - 1:02d}"), marks
                assert set(marks) == set(re.findall(r"mark-\d\d-\w", str(request(turns))))
                before = prompt
            assert answer.headers.get(SKIPPED_HEADER, "") == left_out

    asyncio.run(go())


@pytest.mark.parametrize("agent", AGENTS)
def test_a_server_that_refuses_images_names_the_field_and_the_option(agent: str, model: str) -> None:
    path, request, left_out = AGENTS[agent]

    async def go() -> None:
        async with asking(model, unreadable_parts="refuse") as ask:
            answer, _ = await ask(path, request(6))
            assert answer.status_code == (400 if "part.image" in left_out else 200)
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert "--unreadable-parts placeholder" in error["message"]
                assert re.match(r"(messages|input)\[\d+\]\.(content|output)\[\d", error["param"]), error["param"]

    asyncio.run(go())


@pytest.mark.parametrize("name", ["Claude Code", "Codex", "opencode", "Cline", "OpenHands", "Aider", "Goose"])
def test_the_page_of_an_agent_has_its_settings_and_the_context_that_it_needs(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert "http://127.0.0.1:8000" in section and re.search(r"Context: .*?[\d,]{5,} tokens", section, re.DOTALL)


MOVES_TOOLS = "Mistral-Small-3.2-24B-Instruct-2506"  # before the last message of the user, so one turn is lost in each
TEMPLATES = (
    *("GLM-4.6", "GLM-4.7-Flash", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen3-Coder", "google-gemma-2-2b-it"),
    *("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", MOVES_TOOLS),
)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("agent", ["claude code", "codex"])
def test_real_templates_refuse_no_turn_and_reuse_what_was_sent_before(agent: str, name: str, tmp_path: Path) -> None:
    """Longer texts, as agents have; *possible* is the whole prompt before, but for the beginning of an answer."""
    path, request, _ = AGENTS[agent]
    model = write_model(tmp_path, (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))

    async def go() -> float:
        before, possible, shared = "", 0, 0
        async with asking(model) as ask:
            for turns in range(1, TURNS + 1):
                text = re.sub(
                    r"mark-\d\d-\w", lambda found: f"{found[0]} " + "line of a file, " * 30, str(request(turns))
                )
                answer, prompt = await ask(path, ast.literal_eval(text))
                assert answer.status_code == 200, answer.text
                assert f"mark-{turns - 1:02d}" in prompt
                possible += len(before)
                shared += common_prefix_length(before, prompt)
                before = prompt
        return shared / possible

    assert asyncio.run(go()) >= (0.85 if name == MOVES_TOOLS else 0.95)
