"""Limits of schemas: refused by the name of the keyword before anything is compiled; what is usual is accepted."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.grammar_text import json_schema_grammar
from headstart.openai.structured.schema_limits import (
    MAX_ALTERNATIVES,
    MAX_COUNT,
    MAX_ENUM,
    MAX_MULTIPLE,
    MAX_OPTIONAL,
    MAX_REFERENCES,
    MAX_SUBSCHEMAS,
    RULES_IN_LARK,
    check_and_adapt_lark,
    check_and_adapt_schema,
    check_regex_limits,
)
from headstart.openai.structured.structured_fields import read_json_schema


def names(number: int) -> list[str]:
    return [f"p{index}" for index in range(number)]


def chain(number: int) -> dict[str, Any]:
    """Every definition refers to the next one."""
    defs: dict[str, Any] = {name: {"$ref": f"#/$defs/p{index + 1}"} for index, name in enumerate(names(number))}
    return {"$ref": "#/$defs/p0", "$defs": {**defs, f"p{number}": {"type": "integer"}}}


AT_THE_LIMIT: dict[str, Any] = {
    "optional properties": {"properties": {key: {"type": "integer"} for key in names(MAX_OPTIONAL)}},
    "anyOf": {"anyOf": [{"const": index} for index in range(MAX_ALTERNATIVES)]},
    "enum": {"enum": list(range(MAX_ENUM))},
    "$ref": chain(MAX_REFERENCES - 1),
    "multipleOf": {"type": "integer", "multipleOf": MAX_MULTIPLE},
    "minProperties": {"required": ["a", "b"], "properties": {"a": {}, "b": {}}, "minProperties": 3},
    "pattern": {"pattern": "a{200}"},
    "decimals": {"type": "number", "multipleOf": 0.01},
    "escapes": {"const": 'a\n\t"\\'},
}
BEYOND: dict[str, Any] = {
    "optional properties": {"properties": {key: {"type": "integer"} for key in names(MAX_OPTIONAL + 1)}},
    "anyOf": {"anyOf": [{"const": index} for index in range(MAX_ALTERNATIVES + 1)]},
    "enum": {"items": {"enum": list(range(MAX_ENUM + 1))}},
    "$ref": chain(MAX_REFERENCES),
    "subschemas": {"required": names(MAX_SUBSCHEMAS), "properties": {key: {} for key in names(MAX_SUBSCHEMAS)}},
    "multipleOf": {"allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]},
    "minProperties": {"required": ["a"], "minProperties": 3},
    "minItems": {"type": "array", "minItems": MAX_COUNT + 1},
    "minLength": {"properties": {"a": {"type": "string", "minLength": 1e9}}},
    "pattern": {"pattern": "((a{100}b){50}){5}"},
    "patternProperties": {"patternProperties": {"^a{30000}$": {}}},
    "const": {"const": "a\x7fb"},
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True}},
    "$id": {"properties": {"a": {"$id": "http://x.y/z", "$ref": "a"}}},
    "number": {"minimum": -(10**447)},
    "control character": {"pattern": "^\\x01$"},
}


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_a_schema_at_the_limit_is_accepted_and_compiles(name: str) -> None:
    schema = check_and_adapt_schema("guided_json", AT_THE_LIMIT[name])
    assert schema == AT_THE_LIMIT[name]
    assert LLMatcher.validate_grammar(json_schema_grammar(schema)) == ""


@pytest.mark.parametrize("name", BEYOND)
def test_a_schema_beyond_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name.replace("$", "\\$")) as caught:
        check_and_adapt_schema("guided_json", BEYOND[name])
    assert caught.value.param is not None and caught.value.param.startswith("guided_json")


def test_counts_may_be_written_as_floats() -> None:
    schema = {"type": "array", "maxItems": 2.0, "items": {"maxLength": 3.0, "const": 4.0}}
    assert json.dumps(check_and_adapt_schema("x", schema)) == json.dumps(
        {"type": "array", "maxItems": 2, "items": {"maxLength": 3, "const": 4.0}}
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_nested_counts_multiply(counts: list[int]) -> None:
    regex = "a"
    for count in counts:
        regex = f"(?:{regex}){{{count}}}"
    if math.prod(counts) > MAX_COUNT:
        with pytest.raises(InvalidRequestError, match=f"{math.prod(counts)}"):
            check_regex_limits("x", regex)
    else:
        check_regex_limits("x", regex)


@pytest.mark.parametrize(
    "regex", [r"[{][}]{3}", r"\{99999\}", "[a-z]{2,5}(x|y){3}", "a{,5}", "a{2,}", "(((", ")))", "[{99999}]"]
)
def test_usual_and_odd_expressions_are_no_error_here(regex: str) -> None:
    check_regex_limits("x", regex)


@pytest.mark.parametrize("name", [*AT_THE_LIMIT, *BEYOND])
@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_a_schema_in_lark_has_the_limits_of_one_alone(name: str, space: str) -> None:
    grammar = f'start: %json{space}{json.dumps({**AT_THE_LIMIT, **BEYOND}[name])} "b"'
    if name in BEYOND or len(grammar) > MAX_COUNT:  # a grammar's text has a limit of its own
        with pytest.raises(InvalidRequestError):
            check_and_adapt_lark("guided_grammar", grammar)
    else:
        check_and_adapt_lark("guided_grammar", grammar)


def test_a_schema_in_lark_is_read_right_and_text_that_looks_like_one_stays() -> None:
    schema = {"type": "array", "items": {"type": "number", "multipleOf": 0.5}, "maxItems": 2}
    read = json.dumps(check_and_adapt_schema("x", schema))
    text = json.dumps(schema)
    quoted = json.dumps(f"%json {text}")
    kept = f'a: {quoted} // %json {{"type": "number"}}\n# %json {{"maxItems": 1}}\nb: /%json [{{]/ %json true\n'
    assert check_and_adapt_lark("x", f"{kept}start: a | %json {text} | %json{text}") == (
        f"{kept}start: a | %json {read} | %json {read}"
    )
    outer = {"const": 'a %json {"type": "number"}'}
    assert check_and_adapt_lark("x", f"start: %json {json.dumps(outer)}") == f"start: %json {json.dumps(outer)}"


def test_the_schemas_of_one_grammar_are_counted_together() -> None:
    half = {"required": names(MAX_SUBSCHEMAS // 2), "properties": {key: {} for key in names(MAX_SUBSCHEMAS // 2)}}
    small = json.dumps({"$defs": half["properties"]})
    check_and_adapt_lark("x", f"start: %json {small}")
    with pytest.raises(InvalidRequestError, match="subschemas"):
        check_and_adapt_lark("x", f"start: a b\na: %json {small}\nb: %json {small}")


OPENED = (
    "%json {",
    '%json {"',
    '%json{"a":',
    '"',
    "/",
    "#",
    "%json [",
    "[",
    "a[",
    "[^",
    "[\\",
    "{1",
    "{",
    "(",
    "\\",
    "\n",
    "a\n",
    "a[\n",
    " a [",
    "a:",
    "[]",
)


@pytest.mark.timeout(60)  # with quadratic expressions some of them take seconds, and all together minutes
@pytest.mark.parametrize("part", OPENED)
def test_the_checks_are_linear_in_what_is_never_closed(part: str) -> None:
    text = part * (MAX_COUNT // len(part))
    for _ in range(15):
        for check in (check_regex_limits, check_and_adapt_lark):
            with suppress(InvalidRequestError):
                check("x", text)


@pytest.mark.parametrize("regex", ["a{99999}", "(a{300}){300}", "(a|b{20}){2000}", "x{1,20001}", "a" * (MAX_COUNT + 1)])
def test_large_counts_are_refused(regex: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_regex_limits("x", regex)


def test_the_rules_of_a_grammar_are_counted() -> None:
    rules = "".join(f'r{index}: "a"\n' for index in range(RULES_IN_LARK - 1))
    check_and_adapt_lark("x", "start: r1\n" + rules)
    with pytest.raises(InvalidRequestError, match="rules"):
        check_and_adapt_lark("x", "start: r1\n" + rules + 'more: "b"\n')


KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "items", "anyOf", "allOf", "oneOf", "enum", "const", "pattern", "multipleOf"),
        *("minLength", "minProperties", "required", "$ref", "$id", "patternProperties", "additionalProperties"),
        *("prefixItems", "maxItems"),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYWORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_anything_is_accepted_or_refused_with_a_name(value: Any) -> None:
    try:
        schema = read_json_schema("guided_json", value)
        json_schema_grammar(schema)
    except InvalidRequestError as error:
        assert str(error)
