"""RequestModel and the OpenAPI document: what the document says of a field is what validation does with it."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from headstart.apis.openapi import request_body_schema
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.prefix_tokens import PrefixRequest
from headstart.openai.request_bodies import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headstart.openai.request_model import RequestModel, Text, UpperLimit, validate_as

BOUNDS = RequestBounds(vocab_size=100, max_model_len=64, max_n=7)
HI = [{"role": "user", "content": "hi"}]
REQUIRED: dict[type[RequestModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hi"},
    ChatRequest: {"messages": HI},
    TokenizeRequest: {},
    DetokenizeRequest: {"tokens": [1]},
    PrefixRequest: {"name": "x"},
}


class Inner(RequestModel):
    level: float = Field(1.0, gt=0.0, le=2.5)
    mode: Literal["slow", "fast"] | None = None


class Outer(RequestModel):
    size: Annotated[int | None, UpperLimit("max_n")] = Field(None, ge=1)
    inner: Inner = Inner()
    text: Text = ""


def schema(model: type[RequestModel]) -> dict[str, Any]:
    return request_body_schema(model)["requestBody"]["content"]["application/json"]["schema"]


def error(model: type[RequestModel], values: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate_as(model, values, BOUNDS)
    return caught.value


def label(value: object) -> str:
    return value.__name__ if isinstance(value, type) else value if isinstance(value, str) else ""


PROPERTIES = [(model, name, one) for model in REQUIRED for name, one in schema(model)["properties"].items()]


@pytest.mark.parametrize(("model", "name", "one"), PROPERTIES, ids=label)
def test_every_property_but_the_required_may_be_null(model: type[RequestModel], name: str, one: dict[str, Any]) -> None:
    says_so = "null" in one.get("type", ()) or {"type": "null"} in one.get("anyOf", ())
    assert says_so == (name not in REQUIRED[model])
    if says_so:
        assert validate_as(model, {**REQUIRED[model], name: None}, BOUNDS) == validate_as(
            model, REQUIRED[model], BOUNDS
        )
    else:
        assert error(model, {**REQUIRED[model], name: None}).param == name


RANGES = [(model, name, one) for model, name, one in PROPERTIES if {"minimum", "exclusiveMinimum"} & one.keys()]


@pytest.mark.parametrize(("model", "name", "one"), RANGES, ids=label)
def test_ranges_of_the_document_are_those_of_validation(
    model: type[RequestModel], name: str, one: dict[str, Any]
) -> None:
    limits = [one[key] for key in ("minimum", "maximum") if key in one]
    for limit in limits:
        validate_as(model, {**REQUIRED[model], name: limit}, BOUNDS)
    beyond = [one["exclusiveMinimum"] if "exclusiveMinimum" in one else one["minimum"] - 1]
    beyond += [one["maximum"] * 2 + 1] if "maximum" in one else []
    for value in beyond:
        refused = error(model, {**REQUIRED[model], name: value})
        assert refused.param == name and str(refused).startswith(f"{name} is {value}; it must be ")


def test_the_document_has_no_references_and_no_titles() -> None:
    for model in REQUIRED:
        text = str(schema(model))
        assert "$ref" not in text and "$defs" not in text and "'title'" not in text


def test_a_limit_of_the_server_is_named_like_any_other() -> None:
    assert validate_as(Outer, {"size": 7}, BOUNDS).size == 7
    assert str(error(Outer, {"size": 8})) == "size is 8; it must be between 1 and 7"
    assert str(error(Outer, {"size": "8"})) == "size is '8'; it must be an integer between 1 and 7"


def test_an_error_inside_an_object_names_the_path() -> None:
    refused = error(Outer, {"inner": {"level": 0}})
    assert (refused.param, str(refused)) == ("inner.level", "inner.level is 0; it must be above 0 and at most 2.5")
    assert str(error(Outer, {"inner": {"mode": 5}})) == "inner.mode is 5; it must be one of slow, fast"
    assert str(error(Outer, {"inner": []})) == "inner is a list; it must be an object"


@pytest.mark.parametrize("value", [True, "1", 1.0, [], {}, 10**400, -(10**400)])
def test_no_value_is_converted_to_an_integer(value: Any) -> None:
    assert error(Outer, {"size": value}).param == "size"


def test_a_text_without_a_limit_must_be_unicode_as_well() -> None:
    assert str(error(Outer, {"text": "\ud800"})) == "text contains a lone surrogate; send valid Unicode"
