"""Values of JSON with the type that is expected, empty ones in the place of others."""

import json
from typing import Any, cast


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object; {} for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}  # JSON has no other keys


def as_list(value: object) -> list[Any]:
    """Return a JSON list; [] for any other value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def parsed_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is; {} for any other text."""
    try:
        return as_object(json.loads(text))
    except (ValueError, RecursionError):
        return {}
