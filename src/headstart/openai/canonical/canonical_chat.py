"""The rules for a validated chat: its messages, tools and template variables. Used by the server before rendering."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.openai.canonical.canonical_messages import KEEPING_VARIABLES, canonical_messages
from headstart.openai.canonical.prompt_rules import AppliedRules, PromptRules, applied_rules
from headstart.openai.canonical.stable_tools import sorted_schema, sorted_tools
from headstart.openai.tools.tool_fields import Tool

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
