"""Detokenizer: token ids -> text, one token at a time, without decoding the prompt or earlier output again.

Invariant: the joined pieces equal the text that decoding all tokens at once adds to the prompt's text. A piece is held
back while a later token could change it: an incomplete UTF-8 character, an unfinished run of byte tokens. One
exception: byte tokens of ASCII characters (a newline, in Llama 2) are returned at once, since stop strings need them;
if that run later proves invalid, they are kept, where decoding all at once would replace the whole run. A character
that the prompt leaves unfinished is the output's if the output completes it; else its U+FFFD is the prompt's.
"""

import codecs
from collections.abc import Collection, Sequence

from headstart.openai.tokenizer.tokenizer import Tokenizer

PROMPT_WINDOW = 5  # prompt tokens that affect the start of the output (a leading space, an incomplete character)
MAX_HELD_TOKENS = 16  # a run of byte tokens is returned after this many, if its bytes so far are valid
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental detokenizer of one sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        """`kept`: special tokens that are not skipped."""
        window = list(prompt[-PROMPT_WINDOW:])
        self._skipped = tokenizer.vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped = self._skipped.difference(kept) if kept else self._skipped
        self._stream: _ByteStream | _Window
        if tokenizer.vocabulary.byte_level:
            self._stream = _ByteStream(tokenizer, [token_id for token_id in window if token_id not in self._skipped])
        else:
            self._stream = _Window(tokenizer, _context(tokenizer, window, self._skipped))

    def push(self, token_id: int) -> str:
        """Return the text that is final with this token, possibly empty."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def finish(self) -> str:
        """Return the text that is still held back; `push` must not be called afterwards."""
        return self._stream.finish()


def _context(tokenizer: Tokenizer, window: list[int], skipped: frozenset[int]) -> list[int]:
    """Return the last prompt tokens with text, beginning at a whole character: a part of one would break a byte run."""
    context = [token_id for token_id in window if token_id not in skipped]
    while context and tokenizer.vocabulary.is_byte_token(context[0]):
        if tokenizer.vocabulary.token_bytes(context[0])[0] & 0xC0 != 0x80:  # not a continuation byte
            break
        del context[0]
    return context


class _ByteStream:
    """Detokenizer for byte-level vocabularies: a text is its tokens' bytes, so a streaming UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in context:
            self._decoder.decode(self._token_bytes(token_id))
        self._begun = self._decoder.getstate()[0]  # bytes of a character that the context leaves unfinished

    def push(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        return self._own(self._decoder.decode(data), data)

    def finish(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str, data: bytes = b"") -> str:
        """Return `text` without the replacement of a character that the context began and the output did not end."""
        if not self._begun:
            return text
        begun = self._begun + data
        self._begun = b"" if text else begun
        is_broken = text.startswith(_REPLACEMENT) and not begun.startswith(_REPLACEMENT.encode())
        return text[1:] if is_broken else text


class _Window:
    """Detokenizer for other vocabularies: decodes the last tokens with and without the newest, returns the difference.

    The text of the first `_shown` tokens of the window is returned already; they are context for the next piece.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode = tokenizer.decode
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._is_byte_token = tokenizer.vocabulary.is_byte_token
        num_begun = self._num_begun(context)
        self._begun = context[
            len(context) - num_begun :
        ]  # byte tokens of a character that the context leaves unfinished
        self._tokens = context[: len(context) - num_begun]
        context = self._tokens
        self._shown = len(context)
        self._shown_text = self._text(context)

    def push(self, token_id: int) -> str:
        if not self._token_bytes(token_id):  # an id without a token has no text, and must not extend the window
            return ""
        if self._begun:
            begun, self._begun = [*self._begun, token_id], []
            if self._num_begun(begun) == len(begun):
                self._begun = begun
                return ""
            if (text := self._character(begun)) is not None:
                self._tokens += begun
                self._shown, self._shown_text = len(self._tokens), self._text(self._tokens)
                return text
        self._tokens.append(token_id)
        held = self._tokens[self._shown :]
        num_held, text = len(held), self._text(self._tokens)
        if self._is_byte_token(token_id) and any(self._token_bytes(token) >= b"\x80" for token in held):
            whole = not text.endswith(_REPLACEMENT)
            if num_held < MAX_HELD_TOKENS or (not whole and num_held < 2 * MAX_HELD_TOKENS):
                return ""
        elif text.endswith(_REPLACEMENT) and num_held < 4:  # no character has more bytes
            return ""
        return self._advance(text)

    def _num_begun(self, tokens: list[int]) -> int:
        """Return the number of byte tokens at the end that begin a character and do not complete it."""
        data = b"".join(self._token_bytes(token_id) for token_id in self._byte_run(tokens))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(data)
        return len(decoder.getstate()[0])

    def _byte_run(self, tokens: list[int]) -> list[int]:
        start = len(tokens)
        while start and self._is_byte_token(tokens[start - 1]):
            start -= 1
        return tokens[start:]

    def _character(self, tokens: list[int]) -> str | None:
        """Return the character that these byte tokens are, or None."""
        try:
            return b"".join(self._token_bytes(token_id) for token_id in self._byte_run(tokens)).decode() or None
        except UnicodeDecodeError:
            return None

    def finish(self) -> str:
        return self._advance(self._text(self._tokens))

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if piece:
            self._tokens = self._tokens[self._shown :]
            self._shown_text = self._text(self._tokens)
        else:
            self._shown_text = text
        self._shown = len(self._tokens)
        return piece

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=False)
