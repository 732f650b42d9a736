"""RequestModel: the pydantic model of a request body, and its validation errors as InvalidRequestError.

A field declares name, type, range, default and description once, for validation and for /openapi.json. Types are
strict: "1", 1.0 and true are no integers. `null` means the default. Unknown fields are accepted. A limit that depends
on the server is the name of an attribute of Bounds, which validation gets as its context.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from headstart.openai.bounds import RequestBounds
from headstart.openai.value_checks import (
    check_list,
    format_limit,
    missing_parameter_error,
    raise_invalid_value,
    safe_repr,
)

_QUOTED = re.compile(r"'([^']*)'")
_TYPES = {
    "bool_type": "it must be true or false",
    "string_type": "it must be a string",
    "model_type": "it must be an object",
}
_Model = TypeVar("_Model", bound="RequestModel")


class RequestModel(BaseModel):
    """A request body, or an object in one; immutable."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    max_entries: ClassVar[int | None] = None  # also of unknown fields; None: the body's own limits suffice

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values  # refused by pydantic
        if cls.max_entries is not None and len(values) > cls.max_entries:
            raise PydanticCustomError("too_long", "too long", {"max_length": cls.max_entries})
        return {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}


@dataclass(frozen=True, slots=True)
class UpperLimit:
    """The upper limit of an integer field: the attribute `bound` of Bounds."""

    bound: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: int, info: core_schema.ValidationInfo) -> int:
            if value > getattr(info.context, self.bound):
                raise PydanticCustomError("less_than_equal", "too large")
            return value

        return core_schema.with_info_after_validator_function(check, handler(source))


Text = Annotated[str, Field(min_length=0)]  # pydantic refuses lone surrogates only in texts with a limit


def custom_validator(check: Callable[[Any, RequestBounds], Any], accepts: Any) -> PlainValidator:
    """Return the validator of a field with a check of its own, which raises InvalidRequestError.

    `accepts` is the type before the check, for /openapi.json.
    """
    return PlainValidator(lambda value, info: check(value, info.context), json_schema_input_type=accepts)


SentObjects = list[dict[str, Any]]
SentMessages = Annotated[  # of another API, each of which its own reader checks
    list[Any], custom_validator(lambda value, _: list(check_list("messages", value, 1 << 20, "messages")), SentObjects)
]


def validate_as(model: type[_Model], values: Mapping[str, Any], bounds: RequestBounds) -> _Model:
    """Return the values as a `model`. Raises InvalidRequestError, with `param` set, for one invalid value."""
    try:
        return model.model_validate(values, context=bounds)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
    _refuse(model, details, bounds)


def _refuse(model: type[RequestModel], details: ErrorDetails, bounds: RequestBounds) -> NoReturn:
    """Raise the InvalidRequestError that names field, value, limit and remedy."""
    kind, value, limits = details["type"], details["input"], details.get("ctx", {})
    name = ".".join(map(str, details["loc"]))[:128]
    problem = f"is {safe_repr(value)}"
    if kind == "missing":
        raise missing_parameter_error(name)
    if kind == "extra_forbidden":
        raise_invalid_value(name, "is unknown", f"the fields are {', '.join(model.model_fields)}")
    if kind == "string_unicode":
        raise_invalid_value(name, "contains a lone surrogate", "send valid Unicode")
    if kind in ("string_too_long", "too_long"):
        unit = "characters" if kind == "string_too_long" else "entries"
        raise_invalid_value(name, f"has {len(value)} {unit}", f"it may have at most {limits['max_length']}")
    if kind == "literal_error":
        raise_invalid_value(name, problem, f"it must be one of {', '.join(_QUOTED.findall(limits['expected']))}")
    if kind in _TYPES:
        raise_invalid_value(name, problem, _TYPES[kind])
    limits |= _limits(_field(model, details["loc"]), bounds)
    if kind == "string_too_short":
        raise_invalid_value(name, "is empty", f"use 1 to {limits['max_length']} characters, or leave it out")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    noun = "an integer " if kind == "int_type" else "" if is_number else "a number "
    low = (
        f"above {format_limit(limits['gt'])} and at most"
        if "gt" in limits
        else f"between {format_limit(limits['ge'])} and"
    )
    raise_invalid_value(name, problem, f"it must be {noun}{low} {format_limit(limits['le'])}")


def _field(model: type[RequestModel], path: tuple[int | str, ...]) -> FieldInfo:
    *outer, name = map(str, path)
    for part in outer:
        annotation = model.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))  # a model, or a union with one
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RequestModel))
    return model.model_fields[name]


def _limits(field: FieldInfo, bounds: RequestBounds) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for item in field.metadata:
        limits |= {key: getattr(item, key) for key in ("ge", "gt", "le", "max_length") if hasattr(item, key)}
        if isinstance(item, UpperLimit):
            limits["le"] = getattr(bounds, item.bound)
    return limits
