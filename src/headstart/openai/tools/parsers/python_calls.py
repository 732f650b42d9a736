"""Calls in Python syntax, f(a=1, b="x"): arguments that are literals, as JSON. Nothing is evaluated.

Beside Python's literals, JSON's true, false and null are accepted, and its escapes in strings.
"""

import json
import re
from typing import Any, NamedTuple

_MAX_DEPTH = 48
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CALLED = re.compile(r"[A-Za-z0-9_.-]+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_MAX_DIGITS = 300  # of a number


class _Parsed(NamedTuple):
    """A value and its end in the text."""

    value: Any
    end: int


def python_arguments_as_json(text: str) -> str | None:
    """Return the keyword arguments of the call as a JSON object; None if it is no call with literal arguments."""
    called = _CALLED.match(text)
    if called is None or not text.endswith(")"):
        return None
    arguments: dict[str, Any] = {}
    try:
        at = _expect(text, called.end(), "(")
        while not text.startswith(")", at):
            name = _NAME.match(text, at)
            if name is None or name[0] in arguments:
                return None
            value = _value(text, _expect(text, _space(text, name.end()), "="), 0)
            arguments[name[0]] = value.value
            at = _space(text, value.end)
            if not text.startswith(")", at):
                at = _expect(text, at, ",")
        if at != len(text) - 1:
            return None
        return _written(arguments)
    except ValueError:
        return None


def python_literal_as_json(text: str) -> str | None:
    """Return a literal as JSON; None if the text is none."""
    try:
        value = _value(text, 0, 0)
        return _written(value.value) if value.end == len(text) else None
    except ValueError:
        return None


def _written(value: object) -> str:
    """Return a value as JSON. Raises ValueError, for a lone surrogate UnicodeEncodeError, which is one."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _expect(text: str, at: int, char: str) -> int:
    """Return the position after `char` and whitespace. Raises ValueError if another character is there."""
    if not text.startswith(char, at):
        raise ValueError(f"no {char!r} at {at}")
    return _space(text, at + 1)


def _value(text: str, at: int, depth: int) -> _Parsed:
    """Return the literal at `at`. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    char = text[at : at + 1]
    if char in ("'", '"'):
        return _string(text, at, char)
    if char == "[":
        return _items(text, at, "]", depth)
    if char == "(":
        return _items(text, at, ")", depth)
    if char == "{":
        return _dict(text, at, depth)
    if (word := _NAME.match(text, at)) and word[0] in _WORDS:
        return _Parsed(_WORDS[word[0]], word.end())
    number = _NUMBER.match(text, at)
    if number is None or len(number[0]) > _MAX_DIGITS:
        raise ValueError(f"no literal at {at}")
    is_integer = number[0].lstrip("+-").isdigit()
    return _Parsed(int(number[0]) if is_integer else float(number[0]), number.end())


def _string(text: str, at: int, quote: str) -> _Parsed:
    start = at = at + 1
    while not text.startswith(quote, at):
        if at >= len(text):
            raise ValueError("the string has no end")
        at += 2 if text[at] == "\\" else 1
    value = _ESCAPE.sub(_unescaped, text[start:at])
    return _Parsed(value.encode("utf-16", "surrogatepass").decode("utf-16"), at + 1)  # joins escaped surrogate pairs


def _unescaped(match: "re.Match[str]") -> str:
    escape = match[1]
    if escape[0] in "uUx" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, escape if escape in "\"'\\/" else "\\" + escape)


def _items(text: str, at: int, closing: str, depth: int) -> _Parsed:
    """Return a list or a tuple, both as a list."""
    items: list[Any] = []
    at = _space(text, at + 1)
    while not text.startswith(closing, at):
        item = _value(text, at, depth + 1)
        items.append(item.value)
        at = _space(text, item.end)
        if not text.startswith(closing, at):
            at = _expect(text, at, ",")
    return _Parsed(items, at + 1)


def _dict(text: str, at: int, depth: int) -> _Parsed:
    values: dict[str, Any] = {}
    at = _space(text, at + 1)
    while not text.startswith("}", at):
        if text[at : at + 1] not in ("'", '"'):
            raise ValueError("a key is no string")
        key = _string(text, at, text[at])
        value = _value(text, _expect(text, _space(text, key.end), ":"), depth + 1)
        values[key.value] = value.value
        at = _space(text, value.end)
        if not text.startswith("}", at):
            at = _expect(text, at, ",")
    return _Parsed(values, at + 1)
