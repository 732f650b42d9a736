"""Changes between two texts that are meant to be the same, classified by their appearance. Pure; a likely kind.

The texts are compared line by line, and changed lines word by word. What is equal counts even behind a change: it is
the text that would be reused if the change stood behind it. Lists of tools and tool calls are compared by their order,
the order of their keys, and their text.
"""

import json
import re
from collections import Counter
from difflib import SequenceMatcher
from typing import NamedTuple

from headstart.common_prefix import common_prefix_length
from headstart.reuse.causes import WORDS, classify_value, have_same_words, looks_like_json
from headstart.reuse.logged_prompt import object_or_empty, parse_object_or_empty

NEAR = 24  # characters between two changes of one line that belong to one value, such as a date and its time
MIN_ALIKE = 0.5  # share of equal characters in texts that are versions of one text
MAX_LINES = 4000

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_JSON_LINE = re.compile(r'\s*["{}\[\]]')


class TextChange(NamedTuple):
    """A difference at characters `this_at` and `that_at`, and the equal characters behind it up to the next one."""

    kind: str  # a key of causes.CAUSES, or "other"
    this_at: int
    this: str
    that: str
    num_same: int


class TextChanges(NamedTuple):
    """All differences of two texts, and the equal characters before the first one."""

    num_before: int
    changes: list[TextChange]

    @property
    def total_same_chars(self) -> int:
        """The equal characters in all."""
        return self.num_before + sum(change.num_same for change in self.changes)


class _Gap(NamedTuple):
    """Ranges of both texts that differ."""

    this_start: int
    this_end: int
    that_start: int
    that_end: int


def text_changes(this: str, that: str) -> TextChanges:
    """Return the differences of two texts."""
    if this == that:
        return TextChanges(len(this), [])
    whole = _whole_change(this, that)
    if whole is not None:
        at = common_prefix_length(this, that)
        return TextChanges(at, [TextChange(whole, at, this[at : at + 40], that[at : at + 40], len(this) - at)])
    this, that = f"{this}\n", f"{that}\n"  # the last line may have moved too
    moved = _moved_lines(this, that)
    if not moved:
        return _changes_in_place(this, that)
    own, others = _without(moved, this), _without(moved, that)
    lines = this.splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if line in moved)
    found = _changes_in_place(own, others)
    num_chars = len(this) - len(own)
    kind = "json_order" if all(_JSON_LINE.match(line) for line in moved) else "document_order"
    return _with_move(found, TextChange(kind, len("".join(lines[:first])), lines[first].strip(), "", num_chars))


def _changes_in_place(this: str, that: str) -> TextChanges:
    """Return the differences of two texts without moved lines."""
    gaps = _merged(_gaps(this, that), this, that)
    changes: list[TextChange] = []
    for index, gap in enumerate(gaps):
        next_start = gaps[index + 1].this_start if index + 1 < len(gaps) else len(this)
        kind = _kind(this, that, gap)
        own, other = this[gap.this_start : gap.this_end], that[gap.that_start : gap.that_end]
        changes.append(TextChange(kind, gap.this_start, own, other, next_start - gap.this_end))
    return TextChanges(gaps[0].this_start if gaps else len(this), changes)


def _with_move(found: TextChanges, move: TextChange) -> TextChanges:
    """Return the changes with one more, at its place."""
    if move.this_at <= found.num_before:
        move = move._replace(num_same=move.num_same + found.num_before - move.this_at)
        return TextChanges(move.this_at, [move, *found.changes])
    changes = sorted([*found.changes, move], key=lambda change: change.this_at)
    return TextChanges(found.num_before, changes)


def _moved_lines(this: str, that: str) -> set[str]:
    """Return the lines that both texts have, as often, but in another order; without short ones."""
    own, others = this.splitlines(keepends=True), that.splitlines(keepends=True)
    if len(own) < 2 or len(own) + len(others) > MAX_LINES:
        return set()
    blocks = SequenceMatcher(None, own, others, autojunk=False).get_matching_blocks()
    kept = Counter(line for block in blocks for line in own[block.a : block.a + block.size])
    rest, other_rest = Counter(own) - kept, Counter(others) - kept
    return {line for line, count in rest.items() if len(line) >= NEAR and other_rest[line] == count}


