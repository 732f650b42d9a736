"""A text that is JSON in one form: keys sorted, no blanks, numbers as written. Other texts are unchanged."""

import json
from typing import Any, cast


class _Number(str):
    """A number as it was written, so that it loses no digit."""

    __slots__ = ()


def canonical_json(text: str) -> str:
    """Return a JSON object or list in its one form; the text itself if it is neither, or has a key twice."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=_Number, parse_float=_Number, parse_constant=_refuse
        )
        pieces: list[str] = []
        _write(value, pieces)
    except (ValueError, RecursionError):
        return text
    return "".join(pieces)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _write(value: Any, pieces: list[str]) -> None:
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        for index, key in enumerate(sorted(found)):
            pieces.append(f"{',' if index else '{'}{json.dumps(key, ensure_ascii=False)}:")
            _write(found[key], pieces)
        pieces.append("}" if found else "{}")
    elif isinstance(value, list):
        pieces.append("[")
        for index, item in enumerate(cast("list[Any]", value)):
            if index:
                pieces.append(",")
            _write(item, pieces)
        pieces.append("]")
    else:
        pieces.append(str(value) if isinstance(value, _Number) else json.dumps(value, ensure_ascii=False))
