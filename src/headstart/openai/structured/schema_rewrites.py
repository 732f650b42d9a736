"""Rewrites of JSON Schemas where llguidance reads a keyword otherwise than the standard.

The rewritten schema allows what the original allows, or a part of it. Bounds are rounded inwards to numbers that
llguidance reads exactly. The formats of dates and times become patterns: llguidance knows neither leap years nor when
a minute has 61 seconds. Whitespace in patterns becomes that of ECMA 262, and one kind of look-ahead becomes a second
pattern. With `oneOf`, where a part of an alternative could be too much, bounds are not rounded.
"""

import re
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from headstart.openai.value_checks import raise_invalid_value, safe_repr

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names -> subschemas
VALUES = ("const", "enum", "default", "examples")  # their values are no subschemas, whatever they look like
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = {
    "minimum": ROUND_CEILING,
    "exclusiveMinimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "exclusiveMaximum": ROUND_FLOOR,
}
MAX_BOUND = 2**53  # the integers up to it are doubles
MAX_DIGITS = 15  # decimals of so many digits are read alike by all parsers of doubles
MAX_DECIMALS = 15
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
_DATE = f"(?:[0-9]{{4}}-(?:{_DAY})|(?:{_LEAP_YEAR})-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_HOUR_MINUTE})|23:59:60{_FRACTION}[zZ])"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}

# ECMA 262, 22.2.2.9: without U+000B here, since it is a control character, which no answer contains
_SPACES = r" \t\n\f\r\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_NOT_ONLY = re.compile(r"\^\(\?!\^?\[(?!\^)((?:\\.|[^\]\\])+)\]\*\$\)(?!.*\|)", re.DOTALL)  # pydantic's, of a Decimal
_ESCAPE_OR_BRACKET = re.compile(r"\\.|[\[\]]", re.DOTALL)


_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "if", "dependentSchemas", "dependencies")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")


def close_schema_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose objects have no properties but those that it lists, unless it says something about others.

    A schema in which several parts describe one object stays as it is, since each would exclude the others' properties.
    """
    try:
        return _rebuilt(schema, _closed)
    except _SharedObjectError:
        return schema


class _SharedObjectError(Exception):
    """Several parts of a schema may describe one object."""


def _closed(part: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema without others' properties. Raises _SharedObjectError."""
    properties = part.get("properties")
    if not isinstance(properties, Mapping):
        if isinstance(parts := part.get("allOf"), list) and len(parts) > 1:
            raise _SharedObjectError
        return part
    if any(key in part for key in _COMBINED):
        raise _SharedObjectError
    required = part.get("required")
    is_listed = isinstance(required, list) and not set(map(str, required)) <= properties.keys()
    if is_listed or "minProperties" in part or any(key in part for key in _OPEN):
        return part
    return {**part, "additionalProperties": False}


def _rebuilt(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], *, is_map: bool = False) -> Any:
    """Return a subschema, list of subschemas, or, if `is_map`, mapping of names to them, after `change` of each one.

    Inner subschemas change first.
    """
    if isinstance(schema, list):
        return [_rebuilt(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {
        key: value
        if key in VALUES and not is_map
        else _rebuilt(value, change, is_map=key in SCHEMA_MAPS and not is_map)
        for key, value in schema.items()
    }
    return inner if is_map else change(inner)


def adapt_schema_for_llguidance(name: str, schema: Mapping[str, Any], *, is_exact: bool = False) -> Mapping[str, Any]:
    """Return the schema as llguidance reads it right. Raises InvalidRequestError, which names the keyword.

    `is_exact`: refuse bounds that need rounding.
    """

    def rewritten(part: dict[str, Any]) -> dict[str, Any]:
        return _with_format(_without_look_ahead(_with_spaces(_with_bounds(name, _with_counts(part), is_exact))))

    return _rebuilt(schema, rewritten)


def _with_counts(part: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema in which counts such as 2.0, integers by the standard, are integers."""
    floats = {key: part[key] for key in COUNTS if isinstance(part.get(key), float)}
    return {**part, **{key: int(value) for key, value in floats.items() if value.is_integer()}}


def _with_bounds(name: str, part: dict[str, Any], is_exact: bool) -> dict[str, Any]:
    """Return a subschema whose bounds are exact in llguidance."""
    for key in BOUNDS:
        bound = part.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        exact = _exact_bound(name, key, bound)
        if is_exact and exact != bound:
            raise_invalid_value(name, f"has {key} {safe_repr(bound)} beside oneOf", f"use at most {MAX_DIGITS} digits")
        part = {**part, key: exact}
    return part


def _exact_bound(name: str, key: str, bound: float) -> int | float:
    """Return the nearest bound inwards that is an integer up to MAX_BOUND or a decimal of at most MAX_DIGITS digits."""
    is_upper = BOUNDS[key] == ROUND_FLOOR
    if abs(bound) > MAX_BOUND:
        if (bound < 0) == is_upper:
            raise_invalid_value(
                name, f"has {key} {safe_repr(bound)}", f"only numbers between -{MAX_BOUND} and {MAX_BOUND} are written"
            )
        return MAX_BOUND if is_upper else -MAX_BOUND
    exact = Decimal(repr(bound))
    if exact == exact.to_integral_value():
        return int(exact)
    decimals = min(MAX_DECIMALS, MAX_DIGITS - 1 - exact.adjusted())
    rounded = exact.quantize(Decimal(1).scaleb(-max(decimals, 0)), rounding=BOUNDS[key])
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)


def _with_format(part: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema with a pattern in place of a format of FORMATS."""
    chosen = part.get("format")
    if not isinstance(chosen, str) or chosen not in FORMATS:
        return part
    rest = {key: value for key, value in part.items() if key != "format"}
    if "pattern" not in part:
        return {**rest, "pattern": FORMATS[chosen]}
    return _with_second_pattern(rest, FORMATS[chosen])


def _with_second_pattern(part: dict[str, Any], pattern: str) -> dict[str, Any]:
    others = part.get("allOf")
    return {**part, "allOf": [*(others if isinstance(others, list) else ()), {"pattern": pattern}]}


def _without_look_ahead(part: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema that asks for another character by a second pattern, not by a look-ahead as in _NOT_ONLY."""
    pattern = part.get("pattern")
    if not isinstance(pattern, str) or (found := _NOT_ONLY.match(pattern)) is None:
        return part
    return _with_second_pattern({**part, "pattern": f"^{pattern[found.end() :]}"}, f"[^{found[1]}]")


def _with_spaces(part: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema in whose patterns the whitespace is that of ECMA 262."""
    changed: dict[str, Any] = {}
    if isinstance(pattern := part.get("pattern"), str):
        changed["pattern"] = use_ecma_whitespace(pattern)
    if isinstance(patterns := part.get("patternProperties"), Mapping):
        changed["patternProperties"] = {use_ecma_whitespace(one): inner for one, inner in patterns.items()}
    return {**part, **changed}


def use_ecma_whitespace(pattern: str) -> str:
    r"""Return a regular expression of Rust in which \s and \S mean what they mean in ECMA 262."""
    is_in_class = False

    def rewritten(found: re.Match[str]) -> str:
        nonlocal is_in_class
        match found[0]:
            case "[":
                is_in_class = True
            case "]":
                is_in_class = False
            case r"\s":
                return _SPACES if is_in_class else f"[{_SPACES}]"
            case r"\S":
                return rf"[^{_SPACES}]"
            case _:
                pass
        return found[0]

    return _ESCAPE_OR_BRACKET.sub(rewritten, pattern)
