"""Rewritten schemas: what llguidance accepts by them is valid by the original schema; usual ones are unchanged."""

import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.dropped_keywords import loosen_or_refuse_schema
from headstart.openai.structured.grammar_text import json_schema_grammar
from headstart.openai.structured.schema_limits import check_and_adapt_schema
from headstart.openai.structured.schema_rewrites import (
    BOUNDS,
    FORMATS,
    MAX_BOUND,
    adapt_schema_for_llguidance,
    close_schema_objects,
)

BYTES = LLTokenizer("byte")
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def matcher(schema: Any) -> LLMatcher:
    return LLMatcher(BYTES, json_schema_grammar(check_and_adapt_schema("x", schema)), log_level=0)


def accepts(schema: Any, text: str) -> bool:
    found, tokens = matcher(schema), BYTES.tokenize_bytes(text.encode())
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def satisfies(value: Decimal, key: str, bound: float) -> bool:
    limit = Decimal(repr(bound))
    return {
        "minimum": value >= limit,
        "exclusiveMinimum": value > limit,
        "maximum": value <= limit,
        "exclusiveMaximum": value < limit,
    }[key]


bounds = (
    st.floats(-1e17, 1e17)
    | st.floats(-1, 1)
    | st.integers(-(2**64), 2**64)
    | st.sampled_from([1e-300, -1e-300, 1e300, -1e300, 0.1, 2**53 + 1, 10**300])
    | st.decimals(-1000, 1000, places=6).map(float)
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(BOUNDS)), bounds, st.sampled_from(["integer", "number"]))
def test_numbers_near_a_bound_are_accepted_only_if_they_satisfy_it(key: str, bound: float, kind: str) -> None:
    try:
        found = matcher({"type": kind, key: bound})
    except InvalidRequestError as error:
        assert abs(bound) > MAX_BOUND and key in str(error)
        return
    if found.is_error():
        return  # nothing is left of it
    near = Decimal(repr(bound))
    unit = Decimal(1).scaleb(max(near.adjusted(), -20) - 15)
    for value in {
        near,
        near.to_integral_value(),
        *(near + step * unit for step in map(Decimal, ("-10", "-1", "-0.1", "0.1", "1", "10"))),
    }:
        if kind == "integer" and value != value.to_integral_value():
            continue
        text = format(value if value != value.to_integral_value() else int(value), "f").rstrip() or "0"
        if accepts({"type": kind, key: bound}, text):
            assert satisfies(Decimal(text), key, bound), text


@given(st.sampled_from(sorted(BOUNDS)), bounds)
def test_bounds_are_rounded_inwards_and_once(key: str, bound: float) -> None:
    try:
        once = adapt_schema_for_llguidance("x", {key: bound})
    except InvalidRequestError:
        return
    assert adapt_schema_for_llguidance("x", once) == once
    exact = Decimal(repr(once[key]))
    assert exact >= Decimal(repr(bound)) if "inimum" in key else exact <= Decimal(repr(bound))


@pytest.mark.parametrize(
    ("key", "bound", "exact"),
    [
        *((key, value, value) for key in BOUNDS for value in (0, -7, 1.5, 0.001, -2.25e-5, MAX_BOUND, -MAX_BOUND)),
        ("maximum", 2**64, MAX_BOUND),
        ("exclusiveMinimum", -1e300, -MAX_BOUND),
        ("minimum", 1e-300, 1e-15),
        ("maximum", 1e-300, 0),
        ("exclusiveMaximum", -959.3000000000001, -959.300000000001),
        ("minimum", 0.30000000000000004, 0.300000000000001),
        ("maximum", 1e15, 10**15),
    ],
)
def test_bounds_by_hand(key: str, bound: float, exact: float) -> None:
    assert adapt_schema_for_llguidance("x", {"items": {key: bound}}) == {"items": {key: exact}}


@pytest.mark.parametrize("schema", [{"minimum": 2**60}, {"maximum": -1e20}, {"oneOf": [{}], "maximum": 2**60}])
def test_bounds_that_cannot_be_rounded_are_refused_by_keyword(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"minimum|maximum"):
        check_and_adapt_schema("x", schema)


