"""The rules for a body as it was sent to any of the three APIs, for a router in front of other engines.

Only fields that a rule changes are written anew; a body that no rule changes stays the same bytes. Bodies need not be
valid: what has not the expected form is left alone.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from headstart.openai.canonical.canonical_messages import (
    KEEPING_VARIABLES,
    SYSTEM_RULES,
    canonical_messages,
    clean_system_prompt,
    inline_system_messages,
    strip_think_section,
    strip_token_counts_of_content,
    with_appended_lines,
    with_canonical_json_field,
)
from headstart.openai.canonical.plain_items import (
    replace_unsupported_items,
    replace_unsupported_tools,
    supported_messages,
)
from headstart.openai.canonical.prompt_rules import (
    AppliedRules,
    PromptRules,
    applied_rules,
    has_replaced_items,
    with_field,
)
from headstart.openai.canonical.stable_tools import sorted_schema, sorted_tools, tool_name_of
from headstart.openai.chat.template_forms import ContentForms
from headstart.reuse.logged_prompt import BODY_KEYS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_THOUGHTS = ("thinking", "redacted_thinking")

Values = Mapping[str, Any]


class CanonicalBody(NamedTuple):
    """A body after the rules: its bytes, its fields, and the rules that applied."""

    data: bytes
    values: Values
    applied: AppliedRules


def canonical_body(
    path: str, data: bytes, values: Values, rules: PromptRules, forms: ContentForms | None = None
) -> CanonicalBody:
    """Return the body of a request to `path` after the rules; `values` are its fields.

    `forms`: of the engine's chat template, if it is known.
    """
    of_api = _APIS.get(path)
    if of_api is None:
        return CanonicalBody(data, values, ())
    counts: Counter[str] = Counter()
    plain = _plain(path, values, counts) if "plain_items" in rules else {}
    values = {**values, **plain}
    changed = {**plain, **_changed_tools(values, rules, counts), **of_api(values, rules, counts)}
    if "inline_system" in rules:
        changed |= _inlined(path, {**values, **changed}, forms, counts)
    if changed:
        data = msgspec.json.encode({**msgspec.json.decode(data, type=dict[str, msgspec.Raw]), **changed})
    return CanonicalBody(data, {**values, **changed} if changed else values, applied_rules(counts))


def canonicalize_log_line(line: str, rules: PromptRules) -> str:
    """Return a line of a log with its body after the rules; a line without a body stays as it is."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(entry, dict):
        return line
    sent = cast("dict[str, Any]", entry)
    key = next((key for key in BODY_KEYS if isinstance(sent.get(key), dict)), None)
    values = sent if key is None else cast("dict[str, Any]", sent[key])
    path = RESPONSES if "input" in values else MESSAGES if "system" in values else CHAT
    found = dict(canonical_body(path, json.dumps(values).encode(), values, rules).values)
    return json.dumps(found if key is None else {**sent, key: found})


def _plain(path: str, values: Values, counts: Counter[str]) -> dict[str, Any]:
    """Return the fields that the rule `plain_items` changes."""
    name, found = "input" if path == RESPONSES else "messages", dict[str, Any]()
    if (tools := _objects(values.get("tools"))) is not None:
        found |= _if_changed("tools", replace_unsupported_tools(path, tools, counts), tools)
    if (sent := _objects(values.get(name))) is not None:
        plain = replace_unsupported_items(sent, counts) if path == RESPONSES else supported_messages(path, sent, counts)
        found |= _if_changed(name, plain, sent)
    return found


def _inlined(path: str, values: Values, forms: ContentForms | None, counts: Counter[str]) -> dict[str, Any]:
    name = "input" if path == RESPONSES else "messages"
    sent = _objects(values.get(name))
    if sent is None:
        return {}
    return _if_changed(name, inline_system_messages(sent, forms, counts, leads=path != MESSAGES), sent)


def _changed_tools(values: Values, rules: PromptRules, counts: Counter[str]) -> dict[str, Any]:
    tools = values.get("tools")
    if not isinstance(tools, list) or not rules & {"tools", "schemas"}:
        return {}
    sent = found = cast("list[Any]", tools)
    if "schemas" in rules:
        found = [sorted_schema(tool) for tool in sent]
        counts["schemas"] += sum(new is not old for new, old in zip(found, sent, strict=True))
    if "tools" in rules:
        ordered = sorted_tools(found, tool_name_of)
        counts["tools"] += any(new is not old for new, old in zip(ordered, found, strict=True))
        found = ordered
    return {"tools": found} if counts.total() else {}


