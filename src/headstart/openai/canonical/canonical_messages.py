"""The rules for chats, and for their messages as sent or validated: contents are texts or lists of parts."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from headstart.openai.canonical.nonces import strip_nonces, strip_token_counts
from headstart.openai.canonical.prompt_rules import AppliedRules, PromptRules, applied_rules, map_items, with_field
from headstart.openai.canonical.stable_tools import sorted_schema, sorted_tools
from headstart.openai.chat.template_forms import SYSTEM_ROLES, ContentForms
from headstart.openai.tools.tool_fields import Tool
from headstart.reuse.causes import count_timestamps

Message = Mapping[str, Any]
SYSTEM_RULES = frozenset({"billing_header", "trace_headers", "request_ids", "dates"})
KEEPING_VARIABLES: Mapping[str, bool] = {
    "preserve_thinking": True,  # Qwen 3.6 and later
    "clear_thinking": False,  # GLM 4.7
    "truncate_history_thinking": False,  # Nemotron 3
    "keep_past_thinking": True,  # LFM 2.5
}
"""Variables of published chat templates that keep the reasoning of earlier turns; others ignore them."""
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class CleanedText(NamedTuple):
    """A content without nonces, and the lines that are to be moved behind the last message."""

    content: Any
    moved: list[str]


def canonical_messages(messages: Sequence[Message], rules: PromptRules, counts: Counter[str]) -> list[Message]:
    """Return the messages after the rules. Messages that no rule changes are the same objects."""
    found: list[Message] = []
    moved: list[str] = []
    for message in messages:
        role = message.get("role")
        if role in SYSTEM_ROLES and rules & SYSTEM_RULES:
            clean = clean_system_prompt(message.get("content"), rules, counts)
            moved += clean.moved
            message = with_field(message, "content", clean.content)
        elif role == "assistant" and "drop_reasoning" in rules:
            message = _without_reasoning(message, counts)
        elif role == "tool" and "json" in rules:
            message = with_canonical_json_field(message, "content", counts)
        if "token_counts" in rules and role != "assistant" and "content" in message:
            content = strip_token_counts_of_content(message["content"], counts)
            if not content and message["content"] and len(messages) > 1:
                continue
            message = with_field(message, "content", content)
        found.append(message)
    return _with_moved(found, moved) if moved else found


def inline_system_messages(
    messages: Sequence[Message], forms: ContentForms | None, counts: Counter[str], *, leads: bool
) -> list[Message]:
    """Return messages or items with system messages as a user's, in place, that the template refuses, drops or moves.

    `forms` None: the template is not known, and any system message behind the first other one is inlined. `leads`: the
    API allows system messages at the beginning.
    """
    known = None if forms is None or forms.shown is None else forms
    joins = known is not None and not known.shows_probe("user user")
    found: list[Message] = []
    is_leading, was_inlined = leads, False
    for message in messages:
        role = message.get("role")
        is_leading = is_leading and role in SYSTEM_ROLES
        shown = is_leading if known is None else known.shows_probe(str(role) if is_leading else f"inline {role}")
        is_inlined = role in SYSTEM_ROLES and not shown
        if is_inlined:
            counts["inline_system"] += 1
            message = {**message, "role": "user"}
        contents = [one.get("content") for one in (*found[-1:], message) if one.get("role") == "user"]
        if joins and (is_inlined or was_inlined) and [isinstance(one, str | list) for one in contents] == [True, True]:
            found[-1] = {**message, **found[-1], "content": _joined_content(*contents)}
        else:
            found.append(message)
        was_inlined = is_inlined
    return found


def strip_token_counts_of_content(content: Any, counts: Counter[str]) -> Any:
    """Return a content without statements of the tokens that are left; the same object if it has none."""
    if isinstance(content, str):
        text = strip_token_counts(content, counts)
        return content if text == content else text
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    is_changed = False
    for part in cast("list[Any]", content):
        key = "content" if isinstance(part, Mapping) and "content" in part else "text"
        inner = cast("Mapping[str, Any]", part).get(key) if isinstance(part, Mapping) else None
        found = strip_token_counts_of_content(inner, counts)
        is_changed = is_changed or found is not inner
        if found is inner:
            parts.append(part)
        elif found or key == "content":
            parts.append({**part, key: found})
    return parts if is_changed else content


def clean_system_prompt(content: Any, rules: PromptRules, counts: Counter[str]) -> CleanedText:
    """Return the content of a system prompt without the nonces of `rules`; the same object if it has none."""
    moved: list[str] = []
    if isinstance(content, str):
        return _clean(content, rules, counts)
    if not isinstance(content, list):
        return CleanedText(content, moved)
    parts: list[Any] = []
    is_changed = False
    for part in cast("list[Any]", content):
        text = _text_of(part)
        if text is None:
            parts.append(part)
            continue
        clean = _clean(text, rules, counts)
        moved += clean.moved
        if clean.content == text:
            parts.append(part)
            continue
        is_changed = True
        if clean.content.strip():
            parts.append({**part, "text": clean.content})
    return CleanedText(parts if is_changed and parts else content, moved if parts else [])


def canonical_tool_content(content: Any, counts: Counter[str]) -> Any:
    """Return the content of a tool message with JSON in one form; the same object if nothing changes."""
    if isinstance(content, str):
        text = canonicalize_json_text(content)
        if text == content:
            return content
        counts["json"] += 1
        return text
    if not isinstance(content, list):
        return content
    return map_items(
        cast("list[Any]", content),
        lambda part: part if _text_of(part) is None else with_canonical_json_field(part, "text", counts),
    )


def with_canonical_json_field(holder: Message, name: str, counts: Counter[str]) -> Message:
    """Return an object with the JSON of a field in one form."""
    return with_field(holder, name, canonical_tool_content(holder.get(name), counts))


def strip_think_section(text: str, counts: Counter[str]) -> str:
    """Return an assistant's text without a leading <think> section."""
    found = _THOUGHT.match(text)
    if found is None:
        return text
    counts["drop_reasoning"] += 1
    return text[found.end() :]


