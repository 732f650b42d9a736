"""JSON of request bodies: decoded strictly, after its number of values was checked. Shapes are checked later.

For any input, the only exception raised is InvalidRequestError.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any

import msgspec

from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.openai.bounds import MAX_JSON_VALUES
from headstart.openai.value_checks import safe_repr

_VALUE = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]', re.DOTALL
)  # also matches an unterminated string, which keeps the time linear
_VALUE_OR_NUMBER = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|-?\d[\d.eE+-]*+', re.DOTALL)
_SCALARS = frozenset((str, int, float, bool, type(None)))
_SHORT = 64  # items of a list
MAX_DEPTH = 64  # of nested lists and objects


def parse_json_object(body: bytes | bytearray | memoryview, max_numbers: int | None = None) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequestError (invalid_json) for anything else.

    Strict: no NaN, no numbers that overflow, no lone surrogates, at most MAX_DEPTH levels, MAX_JSON_VALUES values, and
    as many fractions; at most `max_numbers` numbers, of which a list of token ids takes 8 to 40 bytes each: then
    RequestTooLargeError.
    """
    body = strip_bom(body)
    _check_size(body)
    if max_numbers is not None:
        _check_numbers(body, max_numbers)
    try:
        value = parse_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter below msgspec 0.23
        message = _not_utf8(body) or f"the body is not valid JSON: {error}"
        raise InvalidRequestError(message, code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is {safe_repr(value)}; it must be a JSON object", code="invalid_json")
    check_json_depth(value)
    return value


def strip_bom(body: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """Return the body without the byte order mark that editors and shells of some systems put before UTF-8."""
    return body[len(BOM_UTF8) :] if body[: len(BOM_UTF8)] == BOM_UTF8 else body


def parse_json(text: bytes | bytearray | memoryview | msgspec.Raw) -> Any:
    """Return the value of a JSON text. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError.

    Fractions go to Python's `float`: msgspec 0.22 takes 16 us for "1e308", and lets no other thread run meanwhile. They
    still take ten times as long as token ids, so their number is bounded.
    """
    if len(memoryview(text)) <= MAX_JSON_VALUES:  # each takes at least a byte
        return _DECODER.decode(text)
    left = MAX_JSON_VALUES

    def fraction(digits: str) -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {MAX_JSON_VALUES} numbers with a fraction or an exponent")
        return _fraction(digits)

    return msgspec.json.Decoder(float_hook=fraction).decode(text)


def _fraction(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise ValueError("number out of range")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_fraction)


def _not_utf8(body: bytes | bytearray | memoryview) -> str | None:
    """Return the message for a body that is not UTF-8, with the position in the body (msgspec names none)."""
    text = bytes(body)
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        at, line = error.start, text.count(b"\n", 0, error.start) + 1
        return f"the body is not valid UTF-8 at byte {at} ({text[at]:02X} in hex, line {line}); send it as UTF-8"
    return None


def _check_size(body: bytes | bytearray | memoryview) -> None:
    """Raise InvalidRequestError, before any object is built, if the body has more than MAX_JSON_VALUES values.

    Numbers do not count: the number of token ids in a prompt is limited by the size of the body only.
    """
    if len(body) <= MAX_JSON_VALUES:
        return  # each value takes at least a byte
    text = bytes(body)
    if text.count(b'"') // 2 + text.count(b"[") + text.count(b"{") <= MAX_JSON_VALUES:
        return
    num_values = sum(1 for _ in islice(_VALUE.finditer(text), MAX_JSON_VALUES + 1))
    if num_values > MAX_JSON_VALUES:
        raise InvalidRequestError(
            f"the body has more than {MAX_JSON_VALUES} strings, lists and objects, which is the limit: send less",
            code="invalid_json",
        )


def _check_numbers(body: bytes | bytearray | memoryview, max_numbers: int) -> None:
    """Raise RequestTooLargeError, before any object is built, if the body has more than `max_numbers` numbers."""
    if len(body) // 2 <= max_numbers:
        return  # each number takes at least a digit and a separator
    text = bytes(body)
    if text.count(b",") < max_numbers:
        return
    found = (match for match in _VALUE_OR_NUMBER.finditer(text) if match.group()[0] in b"-0123456789")
    if sum(1 for _ in islice(found, max_numbers + 1)) > max_numbers:
        raise RequestTooLargeError(
            f"prompt is too long: the body has more than {max_numbers} numbers, and no request of this model has as "
            "many token ids; shorten it"
        )


def check_json_depth(value: object) -> None:
    """Raise InvalidRequestError if lists and objects are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):  # do not copy the token ids of a prompt, which may be millions
                inner.extend(item if len(item) <= _SHORT else [one for one in item if type(one) not in _SCALARS])
        if not inner:
            return
        level = [item for item in inner if type(item) not in _SCALARS]
    if level:
        raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it", code="invalid_json")
