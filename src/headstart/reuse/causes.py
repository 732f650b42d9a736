"""Causes of a divergence and of avoidable prefill: their names, how to mend each, and their recognition in texts.

A difference is classified by its appearance: a likely kind, not a proof. Rules are those of `--prompt-rule`. Pure.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

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
REACH = 80  # characters on either side that are searched for a value
BETWEEN = 6  # characters between a date and its time, as in "at"
REST = 4000  # characters after it, to distinguish reordering from other content

_ROLE = re.compile(r"^<(system|developer|user|assistant|tool|function)>\n", re.MULTILINE)
WORDS = re.compile(r'"[^"\\]*"|\w+')
_TIMES = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{1,2}(:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?\b"
    r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
    r"|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
    r"|\b(\d{1,2} )?(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?( \d{1,2})?,?( \d{4})?\b"
    r"|\b1[5-9]\d{8}(\d{3})?(\.\d+)?\b"  # seconds or milliseconds since 1970
)
_STARTS_OF_TIMES = re.compile(  # every match of _TIMES begins so; the set in front makes the search fast
    r"[\dADFJMNOSTW](?:(?<=\d)(?=\d*[-:./ ][\dADFJMNOS]|\d{9})|(?<=[A-Z])(?=[a-z]))"
)
_UUIDS = re.compile(r"\b[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\b")
_IDS = re.compile(r"\b(?=[\w-]*\d)[A-Za-z]*[_-]?[0-9a-zA-Z]{8,}\b")
_DIGIT = re.compile(r"\d")
_NUMBERS = re.compile(r"[-+]?\d[\d,.]*")
TOKEN_COUNTS = re.compile(
    r"<total_tokens>\s*\d[\d,._]*\s+tokens?\s+(?:left|remaining)(?:\s*</total_tokens>)?"
    r"|<system_warning>\s*Token usage:[^<\n]{1,80}</system_warning>"
    r"|<(?P<tag>tokens_left|tokens_remaining|remaining_tokens|context_left)>[^<\n]{0,40}\d[^<\n]{0,40}</(?P=tag)>",
    re.IGNORECASE,
)
"""Statements of the tokens that are left in the context, as agents add them to each turn (Claude Code)."""
_VALUES = (
    *(("token_count", TOKEN_COUNTS), ("uuid", _UUIDS), ("timestamp", _TIMES), ("identifier", _IDS)),
    ("number", _NUMBERS),
)

KINDS = {
    "timestamp": "a time or date, which changes with every request: move it after the constant part",
    "uuid": "a UUID: move it after the constant part",
    "identifier": "an apparent id: move it after the constant part",
    "number": "a number",
    "token_count": "the number of tokens that are left: leave it out (rule token_counts)",
    "whitespace": "white space only",
    "json_order": "the same JSON in another order: serialize keys and tools sorted",
    "order": "the same words in another order",
    "message_order": "the same messages in another order",
    "messages_dropped": "messages missing from this request: a conversation truncated at its start loses its cache",
    "messages_inserted": "messages that the other request does not have there",
    "system_prompt": "the system prompt",
    "system_grown": "a system prompt that grows at its end: send its later texts in place (rule inline_system)",
    "role": "the role of a message",
    "content": "the content",
}


def find_no_rule(line: str) -> str:
    """Return that no rule mends a line: a RuleOf."""
    return ""


def remedy_for_cause(cause: str, rules: Iterable[str] = ()) -> str:
    """Return how to mend a cause, with the rules that mend the lines in which it was found first."""
    return "".join(f"--prompt-rule {rule}, on the server or the router; or: " for rule in rules) + CAUSES[cause]


class MessageSpan(NamedTuple):
    """The role of one message in the text of a conversation, and the range of its content."""

    role: str
    start: int
    end: int


def split_into_messages(text: str) -> list[MessageSpan]:
    """Split a text made by `reading.conversation` into messages; one of an unknown role belongs to the one before."""
    heads = list(_ROLE.finditer(text))
    ends = [*(head.start() - 1 for head in heads[1:]), len(text)][: len(heads)]
    return [MessageSpan(head[1], head.end(), max(end, head.end())) for head, end in zip(heads, ends, strict=True)]


def message_index_at(messages: list[MessageSpan], position: int) -> int | None:
    """Return the index of the message whose content or head contains a character; None: before the first."""
    found = None
    for index, message in enumerate(messages):
        if position < message.start - len(message.role) - 3:  # "<role>" and a line's end
            break
        found = index
    return found


def classify_difference(this: str, that: str, at: int, *, is_chat: bool = False) -> str | None:
    """Classify the difference at character `at`: return a key of KINDS, or None where one of the texts ends."""
    if at >= len(this) or at >= len(that):
        return None
    if is_chat:
        kind = _kind_of_messages(this, that, at)
        if kind is not None:
            return kind
    kind = _kind_of_value(this, that, at)
    if kind is not None:
        return kind
    rest, other = this[at : at + REST], that[at : at + REST]
    if _squeezed(rest)[:REACH] == _squeezed(other)[:REACH]:
        return "whitespace"
    if is_chat:
        own, others = split_into_messages(this), split_into_messages(that)
        index, twin = message_index_at(own, at), message_index_at(others, at)
        if index is not None and twin is not None:
            rest, other = this[at : own[index].end], that[at : others[twin].end]
            if have_same_words(rest, other):
                return "json_order" if looks_like_json(rest) else "order"
            if min(index, twin) == 0 and own[0].role == others[0].role and own[0].role in ("system", "developer"):
                texts = sorted((this[own[0].start : own[0].end], that[others[0].start : others[0].end]), key=len)
                if texts[0] != texts[1] and texts[1].startswith(texts[0]):
                    return "system_grown"
                if index == twin:
                    return "system_prompt"
            return "content"
        if index is None and twin is None:  # in the tools, before the first message
            rest, other = this[at : own[0].start if own else None], that[at : others[0].start if others else None]
    if have_same_words(rest, other):
        return "json_order" if looks_like_json(rest) else "order"
    return "content"


def _kind_of_messages(this: str, that: str, at: int) -> str | None:
    """Return the kind if whole messages differ, else None."""
    own, others = split_into_messages(this), split_into_messages(that)
    index = message_index_at(own, at)
    if index is None or message_index_at(others, at) != index:
        return None
    own_contents = [(message.role, this[message.start : message.end]) for message in own]
    other_contents = [(message.role, that[message.start : message.end]) for message in others]
    mine, theirs = own_contents[index], other_contents[index]
    if mine[0] != theirs[0] and mine[1] == theirs[1]:
        return "role"
    if len(own_contents) == len(other_contents) and Counter(own_contents) == Counter(other_contents):
        return "message_order"
    if mine in other_contents[index + 1 :]:
        return "messages_dropped"
    return "messages_inserted" if theirs in own_contents[index + 1 :] else None


def _kind_of_value(this: str, that: str, at: int) -> str | None:
    """Return the kind of value that both texts have there, if it is the same kind."""
    for kind, pattern in _VALUES:
        if _covers(pattern, this, at) and _covers(pattern, that, at):
            return kind
    return None


def classify_value(text: str, start: int, end: int) -> str | None:
    """Return the kind of the value that contains characters `start` to `end`: a key of KINDS, None if it is no value.

    Dates and times that stand close together are one value.
    """
    first = max(start - REACH, 0)
    window = text[first : end + REACH]
    for kind, pattern in _VALUES:
        spans: list[tuple[int, int]] = []
        for found in pattern.finditer(window):
            begin = found.start()
            if spans and kind == "timestamp" and begin - spans[-1][1] <= BETWEEN:
                begin = spans.pop()[0]
            spans.append((begin, found.end()))
        if any(begin <= start - first and end - first <= stop for begin, stop in spans):
            return kind
    return None


def count_timestamps(text: str) -> int:
    """Return the number of dates and times with a digit in a text; those that stand close together are one."""
    count = 0
    for line in text.split("\n"):
        if _DIGIT.search(line) is None:
            continue
        last = -BETWEEN - 1
        for found in find_timestamps(line):
            count += found.start() - last > BETWEEN
            last = found.end()
    return count


def find_timestamps(line: str) -> Iterator[re.Match[str]]:
    """Yield the dates and times of a line, as `_TIMES.finditer` does in 10 times as long: it tries every character."""
    at = 0
    while (start := _STARTS_OF_TIMES.search(line, at)) is not None:
        found = _TIMES.match(line, start.start())
        at = start.end() if found is None else found.end()
        if found is not None:
            yield found


def _covers(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Return whether a match includes character `at`, or ends there."""
    start = max(at - REACH, 0)
    window = text[start : at + REACH]
    return any(found.start() <= at - start <= found.end() for found in pattern.finditer(window))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def have_same_words(one: str, other: str) -> bool:
    """Return whether two texts have the same words, at least two, in any order."""
    words = WORDS.findall(one)
    return len(words) > 1 and sorted(words) == sorted(WORDS.findall(other))


def looks_like_json(text: str) -> bool:
    """Return whether a text is likely a piece of JSON."""
    return '":' in text or '" :' in text
