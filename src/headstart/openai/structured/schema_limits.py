"""Limits of JSON Schemas and regular expressions, checked before they are compiled.

Some small schemas take llguidance minutes or all of a thread's stack (a large `multipleOf`, long chains of `$ref`),
some make a single mask slow (long counts, thousands of alternatives), and for some it accepts texts that the schema
does not allow. These are refused by the name of their keyword. Everything else is bounded by GrammarChecker.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from headstart.openai.request_json import check_json_depth
from headstart.openai.structured.schema_rewrites import SCHEMA_MAPS, VALUES, adapt_schema_for_llguidance
from headstart.openai.value_checks import raise_invalid_value, safe_repr

MAX_SUBSCHEMAS = 1000
MAX_REFERENCES = 256  # $ref: each level of a chain takes some kilobytes of the compiler's stack
MAX_OPTIONAL = 400  # optional properties of an object
MAX_ALTERNATIVES = 256  # of anyOf and oneOf
MAX_ENUM = 1024
MAX_MULTIPLE = 10_000  # the least common multiple of multipleOf in all parts of an allOf
MAX_COUNT = 20_000  # product of nested counts of a regular expression, characters of a literal
RULES_IN_LARK = 512
# Each also matches what is not closed, to the end, which keeps the time linear.
_COUNT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\{(\d*+)(,?)(\d*+)\}|[()]", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # JSON can write them only as \\u escapes
_CONTROL_ESCAPE = re.compile(r"\\(?:c|x0[0-7be]|x1|x7[fF]|u00(?:0[0-7beBE]|1|7[fF])|u\{|v|0)")
_JSON_IN_LARK = re.compile(r"%json\s*+(?=\{)")
_LARK_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|//[^\n]*+|#[^\n]*+|/(?:[^/\\\n]|\\.)++/?|%json')
_DECODER = json.JSONDecoder()
_RULE = re.compile(r"^[ \t]*+[?!]?[A-Za-z_][\w.]*+(?:\[[^\]\n]*+\])?[ \t]*+:", re.MULTILINE)


def check_and_adapt_schema(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema as llguidance reads it right. Raises InvalidRequestError, which names the keyword."""
    return _limited_schemas(name, [schema])[0]


