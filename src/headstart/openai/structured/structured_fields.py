"""Structured output in a request body: OpenAI's response_format, vLLM's structured_outputs and older guided_* fields.

At most one grammar may be requested. `grammar_of_fields` returns its text; grammar_check.py and the engine compile it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from headstart.core.errors import InvalidRequestError
from headstart.openai.request_json import parse_json_object
from headstart.openai.request_model import RequestModel, custom_validator
from headstart.openai.structured.dropped_keywords import Dropped, LoosenedSchema, loosen_or_refuse_schema, loosen_schema
from headstart.openai.structured.grammar_text import (
    ANY_OBJECT,
    choice_grammar,
    grammar_from_lark,
    json_schema_grammar,
    regex_grammar,
)
from headstart.openai.structured.schema_limits import check_and_adapt_lark, check_and_adapt_schema, check_regex_limits
from headstart.openai.structured.schema_rewrites import close_schema_objects
from headstart.openai.value_checks import (
    check_encodable_text,
    check_list,
    missing_parameter_error,
    raise_invalid_value,
    safe_repr,
)

MAX_GRAMMAR_BYTES = 64 << 10  # of a schema, a regular expression, a grammar, or all choices
MAX_CHOICES = 1024
MAX_WHITESPACE_CHARS = 64
_LARK_START = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
ANY_WHITESPACE = r"[ \t\r\n]{0,16}"  # bounded, so that no model can go on writing spaces


def read_json_schema(name: str, value: object) -> Mapping[str, Any]:
    """Return a JSON Schema, also if it is sent as a string of JSON. Raises InvalidRequestError."""
    if isinstance(value, str):
        check_grammar_size(name, value)
        value = _parsed(name, value)
    if not isinstance(value, Mapping | bool):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be a JSON Schema, as an object")
    if value is False:
        raise_invalid_value(name, "is false", "it allows no document at all")
    value = {} if value is True else value
    check_grammar_size(name, json.dumps(value))
    return check_and_adapt_schema(name, value)


def _parsed(name: str, text: str) -> Any:
    try:
        return parse_json_object(text.encode())
    except InvalidRequestError:
        raise_invalid_value(name, f"is {safe_repr(text)}", "it must be a JSON Schema, as an object")


def check_grammar_size(name: str, text: str) -> str:
    """Return a text of at most MAX_GRAMMAR_BYTES. Raises InvalidRequestError."""
    size = len(check_encodable_text(name, text).encode())
    if size > MAX_GRAMMAR_BYTES:
        raise_invalid_value(name, f"has {size} bytes", f"it may have at most {MAX_GRAMMAR_BYTES}")
    return text


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be a string that is not empty")
    return check_grammar_size(name, value)


def _choices(name: str, value: object) -> tuple[str, ...]:
    choices = tuple(dict.fromkeys(_text(name, choice) for choice in check_list(name, value, MAX_CHOICES, "strings")))
    if not choices:
        raise_invalid_value(name, "is an empty list", "send at least one choice")
    check_grammar_size(name, "".join(choices))
    return choices


def _whitespace(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_WHITESPACE_CHARS:
        raise_invalid_value(
            name, f"is {safe_repr(value)}", f"it must be a string of at most {MAX_WHITESPACE_CHARS} characters"
        )
    return check_encodable_text(name, value)


def _schema_field(name: str) -> Any:
    return custom_validator(lambda value, _: read_json_schema(name, value), dict[str, Any] | str)


def _text_field(name: str, limited: Callable[[str, str], str]) -> Any:
    return custom_validator(lambda value, _: limited(name, _text(name, value)), str)


def _choice_field(name: str) -> Any:
    return custom_validator(lambda value, _: _choices(name, value), list[str])


def _space_field(name: str) -> Any:
    return custom_validator(lambda value, _: _whitespace(name, value), str)


def _lark(name: str, text: str) -> str:
    """Return a grammar in Lark. Raises InvalidRequestError for GBNF, in which llama.cpp takes this field."""
    if "::=" in text and not _LARK_START.search(text):
        raise_invalid_value(
            name, "is a grammar in GBNF", "send one in Lark, a regular expression as regex, or a json_schema"
        )
    return check_and_adapt_lark(name, text)


class JsonSchemaFormat(RequestModel):
    """The schema of a response_format."""

    max_entries = 16
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: Annotated[Mapping[str, Any] | None, _schema_field("response_format.json_schema.schema")] = Field(
        None, alias="schema", description="A JSON Schema of draft 2020-12"
    )
    strict: bool | None = Field(
        None, description="true: keywords that no grammar keeps to are refused; else dropped and named in a header"
    )


class ResponseFormat(RequestModel):
    """OpenAI's response_format."""

    max_entries = 16
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Only with type json_schema")
    schema_: Annotated[Mapping[str, Any] | None, _schema_field("response_format.schema")] = Field(
        None, alias="schema", description="A JSON Schema in place of json_schema, as in llama.cpp"
    )


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs: one of json, regex, choice, grammar and json_object."""

    max_entries = 16
    json_: Annotated[Mapping[str, Any] | None, _schema_field("structured_outputs.json")] = Field(
        None, alias="json", description="A JSON Schema"
    )
    regex: Annotated[str | None, _text_field("structured_outputs.regex", check_regex_limits)] = None
    choice: Annotated[tuple[str, ...] | None, _choice_field("structured_outputs.choice")] = None
    grammar: Annotated[str | None, _text_field("structured_outputs.grammar", _lark)] = Field(
        None, description="In Lark"
    )
    json_object: bool = False
    disable_additional_properties: bool | None = Field(
        None, description="Objects have no properties but those that the schema lists; default: the server's option"
    )
    disable_any_whitespace: bool = Field(True, description="No whitespace between the tokens of JSON")
    whitespace_pattern: Annotated[str | None, _space_field("structured_outputs.whitespace_pattern")] = Field(
        None, description="A regular expression for the whitespace between the tokens of JSON"
    )


class StructuredFields(RequestModel):
    """The fields of a request body that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM")
    guided_json: Annotated[Mapping[str, Any] | None, _schema_field("guided_json")] = Field(
        None, description="A JSON Schema"
    )
    guided_regex: Annotated[str | None, _text_field("guided_regex", check_regex_limits)] = None
    guided_choice: Annotated[tuple[str, ...] | None, _choice_field("guided_choice")] = None
    guided_grammar: Annotated[str | None, _text_field("guided_grammar", _lark)] = Field(None, description="In Lark")
    guided_whitespace_pattern: Annotated[str | None, _space_field("guided_whitespace_pattern")] = Field(
        None, description="A regular expression for the whitespace between the tokens of JSON"
    )
    regex: Annotated[str | None, _text_field("regex", check_regex_limits)] = Field(None, description="As in SGLang")
    json_schema: Annotated[Mapping[str, Any] | None, _schema_field("json_schema")] = Field(
        None, description="A JSON Schema, as in SGLang and llama.cpp"
    )
    grammar: Annotated[str | None, _text_field("grammar", _lark)] = Field(
        None, description="In Lark; llama.cpp's GBNF is refused"
    )


