"""Keywords that no grammar keeps to: named with their tool, or dropped, which never forbids what the schema allows."""

import json
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import BaseModel
from tokenizers import Tokenizer as Backend
from tools.test_tool_grammar import Answers, tool, written

from headstart.bundled import bundled_intent_model_folder
from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.dropped_keywords import dropped_keywords_header, loosen_or_refuse_schema, loosen_schema
from headstart.openai.structured.grammar_process import build

SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
RULES: dict[str, dict[str, Any]] = {  # keyword: a subschema that has it
    "not": {"type": "integer", "not": {"const": 5}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "minContains": {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
    "format": {"type": "string", "format": "json-pointer"},
    "pattern": {"type": "string", "pattern": "^(?!a)[ab]*$"},
}
SILENT: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": False},
    {"then": {"type": "string"}, "else": False},
    {"type": "array", "minContains": 2},
    {"type": "object", "unevaluatedProperties": True},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "integer", "format": "int32"},
    {"type": "string", "format": "date-time"},
    {"enum": [{"not": 1}]},
    {"properties": {"not": {}, "format": {"type": "string"}}},
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend.from_file(str(Path(bundled_intent_model_folder()) / "tokenizer.json"))


def is_valid(schema: Any, value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).is_valid(value)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 5, 1.5, "", "a", "b", "ab", "/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
APPLIED = ("anyOf", "oneOf", "allOf")
LEAVES = [*RULES.values(), *SILENT, SET, {}, {"type": "string"}, {"type": "integer"}, {"const": "a"}]
REFERENCE = {"properties": {"b": {"$ref": "#/$defs/x"}}}


def schemas(*leaves: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            *(st.lists(inner, min_size=1, max_size=3).map(lambda some, key=key: {key: some}) for key in APPLIED),
            st.tuples(inner, inner).map(lambda two: {"properties": {"a": two[0]}, "additionalProperties": two[1]}),
            st.tuples(inner, inner).map(lambda two: {**two[0], **two[1]}),
            inner.map(lambda one: {"items": one, "uniqueItems": True}),
        ),
        max_leaves=4,
    )


SCHEMAS = schemas(*LEAVES) | st.tuples(schemas(*LEAVES, *[REFERENCE] * 8), schemas(*LEAVES)).map(
    lambda two: {**two[0], "$defs": {"x": two[1]}}
)


def any_of(schema: Any) -> Any:
    """The schema as it is compiled: alternatives may overlap."""
    if isinstance(schema, list):
        return [any_of(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {"anyOf" if key == "oneOf" and "anyOf" not in schema else key: any_of(one) for key, one in schema.items()}


@given(schema=SCHEMAS, value=VALUES)
@settings(max_examples=400, deadline=None)
def test_what_the_schema_allows_is_allowed_without_the_keywords(schema: dict[str, Any], value: Any) -> None:
    loosened = loosen_schema(schema)
    if not loosened.dropped:
        assert is_valid(schema, value) == is_valid(loosened.schema, value)
    elif is_valid(schema, value):
        assert is_valid(any_of(loosened.schema), value)


@pytest.mark.parametrize("keyword", RULES)
def test_a_rule_is_named_with_its_place_or_dropped(keyword: str) -> None:
    schema = {"properties": {"p": {"anyOf": [RULES[keyword]]}}}
    with pytest.raises(InvalidRequestError, match=r"x has .* at '/properties/p/anyOf/0', which .* leave it out, or y"):
        loosen_or_refuse_schema("x", schema, ", or y")
    assert keyword in loosen_schema(schema).dropped


@pytest.mark.parametrize("schema", SILENT, ids=str)
def test_what_says_nothing_is_no_reason_to_refuse_or_to_warn(schema: dict[str, Any]) -> None:
    assert loosen_schema(schema).dropped == ()
    loosen_or_refuse_schema("x", schema, "")


def test_a_format_that_the_standard_does_not_know_is_never_a_reason_to_refuse() -> None:
    schema = {"type": "string", "format": "file-path"}
    assert loosen_or_refuse_schema("x", schema, "") == ({"type": "string"}, ("format",))
    assert loosen_schema(schema) == ({"type": "string"}, ("format",))


def test_overlapping_alternatives_are_named_and_exclusive_ones_are_not() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert loosen_schema({"items": overlapping}).dropped == ("oneOf",)
    for branches in ([{"type": "string"}, {"type": "null"}], [{"const": 1}, {"enum": [2]}]):
        assert loosen_schema({"oneOf": branches}).dropped == ()


def test_the_header_names_tools_and_keywords_within_bounds() -> None:
    assert dropped_keywords_header((("f", ("format", "not")), ("g", ("if",)))) == "f: format, not; g: if"
    assert len(dropped_keywords_header(tuple((f"tool_{number}", ("not",)) for number in range(500)))) < 1100


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "qwen3_coder"])
def test_one_tool_of_twenty_does_not_make_a_required_call_fail(backend: Backend, family: str) -> None:
    plain = [
        tool(f"plain_{number}", {"type": "object", "properties": {"a": {"type": "string"}}}) for number in range(7)
    ]
    parts = {**RULES, "uniqueItems": SET}
    hard = [tool(f"hard_{key}", {"type": "object", "properties": {"p": parts[key]}}) for key in parts]
    answers = Answers(backend, family, tools=[*plain, *hard], tool_choice="required")
    assert answers.allows(written(family, "hard_uniqueItems", {"p": [1, 1]}))
    assert not answers.allows(written(family, "hard_uniqueItems", {"p": "x"}))
    assert {name for name, _ in answers.params.dropped} == {f"hard_{key}" for key in parts}
    for key in RULES:
        strict = tool(f"hard_{key}", {"type": "object", "properties": {"p": RULES[key]}}, strict=True)
        with pytest.raises(InvalidRequestError, match=f"tools: function 'hard_{key}' has .*'/properties/p'") as caught:
            Answers(backend, family, tools=[*plain, strict])
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "family", ["hermes", "llama3_json", "mistral", "mistral-args", "pythonic", "qwen3_coder", "glm45"]
)
def test_an_error_of_the_compiler_names_the_tool(backend: Backend, family: str) -> None:
    overlapping = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [tool("one"), tool("two", {"type": "object", "properties": {"p": overlapping}}), tool("three")]
    answers = Answers(backend, family, tools=tools, tool_choice="required")
    check = build((backend.to_str(), backend.get_vocab_size(), [0], 60.0))
    with pytest.raises(InvalidRequestError, match=r"^tool 'two': patternProperties is supported only if"):
        check(answers.params.sampling.grammar)


@pytest.mark.parametrize("strict", [{}, {"strict": True}], ids=str)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_set_of_pydantic_is_the_argument_of_a_constrained_call(
    backend: Backend, strict: dict[str, Any], choice: str
) -> None:
    class Tags(BaseModel):
        tags: set[str]

    answers = Answers(backend, "hermes", tools=[tool("save", Tags.model_json_schema(), **strict)], tool_choice=choice)
    if choice == "auto" and not strict:
        assert answers.params.sampling.grammar is None
        return
    text = written("hermes", "save", {"tags": ["a", "b"]})
    assert answers.allows(text) and answers.params.dropped == (("save", ("uniqueItems",)),)
    assert Tags.model_validate_json(json.dumps(answers.calls(text)[0][1])).tags == {"a", "b"}
    assert LLMatcher(answers.engine, answers.params.sampling.grammar).get_error() == ""
