"""Tools for a chat template that has none: a system text that lists them, and tool messages as plain text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.openai.tools.chat_format import ToolCallFormat
from headstart.openai.tools.tool_fields import ToolParams

_CALL_FORMS = {
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "llama3_json": '{"name": <function-name>, "parameters": <args-json-object>}',
    "mistral": '[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]',
    "pythonic": "[<function-name>(<arg-name>=<value>, ...), ...]",
    "qwen3_coder": (
        "<tool_call>\n<function=<function-name>>\n<parameter=<arg-name>>\n<value>\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call><function-name>\n<arg_key><arg-name></arg_key>\n<arg_value><value></arg_value>\n</tool_call>"
    ),
}


def messages_with_tools(
    messages: Sequence[dict[str, Any]], tools: ToolParams, family: ToolCallFormat
) -> list[dict[str, Any]]:
    """Return the conversation with the tools in its system message."""
    text = describe_tools(tools, family)
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def convert_calls_to_text(messages: Sequence[Mapping[str, Any]], family: ToolCallFormat) -> list[dict[str, Any]]:
    """Return the conversation with calls and tool messages as text, for a template that knows neither."""
    return [_plain(message, family) for message in messages]


def describe_tools(tools: ToolParams, family: ToolCallFormat) -> str:
    """Return the text that describes tools and the form of a call."""
    listed = "\n".join(json.dumps(definition, ensure_ascii=False) for definition in tools.definitions)
    return (
        "You may call functions to help with the user's request. The functions are listed as JSON within "
        f"<tools></tools>:\n<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, answer in this form:\n{_CALL_FORMS[family.name]}"
    )


def tool_calls_as_text(calls: Sequence[Mapping[str, Any]], family: ToolCallFormat) -> str:
    """Return tool calls of a message as the family's models write them."""
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if family.name == "pythonic":
        return "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in functions) + "]"
    if family.name in ("qwen3_coder", "glm45"):
        return "\n".join(_elements(family.name, name, arguments) for name, arguments in functions)
    key = "parameters" if family.name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in functions]
    if family.name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return f"[TOOL_CALLS][{', '.join(objects)}]" if family.name == "mistral" else "; ".join(objects)


def _elements(family: str, name: str, arguments: object) -> str:
    pairs = arguments.items() if isinstance(arguments, Mapping) else ()
    written = [(key, one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) for key, one in pairs]
    if family == "glm45":
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in written)
        return f"<tool_call>{name}\n{inner}</tool_call>"
    inner = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in written)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def tool_result_as_text(content: str) -> str:
    """Return the result of a tool as text of a user message."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _keywords(arguments: object) -> str:
    if not isinstance(arguments, Mapping):
        return ""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _plain(message: Mapping[str, Any], family: ToolCallFormat) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": tool_result_as_text(content)}
    if not message.get("tool_calls"):
        return dict(message)
    calls = tool_calls_as_text(message["tool_calls"], family)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{content}\n{calls}" if content else calls}
