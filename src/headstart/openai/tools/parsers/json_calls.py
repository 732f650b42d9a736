"""Tool calls that are JSON objects: {"name": ..., "arguments" or "parameters": {...}}, read while they arrive.

A call begins when its name is known and its arguments are. From then on the arguments are passed on as the model wrote
them, up to the bracket that closes them; whether they are valid JSON is for the client to check, as with OpenAI. An
object that is no call is not consumed for good: the caller returns its text as content.
"""

import json
from collections.abc import Callable

from headstart.openai.tools.parsers.call_writer import ChatDeltaWriter
from headstart.openai.tools.parsers.text_reader import Read, TextReader

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def read_json_call(reader: TextReader, writer: ChatDeltaWriter, *, any_name: bool = True) -> Read[bool]:
    """Read a call and return True, or return False if this is none. After True, kept text is not part of the call."""
    if not (yield from reader.consume_literal("{")):
        return False
    name: str | None = None
    arguments: str | None = None
    has_begun, is_first = False, True
    while True:
        yield from reader.skip_space()
        if (yield from reader.consume_literal("}")):
            break
        key = yield from _key(reader, is_first=is_first)
        if key is None:
            return _stopped(reader, has_begun)
        is_first = False
        if key in _NAMES and name is None:
            name = yield from read_json_string(reader)
            if name is None or not writer.accepts_call_name(name, any_name=any_name):
                return False
        elif key in _ARGUMENTS and name is not None and arguments is None and (yield from reader.peek_char()) == "{":
            writer.begin(name)
            reader.take_kept()
            has_begun, arguments = True, "{}"
            yield from read_balanced_brackets(reader, writer.write_arguments)
        else:
            value = yield from _value(reader)
            if key in _ARGUMENTS and arguments is None:
                value = arguments = _as_arguments(value)
            if not value:
                return _stopped(reader, has_begun)
    if not has_begun:
        if name is None:
            return False
        writer.begin(name)
        writer.write_arguments("{}" if arguments is None else arguments)
    reader.take_kept()
    return True


def read_json_string(reader: TextReader) -> Read[str | None]:
    """Return the JSON string that is next, decoded; None if there is none or it is invalid."""
    start = reader.at
    if (yield from reader.peek_char()) != '"':
        return None
    yield from _skip_string(reader, '"')
    try:
        return json.loads(reader.text[start : reader.at], strict=False)
    except ValueError:
        return None


def read_balanced_brackets(
    reader: TextReader, write: Callable[[str], None] | None = None, *, quotes: str = '"'
) -> Read[bool]:
    """Consume a bracket and all up to the one that closes it; return False if the text ends or another one closes.

    `write` gets the text as it arrives; None: it stays kept.
    """
    closing: list[str] = []
    quote = ""  # of the string that is open
    while True:
        if reader.at == len(reader.text):
            if write is not None:
                write(reader.take_kept())
            if not (yield from reader.peek_char()):
                return False
            continue
        char = reader.text[reader.at]
        if quote:
            if char == "\\":
                reader.at += 1
                yield from reader.peek_char()
                reader.at = min(reader.at, len(reader.text) - 1)
            elif char == quote:
                quote = ""
        elif char in quotes:
            quote = char
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in "}])":
            if char != closing[-1]:
                break
            closing.pop()
        reader.at += 1
        if not closing:
            break
    if write is not None:
        write(reader.take_kept())
    return not closing


def _stopped(reader: TextReader, has_begun: bool) -> bool:
    """Return whether a call has begun in an object that is invalid here; the text behind its arguments is unread."""
    if has_begun:
        reader.rewind_kept_text()
    return has_begun


def _key(reader: TextReader, *, is_first: bool) -> Read[str | None]:
    """Return the next key of an object, and consume the colon and the whitespace behind it; None: there is none."""
    if not is_first:
        if not (yield from reader.consume_literal(",")):
            return None
        yield from reader.skip_space()
    key = yield from read_json_string(reader)
    yield from reader.skip_space()
    if key is None or not (yield from reader.consume_literal(":")):
        return None
    yield from reader.skip_space()
    return key


def _value(reader: TextReader) -> Read[str]:
    """Return the text of the JSON value that is next; "" if it is incomplete."""
    start = reader.at
    char = yield from reader.peek_char()
    if char == '"':
        if not (yield from _skip_string(reader, '"')):
            return ""
    elif char in ("{", "["):
        if not (yield from read_balanced_brackets(reader)):
            return ""
    else:
        while (char := (yield from reader.peek_char())).isalnum() or char in ("+", "-", "."):
            reader.at += 1
    return reader.text[start : reader.at]


def _skip_string(reader: TextReader, quote: str) -> Read[bool]:
    """Consume a string with its quotes; return False if the text ends before."""
    reader.at += 1
    while (char := (yield from reader.peek_char())) != quote:
        if not char:
            return False
        reader.at += 1
        if char == "\\" and (yield from reader.peek_char()):
            reader.at += 1
    reader.at += 1
    return True


def _as_arguments(value: str) -> str:
    """Return arguments from a JSON value: an object as it is written, also inside a string; "" if it is no object."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            value = json.loads(value, strict=False)
            value.encode()
        except ValueError:  # UnicodeEncodeError is one: a lone surrogate
            return ""
        value = value.strip() or "{}"
    return value if value.startswith("{") else ""
