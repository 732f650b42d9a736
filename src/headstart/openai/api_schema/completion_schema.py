"""Models of the responses of /v1/completions and /v1/chat/completions, whole and streamed."""

from typing import Literal

from headstart.openai.api_schema.api_object import ApiObject, CacheDiagnostics, Usage

FinishReason = Literal["stop", "length", "tool_calls", "error", "abort"]


class PromptToken(ApiObject):
    """A token at one position of the prompt."""

    logprob: float | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]  # by token id; null for the first token


class _Head(ApiObject):
    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: None
    cache_diagnostics: CacheDiagnostics | None = None


class _Choice(ApiObject):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(ApiObject):
    """One item per token; an echoed prompt comes first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """One completion, or its next part."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Head):
    """A whole completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Completion):
    """An event of a streamed completion; the usage is in the last one, if it was requested."""

    usage: Usage | None  # pyright: ignore[reportIncompatibleVariableOverride]


class TokenLogprob(ApiObject):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A generated token and its best alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ApiObject):
    """Log-probabilities of a chat message."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(ApiObject):
    """The name of a function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(ApiObject):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ApiObject):
    """The generated message. Reasoning has two names, as in vLLM."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    """One generated message."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Head):
    """A whole chat response."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(ApiObject):
    """The next part of a function call; the name is in the first one."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ApiObject):
    """The next part of a tool call; id and type are in the first one."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(ApiObject):
    """The new parts of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(_Choice):
    """The next part of one message."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatChunk(_Head):
    """An event of a streamed chat response; the usage is in the last one, if it was requested."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None
