"""Models of the Messages API: the message, its content blocks, the events of a stream, errors."""

from typing import Any, Literal

from headstart.openai.api_schema.api_object import ApiObject, CacheDiagnostics


class TextBlock(ApiObject):
    """Text of a message."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(ApiObject):
    """The reasoning before a message; the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(ApiObject):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(ApiObject):
    """Tokens written to the cache, by the lifetime that was requested."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class ThinkingTokens(ApiObject):
    """Tokens of the output by kind."""

    thinking_tokens: int


class MessageUsage(ApiObject):
    """Numbers of tokens; the three counts of input tokens add up to those of the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: ThinkingTokens


class CacheMissReason(ApiObject):
    """The difference from the prompt of the earlier message; the number is that of a change."""

    type: Literal["system_changed", "tools_changed", "messages_changed", "previous_message_not_found", "unavailable"]
    cache_missed_input_tokens: int | None = None


class Diagnostics(ApiObject):
    """The comparison with the prompt of an earlier message."""

    cache_miss_reason: CacheMissReason


class Message(ApiObject):
    """The generated message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    diagnostics: Diagnostics | None = None
    cache_diagnostics: CacheDiagnostics | None = None
    usage: MessageUsage


class MessageEvent(ApiObject):
    """An event of a streamed message; which fields it has depends on `type`."""

    type: str
    message: Message | None = None
    index: int | None = None
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: dict[str, Any] | None = None


class TokenCount(ApiObject):
    """The number of tokens of a conversation."""

    input_tokens: int


class MessagesErrorDetail(ApiObject):
    """A description of the error; `code` and `param` are beyond Anthropic's API."""

    type: str
    message: str
    code: str | None
    param: str | None


class MessagesError(ApiObject):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
