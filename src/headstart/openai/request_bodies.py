"""Request bodies: a JSON object -> CompletionBody | ChatBody | TokenizeRequest | DetokenizeRequest, all validated.

Checks shapes and limits and does not tokenize: prompts stay text or token ids as sent. For any input, the only
exception raised is InvalidRequestError.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from headstart.core.errors import InvalidRequestError, prompt_too_long_error
from headstart.openai.bounds import RequestBounds
from headstart.openai.canonical.canonical_messages import canonical_chat
from headstart.openai.canonical.prompt_rules import PromptRules
from headstart.openai.chat.sent_message import Message, Role, read_message
from headstart.openai.generation_fields import (
    AddGenerationPrompt,
    ChatGenerationFields,
    CompletionFields,
    Model,
    TokenId,
)
from headstart.openai.generation_params import GenerationParams, params_from_fields
from headstart.openai.request_model import RequestModel, Text, custom_validator, validate_as
from headstart.openai.tools.tool_fields import Tools
from headstart.openai.value_checks import (
    check_encodable_text,
    check_int,
    check_token_ids,
    missing_parameter_error,
    raise_invalid_value,
    safe_repr,
)

Prompt = str | array  # text, or packed int32 token ids


# Only for /openapi.json: `parse_messages` checks them, in one pass over all messages.
class SentPart(RequestModel):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class SentMessage(RequestModel):
    """A message of a conversation, with tool_calls perhaps, beside which content is optional."""

    role: Role
    content: str | list[SentPart]
    name: str | None = None
    tool_call_id: str | None = None


Messages = Annotated[
    list[Message],
    custom_validator(
        lambda value, bounds: parse_messages(value, bounds), Annotated[list[SentMessage], Field(min_length=1)]
    ),
]
SentIds = Annotated[list[TokenId], Field(min_length=1)]
SentTexts = Annotated[list[str], Field(min_length=1)]
SentLists = Annotated[list[SentIds], Field(min_length=1)]
Prompts = Annotated[
    tuple[Prompt, ...],
    custom_validator(lambda value, bounds: parse_prompts(value, bounds), str | SentTexts | SentIds | SentLists),
]
# An array[int], which cannot be evaluated as a type before Python 3.12.
Decodable = Annotated[
    Any,
    custom_validator(
        lambda value, bounds: array("i", check_token_ids("tokens", value, bounds, max_items=16 * bounds.max_model_len)),
        list[TokenId],
    ),
]


class CompletionRequest(CompletionFields):
    """A /v1/completions body."""

    model: Model = None
    prompt: Prompts = Field(description="A text, texts, token ids, or lists of them")


class ChatRequest(ChatGenerationFields):
    """A /v1/chat/completions body."""

    model: Model = None
    messages: Messages


class TokenizeRequest(RequestModel):
    """A /tokenize body: a text, or messages to render first."""

    model: Model = None
    prompt: Text | None = None
    messages: Messages | None = Field(None, description="Instead of prompt")
    add_special_tokens: bool | None = Field(None, description="By default true for a prompt only")
    continue_final_message: bool = False
    add_generation_prompt: AddGenerationPrompt
    tools: Tools = Field((), description="Functions, for the chat template")
    return_token_strs: bool = Field(False, description="Send the text of each token as well")


class DetokenizeRequest(RequestModel):
    """A /detokenize body."""

    model: Model = None
    token_ids: Decodable = Field(alias="tokens")


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A validated /v1/completions body."""

    model: str | None
    prompts: tuple[Prompt, ...]
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A validated /v1/chat/completions body."""

    model: str | None
    messages: list[Message]
    params: GenerationParams


def parse_completion(values: Mapping[str, Any], bounds: RequestBounds) -> CompletionBody:
    """Return a validated /v1/completions body. Raises InvalidRequestError."""
    fields = validate_as(CompletionRequest, values, bounds)
    return CompletionBody(fields.model, fields.prompt, params_from_fields(fields, values, bounds))


def parse_chat(values: Mapping[str, Any], bounds: RequestBounds) -> ChatBody:
    """Return a validated /v1/chat/completions body, after the rules for prompts. Raises InvalidRequestError."""
    fields = validate_as(ChatRequest, values, bounds)
    body = ChatBody(fields.model, fields.messages, params_from_fields(fields, values, bounds))
    if bounds.prompt_rules:
        body = _canonical(body, bounds.prompt_rules)
    return replace(body, messages=messages_for_template(body.messages, bounds))


def parse_tokenize(values: Mapping[str, Any], bounds: RequestBounds) -> TokenizeRequest:
    """Return a validated /tokenize body: exactly one of `prompt` and `messages`, these after the rules for prompts.

    Raises InvalidRequestError.
    """
    if (values.get("prompt") is None) == (values.get("messages") is None):
        raise InvalidRequestError("send either prompt (a string) or messages (a list)", param="prompt")
    if values.get("messages") is None and values.get("tools"):
        raise InvalidRequestError("tools are rendered with messages only; leave them out", param="tools")
    fields = validate_as(TokenizeRequest, values, bounds)
    if fields.messages is None:
        return fields
    messages, tools = fields.messages, fields.tools
    if bounds.prompt_rules:
        messages, tools, *_ = canonical_chat(messages, tools, (), bounds.prompt_rules)
    return fields.model_copy(update={"messages": messages_for_template(messages, bounds), "tools": tools})


def parse_detokenize(values: Mapping[str, Any], bounds: RequestBounds) -> DetokenizeRequest:
    """Return a validated /detokenize body. Raises InvalidRequestError."""
    return validate_as(DetokenizeRequest, values, bounds)


def parse_prompts(value: object, bounds: RequestBounds) -> tuple[Prompt, ...]:
    """Return the prompts from any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if value is None:
        raise missing_parameter_error("prompt")
    if isinstance(value, str):
        return (check_encodable_text("prompt", value),)
    if not isinstance(value, list | tuple | array):
        raise_invalid_value(
            "prompt", f"is {safe_repr(value)}", "it must be a string, a list of strings or lists of token ids"
        )
    if not len(value):
        raise_invalid_value("prompt", "is an empty list", "send at least one prompt")
    if isinstance(value, array) or _is_int(value[0]):
        return (_token_ids(value, bounds),)
    if len(value) > bounds.max_prompts:
        raise_invalid_value(
            "prompt", f"holds {len(value)} prompts", f"one request may hold at most {bounds.max_prompts}"
        )
    return tuple(_one_prompt(prompt, bounds) for prompt in value)


