"""ChatParser: the text of one answer in pieces -> ChatDeltas with reasoning, content and tool calls.

The reasoning comes first and the calls are looked for in what follows it. For any text: nothing raises, and the joined
deltas are the same however the text is split.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.openai.chat.chat_delta import ChatDelta
from headstart.openai.tools.parsers.call_writer import CallRules, CallWriter
from headstart.openai.tools.parsers.reasoning_reader import ReasoningReader, SplitText
from headstart.openai.tools.parsers.text_reader import Read, TextReader, pieces

ReadCalls = Callable[[TextReader, CallWriter], Read[None]]


class ToolParser:
    """The content and the tool calls of one text."""

    def __init__(self, read_calls: ReadCalls, rules: CallRules) -> None:
        self._reader = TextReader()
        self._writer = CallWriter(rules)
        self._run = read_calls(self._reader, self._writer)

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._writer.num_calls

    def feed(self, text: str) -> ChatDelta:
        """Read the next piece of text."""
        for piece in pieces(text):
            self._reader.add(piece)
            next(self._run, None)
        return self._writer.take()

    def finish(self, *, is_cut: bool = False) -> ChatDelta:
        """Return what was held back at the end of the text. `is_cut`: it was not the model that ended it."""
        self._reader.ended, self._writer.is_cut = True, is_cut
        return self.feed("")


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """The parsers of one answer."""

    read_calls: ReadCalls | None = None  # None: there are no calls
    rules: CallRules | None = None  # with read_calls
    is_reasoning: bool = False
    is_open: bool = False  # the prompt ends inside the reasoning


class ChatParser:
    """The reasoning, the content and the tool calls of one answer."""

    def __init__(self, setup: ParserSetup) -> None:
        self._reasoning = ReasoningReader(is_open=setup.is_open) if setup.is_reasoning else None
        self._tools: ToolParser | None = None
        if setup.read_calls is not None and setup.rules is not None:
            self._tools = ToolParser(setup.read_calls, setup.rules)

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> ChatDelta:
        """Read the next piece of text."""
        split = SplitText(rest=text) if self._reasoning is None else self._reasoning.feed(text)
        return self._parsed(split)

    def finish(self, *, is_cut: bool = False) -> ChatDelta:
        """Return what was held back at the end of the text. `is_cut`: it was not the model that ended it.

        Of a call that was cut before its name and arguments are known nothing is returned.
        """
        split = SplitText() if self._reasoning is None else self._reasoning.finish()
        delta = self._parsed(split)
        if self._tools is None:
            return delta
        return joined(delta, self._tools.finish(is_cut=is_cut))

    def _parsed(self, split: SplitText) -> ChatDelta:
        if self._tools is None:
            return ChatDelta(split.rest, split.reasoning)
        delta = self._tools.feed(split.rest) if split.rest else ChatDelta()
        return delta._replace(reasoning=split.reasoning)


def joined(*deltas: ChatDelta) -> ChatDelta:
    """Return the deltas of one answer as one, with one ToolCallDelta for each call."""
    calls = {}
    for delta in deltas:
        for call in delta.tool_calls:
            known = calls.get(call.call_index)
            calls[call.call_index] = (
                call if known is None else known._replace(arguments=known.arguments + call.arguments)
            )
    return ChatDelta(
        "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), tuple(calls.values())
    )
