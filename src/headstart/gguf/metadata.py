"""Typed reading of GGUF metadata: values with a check of their type, and errors that name the key."""

from typing import Any

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import GGUFFile

REQUIRED: Any = object()  # as a default: the key must be there


def text_of(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the text of `key`, or `default` if it is missing. Raises ConfigError."""
    return _typed(file, key, default, str, "a text")


def integer_of(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the whole number of `key`, or `default` if it is missing. Raises ConfigError."""
    return _typed(file, key, default, int, "a whole number")


def number_of(file: GGUFFile, key: str, default: Any = REQUIRED) -> Any:
    """Return the number of `key` as a float, or `default` if it is missing. Raises ConfigError."""
    found = _typed(file, key, default, (int, float), "a number")
    return float(found) if key in file.metadata else found


def flag_of(file: GGUFFile, key: str, default: bool) -> bool:
    """Return the truth value of `key`, or `default` if it is missing. Raises ConfigError."""
    found = file.metadata.get(key, default)
    if not isinstance(found, bool):
        raise ConfigError(f"{file.path}: {key} is {found!r:.80}; it must be true or false")
    return found


def list_of(file: GGUFFile, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
    """Return the list of `key`, or `default` if it is missing. Raises ConfigError unless all items are of `kind`."""
    found = _typed(file, key, default, list, "a list")
    if key in file.metadata and not all(isinstance(item, kind) for item in found):
        raise ConfigError(f"{file.path}: {key} holds items of a wrong type")
    return found


def _typed(file: GGUFFile, key: str, default: Any, kind: type | tuple[type, ...], article: str) -> Any:
    if key not in file.metadata:
        if default is REQUIRED:
            raise ConfigError(f"{file.path}: metadata key {key} is missing")
        return default
    found = file.metadata[key]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ConfigError(f"{file.path}: {key} is {found!r:.80}; it must be {article}")
    return found
