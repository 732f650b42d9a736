"""TextReader: a text that arrives in pieces, read by generators that yield while they need more of it.

A generator reads character by character and cannot see where a piece ends, so its result does not depend on the split.
Consumed text is kept until `take`: a reader that meets something unexpected returns it as content, or rewinds. Of
whitespace at most MAX_BLANKS characters are kept, since it is looked at again with each piece.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

MAX_BLANKS = 1024
MAX_PIECE = 1024  # characters that are added at a time

T = TypeVar("T")
Read = Generator[None, None, T]


class FoundMarker(NamedTuple):
    """The first of some markers in a text."""

    marker: str
    start: int


class TextReader:
    """The unread and the kept text. `ended` is set when no more text will arrive."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # text[:at] is consumed and kept, text[at:] is unread
        self._ran_out = False  # a reader asked for more than the text has
        self.ended = False
        self.is_cut = False  # it ended because of a limit, so the model would have written more

    @property
    def is_cut_off(self) -> bool:
        """Whether the text was cut where it is read, so what is kept may be the beginning of a call."""
        return self.is_cut and self._ran_out

    def feed(self, text: str, run: Read[None]) -> None:
        """Append text and let a generator read it, MAX_PIECE characters at a time: each `take` copies what is unread.

        An empty text lets it read the end.
        """
        for start in range(0, len(text) or 1, MAX_PIECE):
            held, self.text = self.text, ""  # CPython appends in place to a string that nothing else refers to
            held += text[start : start + MAX_PIECE]
            self.text = held
            next(run, None)

    def take_kept(self) -> str:
        """Return the kept text, which is dropped here."""
        taken, self.text = self.text[: self.at], self.text[self.at :]
        self.at = 0
        return taken

    def rewind_kept_text(self) -> None:
        """Make the kept text unread again. If it ran out, it is dropped: it may be the rest of a call."""
        if self.is_cut_off:
            self.text = ""
        self.at = 0

    def peek_char(self) -> Read[str]:
        """Return the next character without consuming it; "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        self._ran_out |= self.at == len(self.text)
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Read[None]:
        """Consume whitespace, at most MAX_BLANKS characters."""
        end = self.at + MAX_BLANKS
        while self.at < end and (yield from self.peek_char()).isspace():
            self.at += 1

    def index_before_whitespace(self, end: int) -> int:
        """Return where the text before `end` ends without its whitespace, at most MAX_BLANKS characters earlier."""
        start = max(end - MAX_BLANKS, 0)
        return start + len(self.text[start:end].rstrip())

    def consume_literal(self, literal: str) -> Read[bool]:
        """Consume `literal` if it is next; otherwise consume nothing."""
        while True:
            unread = self.text[self.at : self.at + len(literal)]
            if unread == literal:
                self.at += len(literal)
                return True
            if not literal.startswith(unread):
                return False
            if self.ended:
                self._ran_out = True
                return False
            yield

    def read_name(self) -> Read[str]:
        """Consume and return the characters of a name that are next."""
        start = self.at
        while (char := (yield from self.peek_char())) and ((char.isascii() and char.isalnum()) or char in "_.-"):
            self.at += 1
        return self.text[start : self.at]


def first_marker(text: str, markers: Sequence[str]) -> FoundMarker | None:
    """Return the marker that begins first in `text`; of two at one position the longer one."""
    found = [FoundMarker(marker, at) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda one: (one.start, -len(one.marker)), default=None)


def num_chars_of_partial_marker(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may become a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
