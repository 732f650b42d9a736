"""JSON files of a model folder, read with limits on size and nesting; their content is not trusted."""

import json
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError

MAX_JSON_BYTES = 32 << 20  # the index of the largest published checkpoints takes 10 MB
MAX_DEPTH = 32  # published files nest at most 6 deep; copying and printing recurse once or more per level
MAX_MESSAGE_CHARS = 400


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises ConfigError if it is missing, too large, too deep or not an object."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; a model folder holds config.json and *.safetensors")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    num_bytes = path.stat().st_size
    if num_bytes > MAX_JSON_BYTES:
        raise ConfigError(f"{path} is {num_bytes} bytes long; at most {MAX_JSON_BYTES} are read")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line_error(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; at most {MAX_DEPTH} levels are read") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not a JSON object")
    if _deeper_than(data, MAX_DEPTH):
        raise ConfigError(f"{path} is nested too deeply; at most {MAX_DEPTH} levels are read")
    return data


def one_line_error(error: BaseException) -> str:
    """Return the message of an error as one short line of printable characters, or its type if it has none."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) or not text:
        text = f"{type(error).__name__} {text}".strip()
    return shorten_text(text)


def shorten_text(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Return `text` in printable characters, cut to `max_chars`."""
    cut = text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def _deeper_than(data: Any, limit: int) -> bool:
    """Return whether lists and objects nest more than `limit` deep. Works level by level, without recursion."""
    level: list[Any] = [data]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
