"""Content blocks of a Messages conversation, checked, as the messages of a chat.

A user message with tool results becomes one message of role `tool` per result, and user messages of the text between
and behind them. Positions of cache breakpoints are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headstart.openai.bounds import RequestBounds
from headstart.openai.forms.carried_text import item_text, non_text_part_text, tool_result_content
from headstart.openai.forms.treatments import UNREADABLE, ApiName, NameKind, NameTreatment, find_treatment
from headstart.openai.responses import Json
from headstart.openai.tools.call_arguments import parse_call_arguments
from headstart.openai.value_checks import (
    check_encodable_text,
    check_list,
    check_string,
    missing_parameter_error,
    raise_invalid_value,
    safe_repr,
)

MAX_MESSAGES = 100_000
MAX_BLOCKS = 4096
TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}


@dataclass(slots=True)
class ConversationBuilder:
    """Messages of a chat, the field that each comes from, and the cache breakpoints.

    `last_breakpoint`: the number of messages up to and including the one of the last breakpoint, and the number of
    that message's text parts up to it; None without any breakpoint.
    """

    messages: list[Json] = field(default_factory=list[Json])
    names: list[str] = field(default_factory=list[str])
    ttl: float = 0.0  # seconds; the longest of all breakpoints
    last_breakpoint: tuple[int, int] | None = None

    def append(self, name: str, message: Json) -> None:
        """Add a message."""
        self.messages.append(message)
        self.names.append(name)

    def note_cache_breakpoint(self, block: Mapping[str, Any]) -> None:
        """Note the breakpoint behind the block that was added last, if it has one."""
        ttl = cache_control_ttl(block.get("cache_control"))
        if ttl:
            self.ttl = max(self.ttl, ttl)
            content = self.messages[-1]["content"] if self.messages else ""
            self.last_breakpoint = (len(self.messages), len(content) if isinstance(content, list) else 1)


def cache_control_ttl(mark: object) -> float:
    """Return the lifetime that a cache_control requests, in seconds; 0 without one, the shortest in an unknown form."""
    if mark is None:
        return 0.0
    ttl = mark.get("ttl") if isinstance(mark, Mapping) else None
    return TTL_SECONDS["1h" if ttl == "1h" else "5m"]


def add_system_prompt(value: object, into: ConversationBuilder, bounds: RequestBounds) -> None:
    """Add the system prompt: a text, or text blocks. Raises InvalidRequestError."""
    if isinstance(value, str):
        into.append("system", {"role": "system", "content": check_encodable_text("system", value)})
        return
    blocks = check_list("system", value, MAX_BLOCKS, "text blocks")
    if not blocks:
        return
    into.append("system", {"role": "system", "content": (parts := list[Json]())})
    for index, block in enumerate(blocks):
        name = f"system[{index}]"
        _add_text(parts, _text_of(name, block, bounds))
        into.note_cache_breakpoint(block)


def add_messages(value: object, into: ConversationBuilder, bounds: RequestBounds) -> None:
    """Add the messages. Raises InvalidRequestError."""
    if value is None:
        raise missing_parameter_error("messages")
    messages = check_list("messages", value, MAX_MESSAGES, "messages")
    if not messages:
        raise_invalid_value("messages", "is empty", "send at least one message")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise_invalid_value(name, f"is {safe_repr(message)}", "it must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise_invalid_value(f"{name}.role", f"is {safe_repr(role)}", "it must be user or assistant")
        if isinstance(content, str):
            into.append(name, {"role": role, "content": check_encodable_text(f"{name}.content", content)})
            continue
        blocks = check_list(f"{name}.content", content, MAX_BLOCKS, "blocks")
        if role == "assistant":
            _read_assistant(name, blocks, into, bounds)
        else:
            _read_user(name, str(role), blocks, into, bounds)


def _read_user(
    name: str, role: str, blocks: "list[Any] | tuple[Any, ...]", into: ConversationBuilder, bounds: RequestBounds
) -> None:
    parts: list[Json] | None = None  # of the user message that is open
    if not blocks:
        into.append(name, {"role": role, "content": ""})
    for index, item in enumerate(blocks):
        at = f"{name}.content[{index}]"
        block = _typed(at, item)
        if role != "user" or block["type"] != "tool_result":
            text = _text_of(at, block, bounds)
            if parts is None and text is not None:
                parts = []
                into.append(name, {"role": role, "content": parts})
            if parts is not None:
                _add_text(parts, text)
        else:
            call_id = check_string(f"{at}.tool_use_id", block.get("tool_use_id"))
            into.append(name, {"role": "tool", "tool_call_id": call_id, "content": _result(at, block, into, bounds)})
            parts = None
        into.note_cache_breakpoint(block)


def _read_assistant(
    name: str, blocks: "list[Any] | tuple[Any, ...]", into: ConversationBuilder, bounds: RequestBounds
) -> None:
    message: Json = {"role": "assistant", "content": (parts := list[Json]())}
    into.append(name, message)
    for index, item in enumerate(blocks):
        at = f"{name}.content[{index}]"
        block = _typed(at, item)
        match block["type"]:
            case "thinking":
                text = check_string(f"{at}.thinking", block.get("thinking"))
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(at, block))
            case _:
                _add_text(parts, _text_of(at, block, bounds))
        into.note_cache_breakpoint(block)
    if not parts:
        message["content"] = None if "tool_calls" in message else ""


def _call(name: str, block: Mapping[str, Any]) -> Json:
    arguments = parse_call_arguments(block.get("input"))
    return {
        "id": check_string(f"{name}.id", block.get("id")),
        "type": "function",
        "function": {
            "name": check_string(f"{name}.name", block.get("name")),
            "arguments": msgspec.json.encode(arguments).decode(),
        },
    }


def _result(name: str, block: Mapping[str, Any], into: ConversationBuilder, bounds: RequestBounds) -> str | list[Json]:
    """Return the content of a tool result, a text or text parts. Breakpoints inside of it count as one behind it."""
    content = tool_result_content(block.get("content"))
    if isinstance(content, str):
        return check_encodable_text(f"{name}.content", content)
    parts: list[Json] = []
    for index, item in enumerate(check_list(f"{name}.content", content, MAX_BLOCKS, "blocks")):
        at = f"{name}.content[{index}]"
        inner = _typed(at, item)
        _add_text(parts, _text_of(at, inner, bounds))
        into.ttl = max(into.ttl, cache_control_ttl(inner.get("cache_control")))
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)


def _typed(name: str, block: object) -> Mapping[str, Any]:
    """Return a block with a type. Raises InvalidRequestError."""
    if not isinstance(block, Mapping):
        raise_invalid_value(
            name, f"is {safe_repr(block)}", 'it must be an object such as {"type": "text", "text": "..."}'
        )
    if not isinstance(block.get("type"), str):
        raise_invalid_value(f"{name}.type", f"is {safe_repr(block.get('type'))}", 'it must be a string such as "text"')
    return block


def _text_of(name: str, block: object, bounds: RequestBounds) -> str | None:
    """Return the text of a block, that of other types by the table; None if it is skipped, which is noted."""
    block = _typed(name, block)
    kind = block["type"]
    if kind == "text":
        return check_string(f"{name}.text", block.get("text"))
    row = find_treatment(ApiName.MESSAGES, NameKind.ITEM, kind)
    if row is None or row.treatment is not NameTreatment.SKIPPED:
        is_part = kind in UNREADABLE or kind == "document"
        text = (non_text_part_text if is_part else item_text)(name, block, bounds)
        if text:
            return text
    bounds.note_omitted_from_prompt(NameKind.ITEM, kind)
    return None


def _add_text(parts: list[Json], text: str | None) -> None:
    if text is not None:
        parts.append({"type": "text", "text": text})