_CONSTRAINTS = frozenset(StructuredFields.model_fields)


class OutputGrammar(NamedTuple):
    """The text of a grammar, and the field that requests it. `dropped`: keywords that it does not keep to."""

    name: str
    text: str
    dropped: Dropped = ()


def grammar_of_fields(fields: StructuredFields, *, closes_objects: bool = False) -> OutputGrammar | None:
    """Return the grammar of the output; None if there is none.

    `closes_objects`: objects have no properties but those that a schema lists.

    Raises InvalidRequestError if several fields do.
    """
    if fields.model_fields_set.isdisjoint(_CONSTRAINTS):
        return None
    closes = closes_objects
    guided = {kind: getattr(fields, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
    others = {"regex": fields.regex, "json_schema": fields.json_schema, "grammar": fields.grammar}
    found = [*_of_response_format(fields, closes), *_of_structured_outputs(fields, closes)]
    found += _of_values("guided_", guided, closes, fields.guided_whitespace_pattern)
    found += _of_values("", others, closes)
    found = list({one.text: one for one in reversed(found)}.values())[::-1]  # guidance sends one by two names
    if len(found) > 1:
        names = " and ".join(one.name for one in found)
        raise_invalid_value(
            found[1].name, f"is set beside {found[0].name}", f"only one of {names} can constrain the output"
        )
    return found[0] if found else None


def _of_response_format(fields: StructuredFields, closes: bool) -> list[OutputGrammar]:
    chosen = fields.response_format
    if chosen is None or chosen.type == "text":
        return []
    if chosen.schema_ is not None and chosen.json_schema is None:
        return [_of_schema("response_format", chosen.schema_, closes)]
    if chosen.type == "json_object":
        return [OutputGrammar("response_format", json_schema_grammar(ANY_OBJECT))]
    if chosen.json_schema is None:
        raise missing_parameter_error("response_format.json_schema")
    if chosen.json_schema.schema_ is None:
        raise missing_parameter_error("response_format.json_schema.schema")
    name, schema = "response_format", chosen.json_schema.schema_
    schema = close_schema_objects(schema) if closes else schema
    if chosen.json_schema.strict:
        return [_of_loosened(name, loosen_or_refuse_schema(name, schema, ", or send strict: false"))]
    return [_of_loosened(name, loosen_schema(schema))]


def _of_schema(name: str, schema: Mapping[str, Any], closes: bool, whitespace: str | None = None) -> OutputGrammar:
    schema = close_schema_objects(schema) if closes else schema
    remedy = ", or send the schema as response_format of type json_schema"
    return _of_loosened(name, loosen_or_refuse_schema(name, schema, remedy), whitespace)


def _of_loosened(name: str, loosened: LoosenedSchema, whitespace: str | None = None) -> OutputGrammar:
    schema, dropped = loosened
    text = json_schema_grammar(schema, whitespace=whitespace, is_strict="oneOf" not in dropped)
    return OutputGrammar(name, text, ((name, dropped),) if dropped else ())


def _of_structured_outputs(fields: StructuredFields, closes: bool) -> list[OutputGrammar]:
    chosen = fields.structured_outputs
    if chosen is None:
        return []
    closes = closes if chosen.disable_additional_properties is None else chosen.disable_additional_properties
    spaces = chosen.whitespace_pattern
    if spaces is None and not chosen.disable_any_whitespace:
        spaces = ANY_WHITESPACE
    values = {
        "json": chosen.json_,
        "json_object": ANY_OBJECT if chosen.json_object else None,
        **{kind: getattr(chosen, kind) for kind in _OF_TEXTS},
    }
    found = [*_of_values("structured_outputs.", values, closes, spaces)]
    if not found:
        raise_invalid_value(
            "structured_outputs", "has no constraint", "set one of json, regex, choice, grammar, json_object"
        )
    return found


_OF_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": grammar_from_lark,
}


def _of_values(
    prefix: str, values: Mapping[str, Any], closes: bool, whitespace: str | None = None
) -> Iterator[OutputGrammar]:
    """Yield the grammars of fields that are set, by the ends of their names; those not of texts are of schemas."""
    for kind, value in values.items():
        if value is not None and kind in _OF_TEXTS:
            yield OutputGrammar(prefix + kind, _OF_TEXTS[kind](value))
        elif value is not None:
            yield _of_schema(prefix + kind, value, closes, whitespace)