def _clean(text: str, rules: PromptRules, counts: Counter[str]) -> CleanedText:
    clean, moved = strip_nonces(text, rules, counts)
    if "dates" in rules:
        counts["dates"] += count_timestamps(clean)
    return CleanedText(clean if clean != text else text, moved)


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    found = cast("Mapping[str, Any]", part)
    text = found.get("text")
    return text if found.get("type") in _TEXT_PARTS and isinstance(text, str) else None


def _without_reasoning(message: Message, counts: Counter[str]) -> Message:
    kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    if any(message.get(key) for key in ("reasoning_content", "reasoning")):
        counts["drop_reasoning"] += 1
    elif len(kept) == len(message):
        kept = dict(message)
    content = kept.get("content")
    if isinstance(content, str):
        kept["content"] = strip_think_section(content, counts)
    return message if kept == message else kept


def _with_moved(messages: list[Message], lines: list[str]) -> list[Message]:
    """Return the messages with lines behind the last one that is a user's or a tool's; else behind the last one."""
    at = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") in ("user", "tool")), -1)
    messages[at] = {**messages[at], "content": with_appended_lines(messages[at].get("content"), "text", lines)}
    return messages


def with_appended_lines(content: Any, kind: str, lines: list[str]) -> Any:
    """Return a content, a text or a list of parts, with lines behind it; `kind`: the type of a new part."""
    text = "\n".join(lines)
    if isinstance(content, list):
        return [*cast("list[Any]", content), {"type": kind, "text": f"\n{text}"}]
    return f"{content}\n\n{text}" if content else text


def _joined_content(one: Any, other: Any) -> Any:
    """Return two contents as one, with a blank line between them; texts, or lists of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts: list[Any] = [{"type": "text", "text": one}] if isinstance(one, str) else one
    more: list[Any] = [{"type": "text", "text": other}] if isinstance(other, str) else other
    return [*parts, {"type": "text", "text": "\n\n"}, *more]


class _Number(str):
    """A number as it was written, so that it loses no digit."""

    __slots__ = ()


def canonicalize_json_text(text: str) -> str:
    """Return a JSON object or list in its one form; the text itself if it is neither, or has a key twice."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=_Number, parse_float=_Number, parse_constant=_refuse
        )
        pieces: list[str] = []
        _write(value, pieces)
    except (ValueError, RecursionError):
        return text
    return "".join(pieces)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        for index, key in enumerate(sorted(found)):
            pieces.append(f"{',' if index else '{'}{json.dumps(key, ensure_ascii=False)}:")
            _write(found[key], pieces)
        pieces.append("}" if found else "{}")
    elif isinstance(value, list):
        pieces.append("[")
        for index, item in enumerate(cast("list[Any]", value)):
            if index:
                pieces.append(",")
            _write(item, pieces)
        pieces.append("]")
    else:
        pieces.append(str(value) if isinstance(value, _Number) else json.dumps(value, ensure_ascii=False))


TemplateOptions = tuple[tuple[str, str | int | bool], ...]


class CanonicalChat(NamedTuple):
    """A chat after the rules, and those that applied."""

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    options: TemplateOptions
    applied: AppliedRules


def canonical_chat(
    messages: Sequence[dict[str, Any]], tools: tuple[Tool, ...], options: TemplateOptions, rules: PromptRules
) -> CanonicalChat:
    """Return the chat after the rules. What no rule changes is unchanged."""
    counts: Counter[str] = Counter()
    found = [dict(message) for message in canonical_messages(messages, rules, counts)]
    if "schemas" in rules:
        tools = tuple(_with_sorted_schema(tool, counts) for tool in tools)
    if "tools" in rules:
        ordered = tuple(sorted_tools(tools, lambda tool: tool.name))
        counts["tools"] += ordered != tools
        tools = ordered
    if "keep_reasoning" in rules:
        options = _keeping(options, counts)
    return CanonicalChat(found, tools, options, applied_rules(counts))


def _with_sorted_schema(tool: Tool, counts: Counter[str]) -> Tool:
    definition = sorted_schema(tool.definition)
    if definition is tool.definition:
        return tool
    counts["schemas"] += 1
    return replace(tool, parameters=definition["function"]["parameters"], definition=definition)


def _keeping(options: TemplateOptions, counts: Counter[str]) -> TemplateOptions:
    known = {name for name, _ in options}
    added = tuple((name, value) for name, value in KEEPING_VARIABLES.items() if name not in known)
    counts["keep_reasoning"] += bool(added)
    return (*options, *added)