def walk(schema: Any, rng: random.Random) -> str:
    """A random text of a schema's grammar; None if it does not end soon."""
    found, text = matcher(schema), bytearray()
    for _ in range(60):
        mask = int.from_bytes(found.compute_bitmask(), "little")
        allowed = [byte for byte in range(32, 127) if mask >> byte & 1]
        if not allowed:
            break
        byte = rng.choice(allowed)
        assert found.consume_token(byte)
        text.append(byte)
    return text.decode()


@pytest.mark.parametrize("name", [*FORMATS, "uuid", "ipv4", "ipv6", "email", "hostname"])
def test_texts_of_a_format_are_valid(name: str) -> None:
    schema, rng = {"type": "string", "format": name}, random.Random(3)
    check = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    texts = [text for _ in range(150) if (text := walk(schema, rng)).endswith('"')]
    assert len(texts) > 20
    assert [text for text in texts if not check.is_valid(json.loads(text))] == []


DATES = ["2020-02-29", "2000-02-29", "1900-02-29", "2021-02-29", "2400-02-29", "0000-02-29", "2021-02-28", "2021-04-31"]
TIMES = ["23:59:60Z", "22:59:60Z", "23:59:60+01:00", "12:00:00Z", "24:00:00Z", "12:00:00.123-08:00", "12:00:00"]


def test_leap_days_and_leap_seconds() -> None:
    for name, values in (
        ("date", DATES),
        ("time", TIMES),
        ("date-time", [f"{day}T{time}" for day in DATES for time in TIMES]),
    ):
        schema = {"type": "string", "format": name}
        check = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for value in values:
            assert accepts(schema, json.dumps(value)) == check.is_valid(value), value


def test_a_format_holds_beside_a_pattern_and_other_types_are_free() -> None:
    schema = {"format": "date", "pattern": "^19", "allOf": [{"maxLength": 10}]}
    found = [accepts(schema, text) for text in ('"1999-12-31"', '"2000-01-01"', '"1999-02-29"', '"19"', "7")]
    assert found == [True, False, False, False, True]


SPACES = [chr(point) for point in range(0x20, 0x10000) if chr(point).isspace() or point in (0x180E, 0x200B, 0xFEFF)]


@pytest.mark.parametrize(
    "pattern", [r"^\s$", r"^\S$", r"^[\s]$", r"^[^\s]$", r"^[^\S]$", r"^[a\S]$", r"^[a\]\s]$", r"^\\s$"]
)
def test_whitespace_is_that_of_ecma_262(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    names = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    check = jsonschema_rs.Draft202012Validator(schema)
    for text in (*SPACES, "a", "]", "\\s"):
        is_valid = check.is_valid(text)
        assert accepts(schema, json.dumps(text, ensure_ascii=False)) == is_valid, (pattern, text)
        assert accepts(names, json.dumps({text: 1}, ensure_ascii=False, separators=(",", ":"))) == is_valid


@pytest.mark.parametrize("pattern", [r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?![a.]*$)[a-c.]{1,3}$", r"^(?!^[\s\]]*$)"])
def test_a_text_that_must_not_be_of_some_characters_only_is_accepted_as_by_the_expression(pattern: str) -> None:
    """The first is what pydantic writes for a Decimal, also in strict schemas."""
    schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern, "allOf": [{"maxLength": 4}]}]}
    strict = loosen_or_refuse_schema("x", check_and_adapt_schema("x", schema), "").schema
    found = LLMatcher(BYTES, json_schema_grammar(strict), log_level=0)
    rng = random.Random(1)
    texts = {"".join(rng.choices("+-.019abc]", k=rng.randrange(5))) for _ in range(400)}
    verdicts: set[bool] = set()
    for text in texts:
        tokens, one = BYTES.tokenize_bytes(json.dumps(text).encode()), found.deep_copy()
        is_accepted = one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()
        assert is_accepted == bool(re.search(pattern, text)), text
        verdicts.add(is_accepted)
    assert verdicts == {True, False}


def test_a_look_ahead_in_one_of_several_alternatives_stays() -> None:
    for pattern in (r"^(?![a]*$)a|b", r"^(?=[a]*$)a", r"^(?!ab)a"):
        with pytest.raises(InvalidRequestError, match="pattern"):
            loosen_or_refuse_schema("x", check_and_adapt_schema("x", {"type": "string", "pattern": pattern}), "")


