"""ChatParser: the text of one answer in pieces -> ChatDeltas with reasoning, content and tool calls.

The reasoning comes first and the calls are looked for in what follows it. For any text: nothing raises, and the joined
deltas are the same however the text is split.
"""

from collections.abc import Callable

from headstart.openai.chat.chat_delta import ChatDelta, joined
from headstart.openai.tools.parsers.call_writer import CallRules, CallWriter
from headstart.openai.tools.parsers.reasoning_reader import ReasoningReader, SplitText
from headstart.openai.tools.parsers.text_reader import Read, TextReader

ReadCalls = Callable[[TextReader, CallWriter], Read[None]]


class ChatParser:
    """The reasoning, the content and the tool calls of one answer."""

    def __init__(
        self,
        read_calls: ReadCalls | None = None,
        rules: CallRules | None = None,
        *,
        is_reasoning: bool = False,
        is_open: bool = False,
    ) -> None:
        """`read_calls` None: there are no calls; otherwise with `rules`. `is_open`: the answer begins in reasoning."""
        self._reasoning = ReasoningReader(is_open=is_open) if is_reasoning else None
        self._reader = TextReader()
        self._writer: CallWriter | None = None
        if read_calls is not None and rules is not None:
            self._writer = CallWriter(rules)
            self._run = read_calls(self._reader, self._writer)
            self._is_forced = rules.is_forced

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._writer is None else self._writer.num_calls

    def feed(self, text: str) -> ChatDelta:
        """Read the next piece of text."""
        return self._parsed(SplitText(rest=text) if self._reasoning is None else self._reasoning.feed(text))

    def finish(self, *, is_cut: bool = False) -> ChatDelta:
        """Return what was held back at the end of the text.

        `is_cut`: the model would have written more, so the beginning of a call is dropped.
        """
        delta = self._parsed(SplitText() if self._reasoning is None else self._reasoning.finish())
        if self._writer is None:
            return delta
        self._reader.ended, self._reader.is_cut = True, is_cut
        self._reader.feed("", self._run)
        last = self._writer.take()
        return joined(delta, last._replace(content="") if is_cut and self._is_forced else last)

    def _parsed(self, split: SplitText) -> ChatDelta:
        if self._writer is None:
            return ChatDelta(split.rest, split.reasoning)
        if not split.rest:
            return ChatDelta(reasoning=split.reasoning)
        self._reader.feed(split.rest, self._run)
        return self._writer.take()._replace(reasoning=split.reasoning)
