"""ChatDeltaWriter: collects the content and the tool calls that a parser finds, between two ChatDeltas."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta, join_deltas
from headstart.openai.tools.parsers.argument_types import ToolArgumentTypes
from headstart.openai.tools.parsers.text_reader import Read, TextReader, first_marker, num_chars_of_partial_marker

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCallRules:
    """The rules for the tool calls of one answer."""

    tool_names: frozenset[str]
    new_id: Callable[[], str]  # of a call
    special: tuple[str, ...] = ()  # markers that are special tokens here: they are never part of the content
    first_only: bool = False  # parallel_tool_calls is false: later calls are dropped
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])  # by tool
    is_forced: bool = False  # a grammar allows nothing but calls
    needs_marker: bool = False  # a grammar allows calls only behind the family's marker


class ChatDeltaWriter:
    """The output of a parser. Whitespace beside a call is no content, unless content precedes and follows it."""

    def __init__(self, rules: ToolCallRules) -> None:
        self._rules = rules
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._has_content = False
        self._is_after_call = False
        self._is_dropped = False  # the call that is being written
        self._types: dict[str, ToolArgumentTypes] = {}
        self.num_calls = 0
        self.needs_marker = rules.needs_marker

    def accepts_call_name(self, name: str, *, any_name: bool) -> bool:
        """Return whether a call may have this name: that of a tool, or with `any_name` any valid one."""
        return name in self._rules.tool_names or (any_name and _NAME.fullmatch(name) is not None)

    def argument_types_of(self, name: str) -> ToolArgumentTypes:
        """Return the types of the arguments of a function, by the schema of the tool if there is one."""
        if name not in self._types:
            self._types[name] = ToolArgumentTypes(self._rules.parameters.get(name, {}))
        return self._types[name]

    def write_content(self, text: str) -> None:
        """Append content; special tokens in it are dropped."""
        for marker in self._rules.special:
            text = text.replace(marker, "")
        if self.num_calls and not self._has_content:
            text = text.lstrip()
        if text:
            self._content.append(text)
            self._has_content, self._is_after_call = True, False

    def write_last_content(self, text: str) -> None:
        """Append content at the end of the text: whitespace after a call is dropped."""
        if not (self._is_after_call and text.isspace()):
            self.write_content(text)

    def write_or_drop_kept(self, reader: TextReader, beginnings: Sequence[str] = ()) -> None:
        """Write kept text as content. If it ran out, a part of a call is missing, and it is dropped.

        `beginnings`: of a call without a marker, with %s for the name of a tool; the text must begin like one of them.
        """
        if reader.is_cut_off and (not beginnings or self._begins_call(reader.text, beginnings)):
            reader.rewind_kept_text()
        else:
            self.write_last_content(reader.take_kept())

    def _begins_call(self, text: str, beginnings: Sequence[str]) -> bool:
        text = "".join(text.split())
        whole = [beginning % name for beginning in beginnings for name in self._rules.tool_names]
        return any(text.startswith(one) or one.startswith(text) for one in whole)

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._is_dropped = self._rules.first_only and self.num_calls > 0
        self._is_after_call = True
        if not self._is_dropped:
            self._calls.append(ToolCallDelta(self.num_calls, self._rules.new_id(), name))
            self.num_calls += 1

    def write_arguments(self, text: str) -> None:
        """Append arguments to the call that was begun last."""
        if text and not self._is_dropped:
            self._calls.append(ToolCallDelta(self.num_calls - 1, arguments=text))

    def take(self) -> ChatDelta:
        """Return all output since the last take: one ToolCallDelta for each call in it."""
        delta = ChatDelta("".join(self._content), tool_calls=tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return join_deltas(delta) if len(delta.tool_calls) > 1 else delta

    def write_content_until_opener(self, reader: TextReader, openers: Sequence[str]) -> Read[bool]:
        """Write text as content up to an opener, which is consumed; return False at the end of the text.

        Whitespace before the opener stays kept with it. Other special markers are dropped.
        """
        markers = (*openers, *(marker for marker in self._rules.special if marker not in openers))
        while True:
            found = first_marker(reader.text, markers)
            held = (
                num_chars_of_partial_marker(reader.text, markers) if found is None else len(reader.text) - found.start
            )
            reader.at = reader.index_before_whitespace(len(reader.text) - held)
            self.write_content(reader.take_kept())
            if found is not None:
                reader.at = reader.text.index(found.marker) + len(found.marker)
                if found.marker in openers:
                    return True
                self.write_content(reader.take_kept())
            elif reader.ended:
                reader.at = len(reader.text) - (held if reader.is_cut and (held > 1 or self._is_after_call) else 0)
                self.write_last_content(reader.take_kept())
                reader.at = len(reader.text)  # of a marker that was cut
                reader.take_kept()
                return False
            else:
                yield