def test_values_and_names_that_look_like_keywords_stay() -> None:
    schema = {
        "properties": {"format": {"const": {"format": "date", "maxItems": 2.0}}, "const": {"maxItems": 2.0}},
        "default": {"maximum": 2**70},
        "enum": [{"minimum": 1e300}],
    }
    assert adapt_schema_for_llguidance("x", schema) == {
        **schema,
        "properties": {**schema["properties"], "const": {"maxItems": 2}},
    }


def test_an_id_beside_a_reference_depends_on_the_draft() -> None:
    schema = {
        "$id": "http://x.y/a/",
        "definitions": {
            "other": {"$id": "http://x.y/foo.json", "type": "string"},
            "inner": {"$id": "foo.json", "type": "number"},
        },
        "allOf": [{"$id": "http://x.y/", "$ref": "foo.json"}],
    }
    with pytest.raises(InvalidRequestError, match=r"\$id"):
        check_and_adapt_schema("x", schema)
    for draft, is_number in ((DRAFT_7, True), ("https://json-schema.org/draft/2020-12/schema", False)):
        assert accepts({**schema, "$schema": draft}, "3") == is_number
        assert accepts({**schema, "$schema": draft}, '"a"') != is_number
    del schema["allOf"]
    assert accepts({**schema, "$ref": "foo.json"}, "3")


@pytest.mark.parametrize(
    ("reference", "is_value"),
    [
        *(("#/const", True), ("#/enum/0", True), ("#/properties/a/default", True), ("a.json#/examples/0/x", True)),
        *(("#/properties/const", False), ("#/$defs/enum/items", False), ("#", False), ("#anchor", False)),
        *(("#/properties/properties/const", True), ("#/components/schemas/x", False)),
    ],
)
def test_a_reference_into_a_value_is_refused(reference: str, is_value: bool) -> None:
    schema = {"properties": {"a": {"$ref": reference}}}
    if is_value:
        with pytest.raises(InvalidRequestError, match=r"\$ref"):
            check_and_adapt_schema("x", schema)
    else:
        assert check_and_adapt_schema("x", schema) == schema


def test_limits_and_rewrites_hold_in_schemas_below_unknown_keywords() -> None:
    def schema(part: dict[str, Any]) -> dict[str, Any]:
        return {"$ref": "#/components/schemas/x", "components": {"schemas": {"x": part}}}

    assert not accepts(schema({"type": "string", "format": "date"}), '"2021-02-29"')
    with pytest.raises(InvalidRequestError, match="multipleOf"):
        check_and_adapt_schema("x", schema({"multipleOf": 999_983}))


def test_one_property_more_than_the_required_ones_can_be_asked_for() -> None:
    one, two = {"type": "object", "minProperties": 1}, {"type": "object", "minProperties": 2, "required": ["a"]}
    assert [accepts(one, text) for text in ("{}", '{"a":1}')] == [False, True]
    assert [accepts(two, text) for text in ('{"a":1}', '{"a":1,"a":2}', '{"a":1,"b":2}')] == [False, False, True]
    with pytest.raises(InvalidRequestError, match="minProperties"):
        check_and_adapt_schema("x", {"minProperties": 3, "required": ["a", "a"]})


OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "additionalProperties": {"type": "integer"}},
        {**OBJECT, "patternProperties": {"^x": {}}},
        {**OBJECT, "required": ["b"]},
        {**OBJECT, "minProperties": 1},
        {**OBJECT, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
        {"allOf": [OBJECT, {"properties": {"b": {}}, "required": ["b"]}]},
        {"items": {**OBJECT, "$ref": "#/$defs/b"}, "$defs": {"b": {"properties": {"b": {}}}}},
        {"type": "object"},
        {"const": OBJECT},
    ],
    ids=str,
)
def test_an_object_that_others_describe_too_is_not_closed(schema: dict[str, Any]) -> None:
    assert close_schema_objects(schema) == schema


def test_objects_with_a_list_of_properties_are_closed_wherever_they_are() -> None:
    closed = {**OBJECT, "additionalProperties": False}
    for around in (
        lambda one: one,
        lambda one: {"items": one},
        lambda one: {"anyOf": [one, {"type": "null"}]},
        lambda one: {"$defs": {"x": one}, "allOf": [{"$ref": "#/$defs/x"}]},
        lambda one: {"type": "object", "properties": {"properties": one}, "additionalProperties": one},
    ):
        assert close_schema_objects(around(OBJECT)) == (around(closed))
