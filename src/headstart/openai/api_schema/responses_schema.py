"""Models of the Responses API: the response, its output items, and the events of a stream."""

from typing import Any, Literal

from headstart.openai.api_schema.api_object import ApiObject, CacheDiagnostics, WrittenTokens

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextPart(ApiObject):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningPart(ApiObject):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(ApiObject):
    """A message of the output."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[TextPart]


class ReasoningItem(ApiObject):
    """The reasoning before a message; its summary is always empty."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningPart]


class FunctionCallItem(ApiObject):
    """A call of a tool; `arguments` is JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCallItem(ApiObject):
    """A call of a custom tool; `input` is plain text."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ClientToolCallItem(ApiObject):
    """A call of a tool with a type of its own, which the client executes. It has one of the last three fields."""

    id: str
    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"]
    status: ItemStatus
    call_id: str
    execution: Literal["client"] | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | ClientToolCallItem


class PromptCacheOptions(ApiObject):
    """The options of the prompt cache in force."""

    mode: Literal["implicit", "explicit"]
    ttl: str
    comparison_response_id: str | None


class PromptCacheDiagnostics(ApiObject):
    """The comparison with an earlier response; the other fields are those of a miss."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: Literal["tools_changed", "reasoning_effort_changed", "context_compacted", "input_changed"] | None = None
    cache_missed_tokens: int | None = None
    comparison_reusable_tokens: int | None = None


class OutputTokensDetails(ApiObject):
    """Tokens of the output by kind."""

    reasoning_tokens: int


class ResponseUsage(ApiObject):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: WrittenTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(ApiObject):
    """A response. The fields after `output` repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since 1970
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_diagnostics: PromptCacheDiagnostics | None
    prompt_cache_key: str | None
    prompt_cache_options: PromptCacheOptions
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    cache_diagnostics: CacheDiagnostics | None = None
    usage: ResponseUsage | None


class ResponseEvent(ApiObject):
    """An event of a streamed response; which fields it has depends on `type`."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: TextPart | ReasoningPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[Any] | None = None


class InputItems(ApiObject):
    """The input items of a stored response, in the shape in which they were sent, with id and status."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(ApiObject):
    """The answer to the deletion of a stored response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