def _limited_schemas(name: str, schemas: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the schemas of one grammar as `check_and_adapt_schema` does; they share the limits on parts."""
    counts: Counter[str] = Counter()
    return [_limited(name, schema, counts) for schema in schemas]


def _limited(name: str, schema: Mapping[str, Any], counts: Counter[str]) -> Mapping[str, Any]:
    _check_numbers(name, schema)
    is_of_draft, has_one_of = isinstance(schema.get("$schema"), str), False
    for part in _subschemas(schema):
        counts["schemas"] += 1
        counts["references"] += "$ref" in part
        has_one_of |= "oneOf" in part
        _check_part(name, part)
        if counts["schemas"] > MAX_SUBSCHEMAS:
            raise_invalid_value(name, f"has more than {MAX_SUBSCHEMAS} subschemas", "simplify the schema")
        if counts["references"] > MAX_REFERENCES:
            raise_invalid_value(name, f"has more than {MAX_REFERENCES} $ref", "simplify the schema")
        if "$id" in part and "$ref" in part and part is not schema and not is_of_draft:
            raise_invalid_value(
                name, "has $id beside $ref", "set $schema: drafts differ in whether it changes the reference"
            )
    return adapt_schema_for_llguidance(name, schema, is_exact=has_one_of)


def check_regex_limits(name: str, regex: str) -> str:
    """Return a regular expression. Raises InvalidRequestError if it is too long or its counts are too large."""
    if len(regex) > MAX_COUNT:
        raise_invalid_value(name, f"has {len(regex)} characters", f"it may have at most {MAX_COUNT}")
    total = _largest_count(regex)
    if total > MAX_COUNT:
        raise_invalid_value(name, f"has counts of {total} in all", f"nested counts may multiply to at most {MAX_COUNT}")
    return regex


def check_and_adapt_lark(name: str, grammar: str) -> str:
    """Return a grammar in Lark with its JSON Schemas (%json) as `check_and_adapt_schema` returns them.

    Raises InvalidRequestError if it has too many rules, too long a line, or what a JSON Schema may not have.
    """
    num_rules = len(_RULE.findall(grammar))
    if num_rules > RULES_IN_LARK:
        raise_invalid_value(name, f"has {num_rules} rules", f"it may have at most {RULES_IN_LARK}")
    check_regex_limits(name, grammar)
    found = [*_schemas_in(name, grammar)]
    schemas = _limited_schemas(name, [schema for _, _, schema in found])
    outside = {token.end() for token in _LARK_TOKEN.finditer(grammar) if token[0] == "%json"}
    pieces: list[str] = []
    done = 0
    for (start, end, _), schema in zip(found, schemas, strict=True):
        if start >= done and start in outside:  # not in a string, a comment or another schema
            pieces += (grammar[done:start], " ", json.dumps(schema))
            done = end
    return "".join(pieces) + grammar[done:]


def _schemas_in(name: str, grammar: str) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield the start and the end of each text behind %json, wherever it stands, that is a JSON object, and its value.

    Raises InvalidRequestError for one that is nested too deeply.
    """
    for found in _JSON_IN_LARK.finditer(grammar):
        try:
            schema, end = _DECODER.raw_decode(grammar, found.end())
            check_json_depth(schema)
        except ValueError:
            continue  # refused by the compiler if it is not in a string
        except RecursionError:
            raise_invalid_value(name, "has a JSON Schema that is nested too deeply", "flatten it")
        if isinstance(schema, dict):
            yield found.start() + len("%json"), end, schema


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all subschemas that are objects, the schema itself first.

    Also those in keywords that JSON Schema does not know, such as "components": a $ref may point there.
    """
    pending: list[tuple[object, bool]] = [(schema, False)]
    while pending:
        part, is_map = pending.pop()
        if isinstance(part, list):
            pending += [(one, False) for one in part]
        elif isinstance(part, Mapping) and is_map:
            pending += [(one, False) for one in part.values()]
        elif isinstance(part, Mapping):
            yield part
            pending += [(one, key in SCHEMA_MAPS) for key, one in part.items() if key not in VALUES]


def _is_value(reference: str) -> bool:
    """Return whether a $ref points into the value of a keyword such as const, which is no schema."""
    is_name = False
    for token in reference.partition("#")[2].split("/")[1:]:
        if token in VALUES and not is_name:
            return True
        is_name = token in SCHEMA_MAPS and not is_name
    return False


def _check_numbers(name: str, schema: object) -> None:
    """Check that all numbers are finite as doubles, which is all that other parsers of JSON read."""
    for part in _inner(schema):
        if isinstance(part, int | float) and not abs(part) <= sys.float_info.max:
            raise_invalid_value(name, f"has the number {safe_repr(part)}", "use numbers within the range of doubles")


def _check_part(name: str, part: Mapping[str, Any]) -> None:
    """Check the keywords of one subschema."""
    if isinstance(reference := part.get("$ref"), str) and _is_value(reference):
        raise_invalid_value(name, f"has $ref {safe_repr(reference)}", "move the schema that it points to into $defs")
    if "x-guidance" in part:
        raise_invalid_value(name, "contains x-guidance", "leave it out: options of the compiler cannot be set here")
    for key in ("anyOf", "oneOf"):
        _check_length(name, key, part.get(key), MAX_ALTERNATIVES)
    _check_length(name, "enum", part.get("enum"), MAX_ENUM)
    _check_pattern(name, "pattern", part.get("pattern"))
    for pattern in _listed([*patterns] if isinstance(patterns := part.get("patternProperties"), Mapping) else None):
        _check_pattern(name, "patternProperties", pattern)
    _check_count(name, "const", part.get("const"))
    for value in _listed(part.get("enum")):
        _check_count(name, "enum", value)
    for key in ("minLength", "maxLength", "minItems", "maxItems"):
        value = part.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > MAX_COUNT and key[:3] == "min":
            raise_invalid_value(name, f"has {key} {safe_repr(value)}", f"it may be at most {MAX_COUNT}")
    _check_properties(name, part)
    _check_multiples(name, part)


def _check_pattern(name: str, key: str, pattern: object) -> None:
    if not isinstance(pattern, str):
        return
    check_regex_limits(f"{name}: {key}", pattern)
    if _CONTROL.search(pattern) or _CONTROL_ESCAPE.search(pattern):
        raise_invalid_value(
            name, f"has {key} with a control character, {safe_repr(pattern)}", "leave such characters out"
        )


def _check_length(name: str, key: str, value: object, most: int) -> None:
    if isinstance(value, list) and len(value) > most:
        raise_invalid_value(name, f"has {key} with {len(value)} entries", f"it may have at most {most}")


def _check_count(name: str, key: str, value: object) -> None:
    """Check the texts of a const or enum, which are compiled character by character."""
    for one in _inner(value):
        if isinstance(one, str) and len(one) > MAX_COUNT:
            raise_invalid_value(name, f"has {key} with a text of {len(one)} characters", f"use at most {MAX_COUNT}")
        if isinstance(one, str) and _CONTROL.search(one):
            raise_invalid_value(
                name, f"has {key} with a control character, {safe_repr(one)}", "leave such characters out"
            )


def _inner(value: object) -> Iterator[object]:
    """Yield a value and all values in it, keys too."""
    pending = [value]
    while pending:
        one = pending.pop()
        yield one
        if isinstance(one, Mapping):
            pending += [*one.values(), *one]
        elif isinstance(one, list):
            pending += one


def _check_properties(name: str, part: Mapping[str, Any]) -> None:
    properties, required = part.get("properties"), _listed(part.get("required"))
    if isinstance(properties, Mapping):
        num_optional = len(properties.keys() - {key for key in required if isinstance(key, str)})
        if num_optional > MAX_OPTIONAL:
            raise_invalid_value(name, f"has {num_optional} optional properties", f"it may have at most {MAX_OPTIONAL}")
    least, most = part.get("minProperties"), 1 + len({key for key in required if isinstance(key, str)})
    if isinstance(least, int | float) and least > most:
        # Names of other properties could repeat: the text would have enough, the parsed object would not.
        raise_invalid_value(
            name, f"has minProperties {safe_repr(least)}", f"it may be at most {most}: the required ones and one more"
        )


def _check_multiples(name: str, part: Mapping[str, Any]) -> None:
    """Check the least common multiple of multipleOf in a subschema and its allOf."""
    parts = [part, *(one for one in _listed(part.get("allOf")) if isinstance(one, Mapping))]
    multiple = math.lcm(*(_digits(one["multipleOf"]) for one in parts if "multipleOf" in one))
    if multiple > MAX_MULTIPLE:
        raise_invalid_value(name, f"has multipleOf of {multiple} in all", f"it may be at most {MAX_MULTIPLE}")


def _digits(number: object) -> int:
    """Return the digits of a positive number without the decimal point: 25 for 2.5; 1 for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        return 1
    digits = Decimal(str(number)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


def _largest_count(regex: str) -> int:
    """Return an upper bound of the product of nested counts: of each group, its count times the largest inside it."""
    inner: list[int] = [1]  # by depth of open groups: the largest product so far
    closed = 1  # the product of the group that has just ended
    for found in _COUNT.finditer(regex):
        text = found[0]
        if text == "(":
            inner.append(1)
        elif text == ")":
            closed = inner.pop() if len(inner) > 1 else inner[0]
            inner[-1] = max(inner[-1], closed)
        elif text[0] == "{" and (found[1] or found[3]):
            count = max(int(found[1][:12] or 0), int(found[3][:12] or 0), 1)
            is_group = found.start() > 0 and regex[found.start() - 1] == ")"
            inner[-1] = max(inner[-1], count * (closed if is_group else 1))
    return max(inner)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