def _without(moved: set[str], text: str) -> str:
    """Return a text without the moved lines and without blank ones, which moved with them."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip() and line not in moved)


def _whole_change(this: str, that: str) -> str | None:
    """Return the kind if both texts have the same content as a whole, in another form or order."""
    if "".join(this.split()) == "".join(that.split()):
        return "json_order" if looks_like_json(this) else "whitespace"
    if _parsed(this) is not None and _parsed(this) == _parsed(that):
        return "json_order"
    for separator in ("\n\n", "\n"):
        own, others = this.split(separator), that.split(separator)
        if len(own) > 1 and Counter(map(str.strip, own)) == Counter(map(str.strip, others)):
            return "document_order"
    return (
        "json_order" if looks_like_json(this) and have_same_words(this, that) and len(WORDS.findall(this)) > 3 else None
    )


def _gaps(this: str, that: str) -> list[_Gap]:
    """Return the ranges that differ, in order."""
    own, others = this.splitlines(keepends=True), that.splitlines(keepends=True)
    if len(own) + len(others) > MAX_LINES:
        own, others = [this], [that]
    found: list[_Gap] = []
    starts, other_starts = _starts(own), _starts(others)
    for tag, i, i_end, j, j_end in SequenceMatcher(None, own, others, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        is_paired = i_end - i == j_end - j
        pairs = [(at, at + 1, at + j - i, at + j - i + 1) for at in range(i, i_end)] if is_paired else []
        for own_start, own_end, start, end in pairs or [(i, i_end, j, j_end)]:
            gap = _Gap(starts[own_start], starts[own_end], other_starts[start], other_starts[end])
            found += _word_gaps(this, that, gap)
    return found


def _word_gaps(this: str, that: str, gap: _Gap) -> list[_Gap]:
    """Return the words that differ in a range of lines; the range itself if the lines have little in common."""
    own, others = this[gap.this_start : gap.this_end], that[gap.that_start : gap.that_end]
    if not own or not others:
        return [gap]
    words, other_words = _WORD.findall(own), _WORD.findall(others)
    if len(words) + len(other_words) > MAX_LINES:
        start = common_prefix_length(own, others)
        end = common_prefix_length(own[start:][::-1], others[start:][::-1])
        return [_Gap(gap.this_start + start, gap.this_end - end, gap.that_start + start, gap.that_end - end)]
    matcher = SequenceMatcher(None, words, other_words, autojunk=False)
    if matcher.ratio() < MIN_ALIKE and common_prefix_length(own[::-1], others[::-1]) < len(own) // 4:
        return [gap]
    starts, other_starts = _starts(words), _starts(other_words)
    return [
        _Gap(
            gap.this_start + starts[i],
            gap.this_start + starts[i_end],
            gap.that_start + other_starts[j],
            gap.that_start + other_starts[j_end],
        )
        for tag, i, i_end, j, j_end in matcher.get_opcodes()
        if tag != "equal"
    ]


def _merged(gaps: list[_Gap], this: str, that: str) -> list[_Gap]:
    """Join changes of one line that stand close together: they are one value."""
    joined: list[_Gap] = []
    for gap in gaps:
        last = joined[-1] if joined else None
        if last is not None:
            between = this[last.this_end : gap.this_start]
            if len(between) <= NEAR and "\n" not in between and not between.endswith(". "):
                joined[-1] = _Gap(last.this_start, gap.this_end, last.that_start, gap.that_end)
                continue
        joined.append(gap)
    return joined


def _kind(this: str, that: str, gap: _Gap) -> str:
    """Return the kind of a change: that of the value it lies in, or "other"."""
    own, other = this[gap.this_start : gap.this_end], that[gap.that_start : gap.that_end]
    if not own.strip() and not other.strip():
        return "whitespace"
    if have_same_words(own, other):
        return "json_order" if looks_like_json(own) or looks_like_json(other) else "document_order"
    kind = classify_value(this, *_core(this, gap.this_start, gap.this_end))
    return (
        kind
        if kind is not None and kind == classify_value(that, *_core(that, gap.that_start, gap.that_end))
        else "other"
    )


def _core(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a range without brackets, blanks and the like at its ends."""
    while end > start and not text[end - 1].isalnum():
        end -= 1
    while start < end and not text[start].isalnum():
        start += 1
    return start, end


def _starts(pieces: list[str]) -> list[int]:
    """Return the start of each piece in their joined text, and its end."""
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return starts


def _parsed(text: str) -> object:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def tool_changes(this: tuple[str, ...], that: tuple[str, ...]) -> TextChanges | None:
    """Return the changes of a list; None if most of its entries differ."""
    own, others = [_canonical(text) for text in this], [_canonical(text) for text in that]
    before = 0
    for one, other in zip(this, that, strict=False):
        if one != other:
            break
        before += len(one)
    num_chars = sum(map(len, this))
    if sorted(own) == sorted(others):
        changes = [] if own == others else [TextChange("tool_order", before, "", "", 0)]
        if sorted(this) != sorted(that):
            changes.append(TextChange("json_order", before, "", "", 0))
        changes[-1] = changes[-1]._replace(num_same=num_chars - before)
        return TextChanges(before, changes)
    names, other_names = [_name(text) for text in this], [_name(text) for text in that]
    if names == other_names:
        return _texts(this, that)
    common = set(own) & set(others)
    num_common = sum(len(text) for text, canonical in zip(this, own, strict=True) if canonical in common)
    if num_common < MIN_ALIKE * max(num_chars, sum(map(len, that))):
        return None
    shown = ", ".join(name for name in names if name not in other_names)
    gone = ", ".join(name for name in other_names if name not in names)
    return TextChanges(before, [TextChange("tools_changed", before, shown, gone, max(num_common - before, 0))])


def _texts(this: tuple[str, ...], that: tuple[str, ...]) -> TextChanges | None:
    """Return the changes of tools with the same names, one after the other."""
    before, changes = 0, list[TextChange]()
    for own, other in zip(this, that, strict=True):
        found = text_changes(own, other)
        if found.total_same_chars < MIN_ALIKE * len(own):
            return None
        if changes:
            changes[-1] = changes[-1]._replace(num_same=changes[-1].num_same + found.num_before)
        else:
            before += found.num_before
        changes += [
            change._replace(kind="tools_changed") if change.kind == "other" else change for change in found.changes
        ]
    return TextChanges(before, changes)


def _canonical(text: str) -> str:
    """Return the JSON with sorted keys; arguments that are JSON in a string are read too."""
    value = parse_object_or_empty(text)
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        value["arguments"] = parse_object_or_empty(arguments) or arguments
    return json.dumps(value, sort_keys=True) if value else text


def _name(text: str) -> str:
    """Return the name of a tool; the text itself if it has none."""
    value = parse_object_or_empty(text)
    return str(object_or_empty(value.get("function", value)).get("name", text))
