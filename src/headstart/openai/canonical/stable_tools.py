"""Tools in one order and with keys in one order. Changes no meaning of a JSON schema; the model sees another text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from headstart.openai.canonical.prompt_rules import map_items

_Tool = TypeVar("_Tool")

_FIRST = ("type", "function", "name", "title", "description", "parameters", "input_schema", "properties", "required")
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # maps of schemas
_DATA = frozenset({"default", "const", "enum", "examples", "example"})  # values, not schemas


def sorted_tools(tools: Sequence[_Tool], name_of: Callable[[_Tool], str | None]) -> list[_Tool]:
    """Return the tools in the order of their names; unchanged if one has no name or two have the same."""
    names = [name_of(tool) for tool in tools]
    if None in names or len(set(names)) < len(names):
        return list(tools)
    return sorted(tools, key=lambda tool: name_of(tool) or "")


def sorted_schema(value: Any) -> Any:
    """Return a tool or a JSON schema with the keys of each object in one order, and `required` sorted.

    Keywords have the usual order, then the alphabet's; names of properties have the alphabet's. Other lists, such as
    `enum`, are kept. The same object if nothing changes. Raises RecursionError for values nested too deeply.
    """
    return _sorted(value, _SCHEMA)


def tool_name_of(tool: object) -> str | None:
    """Return the name of a tool as sent to any of the three APIs; None if it has none."""
    if not isinstance(tool, Mapping):
        return None
    sent = cast("Mapping[str, Any]", tool)
    function = sent.get("function")
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else sent.get("name")
    return name if isinstance(name, str) else None


class _Ranks(dict[str, tuple[int, str]]):
    """The place of each keyword; other keys follow in the order of the alphabet."""

    def __missing__(self, key: str) -> tuple[int, str]:
        return len(_FIRST), key


_RANKS = _Ranks({name: (rank, "") for rank, name in enumerate(_FIRST)})
_SCHEMA, _NAMES, _VALUE = "schema", "names", "value"  # kinds of objects


def _sorted(value: Any, kind: str) -> Any:
    if isinstance(value, list):
        child = _SCHEMA if kind == _NAMES else kind
        return map_items(cast("list[Any]", value), lambda item: _sorted(item, child))
    if not isinstance(value, Mapping):
        return value
    sent = cast("Mapping[str, Any]", value)
    keys = sorted(sent, key=_RANKS.__getitem__) if kind == _SCHEMA else sorted(sent)
    result: dict[str, Any] = {}
    is_same = keys == list(sent)
    for key in keys:
        item = sent[key]
        if not isinstance(item, dict | list):
            result[key] = item
            continue
        if kind == _SCHEMA and key == "required" and _is_texts(cast("object", item)):
            new = sorted(cast("list[str]", item))
            new = cast("list[Any]", item) if new == item else new
        else:
            new = _sorted(item, _kind_of(kind, key))
        is_same = is_same and new is item
        result[key] = new
    return value if is_same else result


def _kind_of(kind: str, key: str) -> str:
    """Return the kind of the object at `key` of an object of `kind`."""
    if kind == _SCHEMA:
        return _NAMES if key in _NAMED else _VALUE if key in _DATA else _SCHEMA
    return _SCHEMA if kind == _NAMES else _VALUE


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))
