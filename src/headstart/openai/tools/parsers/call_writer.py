"""CallWriter: collects the content and the tool calls that a parser finds, between two ChatDeltas."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.tools.parsers.text_reader import Read, TextReader, first_marker, num_held

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules for the tool calls of one answer."""

    tool_names: frozenset[str]
    new_id: Callable[[], str]  # of a call
    special: tuple[str, ...] = ()  # markers that are special tokens here: they are never part of the content
    first_only: bool = False  # parallel_tool_calls is false: later calls are dropped
    is_forced: bool = False  # the whole answer is calls: the beginning of a marker is one


class CallWriter:
    """The output of a parser. Whitespace beside a call is no content, unless content precedes and follows it."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._has_content = False
        self._is_after_call = False
        self._is_dropped = False  # the call that is being written
        self.num_calls = 0
        self.is_cut = False  # the text ended where it was cut, not where the model ended it

    def accepts(self, name: str, *, any_name: bool) -> bool:
        """Return whether a call may have this name: that of a tool, or with `any_name` any valid one."""
        return name in self._rules.tool_names or (any_name and _NAME.fullmatch(name) is not None)

    def content(self, text: str) -> None:
        """Append content; special tokens in it are dropped."""
        for marker in self._rules.special:
            text = text.replace(marker, "")
        if self.num_calls and not self._has_content:
            text = text.lstrip()
        if text:
            self._content.append(text)
            self._has_content, self._is_after_call = True, False

    def last_content(self, text: str) -> None:
        """Append content at the end of the text: whitespace after a call is dropped."""
        if not (self._is_after_call and text.isspace()):
            self.content(text)

    def no_call(self, reader: TextReader, *, is_marked: bool = True) -> None:
        """Take the kept text, which is no call, as content, unless it is the beginning of a call that was cut.

        `is_marked`: it stands behind the marker of a call.
        """
        if self.ends_cut(reader) and (is_marked or self._rules.is_forced):
            reader.take()
        elif is_marked:
            self.content(reader.take())
        else:
            self.last_content(reader.take())

    def ends_cut(self, reader: TextReader) -> bool:
        """Return whether all text is consumed, and was cut."""
        return self.is_cut and reader.ended and reader.at == len(reader.text)

    def end_call(self, reader: TextReader, closing: str) -> Read[None]:
        """Consume the marker that closes a call if it is next; a beginning of it only where the text was cut."""
        yield from reader.skip_space()
        if (yield from reader.match(closing)) or self.skip_cut_marker(reader, closing):
            reader.take()
        else:
            reader.rewind()

    def skip_cut_marker(self, reader: TextReader, *markers: str) -> bool:
        """Consume the beginning of a marker, or nothing, at the end of a text that was cut; return whether it was."""
        rest = reader.text[reader.at :]
        if not (self.is_cut and reader.ended and any(marker.startswith(rest) for marker in markers)):
            return False
        reader.at = len(reader.text)
        return True

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._is_dropped = self._rules.first_only and self.num_calls > 0
        self._is_after_call = True
        if not self._is_dropped:
            self._calls.append(ToolCallDelta(self.num_calls, self._rules.new_id(), name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append arguments to the call that was begun last."""
        if text and not self._is_dropped:
            self._calls.append(ToolCallDelta(self.num_calls - 1, arguments=text))

    def take(self) -> ChatDelta:
        """Return all output since the last take: one ToolCallDelta for each call in it."""
        merged: dict[int, ToolCallDelta] = {}
        for call in self._calls:
            known = merged.get(call.call_index)
            merged[call.call_index] = (
                call if known is None else known._replace(arguments=known.arguments + call.arguments)
            )
        delta = ChatDelta("".join(self._content), tool_calls=tuple(merged.values()))
        self._content.clear()
        self._calls.clear()
        return delta

    def text_until(self, reader: TextReader, openers: Sequence[str]) -> Read[bool]:
        """Write text as content up to an opener, which is consumed; return False at the end of the text.

        Whitespace before the opener stays kept with it. Other special markers are dropped.
        """
        markers = (*openers, *(marker for marker in self._rules.special if marker not in openers))
        while True:
            found = first_marker(reader.text, markers)
            held = num_held(reader.text, markers) if found is None else len(reader.text) - found.start
            reader.at = reader.end_before_space(len(reader.text) - held)
            self.content(reader.take())
            if found is not None:
                reader.at = reader.text.index(found.marker) + len(found.marker)
                if found.marker in openers:
                    return True
                self.content(reader.take())
            elif reader.ended:
                reader.at = len(reader.text)
                is_marker = any(opener.startswith(reader.text.strip()) for opener in openers)
                if self._is_after_call and is_marker and self.ends_cut(reader):
                    reader.take()
                self.no_call(reader, is_marked=False)
                return False
            else:
                yield
