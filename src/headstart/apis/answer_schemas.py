"""JSON schemas of all answers of a server, for /openapi.json. Tests hold every answer against them."""

from typing import Any, NamedTuple

Schema = dict[str, Any]
NULL, STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("null", "string", "integer", "number", "boolean"))
LIST: Schema = {"items": {}, "type": "array"}
OBJECT: Schema = {"additionalProperties": True, "type": "object"}


class OptionalProperty(dict[str, Any]):
    """The schema of a property that may be absent."""


def object_schema(description: str, /, **properties: Schema) -> Schema:
    """Return the schema of an object. All properties are required that are not Optional; clients accept others."""
    required = [name for name, schema in properties.items() if not isinstance(schema, OptionalProperty)]
    more = {"required": required} if required else {}
    return {"description": description, "properties": properties, **more, "type": "object"}


def array_schema(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"items": items, "type": "array"}


def map_schema(values: Schema) -> Schema:
    """Return the schema of an object whose properties have names that are not known beforehand."""
    return {"additionalProperties": values, "type": "object"}


def any_of_schema(*schemas: Schema) -> Schema:
    """Return the schema of a value of one of several kinds."""
    return {"anyOf": list(schemas)}


def nullable_schema(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return any_of_schema(*schema.get("anyOf", [schema]), NULL)


def optional_property(schema: Schema) -> OptionalProperty:
    """Return the schema of a property that is absent where it would be null."""
    return OptionalProperty(nullable_schema(schema))


def enum_schema(first: str | bool, *others: str) -> Schema:
    """Return the schema of one of these constants."""
    kind = "boolean" if isinstance(first, bool) else "string"
    return {"enum": [first, *others], "type": kind} if others else {"const": first, "type": kind}


def integer_properties(names: str) -> dict[str, Schema]:
    """Return properties that are integers."""
    return dict.fromkeys(names.split(), INTEGER)


# --------------------------------------------------------------------------------------------------------- shared parts

_ERROR_DETAIL = object_schema(
    "A description of the error: `code` is stable, `param` names the field at fault.",
    message=STRING,
    type=STRING,
    param=nullable_schema(STRING),
    code=nullable_schema(STRING),
)
ERROR = object_schema("OpenAI's error object.", error=_ERROR_DETAIL)


class RouteResponseSchemas(NamedTuple):
    """The schemas of a route's responses: a success (None: text), an event if it is streamed, any other status."""

    success: Schema | None
    event: Schema | None = None
    error: Schema = ERROR
    status: int = 200


STATUS = object_schema("The answer of a probe, and of an action without result.", status=enum_schema("ok"))
VERSION = object_schema("The version of the server.", version=STRING)
_SOURCES = integer_properties("cached_tokens pinned_tokens shared_tokens store_tokens followed_tokens")
_WRITTEN_TOKENS = object_schema(
    "Cached prompt tokens by source, and those that were computed and published in the cache.",
    **_SOURCES,
    cache_write_tokens=INTEGER,
)
_USAGE = object_schema(
    "Numbers of tokens of a request, over all its prompts and choices.",
    **integer_properties("prompt_tokens completion_tokens total_tokens"),
    prompt_tokens_details=_WRITTEN_TOKENS,
)
_CACHE_DIAGNOSTICS = object_schema(
    "The end of the reuse of an earlier prompt, in numbers and names only; tokens.",
    compared_id=STRING,
    result=enum_schema("hit", "miss", "not_found"),
    cause=nullable_schema(STRING),
    field=nullable_schema(STRING),
    **integer_properties("compared_tokens common_tokens reusable_tokens cached_tokens evicted_tokens"),
    rules=map_schema(INTEGER),
)

# ----------------------------------------------------------------------------------------------- completions and chats

_HEAD = {
    "id": STRING,
    "created": INTEGER,  # seconds since 1970
    "model": STRING,
    "system_fingerprint": NULL,
    "cache_diagnostics": optional_property(_CACHE_DIAGNOSTICS),
}
_PROMPT_TOKEN = object_schema(
    "A token at one position of the prompt.", logprob=nullable_schema(NUMBER), decoded_token=STRING
)
_CHOICE = {
    "index": INTEGER,
    "finish_reason": nullable_schema(enum_schema("stop", "length", "tool_calls", "error", "abort")),
    "stop_reason": optional_property(any_of_schema(STRING, INTEGER)),
    "token_ids": optional_property(array_schema(INTEGER)),
    "prompt_logprobs": optional_property(
        array_schema(nullable_schema(map_schema(_PROMPT_TOKEN)))
    ),  # by token id; null for the first token
}
_COMPLETION_LOGPROBS = object_schema(
    "One item per token; an echoed prompt comes first.",
    tokens=array_schema(STRING),
    token_logprobs=array_schema(nullable_schema(NUMBER)),
    top_logprobs=array_schema(nullable_schema(map_schema(NUMBER))),
    text_offset=array_schema(INTEGER),
)
_COMPLETION_CHOICE = object_schema(
    "One completion, or its next part.", **_CHOICE, text=STRING, logprobs=nullable_schema(_COMPLETION_LOGPROBS)
)
_COMPLETION: Schema = {
    **_HEAD,
    "object": enum_schema("text_completion"),
    "choices": array_schema(_COMPLETION_CHOICE),
}
COMPLETION = object_schema("A whole completion.", **_COMPLETION, usage=_USAGE)
COMPLETION_CHUNK = object_schema(
    "An event of a streamed completion; the usage is in the last one, if it was requested.",
    **_COMPLETION,
    usage=nullable_schema(_USAGE),
)
COMPLETIONS = RouteResponseSchemas(COMPLETION, COMPLETION_CHUNK)
_TOKEN: Schema = {"token": STRING, "logprob": nullable_schema(NUMBER), "bytes": array_schema(INTEGER)}
_CHAT_TOKEN = object_schema(
    "A generated token and its best alternatives.",
    **_TOKEN,
    top_logprobs=array_schema(object_schema("A token and its log-probability.", **_TOKEN)),
)
_CHAT_LOGPROBS = object_schema("Log-probabilities of a chat message.", content=array_schema(_CHAT_TOKEN), refusal=NULL)
_FUNCTION = object_schema("The name of a function, and its arguments as JSON text.", name=STRING, arguments=STRING)
_TOOL_CALL = object_schema("A call of a tool.", id=STRING, type=enum_schema("function"), function=_FUNCTION)
_CHAT_MESSAGE = object_schema(
    "The generated message. Reasoning has two names, as in vLLM.",
    role=enum_schema("assistant"),
    content=nullable_schema(STRING),
    refusal=NULL,
    reasoning=optional_property(STRING),
    reasoning_content=optional_property(STRING),
    tool_calls=optional_property(array_schema(_TOOL_CALL)),
)
_CHAT_CHOICE = object_schema(
    "One generated message.", **_CHOICE, message=_CHAT_MESSAGE, logprobs=nullable_schema(_CHAT_LOGPROBS)
)
CHAT_COMPLETION = object_schema(
    "A whole chat response.",
    **_HEAD,
    object=enum_schema("chat.completion"),
    choices=array_schema(_CHAT_CHOICE),
    usage=_USAGE,
)
_FUNCTION_DELTA = object_schema(
    "The next part of a function call; the name is in the first one.", name=optional_property(STRING), arguments=STRING
)
_TOOL_CALL_DELTA = object_schema(
    "The next part of a tool call; id and type are in the first one.",
    index=INTEGER,
    id=optional_property(STRING),
    type=optional_property(enum_schema("function")),
    function=_FUNCTION_DELTA,
)
_MESSAGE_DELTA = object_schema(
    "The new parts of a message.",
    role=optional_property(enum_schema("assistant")),
    content=optional_property(STRING),
    reasoning=optional_property(STRING),
    reasoning_content=optional_property(STRING),
    tool_calls=optional_property(array_schema(_TOOL_CALL_DELTA)),
)
_CHUNK_CHOICE = object_schema(
    "The next part of one message.", **_CHOICE, delta=_MESSAGE_DELTA, logprobs=nullable_schema(_CHAT_LOGPROBS)
)
CHAT_CHUNK = object_schema(
    "An event of a streamed chat response; the usage is in the last one, if it was requested.",
    **_HEAD,
    object=enum_schema("chat.completion.chunk"),
    choices=array_schema(_CHUNK_CHOICE),
    usage=nullable_schema(_USAGE),
)
CHATS = RouteResponseSchemas(CHAT_COMPLETION, CHAT_CHUNK)

# ----------------------------------------------------------------------------------------------------------- responses

_ITEM_STATUS = enum_schema("in_progress", "completed", "incomplete")
_TEXT_PART = object_schema(
    "Text of a message.", type=enum_schema("output_text"), text=STRING, annotations=LIST, logprobs=LIST
)
_REASONING_PART = object_schema("Text of the reasoning.", type=enum_schema("reasoning_text"), text=STRING)


def _item(description: str, *kinds: str, **properties: Schema) -> Schema:
    return object_schema(description, id=STRING, type=enum_schema(*kinds), status=_ITEM_STATUS, **properties)


_CALL: Schema = {"call_id": STRING, "name": STRING, "namespace": optional_property(STRING)}
_OUTPUT_ITEM = any_of_schema(
    _item("A message of the output.", "message", role=enum_schema("assistant"), content=array_schema(_TEXT_PART)),
    _item(
        "The reasoning before a message; its summary is always empty.",
        "reasoning",
        summary=LIST,
        content=array_schema(_REASONING_PART),
    ),
    _item("A call of a tool; `arguments` is JSON text.", "function_call", **_CALL, arguments=STRING),
    _item("A call of a custom tool; `input` is plain text.", "custom_tool_call", **_CALL, input=STRING),
    _item(
        "A call of a tool with a type of its own, which the client executes. It has one of the last three fields.",
        *("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"),
        call_id=STRING,
        execution=optional_property(enum_schema("client")),
        action=optional_property(OBJECT),
        operation=optional_property(OBJECT),
        arguments=optional_property(OBJECT),
    ),
)
_CACHE_OPTIONS = object_schema(
    "The options of the prompt cache in force.",
    mode=enum_schema("implicit", "explicit"),
    ttl=STRING,
    comparison_response_id=nullable_schema(STRING),
)
_PROMPT_CACHE_DIAGNOSTICS = object_schema(
    "The comparison with an earlier response; the other fields are those of a miss.",
    type=enum_schema("cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"),
    reason=optional_property(
        enum_schema("tools_changed", "reasoning_effort_changed", "context_compacted", "input_changed")
    ),
    cache_missed_tokens=optional_property(INTEGER),
    comparison_reusable_tokens=optional_property(INTEGER),
)
_RESPONSE_USAGE = object_schema(
    "Numbers of tokens.",
    input_tokens=INTEGER,
    input_tokens_details=_WRITTEN_TOKENS,
    output_tokens=INTEGER,
    output_tokens_details=object_schema("Tokens of the output by kind.", reasoning_tokens=INTEGER),
    total_tokens=INTEGER,
)
RESPONSE = object_schema(
    "A response. The fields after `output` repeat the request.",
    id=STRING,
    object=enum_schema("response"),
    created_at=INTEGER,  # seconds since 1970
    status=enum_schema("in_progress", "completed", "incomplete", "failed"),
    background=enum_schema(False),
    error=nullable_schema(OBJECT),
    incomplete_details=nullable_schema(map_schema(STRING)),
    model=STRING,
    output=array_schema(_OUTPUT_ITEM),
    instructions=nullable_schema(STRING),
    max_output_tokens=nullable_schema(INTEGER),
    max_tool_calls=NULL,
    metadata=map_schema(STRING),
    parallel_tool_calls=BOOLEAN,
    previous_response_id=nullable_schema(STRING),
    prompt_cache_diagnostics=nullable_schema(_PROMPT_CACHE_DIAGNOSTICS),
    prompt_cache_key=nullable_schema(STRING),
    prompt_cache_options=_CACHE_OPTIONS,
    reasoning=map_schema(nullable_schema(STRING)),
    safety_identifier=nullable_schema(STRING),
    service_tier=enum_schema("default"),
    store=BOOLEAN,
    temperature=NUMBER,
    text=OBJECT,
    tool_choice=any_of_schema(STRING, OBJECT),
    tools=array_schema(OBJECT),
    top_logprobs=INTEGER,
    top_p=NUMBER,
    truncation=enum_schema("disabled"),
    user=nullable_schema(STRING),
    cache_diagnostics=optional_property(_CACHE_DIAGNOSTICS),
    usage=nullable_schema(_RESPONSE_USAGE),
)
RESPONSE_EVENT = object_schema(
    "An event of a streamed response; which fields it has depends on `type`.",
    type=STRING,
    sequence_number=INTEGER,
    response=optional_property(RESPONSE),
    item=optional_property(_OUTPUT_ITEM),
    item_id=optional_property(STRING),
    output_index=optional_property(INTEGER),
    content_index=optional_property(INTEGER),
    part=optional_property(any_of_schema(_TEXT_PART, _REASONING_PART)),
    **dict.fromkeys(("delta", "text", "name", "arguments", "input"), optional_property(STRING)),
    logprobs=optional_property(LIST),
)
RESPONSES = RouteResponseSchemas(RESPONSE, RESPONSE_EVENT)
INPUT_ITEMS = object_schema(
    "The input items of a stored response, in the shape in which they were sent, with id and status.",
    object=enum_schema("list"),
    data=array_schema(OBJECT),
    first_id=STRING,
    last_id=STRING,
    has_more=BOOLEAN,
)
DELETED_RESPONSE = object_schema(
    "The answer to the deletion of a stored response.",
    id=STRING,
    object=enum_schema("response"),
    deleted=enum_schema(True),
)

# ------------------------------------------------------------------------------------------------------------ messages

_BLOCK = any_of_schema(
    object_schema("Text of a message.", type=enum_schema("text"), text=STRING, citations=NULL),
    object_schema(
        "The reasoning before a message; the signature is empty.",
        type=enum_schema("thinking"),
        thinking=STRING,
        signature=STRING,
    ),
    object_schema("A call of a tool.", type=enum_schema("tool_use"), id=STRING, name=STRING, input=OBJECT),
)
_MESSAGE_USAGE = object_schema(
    "Numbers of tokens; the three counts of input tokens add up to those of the prompt.",
    **integer_properties("input_tokens cache_creation_input_tokens cache_read_input_tokens"),
    cache_creation=object_schema(
        "Tokens written to the cache, by the lifetime that was requested.",
        **integer_properties("ephemeral_5m_input_tokens ephemeral_1h_input_tokens"),
    ),
    output_tokens=INTEGER,
    output_tokens_details=object_schema("Tokens of the output by kind.", thinking_tokens=INTEGER),
)
_CACHE_MISS_REASON = object_schema(
    "The difference from the prompt of the earlier message; the number is that of a change.",
    type=enum_schema(
        "system_changed", "tools_changed", "messages_changed", "previous_message_not_found", "unavailable"
    ),
    cache_missed_input_tokens=optional_property(INTEGER),
)
MESSAGE = object_schema(
    "The generated message.",
    id=STRING,
    type=enum_schema("message"),
    role=enum_schema("assistant"),
    model=STRING,
    content=array_schema(_BLOCK),
    stop_reason=nullable_schema(enum_schema("end_turn", "max_tokens", "stop_sequence", "tool_use")),
    stop_sequence=nullable_schema(STRING),
    diagnostics=optional_property(
        object_schema("The comparison with the prompt of an earlier message.", cache_miss_reason=_CACHE_MISS_REASON)
    ),
    cache_diagnostics=optional_property(_CACHE_DIAGNOSTICS),
    usage=_MESSAGE_USAGE,
)
MESSAGE_EVENT = object_schema(
    "An event of a streamed message; which fields it has depends on `type`.",
    type=STRING,
    message=optional_property(MESSAGE),
    index=optional_property(INTEGER),
    content_block=optional_property(_BLOCK),
    delta=optional_property(OBJECT),
    usage=optional_property(_MESSAGE_USAGE),
    error=optional_property(OBJECT),
)
_MESSAGES_ERROR_DETAIL = object_schema(
    "A description of the error; `code` and `param` are beyond Anthropic's API.",
    type=STRING,
    message=STRING,
    code=nullable_schema(STRING),
    param=nullable_schema(STRING),
)
MESSAGES_ERROR = object_schema(
    "Anthropic's error object.", type=enum_schema("error"), error=_MESSAGES_ERROR_DETAIL, request_id=STRING
)
MESSAGES = RouteResponseSchemas(MESSAGE, MESSAGE_EVENT, MESSAGES_ERROR)
TOKEN_COUNT = RouteResponseSchemas(
    object_schema("The number of tokens of a conversation.", input_tokens=INTEGER), error=MESSAGES_ERROR
)

# -------------------------------------------------------------------------------------------- the model, its tokenizer

MODEL = object_schema(
    "The served model. `max_model_len` in tokens; the KV cache has `num_gpu_blocks` x `block_size`.\n\n"
    "`max_num_batched_tokens` is the most that a step computes; `tokenizer` a digest, for routers.",
    id=STRING,
    object=enum_schema("model"),
    created=INTEGER,  # seconds since 1970
    owned_by=STRING,
    root=STRING,
    parent=NULL,
    **integer_properties("max_model_len block_size num_gpu_blocks max_num_batched_tokens"),
    tokenizer=STRING,
    default_sampling_params=OBJECT,
    exact_reuse=object_schema(
        "Whether logits are a function of the prefix alone, bit for bit (docs/invariants.md, 15), "
        "and what prevents it.",
        holds=BOOLEAN,
        exceptions=array_schema(STRING),
    ),
)
MODEL_LIST = object_schema("The models of a server: one.", object=enum_schema("list"), data=array_schema(MODEL))
TOKENS = object_schema(
    "The tokens of a text or of a conversation.",
    **integer_properties("count max_model_len"),
    tokens=array_schema(INTEGER),
    token_strs=nullable_schema(array_schema(STRING)),
)
SERVER_LOAD = object_schema("The number of requests in flight.", server_load=INTEGER)
_NAMED_TOKENS = "bos_token eos_token unk_token pad_token sep_token cls_token mask_token chat_template"
TOKENIZER_INFO = object_schema(
    "The special tokens of the tokenizer, null without one, its chat template, and the model's context in tokens.",
    tokenizer_class=STRING,
    **dict.fromkeys(_NAMED_TOKENS.split(), nullable_schema(STRING)),
    model_max_length=INTEGER,
)
TEXT = object_schema("The text of token ids.", prompt=STRING)
