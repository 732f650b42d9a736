"""ChatOutputParts: the output of one chat as a list of parts (reasoning, content, tool calls) in order of appearance.

One part is open at a time. A delta of another kind, or of another tool call, closes it and opens the next one. Whole
answers and streams are both made from these parts, so they contain the same.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.text.generation import OutputDelta


class ChatOutputPartKind(Enum):
    """The kind of a part."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool call"


class ChatOutputPart:
    """One part of the output; grows while it is open."""

    __slots__ = ("_texts", "call", "index", "kind")

    def __init__(self, kind: ChatOutputPartKind, index: int, call: ToolCallDelta | None = None) -> None:
        self.kind = kind
        self.index = index  # among all parts
        self.call = call  # the first delta of a tool call: index, id and name
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a tool call: its arguments."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def append(self, text: str) -> None:
        """Add text."""
        self._texts.append(text)


class ChatOutputPartUpdate(NamedTuple):
    """New text of a part. `closed`: the part that ended before it; `is_new`: the part begins with this step."""

    part: ChatOutputPart
    text: str
    is_new: bool
    closed: ChatOutputPart | None


class ChatOutputParts:
    """The parts of one chat so far."""

    def __init__(self) -> None:
        self.parts: list[ChatOutputPart] = []
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def has_calls(self) -> bool:
        """Whether there is a tool call."""
        return any(part.kind is ChatOutputPartKind.TOOL_CALL for part in self.parts)

    def add_delta(self, delta: OutputDelta) -> list[ChatOutputPartUpdate]:
        """Add a delta and return its steps, in order."""
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason
        chat = ChatDelta(content=delta.text) if delta.chat is None else delta.chat
        if chat.reasoning:
            self.num_reasoning_tokens += len(delta.token_ids)
        return [step for kind, text, call in _pieces(chat) for step in self._grow(kind, text, call)]

    def current_part(self) -> ChatOutputPart | None:
        """Return the part that no later one has closed yet; None without any part."""
        return self.parts[-1] if self.parts else None

    def _grow(self, kind: ChatOutputPartKind, text: str, call: ToolCallDelta | None) -> Iterator[ChatOutputPartUpdate]:
        last = self.current_part()
        is_same = last is not None and last.kind is kind
        if is_same and call is not None:
            assert last is not None and last.call is not None
            is_same = last.call.call_index == call.call_index
        if last is not None and is_same:
            last.append(text)
            yield ChatOutputPartUpdate(last, text, is_new=False, closed=None)
            return
        part = ChatOutputPart(kind, len(self.parts), call)
        part.append(text)
        self.parts.append(part)
        yield ChatOutputPartUpdate(part, text, is_new=True, closed=last)


def _pieces(chat: ChatDelta) -> Iterator[tuple[ChatOutputPartKind, str, ToolCallDelta | None]]:
    """Yield the new texts of a delta. A call without arguments yet is a piece as well: it has a name."""
    if chat.reasoning:
        yield ChatOutputPartKind.REASONING, chat.reasoning, None
    if chat.content:
        yield ChatOutputPartKind.CONTENT, chat.content, None
    for call in chat.tool_calls:
        yield ChatOutputPartKind.TOOL_CALL, call.arguments, call
