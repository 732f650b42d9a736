"""Changes between two prompts: tools, then messages, each change with the equal text behind it. Pure.

The comparison ends where the prompts become different on purpose: at another question, another system prompt, or the
end of one of them. Such an end is not a change. Equal text behind a change would have been reused if the change stood
behind it: it is avoidable, as far as it was computed. `headstart lint` and the server count it alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstart.reuse.logged_prompt import CHARS_PER_TOKEN, LoggedMessage, LoggedPrompt
from headstart.reuse.text_changes import MIN_ALIKE, TextChange, text_changes, tool_changes

VALUES = frozenset({"timestamp", "uuid", "identifier", "number", "token_count"})  # change with each request
FORMS = frozenset({"json_order", "document_order", "whitespace"})
MAX_LINE = 256  # characters of a line that is kept
MIN_BEHIND = 256  # characters behind a value in a question that make it likely that the text is a form
BLOCK_TOKENS = 16
MIN_CHARS = 2 * BLOCK_TOKENS * CHARS_PER_TOKEN  # a smaller loss is not reported


class FieldChange(NamedTuple):
    """A change with the field that it is in."""

    cause: str
    path: str  # as in the body: "tools", "messages[0].content"
    at: int  # character of the field
    this: str
    that: str
    num_same: int  # equal characters behind it, up to the next change
    line: str = ""  # the line of a system prompt that it begins in, cut


class PromptComparison(NamedTuple):
    """The equal characters before the first change, and the changes."""

    num_before: int
    changes: list[FieldChange]

    @property
    def total_same_chars(self) -> int:
        """The equal characters in all."""
        return self.num_before + sum(change.num_same for change in self.changes)


class _Walk:
    """A comparison that is being made."""

    def __init__(self) -> None:
        self.num_before = 0
        self.changes: list[FieldChange] = []

    def same(self, num_chars: int) -> None:
        if self.changes:
            last = self.changes[-1]
            self.changes[-1] = last._replace(num_same=last.num_same + num_chars)
        else:
            self.num_before += num_chars

    def add(self, path: str, change: TextChange, cause: str | None = None, line: str = "") -> None:
        self.changes.append(
            FieldChange(cause or change.kind, path, change.this_at, change.this, change.that, change.num_same, line)
        )


def compare_logged_prompts(this: LoggedPrompt, that: LoggedPrompt) -> PromptComparison:
    """Return the changes from an earlier prompt `that` to `this`."""
    walk = _Walk()
    if _compare_tools(walk, this, that):
        before = that.messages if that.answer is None else (*that.messages, that.answer)  # expected to be sent back
        _compare_messages(walk, this.messages, before)
    return PromptComparison(walk.num_before, walk.changes)


def _compare_tools(walk: _Walk, this: LoggedPrompt, that: LoggedPrompt) -> bool:
    """Compare the tools; return whether the prompts have enough in common to go on."""
    if this.tools == that.tools:
        walk.same(sum(map(len, this.tools)))
        return True
    found = tool_changes(this.tools, that.tools)
    if found is None:
        return False
    walk.same(found.num_before)
    for change in found.changes:
        walk.add("tools", change)
    return True


def _compare_messages(walk: _Walk, this: Sequence[LoggedMessage], that: Sequence[LoggedMessage]) -> None:
    i = j = 0
    while i < len(this) and j < len(that):
        own, other = this[i], that[j]
        if own == other:
            walk.same(len(own.full_text))
            i, j = i + 1, j + 1
            continue
        if own.role != "system" and own in that[j + 1 :]:
            dropped = that.index(own, j + 1)
            walk.add(f"messages[{i}]", TextChange("history_truncated", 0, own.content, other.content, 0))
            j = dropped
            continue
        is_last = i == len(this) - 1 or j == len(that) - 1
        if own.role != other.role or not _compare_message(walk, f"messages[{i}]", own, other, is_last=is_last):
            return
        i, j = i + 1, j + 1


def _compare_message(walk: _Walk, path: str, own: LoggedMessage, other: LoggedMessage, *, is_last: bool) -> bool:
    """Compare two messages of one place; return whether what follows them can be compared."""
    if own.reasoning != other.reasoning:
        if own.reasoning and other.reasoning:
            return False
        if own.content != other.content or len(own.calls) != len(other.calls):
            return False
        cause = "reasoning_added" if own.reasoning else "reasoning_stripped"
        walk.add(f"{path}.reasoning", TextChange(cause, 0, own.reasoning, other.reasoning, 0))
    if not _compare_text(walk, f"{path}.content", own, other, is_last=is_last):
        return False
    if own.calls == other.calls:
        walk.same(sum(map(len, own.calls)))
        return True
    found = tool_changes(own.calls, other.calls)
    if found is None or any(change.kind != "json_order" for change in found.changes):
        return False
    walk.same(found.num_before)
    for change in found.changes:
        walk.add(f"{path}.tool_calls", change)
    return True


def _compare_text(walk: _Walk, path: str, own: LoggedMessage, other: LoggedMessage, *, is_last: bool) -> bool:
    """Compare two contents; return whether what follows them can be compared."""
    if own.content == other.content:
        walk.same(len(own.content))
        return True
    found = text_changes(own.content, other.content)
    longest = max(len(own.content), len(other.content), 1)
    is_version = found.total_same_chars / longest >= MIN_ALIKE
    if own.role == "assistant" and any(change.kind not in FORMS for change in found.changes):
        return False  # another answer
    if own.role == "system":
        if not is_version:
            return False
    elif is_last or not is_version:
        behind = sum(change.num_same for change in found.changes)
        is_form = is_version and found.changes and found.changes[0].kind in VALUES | FORMS and behind >= MIN_BEHIND
        if not is_form:
            walk.same(found.num_before)
            return False
    walk.same(found.num_before)
    for change in found.changes:
        if change.kind == "other" and own.role != "system":
            return False
        line = _line(own.content, change.this_at) if own.role == "system" else ""
        named = "system_grown" if own.content.startswith(other.content) else "system_changed"
        walk.add(path, change, named if change.kind == "other" else None, line)
    return True


def _line(text: str, at: int) -> str:
    """Return the line with the character `at`, at most MAX_LINE characters of it."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : min(end if end >= 0 else len(text), start + MAX_LINE)]


@dataclass(frozen=True, slots=True)
class AvoidableText:
    """The avoidable characters of one prompt; per cause those behind its first occurrence, so they overlap."""

    num_chars: int
    causes: dict[str, tuple[int, FieldChange]]


NOTHING = AvoidableText(0, {})


def avoidable_text(comparison: PromptComparison, reused: int) -> AvoidableText:
    """Return the avoidable text of a prompt of which `reused` characters were reused, compared with an earlier one."""
    avoidable = comparison.total_same_chars - max(reused, comparison.num_before)
    if avoidable < MIN_CHARS:
        return NOTHING
    behind = 0
    firsts: dict[str, tuple[int, FieldChange]] = {}
    for change in reversed(comparison.changes):
        behind += change.num_same
        firsts[change.cause] = min(behind, avoidable), change
    return AvoidableText(avoidable, {cause: found for cause, found in firsts.items() if found[0] >= MIN_CHARS})
