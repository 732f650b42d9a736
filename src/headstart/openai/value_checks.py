"""Checks of single values of a request, with errors that name value, limit and remedy.

No value is trusted before it is checked: `true` is not 1, a number must be finite, a string must be encodable.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds

_SHOWN_CHARS = 60


def safe_repr(value: object) -> str:
    """Return `value` as a short ASCII text that is safe in a message to a client: no addresses, bounded length."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        text = value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "..."
        return ascii(text)
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else "a value of another type"


def format_limit(number: float) -> str:
    """Return a limit in readable form: 2 and not 2.0, 3.40282e+38 and not 39 digits."""
    if isinstance(number, float) and abs(number) >= 1e15:
        return f"{number:g}"
    return str(int(number)) if float(number).is_integer() else str(number)


def raise_invalid_value(name: str, problem: str, remedy: str) -> NoReturn:
    """Raise InvalidRequestError with the message "name problem; remedy"."""
    raise InvalidRequestError(f"{name} {problem}; {remedy}", param=name)


def missing_parameter_error(name: str) -> InvalidRequestError:
    """Return the error for a required parameter that is absent."""
    return InvalidRequestError(f"{name} is missing", param=name, code="missing_required_parameter")


def raise_unsupported(name: str, why: str) -> NoReturn:
    """Raise InvalidRequestError for a known parameter that this server does not support."""
    raise InvalidRequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def check_encodable_text(name: str, text: str) -> str:
    """Return `text` if it is encodable as UTF-8 (no lone surrogates), else raise InvalidRequestError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise_invalid_value(name, "contains a lone surrogate", "send valid Unicode")
    return text


def check_string(name: str, value: object) -> str:
    """Return a required string. Raises InvalidRequestError."""
    if value is None:
        raise missing_parameter_error(name)
    if not isinstance(value, str):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be a string")
    return check_encodable_text(name, value)


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer in [low, high], else raise InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise_invalid_value(name, f"is {safe_repr(value)}", f"it must be an integer between {low} and {high}")
    if not low <= value <= high:
        raise_invalid_value(name, f"is {safe_repr(value)}", f"it must be between {low} and {high}")
    return value


def parse_positive_query_count(name: str, text: str, high: int) -> int:
    """Return a query parameter, an integer in [1, high]. Raises InvalidRequestError."""
    if not text.isdecimal() or not text.isascii() or not 1 <= int(text[: len(str(high)) + 1]) <= high:
        raise_invalid_value(name, f"is {safe_repr(text)}", f"it must be between 1 and {high}")
    return int(text)


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Return `value` as a finite float in [low, high], else raise InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise_invalid_value(
            name, f"is {safe_repr(value)}", f"it must be a number between {format_limit(low)} and {format_limit(high)}"
        )
    if not low <= value <= high:
        raise_invalid_value(
            name, f"is {safe_repr(value)}", f"it must be between {format_limit(low)} and {format_limit(high)}"
        )
    return float(value)


def check_list(name: str, value: object, max_items: int, items: str = "") -> "list[Any] | tuple[Any, ...]":
    """Return `value` if it is a list of at most `max_items`, else raise InvalidRequestError. `items` names them."""
    if not isinstance(value, list | tuple):
        raise_invalid_value(name, f"is {safe_repr(value)}", f"it must be a list{items and ' of '}{items}")
    if len(value) > max_items:
        raise_invalid_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
    return value


def check_mapping(name: str, value: object, max_items: int) -> Mapping[Any, Any]:
    """Return `value` if it is an object of at most `max_items` entries, else raise InvalidRequestError."""
    if not isinstance(value, Mapping):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be an object")
    if len(value) > max_items:
        raise_invalid_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
    return value


def check_token_ids(name: str, values: object, bounds: RequestBounds, *, max_items: int) -> tuple[int, ...]:
    """Return `values` as a tuple of at most `max_items` token ids of the vocabulary. Raises InvalidRequestError."""
    values = check_list(name, values, max_items, "token ids")
    for value in values:
        check_int(name, value, 0, bounds.vocab_size - 1)
    return tuple(values)
