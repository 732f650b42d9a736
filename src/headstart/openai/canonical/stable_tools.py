"""Tools in one order and with keys in one order. Changes no meaning of a JSON schema; the model sees another text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

_Tool = TypeVar("_Tool")

_FIRST = ("type", "function", "name", "title", "description", "parameters", "input_schema", "properties", "required")
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # maps of schemas
_DATA = frozenset({"default", "const", "enum", "examples", "example"})  # values, not schemas
_RANKS = {name: rank for rank, name in enumerate(_FIRST)}


def sorted_tools(tools: Sequence[_Tool], name_of: Callable[[_Tool], str | None]) -> list[_Tool]:
    """Return the tools in the order of their names; unchanged if one has no name or two have the same."""
    names = [name_of(tool) for tool in tools]
    if None in names or len(set(names)) < len(names):
        return list(tools)
    return sorted(tools, key=lambda tool: name_of(tool) or "")


def sorted_schema(value: Any) -> Any:
    """Return a tool or a JSON schema with the keys of each object in one order, and `required` sorted.

    Keywords have the usual order, then the alphabet's; names of properties have the alphabet's. Other lists, such as
    `enum`, are kept. Raises RecursionError for values nested too deeply.
    """
    return _sorted(value, _keyword_order)


def tool_name(tool: object) -> str | None:
    """Return the name of a tool as sent to any of the three APIs; None if it has none."""
    if not isinstance(tool, Mapping):
        return None
    sent = cast("Mapping[str, Any]", tool)
    function = sent.get("function")
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else sent.get("name")
    return name if isinstance(name, str) else None


def _keyword_order(key: str) -> tuple[int, str]:
    return _RANKS.get(key, len(_FIRST)), key


def _name_order(key: str) -> tuple[int, str]:
    return 0, key


def _sorted(value: Any, order: Callable[[str], tuple[int, str]], *, is_data: bool = False) -> Any:
    if isinstance(value, list):
        return [_sorted(item, _keyword_order, is_data=is_data) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    found = cast("Mapping[str, Any]", value)
    result: dict[str, Any] = {}
    for key in sorted(found, key=_name_order if is_data else order):
        item = found[key]
        is_schema = order is _keyword_order and not is_data
        if is_schema and key == "required" and _is_texts(item):
            result[key] = sorted(item)
        elif is_schema and key in _NAMED:
            result[key] = _sorted(item, _name_order)
        else:
            result[key] = _sorted(item, _keyword_order, is_data=is_data or (is_schema and key in _DATA))
    return result


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))
