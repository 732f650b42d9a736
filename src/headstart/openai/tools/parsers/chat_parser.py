"""ChatParser: the text of one answer in pieces -> ChatDeltas with reasoning, content and tool calls.

The reasoning comes first and the calls are looked for in what follows it. For any text: nothing raises, and the joined
deltas are the same however the text is split.
"""

from collections.abc import Callable

from headstart.openai.chat.chat_delta import ChatDelta, join_deltas
from headstart.openai.tools.parsers.call_writer import ChatDeltaWriter, ToolCallRules
from headstart.openai.tools.parsers.text_reader import Read, TextReader, first_marker, num_chars_of_partial_marker

THINK_MARKERS = ("<think>", "</think>")
ReadCalls = Callable[[TextReader, ChatDeltaWriter], Read[None]]


class ReasoningReader:
    """Splits <think>...</think> at the beginning of an answer from its content. Whitespace around it is in neither."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the answer begins inside the reasoning, since the prompt ends with <think>."""
        self._is_open = is_open
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._rest: list[str] = []
        self._run = self._read()

    def feed(self, text: str) -> ChatDelta:
        """Read the next piece of text."""
        self._reader.feed(text, self._run)
        split = ChatDelta("".join(self._rest), "".join(self._reasoning))
        self._reasoning.clear()
        self._rest.clear()
        return split

    def finish(self) -> ChatDelta:
        """Return what was held back at the end of the text."""
        self._reader.ended = True
        return self.feed("")

    def _read(self) -> Read[None]:
        opening, closing = THINK_MARKERS
        reader = self._reader
        yield from reader.skip_space()
        is_reasoning = (yield from reader.consume_literal(opening)) or self._is_open
        if is_reasoning:
            yield from reader.skip_space()
            reader.take_kept()
            yield from self._until(closing)
            yield from reader.skip_space()
            reader.take_kept()
        while True:
            reader.at = len(reader.text)
            self._rest.append(reader.take_kept())
            yield

    def _until(self, closing: str) -> Read[None]:
        reader = self._reader
        while (found := first_marker(reader.text, (closing,))) is None:
            held = 0 if reader.ended else num_chars_of_partial_marker(reader.text, (closing,))
            reader.at = reader.index_before_whitespace(len(reader.text) - held)
            self._reasoning.append(reader.take_kept())
            if reader.ended:
                reader.at = len(reader.text)
                reader.take_kept()
                return
            yield
        reader.at = reader.index_before_whitespace(found.start)
        self._reasoning.append(reader.take_kept())
        reader.at = reader.text.index(closing) + len(closing)
        reader.take_kept()


class ChatParser:
    """The reasoning, the content and the tool calls of one answer."""

    def __init__(
        self,
        read_calls: ReadCalls | None = None,
        rules: ToolCallRules | None = None,
        *,
        is_reasoning: bool = False,
        is_open: bool = False,
    ) -> None:
        """`read_calls` None: there are no calls; otherwise with `rules`. `is_open`: the answer begins in reasoning."""
        self._reasoning = ReasoningReader(is_open=is_open) if is_reasoning else None
        self._reader = TextReader()
        self._writer: ChatDeltaWriter | None = None
        if read_calls is not None and rules is not None:
            self._writer = ChatDeltaWriter(rules)
            self._run = read_calls(self._reader, self._writer)
            self._is_forced = rules.is_forced

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._writer is None else self._writer.num_calls

    def feed(self, text: str) -> ChatDelta:
        """Read the next piece of text."""
        return self._parsed(ChatDelta(text) if self._reasoning is None else self._reasoning.feed(text))

    def finish(self, *, is_cut: bool = False) -> ChatDelta:
        """Return what was held back at the end of the text.

        `is_cut`: the model would have written more, so the beginning of a call is dropped.
        """
        delta = self._parsed(ChatDelta() if self._reasoning is None else self._reasoning.finish())
        if self._writer is None:
            return delta
        self._reader.ended, self._reader.is_cut = True, is_cut
        self._reader.feed("", self._run)
        last = self._writer.take()
        return join_deltas(delta, last._replace(content="") if is_cut and self._is_forced else last)

    def _parsed(self, split: ChatDelta) -> ChatDelta:
        if self._writer is None or not split.content:
            return split
        self._reader.feed(split.content, self._run)
        delta = self._writer.take()
        return delta._replace(reasoning=split.reasoning) if split.reasoning else delta
