"""Published chat templates with tools: what they render is what the parser of their family reads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import join_deltas
from headstart.openai.chat.chat_renderer import ChatRenderer
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.request_bodies import parse_chat
from headstart.openai.tools.chat_format import TOOL_FAMILIES, find_chat_format, is_reasoning_open_at_end
from headstart.openai.tools.default_prompt import tool_calls_as_text
from headstart.openai.tools.parsers.call_writer import ToolCallRules
from headstart.openai.tools.parsers.chat_parser import ChatParser

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "google-gemma-2-2b-it": None,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": None,
}
REASONING = {"Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"}
REASONING |= {"Qwen3.5-4B", "GLM-4.6", "GLM-4.7-Flash"}
ARGUMENTS = {"city": 'Pär"is', "days": [1, 2], "deep": {"x": None}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a1b2c3d4e",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": '{"city": "Pär\\"is", "days": [1, 2], "deep": {"x": null}}',
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "It rains."},
]


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def render(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    body = parse_chat({"messages": messages, "tools": [TOOL]}, RequestBounds(1000, 1000))
    assert body.params.tools is not None
    template = ChatTemplate(source(name), NAMED_TOKENS)
    return template.render(body.messages, tools=body.params.tools.definitions, **options)


def test_every_template_has_an_expected_family() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_formats_of_a_model_follow_from_its_template(name: str) -> None:
    form = find_chat_format(source(name), "auto", "auto")
    assert (form.family.name if form.family else None) == FAMILIES[name]
    assert (form.reasoning == "qwen3") is (name in REASONING)
    assert form.shows_tools is (FAMILIES[name] is not None)
    assert (
        find_chat_format(source(name), "none", "none").family
        is find_chat_format(source(name), "none", "none").reasoning
        is None
    )


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family])
def test_the_call_that_a_template_renders_is_parsed_back(name: str) -> None:
    before = render(name, MESSAGES[:1])
    assert "weather" in before and "Tells the weather." in before
    text = render(name, MESSAGES[:2], add_generation_prompt=False)
    assert text.startswith(before.removesuffix("<think>\n")[: len(before) // 2])
    form = find_chat_format(source(name), "auto", "auto")
    assert form.family is not None
    called = text[text.index("How is the weather?") + len("How is the weather?") :]
    pieces = re.split(r"<\|eot_id\|>|<\|im_end\|>|</s>|<\|end_header_id\|>", called)
    called = next(piece for piece in pieces if "weather" in piece)
    parser = ChatParser(form.family.read_calls, ToolCallRules(frozenset(("weather",)), form.family.new_id))
    found = join_deltas(parser.feed(called), parser.finish())
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [("weather", ARGUMENTS)], called


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family])
def test_a_conversation_with_tool_messages_is_rendered(name: str) -> None:
    text = render(name, MESSAGES)
    assert "It rains." in text and text.index("weather") < text.index("It rains.")


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_calls_in_a_default_prompt_are_parsed_back(family: str) -> None:
    body = parse_chat({"messages": MESSAGES}, RequestBounds(1000, 1000))
    chosen = find_chat_format("", family, "auto").family
    assert chosen is not None
    parser = ChatParser(chosen.read_calls, ToolCallRules(frozenset(("weather",)), chosen.new_id))
    found = join_deltas(parser.feed(tool_calls_as_text(body.messages[1]["tool_calls"], chosen)), parser.finish())
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [("weather", ARGUMENTS)]


def test_the_renderer_passes_tools_on() -> None:
    name = "Qwen-Qwen3-0.6B"
    renderer = ChatRenderer(source(name), NAMED_TOKENS)
    try:
        assert renderer.render(MESSAGES[:1], tools=[TOOL]) == render(name, MESSAGES[:1])
        assert renderer.render(MESSAGES[:1], tools=None) != renderer.render(MESSAGES[:1], tools=[TOOL])
    finally:
        renderer.close()


def test_the_prompt_tells_whether_reasoning_has_begun() -> None:
    deepseek = ChatTemplate(source("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"), NAMED_TOKENS)
    qwen = ChatTemplate(source("Qwen-Qwen3-0.6B"), NAMED_TOKENS)
    opening = ChatTemplate(source("Qwen-QwQ-32B"), NAMED_TOKENS)
    assert is_reasoning_open_at_end(opening.render(MESSAGES[:1], options={"enable_thinking": True})) is True
    assert is_reasoning_open_at_end(deepseek.render(MESSAGES[:1])) is False
    assert is_reasoning_open_at_end(qwen.render(MESSAGES[:1])) is None
    assert is_reasoning_open_at_end(qwen.render(MESSAGES[:1], options={"enable_thinking": False})) is False
