"""Fields: typed, bounded values read out of a plain mapping, with errors that name value, limit and remedy.

Every value is hostile until it was read through here: `null` means the default, `true` is not 1, a number must be
finite, a string must be encodable. Names that nobody read are what the client sent in vain (`unread`).
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from headstart.core.errors import InvalidRequestError

_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Returns `value` as a short text that is safe to send to a client: no addresses, no megabytes."""
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
    """Returns a limit as people write it: 2 and not 2.0, and 3.40282e+38 instead of 39 digits."""
    if abs(number) >= 1e15:
        return f"{number:g}"
    return str(int(number)) if float(number).is_integer() else str(number)


def bad_value(name: str, problem: str, remedy: str) -> NoReturn:
    """Raises InvalidRequestError saying "name problem; remedy"."""
    raise InvalidRequestError(f"{name} {problem}; {remedy}", param=name)


def unsupported(name: str, why: str) -> NoReturn:
    """Raises InvalidRequestError for a parameter that this server knows of and does not do."""
    raise InvalidRequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def check_text(name: str, text: str) -> str:
    """Returns `text` if it is encodable as UTF-8 (no lone surrogates), else raises InvalidRequestError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        bad_value(name, "contains a lone surrogate", "send valid Unicode")
    return text


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Returns `value` if it is an integer in [low, high], else raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int):
        bad_value(name, f"is {shown(value)}", f"it must be an integer between {low} and {high}")
    if not low <= value <= high:
        bad_value(name, f"is {shown(value)}", f"it must be between {low} and {high}")
    return value


def check_number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Returns `value` as a finite float in [low, high], or (low, high] with `above_low`; else InvalidRequestError."""
    limits = f"{'above ' if above_low else 'between '}{plain(low)} and {'at most ' if above_low else ''}{plain(high)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad_value(name, f"is {shown(value)}", f"it must be a number {limits}")
    if not low <= value <= high or (above_low and value == low):
        bad_value(name, f"is {shown(value)}", f"it must be {limits}")
    return float(value)


class Fields:
    """One mapping under inspection. A missing name and `null` both read as None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """Returns the raw value, or None, and counts the name as known."""
        self._read.add(name)
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Returns an integer in [low, high], or None if there is none."""
        value = self.take(name)
        return None if value is None else check_int(name, value, low, high)

    def number(self, name: str, low: float, high: float, default: float, *, above_low: bool = False) -> float:
        """Returns a finite number in [low, high]."""
        value = self.take(name)
        return default if value is None else check_number(name, value, low, high, above_low=above_low)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Returns true or false; 0, 1 and texts are refused."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            bad_value(name, f"is {shown(value)}", "it must be true or false")
        return value

    def string(self, name: str, max_chars: int) -> str | None:
        """Returns a text of at most `max_chars` characters, or None if there is none."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            bad_value(name, f"is {shown(value)}", "it must be a string")
        if len(value) > max_chars:
            bad_value(name, f"has {len(value)} characters", f"it may have at most {max_chars}")
        return check_text(name, value)

    def items(self, name: str, max_items: int) -> list[Any]:
        """Returns a list of at most `max_items` values, empty if there is none."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            bad_value(name, f"is {shown(value)}", "it must be a list")
        if len(value) > max_items:
            bad_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
        return list(value)

    def mapping(self, name: str, max_items: int) -> dict[Any, Any] | None:
        """Returns an object of at most `max_items` entries, or None if there is none."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            bad_value(name, f"is {shown(value)}", "it must be an object")
        if len(value) > max_items:
            bad_value(name, f"has {len(value)} entries", f"it may have at most {max_items}")
        return dict(value)

    def unread(self) -> tuple[str, ...]:
        """Returns the names that were sent and that nobody read, sorted."""
        return tuple(sorted(str(name) for name in self.values if name not in self._read))
