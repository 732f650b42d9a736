"""Arguments of a tool call in a conversation: an object, whatever a model wrote or a client sent.

Chat templates read them as an object. A call that was cut by max_tokens comes back as history, so text that ends early
is closed where it ends.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.request_json import MAX_DEPTH, check_json_depth, parse_json_object

KEY = "arguments"  # of what is no object
_CLOSING = {"{": "}", "[": "]"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?P<end>"|\\?\Z)|[\[\]{}]', re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(?P<cut>\\(?:u[0-9a-fA-F]{0,3})?)\Z")
_CUT_WORD = re.compile(r"[^\s,:\[\]{}\"]+\Z")


def parse_call_arguments(value: object) -> dict[str, Any]:
    """Return the arguments of a call as plain JSON; what is no object is under KEY, nothing at all is an empty one."""
    if isinstance(value, str):
        try:
            return parse_json_object(value.encode())
        except (InvalidRequestError, UnicodeEncodeError):
            found = _decoded(value)
    else:
        found = value
    if isinstance(found, str):
        found = _decoded(found)  # JSON in a string, as some models write it
    if found in (None, "", "null"):
        return {}
    plain = found if isinstance(found, Mapping) else {KEY: found}
    try:
        check_json_depth(plain)
        text = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace").decode()
        return json.loads(text, parse_constant=str)
    except (InvalidRequestError, ValueError, TypeError, RecursionError):
        return {KEY: str(value).encode("utf-8", "replace").decode()}


def _decoded(text: str) -> Any:
    """Return the value of a JSON text, closed where it ends early; the text itself if it is none."""
    for candidate in _closed(text):
        try:
            return json.loads(candidate, strict=False, parse_constant=str)
        except (ValueError, RecursionError):
            continue
    return text


def _closed(text: str) -> Iterator[str]:
    """Yield the text, and forms of it with all strings, lists and objects closed."""
    yield text
    closing: list[str] = []
    is_open = False
    for token in _TOKEN.finditer(text):
        char = token.group()[0]
        if char == '"':
            is_open = token["end"] != '"'
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif not closing or closing.pop() != char:
            return
        if len(closing) > MAX_DEPTH:
            return
    if not closing and not is_open:
        return
    end = "".join(reversed(closing))
    if is_open:
        cut = _CUT_ESCAPE.search(text)
        text = (text if cut is None else text[: cut.start("cut")]) + '"'
    text = text.rstrip()
    yield text + end
    yield f"{text}: null{end}"
    yield f"{text} null{end}"
    yield text.removesuffix(",") + end
    yield _CUT_WORD.sub(lambda word: json.dumps(word.group()), text) + end
