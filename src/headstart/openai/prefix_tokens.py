"""Tokens of a prefix: those tokens of a text or a conversation that do not depend on the continuation.

Tokenizers merge across boundaries: "Sort: " alone ends in another token than "Sort: apples" has at that position, and a
chat template may put a system message into the first user turn. So the prefix is encoded with several continuations,
and their common token prefix is used. If a vocabulary merges in yet another way, only the last block is not hit.
"""

from array import array
from collections.abc import Iterable
from itertools import takewhile

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import Bounds
from headstart.openai.engine_requests import encode_prompt, shown_chat
from headstart.openai.request_bodies import Message
from headstart.openai.tokenizer.tokenizer import Tokenizer

# Letters that continue a word or begin one, a blank, capitals, digits, line ends, punctuation, other scripts, symbols.
CONTINUATIONS = (*"aeilnorst", " a", "The", "7", "\n", "\n\n", "  ", ".", "'s", "é", "日", "\U0001f600", "_(")


def text_tokens(text: str, tokenizer: Tokenizer, bounds: Bounds) -> "array[int]":
    """Return the tokens that all prompts beginning with `text` share. Raises InvalidRequestError. Slow for long texts.

    Includes the special tokens that /v1/completions puts before a text.
    """
    texts = (text, *(text + more for more in CONTINUATIONS))
    return _shared([encode_prompt(text, tokenizer, bounds, True) for text in texts])


def chat_tokens(messages: list[Message], tokenizer: Tokenizer, bounds: Bounds) -> "array[int]":
    """Return the tokens that all conversations beginning with `messages` share, rendered as in /v1/chat/completions.

    After a system or assistant message the continuation is a user message; after a user or tool message it is none, or
    an assistant and a user message. Raises InvalidRequestError if the model's template rejects all continuations.
    """
    rendered: list[str] = []
    refusal: InvalidRequestError | None = None
    for tail in _tails(messages[-1]["role"]):
        try:
            shown = shown_chat([*messages, *tail], None, tokenizer, bounds)
            rendered.append(tokenizer.render_chat(shown.messages, tools=shown.tools))
        except InvalidRequestError as error:
            refusal = error
    if refusal is not None and not rendered:
        raise refusal
    return _shared([encode_prompt(text, tokenizer, bounds, False) for text in rendered])


def _tails(last_role: str) -> "list[list[Message]]":
    users: list[Message] = [{"role": "user", "content": text} for text in CONTINUATIONS]
    if last_role not in ("user", "tool"):
        return [[user] for user in users]
    answers: list[Message] = [{"role": "assistant", "content": text} for text in CONTINUATIONS]
    return [[], *([answer, user] for answer, user in zip(answers, users, strict=True))]


def _shared(encodings: "Iterable[array[int]]") -> "array[int]":
    """Return the longest common prefix of one or more token lists."""
    first, *others = encodings
    for other in others:
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
        first = first[:num_same]
    return first
