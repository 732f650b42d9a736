"""Changes between two lists of JSON objects, tools or tool calls: their order, the order of their keys, their text."""

import json

from headstart.explain.lint.plain_json import as_object, parsed_object
from headstart.explain.lint.text_changes import MIN_ALIKE, Change, Changes, text_changes


def tool_changes(this: tuple[str, ...], that: tuple[str, ...]) -> Changes | None:
    """Return the changes of a list; None if most of its entries differ."""
    own, others = [_canonical(text) for text in this], [_canonical(text) for text in that]
    before = 0
    for one, other in zip(this, that, strict=False):
        if one != other:
            break
        before += len(one)
    num_chars = sum(map(len, this))
    if sorted(own) == sorted(others):
        changes = [] if own == others else [Change("tool_order", before, "", "", 0)]
        if sorted(this) != sorted(that):
            changes.append(Change("json_order", before, "", "", 0))
        changes[-1] = changes[-1]._replace(num_same=num_chars - before)
        return Changes(before, changes)
    names, other_names = [_name(text) for text in this], [_name(text) for text in that]
    if names == other_names:
        return _texts(this, that)
    common = set(own) & set(others)
    num_common = sum(len(text) for text, canonical in zip(this, own, strict=True) if canonical in common)
    if num_common < MIN_ALIKE * max(num_chars, sum(map(len, that))):
        return None
    shown = ", ".join(name for name in names if name not in other_names)
    gone = ", ".join(name for name in other_names if name not in names)
    return Changes(before, [Change("tools_changed", before, shown, gone, max(num_common - before, 0))])


def _texts(this: tuple[str, ...], that: tuple[str, ...]) -> Changes | None:
    """Return the changes of tools with the same names, one after the other."""
    before, changes = 0, list[Change]()
    for own, other in zip(this, that, strict=True):
        found = text_changes(own, other)
        if found.num_same < MIN_ALIKE * len(own):
            return None
        if changes:
            changes[-1] = changes[-1]._replace(num_same=changes[-1].num_same + found.num_before)
        else:
            before += found.num_before
        changes += [
            change._replace(kind="tools_changed") if change.kind == "other" else change for change in found.changes
        ]
    return Changes(before, changes)


def _canonical(text: str) -> str:
    """Return the JSON with sorted keys; arguments that are JSON in a string are read too."""
    value = parsed_object(text)
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        value["arguments"] = parsed_object(arguments) or arguments
    return json.dumps(value, sort_keys=True) if value else text


def _name(text: str) -> str:
    """Return the name of a tool; the text itself if it has none."""
    value = parsed_object(text)
    return str(as_object(value.get("function", value)).get("name", text))
