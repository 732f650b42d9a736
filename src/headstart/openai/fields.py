"""Fields: typed, bounded values read from a plain mapping, with errors that name value, limit and remedy.

No value is trusted before it is read through this module: `null` means the default, `true` is not 1, a number must be
finite, a string must be encodable. `unread` returns the names that were sent but never read.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from headstart.core.errors import InvalidRequestError

_SHOWN_CHARS = 60


def shown(value: object) -> str:
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


def plain(number: float) -> str:
    """Return a limit in readable form: 2 and not 2.0, 3.40282e+38 and not 39 digits."""
    if abs(number) >= 1e15:
        return f"{number:g}"
    return str(int(number)) if float(number).is_integer() else str(number)


def bad_value(name: str, problem: str, remedy: str) -> NoReturn:
    """Raise InvalidRequestError with the message "name problem; remedy"."""
    raise InvalidRequestError(f"{name} {problem}; {remedy}", param=name)


def unsupported(name: str, why: str) -> NoReturn:
    """Raise InvalidRequestError for a known parameter that this server does not support."""
    raise InvalidRequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def check_text(name: str, text: str) -> str:
    """Return `text` if it is encodable as UTF-8 (no lone surrogates), else raise InvalidRequestError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        bad_value(name, "contains a lone surrogate", "send valid Unicode")
    return text


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer in [low, high], else raise InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        bad_value(name, f"is {shown(value)}", f"it must be an integer between {low} and {high}")
    if not low <= value <= high:
        bad_value(name, f"is {shown(value)}", f"it must be between {low} and {high}")
    return value


def check_number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return `value` as a finite float in [low, high], or (low, high] with `above_low`. Raises InvalidRequestError."""
    limits = f"{'above ' if above_low else 'between '}{plain(low)} and {'at most ' if above_low else ''}{plain(high)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad_value(name, f"is {shown(value)}", f"it must be a number {limits}")
    if not low <= value <= high or (above_low and value == low):
        bad_value(name, f"is {shown(value)}", f"it must be {limits}")
    return float(value)


class Fields:
    """A mapping whose values are checked when read. A missing name and `null` both read as None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """Return the raw value or None, and mark the name as read."""
        self._read.add(name)
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high], or None if absent. Raises InvalidRequestError, as do the methods below."""
        value = self.take(name)
        return None if value is None else check_int(name, value, low, high)

    def number(self, name: str, low: float, high: float, default: float, *, above_low: bool = False) -> float:
        """Return a finite number in [low, high], or `default` if absent."""
        value = self.take(name)
        return default if value is None else check_number(name, value, low, high, above_low=above_low)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean, or `default` if absent; 0, 1 and texts are refused."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            bad_value(name, f"is {shown(value)}", "it must be true or false")
        return value

    def string(self, name: str, max_chars: int) -> str | None:
        """Return a text of at most `max_chars` characters, or None if absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            bad_value(name, f"is {shown(value)}", "it must be a string")
        if len(value) > max_chars:
            bad_value(name, f"has {len(value)} characters", f"it may have at most {max_chars}")
        return check_text(name, value)

    def items(self, name: str, max_items: int) -> list[Any]:
        """Return a list of at most `max_items` values, empty if absent."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            bad_value(name, f"is {shown(value)}", "it must be a list")
        if len(value) > max_items:
            bad_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
        return list(value)

    def mapping(self, name: str, max_items: int) -> dict[Any, Any] | None:
        """Return an object of at most `max_items` entries, or None if absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            bad_value(name, f"is {shown(value)}", "it must be an object")
        if len(value) > max_items:
            bad_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
        return dict(value)

    def unread(self) -> tuple[str, ...]:
        """Return the names in the mapping that were not read, sorted."""
        return tuple(sorted(str(name) for name in self.values if name not in self._read))
