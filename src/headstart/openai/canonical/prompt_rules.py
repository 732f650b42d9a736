"""PromptRules: the rules that an operator has chosen, and AppliedRules: how often each changed one request.

A rule changes the prompt that the model sees, so none is on by default. Rules are idempotent: a router and the server
behind it may have the same ones. What no rule changes stays the same object.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

RULE_TEXTS: dict[str, str] = {
    "tools": "tools in the order of their names",
    "schemas": "keys of tools and their schemas in one order, `required` sorted",
    "json": "tool results that are JSON: keys sorted, no blanks",
    "drop_reasoning": "no reasoning of earlier turns in the prompt",
    "keep_reasoning": "chat templates that can keep the reasoning of all turns do so",
    "billing_header": "lines `x-anthropic-billing-header:` of system prompts (Claude Code) dropped",
    "trace_headers": "lines of system prompts that are tracing headers (`traceparent:`, `x-request-id:`, ...) dropped",
    "request_ids": "lines of system prompts that are ids (`Request ID: ...`) moved to the end of the last message",
    "token_counts": "statements of the tokens that are left (`<total_tokens>`, `<system_warning>`) dropped",
    "inline_system": "system messages that the chat template refuses, drops or moves written as a user's, in place",
    "plain_items": "at a router: items, blocks and tools that other engines refuse written as those that they read",
    "dates": "dates and times in system prompts counted; never changed",
}
"""Every rule, and its effect."""

PLACEMENT_TEXTS: dict[str, str] = {
    "inline_system": RULE_TEXTS["inline_system"],
    "developer_as_system": "developer messages that the chat template does not show written as a system's",
    "joined_turns": "turns joined by a blank line, where the chat template demands that roles alternate",
    "separate_calls": "parallel calls, or calls and the text beside them, written as several messages",
    "short_ids": "ids of calls as nine letters and digits, where the chat template demands that",
    "plain_calls": "tool calls and results that the chat template does not show written as text",
}
"""Placements of messages that a chat template would not show. Always on, unlike rules, and reported with them."""

RULES_HEADER = "x-headstart-prompt-rules"
"""The response header that states the rules which applied: `tools=1, dates=2`."""

PromptRules = frozenset[str]
NO_RULES: PromptRules = frozenset()
AppliedRules = tuple[tuple[str, int], ...]
"""Rules that applied to a request, with the number of places."""


def applied_rules(counts: Counter[str]) -> AppliedRules:
    """Return the rules and placements that were counted, in the order of their texts."""
    return tuple((name, counts[name]) for name in RULE_TEXTS | PLACEMENT_TEXTS if counts[name])


def applied_rules_header(applied: Iterable[tuple[str, int]]) -> str:
    """Return the value of RULES_HEADER; empty if no rule applied."""
    return ", ".join(f"{name}={count}" for name, count in applied)


def with_field(holder: Mapping[str, Any], name: str, value: Any) -> Mapping[str, Any]:
    """Return an object with a field; the same object if the field has the value already."""
    return holder if holder.get(name) is value else {**holder, name: value}


def map_items(items: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the items after `change`; the same list if it changes none."""
    found = list(map(change, items))
    return found if has_replaced_items(found, items) else items


def has_replaced_items(found: Sequence[object], sent: Sequence[object]) -> bool:
    """Return whether a list has other objects than another one."""
    return len(found) != len(sent) or any(new is not old for new, old in zip(found, sent, strict=True))
