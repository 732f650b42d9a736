"""ToolArgumentTypes: the JSON types that a tool's schema allows for each argument, and the values of raw text by them.

Formats that write arguments as XML elements do not quote strings, so only the schema tells `5` from `"5"`. A schema may
be anything here, since tools without a grammar are not checked: what is not understood allows all types.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.openai.tools.parsers.python_calls import python_literal_as_json

ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
STRING = frozenset(("string",))
BLANKS = " \t\r\n"  # of JSON
MAX_DEPTH = 32
MAX_SUBSCHEMAS = 4000
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as some chat templates print them


class ToolArgumentTypes:
    """The types of the arguments of one tool."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._referred: dict[str, frozenset[str]] = {}
        self._num_left = MAX_SUBSCHEMAS

    def types_of_argument(self, name: str) -> frozenset[str]:
        """Return the types of an argument, at least one."""
        found = [self.types_of_schema(schema) for schema in self._named(self._root, name, 0)]
        return frozenset[str]().union(*found) or ALL_TYPES

    def types_of_schema(self, schema: object, depth: int = 0) -> frozenset[str]:
        """Return the types that a subschema allows. An integer is a number as well."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._num_left < 0:
            return ALL_TYPES
        types = ALL_TYPES
        if isinstance(reference := schema.get("$ref"), str):
            types &= self._of_reference(reference, depth)
        if (chosen := schema.get("type")) is not None:
            names = {name for name in (chosen if isinstance(chosen, list) else [chosen]) if isinstance(name, str)}
            types &= names | ({"integer"} if "number" in names else set())
        if "const" in schema:
            types &= {json_type_of_value(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            types &= set(map(json_type_of_value, values))
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list):
                types &= frozenset[str]().union(*(self.types_of_schema(branch, depth + 1) for branch in branches))
        for branch in branches if isinstance(branches := schema.get("allOf"), list) else ():
            types &= self.types_of_schema(branch, depth + 1)
        return types or ALL_TYPES

    def _of_reference(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._referred:
            self._referred[reference] = ALL_TYPES  # of a reference to itself
            self._referred[reference] = self.types_of_schema(resolve_reference(self._root, reference), depth + 1)
        return self._referred[reference]

    def _named(self, schema: object, name: str, depth: int) -> Iterator[object]:
        """Yield the subschemas of an argument."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._num_left < 0:
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        elif isinstance(schema.get("additionalProperties"), Mapping):
            yield schema["additionalProperties"]
        if isinstance(reference := schema.get("$ref"), str):
            yield from self._named(resolve_reference(self._root, reference), name, depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            for branch in branches if isinstance(branches := schema.get(key), list) else ():
                yield from self._named(branch, name, depth + 1)


def resolve_reference(root: object, reference: str) -> object:
    """Return the subschema that a local $ref points to; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for token in reference[1:].split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(token)
        elif isinstance(found, list) and token.isdecimal() and len(token) < 7 and int(token) < len(found):
            found = found[int(token)]
        else:
            return None
    return found


def json_type_of_value(value: object) -> str:
    """Return the most special type of a JSON value: integer for 5 and 5.0."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def argument_as_json(text: str, types: frozenset[str]) -> str:
    """Return the raw text of an argument as JSON: its value if that has one of the types, else the text as a string."""
    stripped = text.strip(BLANKS)
    stripped = _WORDS.get(stripped, stripped)
    found = _type_of_json(stripped)
    if found is not None and found in types - STRING:
        return stripped
    if "string" not in types:
        if found is not None:
            return stripped
        if stripped[:1] in ("[", "{", "(") and (literal := python_literal_as_json(stripped)) is not None:
            return literal
    return json.dumps(text, ensure_ascii=False)


def _type_of_json(text: str) -> str | None:
    """Return the type of a JSON document, None if the text is none."""
    try:
        return json_type_of_value(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
