"""ReasoningReader: splits <think>...</think> at the beginning of an answer from the rest of its text."""

from typing import NamedTuple

from headstart.openai.tools.parsers.text_reader import Read, TextReader, first_marker, num_held

THINK_MARKERS = ("<think>", "</think>")


class SplitText(NamedTuple):
    """New text of an answer."""

    reasoning: str = ""
    rest: str = ""


class ReasoningReader:
    """The reasoning of one answer. Whitespace around it belongs to neither part."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the answer begins inside the reasoning, since the prompt ends with <think>."""
        self._is_open = is_open
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._rest: list[str] = []
        self._run = self._read()

    def feed(self, text: str) -> SplitText:
        """Read the next piece of text."""
        self._reader.feed(text, self._run)
        split = SplitText("".join(self._reasoning), "".join(self._rest))
        self._reasoning.clear()
        self._rest.clear()
        return split

    def finish(self) -> SplitText:
        """Return what was held back at the end of the text."""
        self._reader.ended = True
        return self.feed("")

    def _read(self) -> Read[None]:
        opening, closing = THINK_MARKERS
        reader = self._reader
        yield from reader.skip_space()
        is_reasoning = (yield from reader.match(opening)) or self._is_open
        if is_reasoning:
            yield from reader.skip_space()
            reader.take()
            yield from self._until(closing)
            yield from reader.skip_space()
            reader.take()
        while True:
            reader.at = len(reader.text)
            self._rest.append(reader.take())
            yield

    def _until(self, closing: str) -> Read[None]:
        reader = self._reader
        while (found := first_marker(reader.text, (closing,))) is None:
            held = 0 if reader.ended else num_held(reader.text, (closing,))
            reader.at = reader.end_before_space(len(reader.text) - held)
            self._reasoning.append(reader.take())
            if reader.ended:
                reader.at = len(reader.text)
                reader.take()
                return
            yield
        reader.at = reader.end_before_space(found.start)
        self._reasoning.append(reader.take())
        reader.at = reader.text.index(closing) + len(closing)
        reader.take()
