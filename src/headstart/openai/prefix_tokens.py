"""Prefixes to pin: their requests, and the tokens of a text or a conversation that do not depend on the continuation.

Tokenizers merge across boundaries: "Sort: " alone ends in another token than "Sort: apples" has at that position, and a
chat template may put a system message into the first user turn. So the prefix is encoded with several continuations,
and their common token prefix is used. If a vocabulary merges in yet another way, only the last block is not hit.
"""

from array import array
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import chat_for_template, encode_prompt
from headstart.openai.generation_fields import TokenId
from headstart.openai.request_bodies import Message, Messages, messages_for_template
from headstart.openai.request_model import RequestModel, Text, custom_validator, validate_as
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.value_checks import check_token_ids, missing_parameter_error

# Letters that continue a word or begin one, a blank, capitals, digits, line ends, punctuation, other scripts, symbols.
CONTINUATIONS = (*"aeilnorst", " a", "The", "7", "\n", "\n\n", "  ", ".", "'s", "é", "日", "\U0001f600", "_(")
MAX_NAME_CHARS = 64


def _token_ids(values: object, bounds: RequestBounds) -> "array[int]":
    values = list(values) if isinstance(values, array) else values
    return array("i", check_token_ids("token_ids", values, bounds, max_items=bounds.max_model_len))


class PrefixRequest(RequestModel):
    """A POST /v1/prefixes body: exactly one of text, messages, token_ids. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=MAX_NAME_CHARS)
    tenant: str = Field("", max_length=MAX_NAME_CHARS, description="Empty: all tenants share it")
    wait: bool = Field(True, description="Respond when it is computed")
    text: Text | None = None
    messages: Messages | None = None
    # An array[int] | None, which cannot be evaluated as a type before Python 3.12.
    token_ids: Annotated[Any, custom_validator(_token_ids, list[TokenId])] = None


def parse_prefix(values: Mapping[str, Any], bounds: RequestBounds) -> PrefixRequest:
    """Return a validated body. Raises InvalidRequestError, also for unknown fields, such as a misspelled `tenant`."""
    if values.get("name") in (None, ""):
        raise missing_parameter_error("name")
    if sum(values.get(content) is not None for content in ("text", "messages", "token_ids")) != 1:
        raise InvalidRequestError("send exactly one of text, messages and token_ids", param="text")
    return validate_as(PrefixRequest, values, bounds)


def prefix_field_name(prefix: object) -> str:
    """Return the body field for a prefix given as one Python value: "text", "messages" or "token_ids"."""
    if isinstance(prefix, str):
        return "text"
    is_chat = isinstance(prefix, list | tuple) and len(prefix) > 0 and isinstance(prefix[0], Mapping)
    return "messages" if is_chat else "token_ids"


def encode_prefix(body: PrefixRequest, tokenizer: Tokenizer, bounds: RequestBounds) -> "array[int]":
    """Return the token ids that all prompts with this prefix share. Thread-safe, slow. Raises InvalidRequestError."""
    if body.token_ids is not None:
        return body.token_ids
    if body.messages is not None:
        return chat_prefix_tokens(messages_for_template(body.messages, bounds), tokenizer, bounds)
    return tokens_shared_by_continuations(body.text or "", tokenizer, bounds)


def tokens_shared_by_continuations(text: str, tokenizer: Tokenizer, bounds: RequestBounds) -> "array[int]":
    """Return the tokens that all prompts beginning with `text` share. Raises InvalidRequestError. Slow for long texts.

    Includes the special tokens that /v1/completions puts before a text.
    """
    texts = (text, *(text + more for more in CONTINUATIONS))
    return _shared([encode_prompt(text, tokenizer, bounds, True) for text in texts])


def chat_prefix_tokens(messages: list[Message], tokenizer: Tokenizer, bounds: RequestBounds) -> "array[int]":
    """Return the tokens that all conversations beginning with `messages` share, rendered as in /v1/chat/completions.

    After a system or assistant message the continuation is a user message; after a user or tool message it is none, or
    an assistant and a user message. Raises InvalidRequestError if the model's template rejects all continuations.
    """
    rendered: list[str] = []
    refusal: InvalidRequestError | None = None
    for tail in _tails(messages[-1]["role"]):
        try:
            shown = chat_for_template([*messages, *tail], None, tokenizer, bounds)
            rendered.append(tokenizer.render_chat_text(shown.messages, tools=shown.tools))
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
