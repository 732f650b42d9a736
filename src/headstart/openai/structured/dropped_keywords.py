"""Keywords of JSON Schema that no grammar keeps to: found by name and place, and dropped where the caller allows it.

`uniqueItems` is dropped and named in any case: OpenAI's client sends pydantic's sets as strict schemas, and a reader
of sets takes equal items for one.

Dropping one allows more documents, never fewer. Each stands where more values of a part mean more of the whole, since
the keywords that turn this round (`not`, `if`, `contains` with maxContains) are themselves among them, and `oneOf` is
read as `anyOf` unless its alternatives exclude each other, also the widened ones. Not dropped is what could allow
fewer: `patternProperties` beside `additionalProperties`, a `$ref` that leads nowhere, a `type` that does not exist.
"""

import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from headstart.openai.structured.schema_rewrites import SCHEMA_MAPS, VALUES
from headstart.openai.value_checks import raise_invalid_value, safe_repr

DROPPED_HEADER = "x-headstart-dropped-keywords"
"""The response header that names keywords which an answer may not keep to: `weather: format, uniqueItems`."""

Dropped = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of tools, or of a field, and the keywords that were dropped from their schemas."""

_MAX_HEADER_CHARS = 1000
_ALWAYS = frozenset(
    (
        *("not", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
_WITH = {  # keywords that say nothing without one of others
    "if": ("then", "else"),
    **dict.fromkeys(("then", "else"), ("if",)),
    **dict.fromkeys(("minContains", "maxContains"), ("contains",)),
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), ()),
}
_UNLESS = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # zod's, of any record
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
}
_KEPT_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_STANDARD_FORMATS = frozenset(  # all others say nothing by the standard
    (
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
_NOT_IN_RUST = re.compile(
    r"(\(\?<?[=!]|\\[1-9bBk])|\\.|\[(?:\\.|[^\]\\])*+(?:\]|\Z)", re.DOTALL
)  # a group: of ECMA only


class KeywordMeaning(IntEnum):
    """The meaning of a keyword that no grammar keeps to."""

    NOTHING = 0
    ANNOTATION = 1  # nothing by the standard, but a reader may expect it
    SET = 2  # a rule whose violation a reader of sets does not notice
    RULE = 3


class LoosenedSchema(NamedTuple):
    """A schema without the keywords that no grammar keeps to. `dropped`: those that say something, sorted."""

    schema: Any
    dropped: tuple[str, ...]


def loosen_schema(schema: Mapping[str, Any]) -> LoosenedSchema:
    """Return a schema that allows what the given one allows, and maybe more.

    `oneOf` stays: it is among the dropped ones if its alternatives may overlap, and then to be compiled as anyOf.
    """
    return _Walk().loosened(schema)


def loosen_or_refuse_schema(name: str, schema: Mapping[str, Any], remedy: str) -> LoosenedSchema:
    """Return a schema without keywords that say less than a rule. Raises InvalidRequestError for one that says a rule.

    `remedy`: what helps beside leaving it out. `oneOf` keeps its meaning.
    """
    walk = _Walk()
    loosened = walk.loosened(schema)
    for keyword, place in walk.rules:
        where = f" at {safe_repr(place)}" if place else ""
        raise_invalid_value(name, f"has {keyword}{where}, which a grammar cannot keep to", f"leave it out{remedy}")
    return _without_one_of(loosened)


def loosen_checked_schema(schema: Mapping[str, Any]) -> LoosenedSchema:
    """Return what strict_schema returns of a schema that it does not refuse."""
    return _without_one_of(loosen_schema(schema))


def _without_one_of(loosened: LoosenedSchema) -> LoosenedSchema:
    return loosened._replace(dropped=tuple(keyword for keyword in loosened.dropped if keyword != "oneOf"))


def dropped_keywords_header(dropped: Dropped) -> str:
    """Return the value of DROPPED_HEADER."""
    text = "; ".join(f"{name}: {', '.join(keywords)}" for name, keywords in dropped)
    return text if len(text) <= _MAX_HEADER_CHARS else text[:_MAX_HEADER_CHARS] + "..."


def _unkept(part: Mapping[str, Any]) -> Iterator[tuple[str, KeywordMeaning]]:
    """Yield the keywords of one subschema that no grammar keeps to, and what each says."""
    for keyword, value in part.items():
        if keyword in _ALWAYS:
            yield keyword, KeywordMeaning.RULE
        elif keyword in _WITH:
            yield (
                keyword,
                KeywordMeaning.RULE if any(other in part for other in _WITH[keyword]) else KeywordMeaning.NOTHING,
            )
        elif keyword in _UNLESS:
            said = KeywordMeaning.SET if keyword == "uniqueItems" else KeywordMeaning.RULE
            yield keyword, KeywordMeaning.NOTHING if value in _UNLESS[keyword] else said
        elif keyword in ("format", "pattern") and isinstance(value, str):
            if keyword == "format" and value not in _KEPT_FORMATS and _may_be_string(part):
                yield keyword, KeywordMeaning.RULE if value in _STANDARD_FORMATS else KeywordMeaning.ANNOTATION
            elif keyword == "pattern" and any(found[1] for found in _NOT_IN_RUST.finditer(value)):
                yield keyword, KeywordMeaning.RULE if _may_be_string(part) else KeywordMeaning.NOTHING


def _excludes(part: Mapping[str, Any]) -> bool:
    """Return whether the alternatives of oneOf are known to exclude each other."""
    branches = part["oneOf"]
    if not isinstance(branches, list) or "discriminator" in part:
        return True
    parts = [one for one in branches if isinstance(one, Mapping)]
    types = [one["type"] for one in parts if isinstance(one.get("type"), str)]
    types += ["number"] if "integer" in types else []
    if len(types) >= len(branches) and len(set(types)) == len(types):
        return True
    return len(parts) == len(branches) and all("const" in one or "enum" in one for one in parts)


def _may_be_string(part: Mapping[str, Any]) -> bool:
    types = part.get("type", "string")
    return "string" in (types if isinstance(types, list) else [types])


class _Walk:
    """One walk through a schema. `rules`: the keywords that say a rule no grammar keeps to, and where."""

    def __init__(self) -> None:
        self.rules: list[tuple[str, str]] = []
        self._dropped: set[str] = set()

    def loosened(self, schema: Mapping[str, Any]) -> LoosenedSchema:
        """Return the schema without the keywords that no grammar keeps to."""
        return LoosenedSchema(self._loosened(schema, "", is_map=False), tuple(sorted(self._dropped)))

    def _loosened(self, schema: Any, place: str, *, is_map: bool) -> Any:
        """Return a loosened subschema, list of subschemas, or, if `is_map`, mapping of names to them."""
        if isinstance(schema, list):
            return [self._loosened(one, f"{place}/{index}", is_map=False) for index, one in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        if is_map:
            return {name: self._loosened(one, f"{place}/{name}", is_map=False) for name, one in schema.items()}
        unkept = dict(_unkept(schema))
        self.rules += [(keyword, place) for keyword, said in unkept.items() if said is KeywordMeaning.RULE]
        self._dropped.update(keyword for keyword, said in unkept.items() if said)
        if "oneOf" in schema and not _excludes(schema):
            self._dropped.add("oneOf")
        return {
            key: value if key in VALUES else self._loosened(value, f"{place}/{key}", is_map=key in SCHEMA_MAPS)
            for key, value in schema.items()
            if key not in unkept
        }
