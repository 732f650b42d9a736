"""Causes of avoidable prefill: their names, and how to mend each. Rules are those of `--prompt-rule`."""

from collections.abc import Callable, Iterable

RuleOf = Callable[[str], str]
"""Returns the rule that mends a line of a system prompt; empty: none."""

CAUSES = {
    "timestamp": "a date or time: move it behind the constant text, or drop it",
    "uuid": "a UUID: move it behind the constant text, or drop it",
    "identifier": "an id of one request: move it behind the constant text, or drop it",
    "number": "a number that changes, such as a counter: move it behind the constant text, or drop it",
    "token_count": "the number of tokens that are left, which changes each turn: leave it out (rule token_counts)",
    "tool_order": "the tools in another order: sort them by name (rule tools)",
    "json_order": (
        "the same JSON in another form: serialize it in one way, or send back the text received (rules schemas, json)"
    ),
    "document_order": "the same texts in another order: keep the order in which they were first sent",
    "whitespace": "other white space: send texts back unchanged",
    "reasoning_stripped": (
        "reasoning that is missing when the turn comes back: keep it, or never send it (rule drop_reasoning)"
    ),
    "reasoning_added": "reasoning that was not there before: keep it, or never send it",
    "system_changed": "a changed system prompt: move what changes behind what stays",
    "system_grown": (
        "a system prompt that grows at its end, as when system messages of the conversation are moved to the front: "
        "send them in place (rule inline_system, where an engine would refuse or move them)"
    ),
    "tools_changed": "changed tools: send the same tools in each request, and restrict them with tool_choice",
    "history_truncated": "a conversation whose beginning was dropped: drop more at once and less often, or summarize",
}


def no_rule(line: str) -> str:
    """Return that no rule mends a line: a RuleOf."""
    return ""


def remedy(cause: str, rules: Iterable[str] = ()) -> str:
    """Return how to mend a cause, with the rules that mend the lines in which it was found first."""
    return "".join(f"--prompt-rule {rule}, on the server or the router; or: " for rule in rules) + CAUSES[cause]
