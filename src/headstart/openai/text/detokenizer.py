"""Detokenizer: token ids -> text, one token at a time, never reading the prompt or the past again.

Law: the pieces, joined, are what decoding everything at once adds to the text of the prompt. A piece is held back while
a later token could still change it: a character whose bytes are not all there, a run of byte tokens that is not over.
One exception: byte tokens that spell ASCII (a line end, in Llama 2) are shown at once, as stop strings wait for them;
if the same run then turns out to be broken, they stay, where decoding everything would replace the whole run.
"""

import codecs
from collections.abc import Sequence

from headstart.openai.tokenizer.tokenizer import Tokenizer

PROMPT_WINDOW = 5  # tokens of the prompt that decide how the output begins (a leading space, half a character)
MAX_HELD_TOKENS = 16  # a run of byte tokens is shown after that many, if what it spells so far is valid
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence as it grows."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        window = list(prompt[-PROMPT_WINDOW:])
        self._skipped = tokenizer.vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._stream: _ByteStream | _Window
        if tokenizer.vocabulary.byte_level:
            self._stream = _ByteStream(tokenizer)
            for token_id in window:
                if token_id not in self._skipped:
                    self._stream.push(token_id)
        else:
            self._stream = _Window(tokenizer, _context(tokenizer, window, self._skipped))

    def push(self, token_id: int) -> str:
        """Returns the text that has become certain with this token, possibly none."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def finish(self) -> str:
        """Returns what was still held back; nothing may be pushed after it."""
        return self._stream.finish()


def _context(tokenizer: Tokenizer, window: list[int], skipped: frozenset[int]) -> list[int]:
    """The last prompt tokens that write something, from a whole character on: half of one would spoil its byte run."""
    context = [token_id for token_id in window if token_id not in skipped]
    while context and tokenizer.vocabulary.is_byte_token(context[0]):
        if tokenizer.vocabulary.token_bytes(context[0])[0] & 0xC0 != 0x80:  # not a continuation byte
            break
        del context[0]
    return context


class _ByteStream:
    """For byte-level vocabularies: a text is its tokens' bytes, so a streaming UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """For all others: decodes the last few tokens with and without the newest, and shows the difference.

    `_shown` tokens of the window are text already; they stay as context until the next piece is out.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode = tokenizer.decode
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._is_byte_token = tokenizer.vocabulary.is_byte_token
        self._tokens = context
        self._shown = len(context)
        self._shown_text = self._text(context)

    def push(self, token_id: int) -> str:
        if not self._token_bytes(token_id):  # an id without a token says nothing, and must not widen the window
            return ""
        self._tokens.append(token_id)
        num_held = len(self._tokens) - self._shown
        text = self._text(self._tokens)
        if self._is_byte_token(token_id) and not self._is_ascii():
            whole = not text.endswith(_REPLACEMENT)
            if num_held < MAX_HELD_TOKENS or (not whole and num_held < 2 * MAX_HELD_TOKENS):
                return ""
        elif text.endswith(_REPLACEMENT) and num_held < 4:  # no character has more bytes
            return ""
        return self._advance(text)

    def _is_ascii(self) -> bool:
        return all(self._token_bytes(token_id) < b"\x80" for token_id in self._tokens[self._shown :])

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
