"""What of a text or a conversation later prompts will share: the tokens that do not depend on what follows.

Tokenizers merge across borders: "Sort: " alone ends in another token than "Sort: apples" has there, and a chat template
may put a system message into the first user's turn. So the prefix is encoded with several continuations, and what all
of them begin with is taken. Should a vocabulary merge yet another way, the last block is not hit: no harm but that.
"""

from array import array
from collections.abc import Iterable
from itertools import takewhile

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import Bounds
from headstart.openai.engine_requests import encode_prompt
from headstart.openai.request_bodies import Message
from headstart.openai.tokenizer.tokenizer import Tokenizer

# Letters that continue a word or begin one, a blank, capitals, digits, line ends, punctuation, other scripts, symbols.
CONTINUATIONS = (*"aeilnorst", " a", "The", "7", "\n", "\n\n", "  ", ".", "'s", "é", "日", "\U0001f600", "_(")


def text_tokens(text: str, tokenizer: Tokenizer, bounds: Bounds) -> "array[int]":
    """Returns what every prompt has in common that begins with `text`. Raises InvalidRequestError; slow for long ones.

    With the special tokens that /v1/completions puts before a text.
    """
    texts = (text, *(text + more for more in CONTINUATIONS))
    return _shared([encode_prompt(text, tokenizer, bounds, True) for text in texts])


def chat_tokens(messages: list[Message], tokenizer: Tokenizer, bounds: Bounds) -> "array[int]":
    """Returns what every conversation has in common that begins with `messages`, as /v1/chat/completions renders it.

    Behind a system or assistant message the user's turn comes next; behind a user's it is the answer, or an answer and
    more. Raises InvalidRequestError if the model's template takes none of them.
    """
    rendered: list[str] = []
    refusal: InvalidRequestError | None = None
    for tail in _tails(messages[-1]["role"]):
        try:
            rendered.append(tokenizer.render_chat([*messages, *tail]))
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
    """The longest common beginning of at least one list of tokens."""
    first, *others = encodings
    for other in others:
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
        first = first[:num_same]
    return first
