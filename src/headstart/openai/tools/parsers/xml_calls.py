"""Tool calls whose arguments are XML elements with raw text, as Qwen3-Coder and GLM write them.

Nothing is escaped in such text, so an end marker ends a value only if another argument or the end of the call follows,
and inside a JSON string, which contains no line break, only behind one. The arguments become JSON by the types of the
tool's schema: strings while they arrive, other values when they are complete.
"""

import json
import re
from dataclasses import dataclass

from headstart.openai.tools.parsers.argument_types import STRING, ToolArgumentTypes, argument_as_json
from headstart.openai.tools.parsers.call_writer import ChatDeltaWriter
from headstart.openai.tools.parsers.text_reader import Read, TextReader, first_marker, num_chars_of_partial_marker

CALL_MARKERS = ("<tool_call>", "</tool_call>")
MAX_KEY = 256  # characters of the name of an argument
_NULL_CHARS = len("null")
_NULLABLE = frozenset(("string", "null"))
_JSON_QUOTE = re.compile(r'\\.|\\\Z|"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class XmlCallFormat:
    """The texts of one format: <tool_call>, `name`, and for each argument `key` and `value`, then one of `ends`."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    ends: tuple[str, ...]  # the first one is that of a call, the others also end a value
    is_padded: bool  # a value is between line breaks


QWEN3_CODER_FORM = XmlCallFormat(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), ("</function>", "</tool_call>"), is_padded=True
)
GLM45_FORM = XmlCallFormat(
    ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), ("</tool_call>",), is_padded=False
)


def read_qwen3_coder_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read text with <tool_call><function=f><parameter=a>...</parameter></function></tool_call>.

    Models leave out the first marker at times: then a function must be one of the tools.
    """
    opening, closing = CALL_MARKERS
    begin = QWEN3_CODER_FORM.name[0]
    openers = (opening,) if writer.needs_marker else (opening, begin)
    while (yield from writer.write_content_until_opener(reader, openers)):
        any_name = not reader.text.endswith(begin, 0, reader.at)
        if any_name:
            yield from reader.skip_space()
            if not (yield from reader.consume_literal(begin)):
                writer.write_or_drop_kept(reader)
                continue
        is_call = yield from _call(QWEN3_CODER_FORM, reader, writer, any_name=any_name)
        while is_call:  # in one pair of markers there may be several
            yield from reader.skip_space()
            if (yield from reader.consume_literal(closing)):
                reader.take_kept()
                break
            if not (yield from reader.consume_literal(begin)):
                reader.rewind_kept_text()
                break
            is_call = yield from _call(QWEN3_CODER_FORM, reader, writer, any_name=True)
        if not is_call:
            writer.write_or_drop_kept(reader)


def read_glm45_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read text with <tool_call>f<arg_key>a</arg_key><arg_value>...</arg_value></tool_call>."""
    while (yield from writer.write_content_until_opener(reader, CALL_MARKERS[:1])):
        yield from reader.skip_space()
        if not (yield from _call(GLM45_FORM, reader, writer, any_name=True)):
            writer.write_or_drop_kept(reader)


def _call(form: XmlCallFormat, reader: TextReader, writer: ChatDeltaWriter, *, any_name: bool) -> Read[bool]:
    """Read a call from its name on; return False if this is none. After True, kept text is not part of the call."""
    name = yield from reader.read_name()
    yield from reader.skip_space()
    if not (yield from reader.consume_literal(form.name[1])) or not writer.accepts_call_name(name, any_name=any_name):
        return False
    types: ToolArgumentTypes | None = None
    separator = "{"
    while True:
        yield from reader.skip_space()
        key = yield from _key(form, reader)
        is_end = key is None and (yield from reader.consume_literal(form.ends[0]))
        if types is None:
            if key is None and not is_end:
                return False
            writer.begin(name)
            types = writer.argument_types_of(name)
        if key is None:
            writer.write_arguments("" if reader.is_cut_off else "}" if separator != "{" else "{}")
            if is_end:
                reader.take_kept()
            else:
                reader.rewind_kept_text()
            return True
        before = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        separator = ", "
        if not (yield from _value(form, reader, _ValueWriter(writer, before, types.types_of_argument(key)))):
            return True


def _key(form: XmlCallFormat, reader: TextReader) -> Read[str | None]:
    """Consume the name of an argument and the beginning of its value; return None and consume nothing without one."""
    at = reader.at
    if (yield from reader.consume_literal(form.key[0])):
        start = reader.at
        while reader.at < start + MAX_KEY and (char := (yield from reader.peek_char())) and char not in "<>\n":
            reader.at += 1
        key = reader.text[start : reader.at]
        if (yield from reader.consume_literal(form.key[1])):
            if not form.value[0]:
                return key
            yield from reader.skip_space()
            if (yield from reader.consume_literal(form.value[0])):
                return key
    reader.at = at
    return None


def _value(form: XmlCallFormat, reader: TextReader, value: "_ValueWriter") -> Read[bool]:
    """Write a value and consume its end; return False if the text ends before, all of which is consumed then."""
    if form.is_padded:
        yield from reader.consume_literal("\n")
    reader.take_kept()
    closing = form.value[1]
    closings = (f"\n{closing}", closing) if form.is_padded else (closing,)
    while True:
        found = first_marker(reader.text, closings)
        held = num_chars_of_partial_marker(reader.text, closings) if found is None else len(reader.text) - found.start
        reader.at = len(reader.text) - held
        value.write(reader.take_kept())
        if found is not None:
            reader.at = len(found.marker)
            if (yield from _is_end(form, reader, value, found.marker)):
                value.end()
                reader.take_kept()
                return True
            reader.at = len(found.marker)
            value.write(reader.take_kept())
        elif reader.ended:
            reader.at = len(reader.text)
            reader.take_kept()
            return False
        else:
            yield


def _is_end(form: XmlCallFormat, reader: TextReader, value: "_ValueWriter", marker: str) -> Read[bool]:
    """Return whether an end marker, which is consumed, ends the value."""
    at = reader.at
    yield from reader.skip_space()
    has_break = "\n" in marker or "\n" in reader.text[at : reader.at]
    is_end = has_break or not value.is_in_string
    if is_end:
        followers = (form.key[0], *form.ends)
        behind = reader.at
        for follower in followers:
            if (yield from reader.consume_literal(follower)):
                break
        else:
            unread = reader.text[behind:]
            is_end = reader.ended and any(follower.startswith(unread) for follower in followers)
    reader.at = at
    return is_end


class _ValueWriter:
    """Writes one argument: a string in pieces, any other value at its end, since it depends on all of the text."""

    def __init__(self, writer: ChatDeltaWriter, before: str, types: frozenset[str]) -> None:
        self._writer = writer
        self._before = before
        self._types = types
        self._held: list[str] | None = []
        self._num_held = 0
        self._escape = ""  # a backslash at the end of the text, which may begin an escape
        self._is_structured: bool | None = None  # the text may be a list or an object of JSON; None: it is blank
        self.is_in_string = False  # of JSON, inside a list or an object
        if types <= STRING:
            self._become_string()

    def write(self, text: str) -> None:
        """Append text."""
        if self._held is None:
            self._writer.write_arguments(_escaped(text))
            return
        self._held.append(text)
        self._num_held += len(text)
        if self._types <= _NULLABLE:
            if self._num_held > _NULL_CHARS:
                self._become_string()
            return
        if self._is_structured is None and (begin := text.lstrip()):
            self._is_structured = ("array" if begin[0] == "[" else "object") in self._types and begin[0] in "[{"
        if self._is_structured:
            self._follow_quotes(text)

    def end(self) -> None:
        """End the value."""
        if self._held is None:
            self._writer.write_arguments('"')
        else:
            self._writer.write_arguments(self._before + argument_as_json("".join(self._held), self._types))

    def _become_string(self) -> None:
        held, self._held = self._held or [], None
        self._writer.write_arguments(f'{self._before}"{_escaped("".join(held))}')

    def _follow_quotes(self, text: str) -> None:
        found = _JSON_QUOTE.findall(self._escape + text)
        self._escape = found[-1] if found and found[-1] == "\\" else ""
        self.is_in_string ^= found.count('"') % 2 == 1


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