def parse_messages(value: object, bounds: RequestBounds) -> list[Message]:
    """Return the conversation as it was sent, checked; `messages_for_template` follows. Raises InvalidRequestError."""
    if value is None:
        raise missing_parameter_error("messages")
    if not isinstance(value, list | tuple) or not value:
        raise_invalid_value(
            "messages", f"is {'empty' if value == [] else safe_repr(value)}", "it must be a list of messages"
        )
    if len(value) > bounds.max_messages:
        raise_invalid_value("messages", f"has {len(value)} entries", f"it may have at most {bounds.max_messages}")
    return [read_message(f"messages[{index}]", message, bounds) for index, message in enumerate(value)]


def messages_for_template(messages: list[Message], bounds: RequestBounds) -> list[Message]:
    """Return the messages with each content in the form that the chat template takes, nearly always one text.

    Text parts are joined by what the template prints between parts, or by newlines if it would print them as a list.
    Null beside tool calls stays null if the template takes it. Rules for prompts have seen the parts before. Blocks.
    """
    return [
        message if isinstance(message["content"], str) else {**message, "content": _one_content(message, bounds)}
        for message in messages
    ]


# --------------------------------------------------------------------------------------------------------- inner parts


def _one_content(message: Message, bounds: RequestBounds) -> str | None:
    forms = bounds.content_forms()
    if message["content"] is None:
        return None if forms.takes_null else ""
    return forms.separators.get(message["role"], "\n").join(part["text"] for part in message["content"])


def _canonical(body: ChatBody, rules: PromptRules) -> ChatBody:
    """Return the chat after the rules for prompts."""
    params, tools = body.params, body.params.tools
    found = canonical_chat(body.messages, () if tools is None else tools.tools, params.template_options, rules)
    params = replace(
        params,
        tools=None if tools is None else replace(tools, tools=found.tools),
        template_options=found.options,
        applied_rules=found.applied,
    )
    return replace(body, messages=found.messages, params=params)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_prompt(prompt: object, bounds: RequestBounds) -> Prompt:
    if isinstance(prompt, str):
        return check_encodable_text("prompt", prompt)
    if isinstance(prompt, list | tuple | array):
        return _token_ids(prompt, bounds)
    raise_invalid_value(
        "prompt", f"contains {safe_repr(prompt)}", "it must be a string, a list of strings or lists of token ids"
    )


def _token_ids(values: "list[Any] | tuple[Any, ...] | array[int]", bounds: RequestBounds) -> "array[int]":
    if not len(values):
        raise_invalid_value("prompt", "has an empty list of token ids", "send at least one token")
    if len(values) > bounds.max_model_len:
        raise prompt_too_long_error(len(values), bounds.max_model_len, "shorten the prompt")
    for value in values:
        check_int("prompt", value, 0, bounds.vocab_size - 1)
    return array("i", values)
