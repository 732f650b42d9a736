"""Detokenizer: token ids -> text, one token at a time, without decoding the prompt or earlier output again.

Invariant: the joined pieces equal the text that decoding all tokens at once adds to the prompt's text. A piece is held
back while a later token could change it: an incomplete UTF-8 character, an unfinished run of byte tokens. One
exception: byte tokens of ASCII characters (a newline, in Llama 2) are returned at once, since stop strings need them;
if that run later proves invalid, they are kept, where decoding all at once would replace the whole run.
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
            self._stream = _ByteStream(tokenizer)
            for token_id in window:
                if token_id not in self._skipped:
                    self._stream.push(token_id)
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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Detokenizer for other vocabularies: decodes the last tokens with and without the newest, returns the difference.

    The text of the first `_shown` tokens of the window is returned already; they are context for the next piece.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode = tokenizer.decode
        self._token_bytes = tokenizer.vocabulary.token_bytes
        self._is_byte_token = tokenizer.vocabulary.is_byte_token
        self._tokens = context
        self._shown = len(context)
        self._shown_text = self._text(context)

    def push(self, token_id: int) -> str:
        if not self._token_bytes(token_id):  # an id without a token has no text, and must not extend the window
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