def _chat(values: Values, rules: PromptRules, counts: Counter[str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    sent = _objects(values.get("messages"))
    if sent is not None:
        changed |= _if_changed("messages", canonical_messages(sent, rules, counts), sent)
    options = values.get("chat_template_kwargs")
    if "keep_reasoning" in rules and isinstance(options, Mapping | None):
        given = cast("Mapping[str, Any]", options or {})
        if KEEPING_VARIABLES.keys() - given.keys():
            counts["keep_reasoning"] += 1
            changed["chat_template_kwargs"] = {**KEEPING_VARIABLES, **given}
    return changed


def _messages(values: Values, rules: PromptRules, counts: Counter[str]) -> dict[str, Any]:
    changed, moved = _clean_field(values, "system", rules, counts)
    sent = _objects(values.get("messages"))
    if sent is None or (moved and not sent):
        return {}
    found = [_block_message(message, rules, counts) for message in sent]
    found = [new for new, old in zip(found, sent, strict=True) if new.get("content") or not old.get("content")] or sent
    if moved:
        found[-1] = {**found[-1], "content": with_appended_lines(found[-1].get("content"), "text", moved)}
    return changed | _if_changed("messages", found, sent)


def _clean_field(
    values: Values, name: str, rules: PromptRules, counts: Counter[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the field with the system prompt if a rule changes it, and the lines that are to be moved."""
    sent = values.get(name)
    if not sent or not rules & (SYSTEM_RULES | {"token_counts"}):
        return {}, []
    clean = clean_system_prompt(sent, rules, counts)
    if "token_counts" in rules:
        clean = clean._replace(content=strip_token_counts_of_content(clean.content, counts))
    return ({} if clean.content is sent else {name: clean.content}), clean.moved


def _block_message(message: Values, rules: PromptRules, counts: Counter[str]) -> Values:
    """Return a message of Anthropic's API without thoughts, and with the JSON of tool results in one form."""
    content = message.get("content")
    if message.get("role") == "assistant" and "drop_reasoning" in rules:
        if isinstance(content, str):
            return with_field(message, "content", strip_think_section(content, counts))
        blocks = _objects(content)
        kept = [block for block in blocks or () if block.get("type") not in _THOUGHTS]
        if blocks is None or not kept or len(kept) == len(blocks):
            return message
        counts["drop_reasoning"] += 1
        return {**message, "content": kept}
    if message.get("role") != "assistant" and "token_counts" in rules:
        content = strip_token_counts_of_content(content, counts)
        message = with_field(message, "content", content)
    if message.get("role") == "user" and "json" in rules and (blocks := _objects(content)) is not None:
        found = [
            with_canonical_json_field(one, "content", counts) if one.get("type") == "tool_result" else one
            for one in blocks
        ]
        return {**message, "content": found} if has_replaced_items(found, blocks) else message
    return message


def _responses(values: Values, rules: PromptRules, counts: Counter[str]) -> dict[str, Any]:
    changed, moved = _clean_field(values, "instructions", rules, counts)
    sent = values.get("input")
    if isinstance(sent, str):
        return changed | ({"input": with_appended_lines(sent, "input_text", moved)} if moved else {})
    items = _objects(sent)
    if items is None or (moved and not items):
        return {}
    found: list[Values] = []
    for item in items:
        if item.get("type") == "reasoning" and "drop_reasoning" in rules:
            counts["drop_reasoning"] += 1
        elif item.get("type") == "function_call_output" and rules & {"json", "token_counts"}:
            if "token_counts" in rules:
                item = with_field(item, "output", strip_token_counts_of_content(item.get("output"), counts))
            found.append(with_canonical_json_field(item, "output", counts) if "json" in rules else item)
        else:
            changed_item = canonical_messages([item], rules - {"json"}, counts)[0] if "role" in item else item
            found += [changed_item] if changed_item.get("content") or not item.get("content") else []
    if moved and found:
        last = found[-1]
        name = "output" if last.get("type") == "function_call_output" else "content"
        found[-1] = {**last, name: with_appended_lines(last.get(name), "input_text", moved)}
    return changed | (_if_changed("input", found, items) if found else {})


def _objects(value: object) -> list[Values] | None:
    """Return a list of objects; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in cast("list[object]", value)):
        return None
    return cast("list[Values]", value)


def _if_changed(name: str, found: list[Values], sent: list[Values]) -> dict[str, Any]:
    """Return the field with objects that a rule has changed; {} for the same ones."""
    return {name: found} if has_replaced_items(found, sent) else {}


_APIS: Mapping[str, Callable[[Values, PromptRules, Counter[str]], dict[str, Any]]] = {
    CHAT: _chat,
    RESPONSES: _responses,
    MESSAGES: _messages,
}
