"""Laws of schemas: a text that the grammar of any accepted schema ends is a value of the schema, by the standard.

Schemas are drawn from all supported keywords, and texts are random walks through their grammars.
"""

import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.grammar_process import compute_first_masks
from headstart.openai.structured.grammar_text import grammar_parser_limits, json_schema_grammar
from headstart.openai.structured.structured_fields import read_json_schema
from headstart_lab.structured.bounded import bounded
from headstart_lab.structured.checks import KEYWORDS, Checker, Result
from headstart_lab.structured.suite import SuiteSchema

BYTES = LLTokenizer("byte")
MAX_BYTES = 400
NAMES = st.sampled_from(["a", "b", "name", "const", "ü", "x y"])
SCALARS = st.none() | st.booleans() | st.integers(-50, 50) | st.text('aé \n"', max_size=3)
NUMBERS = st.integers(-60, 60) | st.floats(-60, 60, allow_nan=False).map(lambda number: round(number, 4))
PATTERNS = [r"^a+$", r"[0-9]{2}", r"^\s?\S$", r"^(ab|c)*$", r"^[^a-y]{1,3}$", r"\d", r"^.{0,4}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname"]
STRINGS = st.fixed_dictionaries(
    {},
    optional={
        "minLength": st.integers(0, 4),
        "maxLength": st.integers(2, 9),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
    },
)
RANGES = st.fixed_dictionaries(
    {},
    optional={
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 0.5, 7, 0.01]),
    },
)


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords = {
        "items": inner | st.booleans(),
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(1, 3),
    }
    return st.fixed_dictionaries({}, optional=keywords)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords = {
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(st.sampled_from([r"^a", r"^[0-9]$"]), inner, max_size=2),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 3),
    }
    return st.fixed_dictionaries({}, optional=keywords)


def groups(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), several)


def typed(schemas: st.SearchStrategy[Any], *types: str) -> st.SearchStrategy[Any]:
    """Schemas with one of these types, several of them, or none."""
    kinds = st.sampled_from([*types, [*types, "null"], None])
    return st.builds(lambda schema, kind: {**schema, "type": kind} if kind else schema, schemas, kinds)


SCHEMAS = st.recursive(
    typed(STRINGS, "string")
    | typed(RANGES, "integer", "number")
    | st.builds(lambda value: {"const": value}, SCALARS)
    | st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr))
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"$ref": "#/$defs/shared"}]),
    lambda inner: typed(arrays(inner), "array") | typed(objects(inner), "object") | groups(inner),
    max_leaves=12,
)
ROOTS = st.builds(lambda schema, shared: {**schema, "$defs": {"shared": shared}}, SCHEMAS, SCHEMAS)


def walk(matcher: LLMatcher, rng: random.Random) -> tuple[str, bool]:
    """A random text of a grammar, and whether it ended; bytes that end a value are likelier."""
    text = bytearray()
    while len(text) < MAX_BYTES:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():  # a dead end, which is an error of the request
            return text.decode(errors="replace"), False
        if mask >> BYTES.eos_token & 1 and rng.random() < 0.5:
            break
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        ends = [byte for byte in allowed if byte in b'"]}']
        byte = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    else:
        return text.decode(errors="replace"), False
    return text.decode(), True


def check(schema: Any, seed: int) -> None:
    try:
        grammar = json_schema_grammar(read_json_schema("schema", bounded(schema)))
    except InvalidRequestError as error:
        event("refused")
        assert any(keyword in str(error) for keyword in KEYWORDS), error
        return
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=grammar_parser_limits())
    begun = matcher.deep_copy()
    compute_first_masks(begun)
    if begun.is_error():
        event("not compiled")
        return
    checker = Checker(SuiteSchema("draft2020-12", "law", "law", schema, ()), schema, Path(), BYTES)
    rng = random.Random(seed)
    for _ in range(3):
        text, ended = walk(matcher.deep_copy(), rng)
        event("ended" if ended else "cut")
        if ended:
            assert checker._check_value(text) in (Result.VALID, Result.OVERFLOW), text


def test_a_number_whose_exponent_no_decimal_has_is_checked() -> None:
    checker = Checker(SuiteSchema("draft2020-12", "law", "law", {"type": "number"}, ()), {}, Path(), BYTES)
    assert checker._check_value(f"70E-9{'0' * 25}") == Result.VALID


@settings(max_examples=250, deadline=None)
@given(ROOTS, st.integers(0, 999))
def test_a_text_that_ends_is_a_value_of_the_schema(schema: Any, seed: int) -> None:
    check(schema, seed)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None)
@given(ROOTS, st.integers(0, 999))
def test_a_text_that_ends_is_a_value_of_the_schema_many_times(schema: Any, seed: int) -> None:
    check(schema, seed)


def test_the_validator_knows_the_formats() -> None:
    """So that the law is not empty where formats are concerned."""
    for name in FORMATS:
        validator = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
        assert not validator.is_valid("no"[: 1 if name == "hostname" else 2] + " !")
