"""JSON schemas of all answers of a server, for /openapi.json. Tests hold every answer against them."""

from typing import Any, NamedTuple

Schema = dict[str, Any]
NULL, STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("null", "string", "integer", "number", "boolean"))
LIST: Schema = {"items": {}, "type": "array"}
OBJECT: Schema = {"additionalProperties": True, "type": "object"}


class Optional(dict[str, Any]):
    """The schema of a property that may be absent."""


def object_of(description: str, /, **properties: Schema) -> Schema:
    """Return the schema of an object. All properties are required that are not Optional; clients accept others."""
    required = [name for name, schema in properties.items() if not isinstance(schema, Optional)]
    more = {"required": required} if required else {}
    return {"description": description, "properties": properties, **more, "type": "object"}


def list_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"items": items, "type": "array"}


def map_of(values: Schema) -> Schema:
    """Return the schema of an object whose properties have names that are not known beforehand."""
    return {"additionalProperties": values, "type": "object"}


def any_of(*schemas: Schema) -> Schema:
    """Return the schema of a value of one of several kinds."""
    return {"anyOf": list(schemas)}


def maybe(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return any_of(*schema.get("anyOf", [schema]), NULL)


def optional(schema: Schema) -> Optional:
    """Return the schema of a property that is absent where it would be null."""
    return Optional(maybe(schema))


def one_of(first: str | bool, *others: str) -> Schema:
    """Return the schema of one of these constants."""
    kind = "boolean" if isinstance(first, bool) else "string"
    return {"enum": [first, *others], "type": kind} if others else {"const": first, "type": kind}


def ints(names: str) -> dict[str, Schema]:
    """Return properties that are integers."""
    return dict.fromkeys(names.split(), INTEGER)


# --------------------------------------------------------------------------------------------------------- shared parts

_ERROR_DETAIL = object_of(
    "A description of the error: `code` is stable, `param` names the field at fault.",
    message=STRING,
    type=STRING,
    param=maybe(STRING),
    code=maybe(STRING),
)
ERROR = object_of("OpenAI's error object.", error=_ERROR_DETAIL)


class Answers(NamedTuple):
    """The schemas of a route's responses: a success (None: text), an event if it is streamed, any other status."""

    success: Schema | None
    event: Schema | None = None
    error: Schema = ERROR
    status: int = 200


STATUS = object_of("The answer of a probe, and of an action without result.", status=one_of("ok"))
VERSION = object_of("The version of the server.", version=STRING)
_SOURCES = ints("cached_tokens pinned_tokens shared_tokens store_tokens followed_tokens")
_WRITTEN_TOKENS = object_of(
    "Cached prompt tokens by source, and those that were computed and published in the cache.",
    **_SOURCES,
    cache_write_tokens=INTEGER,
)
_USAGE = object_of(
    "Numbers of tokens of a request, over all its prompts and choices.",
    **ints("prompt_tokens completion_tokens total_tokens"),
    prompt_tokens_details=_WRITTEN_TOKENS,
)
_CACHE_DIAGNOSTICS = object_of(
    "The end of the reuse of an earlier prompt, in numbers and names only; tokens.",
    compared_id=STRING,
    result=one_of("hit", "miss", "not_found"),
    cause=maybe(STRING),
    field=maybe(STRING),
    **ints("compared_tokens common_tokens reusable_tokens cached_tokens evicted_tokens"),
    rules=map_of(INTEGER),
)

# ----------------------------------------------------------------------------------------------- completions and chats

_HEAD = {
    "id": STRING,
    "created": INTEGER,  # seconds since 1970
    "model": STRING,
    "system_fingerprint": NULL,
    "cache_diagnostics": optional(_CACHE_DIAGNOSTICS),
}
_PROMPT_TOKEN = object_of("A token at one position of the prompt.", logprob=maybe(NUMBER), decoded_token=STRING)
_CHOICE = {
    "index": INTEGER,
    "finish_reason": maybe(one_of("stop", "length", "tool_calls", "error", "abort")),
    "stop_reason": optional(any_of(STRING, INTEGER)),
    "token_ids": optional(list_of(INTEGER)),
    "prompt_logprobs": optional(list_of(maybe(map_of(_PROMPT_TOKEN)))),  # by token id; null for the first token
}
_COMPLETION_LOGPROBS = object_of(
    "One item per token; an echoed prompt comes first.",
    tokens=list_of(STRING),
    token_logprobs=list_of(maybe(NUMBER)),
    top_logprobs=list_of(maybe(map_of(NUMBER))),
    text_offset=list_of(INTEGER),
)
_COMPLETION_CHOICE = object_of(
    "One completion, or its next part.", **_CHOICE, text=STRING, logprobs=maybe(_COMPLETION_LOGPROBS)
)
_COMPLETION: Schema = {**_HEAD, "object": one_of("text_completion"), "choices": list_of(_COMPLETION_CHOICE)}
COMPLETION = object_of("A whole completion.", **_COMPLETION, usage=_USAGE)
COMPLETION_CHUNK = object_of(
    "An event of a streamed completion; the usage is in the last one, if it was requested.",
    **_COMPLETION,
    usage=maybe(_USAGE),
)
COMPLETIONS = Answers(COMPLETION, COMPLETION_CHUNK)
_TOKEN: Schema = {"token": STRING, "logprob": maybe(NUMBER), "bytes": list_of(INTEGER)}
_CHAT_TOKEN = object_of(
    "A generated token and its best alternatives.",
    **_TOKEN,
    top_logprobs=list_of(object_of("A token and its log-probability.", **_TOKEN)),
)
_CHAT_LOGPROBS = object_of("Log-probabilities of a chat message.", content=list_of(_CHAT_TOKEN), refusal=NULL)
_FUNCTION = object_of("The name of a function, and its arguments as JSON text.", name=STRING, arguments=STRING)
_TOOL_CALL = object_of("A call of a tool.", id=STRING, type=one_of("function"), function=_FUNCTION)
_CHAT_MESSAGE = object_of(
    "The generated message. Reasoning has two names, as in vLLM.",
    role=one_of("assistant"),
    content=maybe(STRING),
    refusal=NULL,
    reasoning=optional(STRING),
    reasoning_content=optional(STRING),
    tool_calls=optional(list_of(_TOOL_CALL)),
)
_CHAT_CHOICE = object_of("One generated message.", **_CHOICE, message=_CHAT_MESSAGE, logprobs=maybe(_CHAT_LOGPROBS))
CHAT_COMPLETION = object_of(
    "A whole chat response.", **_HEAD, object=one_of("chat.completion"), choices=list_of(_CHAT_CHOICE), usage=_USAGE
)
_FUNCTION_DELTA = object_of(
    "The next part of a function call; the name is in the first one.", name=optional(STRING), arguments=STRING
)
_TOOL_CALL_DELTA = object_of(
    "The next part of a tool call; id and type are in the first one.",
    index=INTEGER,
    id=optional(STRING),
    type=optional(one_of("function")),
    function=_FUNCTION_DELTA,
)
_MESSAGE_DELTA = object_of(
    "The new parts of a message.",
    role=optional(one_of("assistant")),
    content=optional(STRING),
    reasoning=optional(STRING),
    reasoning_content=optional(STRING),
    tool_calls=optional(list_of(_TOOL_CALL_DELTA)),
)
_CHUNK_CHOICE = object_of(
    "The next part of one message.", **_CHOICE, delta=_MESSAGE_DELTA, logprobs=maybe(_CHAT_LOGPROBS)
)
CHAT_CHUNK = object_of(
    "An event of a streamed chat response; the usage is in the last one, if it was requested.",
    **_HEAD,
    object=one_of("chat.completion.chunk"),
    choices=list_of(_CHUNK_CHOICE),
    usage=maybe(_USAGE),
)
CHATS = Answers(CHAT_COMPLETION, CHAT_CHUNK)

# ----------------------------------------------------------------------------------------------------------- responses

_ITEM_STATUS = one_of("in_progress", "completed", "incomplete")
_TEXT_PART = object_of("Text of a message.", type=one_of("output_text"), text=STRING, annotations=LIST, logprobs=LIST)
_REASONING_PART = object_of("Text of the reasoning.", type=one_of("reasoning_text"), text=STRING)


def _item(description: str, *kinds: str, **properties: Schema) -> Schema:
    return object_of(description, id=STRING, type=one_of(*kinds), status=_ITEM_STATUS, **properties)


_CALL: Schema = {"call_id": STRING, "name": STRING, "namespace": optional(STRING)}
_OUTPUT_ITEM = any_of(
    _item("A message of the output.", "message", role=one_of("assistant"), content=list_of(_TEXT_PART)),
    _item(
        "The reasoning before a message; its summary is always empty.",
        "reasoning",
        summary=LIST,
        content=list_of(_REASONING_PART),
    ),
    _item("A call of a tool; `arguments` is JSON text.", "function_call", **_CALL, arguments=STRING),
    _item("A call of a custom tool; `input` is plain text.", "custom_tool_call", **_CALL, input=STRING),
    _item(
        "A call of a tool with a type of its own, which the client executes. It has one of the last three fields.",
        *("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"),
        call_id=STRING,
        execution=optional(one_of("client")),
        action=optional(OBJECT),
        operation=optional(OBJECT),
        arguments=optional(OBJECT),
    ),
)
_CACHE_OPTIONS = object_of(
    "The options of the prompt cache in force.",
    mode=one_of("implicit", "explicit"),
    ttl=STRING,
    comparison_response_id=maybe(STRING),
)
_PROMPT_CACHE_DIAGNOSTICS = object_of(
    "The comparison with an earlier response; the other fields are those of a miss.",
    type=one_of("cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"),
    reason=optional(one_of("tools_changed", "reasoning_effort_changed", "context_compacted", "input_changed")),
    cache_missed_tokens=optional(INTEGER),
    comparison_reusable_tokens=optional(INTEGER),
)
_RESPONSE_USAGE = object_of(
    "Numbers of tokens.",
    input_tokens=INTEGER,
    input_tokens_details=_WRITTEN_TOKENS,
    output_tokens=INTEGER,
    output_tokens_details=object_of("Tokens of the output by kind.", reasoning_tokens=INTEGER),
    total_tokens=INTEGER,
)
RESPONSE = object_of(
    "A response. The fields after `output` repeat the request.",
    id=STRING,
    object=one_of("response"),
    created_at=INTEGER,  # seconds since 1970
    status=one_of("in_progress", "completed", "incomplete", "failed"),
    background=one_of(False),
    error=maybe(OBJECT),
    incomplete_details=maybe(map_of(STRING)),
    model=STRING,
    output=list_of(_OUTPUT_ITEM),
    instructions=maybe(STRING),
    max_output_tokens=maybe(INTEGER),
    max_tool_calls=NULL,
    metadata=map_of(STRING),
    parallel_tool_calls=BOOLEAN,
    previous_response_id=maybe(STRING),
    prompt_cache_diagnostics=maybe(_PROMPT_CACHE_DIAGNOSTICS),
    prompt_cache_key=maybe(STRING),
    prompt_cache_options=_CACHE_OPTIONS,
    reasoning=map_of(maybe(STRING)),
    safety_identifier=maybe(STRING),
    service_tier=one_of("default"),
    store=BOOLEAN,
    temperature=NUMBER,
    text=OBJECT,
    tool_choice=any_of(STRING, OBJECT),
    tools=list_of(OBJECT),
    top_logprobs=INTEGER,
    top_p=NUMBER,
    truncation=one_of("disabled"),
    user=maybe(STRING),
    cache_diagnostics=optional(_CACHE_DIAGNOSTICS),
    usage=maybe(_RESPONSE_USAGE),
)
RESPONSE_EVENT = object_of(
    "An event of a streamed response; which fields it has depends on `type`.",
    type=STRING,
    sequence_number=INTEGER,
    response=optional(RESPONSE),
    item=optional(_OUTPUT_ITEM),
    item_id=optional(STRING),
    output_index=optional(INTEGER),
    content_index=optional(INTEGER),
    part=optional(any_of(_TEXT_PART, _REASONING_PART)),
    **dict.fromkeys(("delta", "text", "name", "arguments", "input"), optional(STRING)),
    logprobs=optional(LIST),
)
RESPONSES = Answers(RESPONSE, RESPONSE_EVENT)
INPUT_ITEMS = object_of(
    "The input items of a stored response, in the shape in which they were sent, with id and status.",
    object=one_of("list"),
    data=list_of(OBJECT),
    first_id=STRING,
    last_id=STRING,
    has_more=BOOLEAN,
)
DELETED_RESPONSE = object_of(
    "The answer to the deletion of a stored response.", id=STRING, object=one_of("response"), deleted=one_of(True)
)

# ------------------------------------------------------------------------------------------------------------ messages

_BLOCK = any_of(
    object_of("Text of a message.", type=one_of("text"), text=STRING, citations=NULL),
    object_of(
        "The reasoning before a message; the signature is empty.",
        type=one_of("thinking"),
        thinking=STRING,
        signature=STRING,
    ),
    object_of("A call of a tool.", type=one_of("tool_use"), id=STRING, name=STRING, input=OBJECT),
)
_MESSAGE_USAGE = object_of(
    "Numbers of tokens; the three counts of input tokens add up to those of the prompt.",
    **ints("input_tokens cache_creation_input_tokens cache_read_input_tokens"),
    cache_creation=object_of(
        "Tokens written to the cache, by the lifetime that was requested.",
        **ints("ephemeral_5m_input_tokens ephemeral_1h_input_tokens"),
    ),
    output_tokens=INTEGER,
    output_tokens_details=object_of("Tokens of the output by kind.", thinking_tokens=INTEGER),
)
_CACHE_MISS_REASON = object_of(
    "The difference from the prompt of the earlier message; the number is that of a change.",
    type=one_of("system_changed", "tools_changed", "messages_changed", "previous_message_not_found", "unavailable"),
    cache_missed_input_tokens=optional(INTEGER),
)
MESSAGE = object_of(
    "The generated message.",
    id=STRING,
    type=one_of("message"),
    role=one_of("assistant"),
    model=STRING,
    content=list_of(_BLOCK),
    stop_reason=maybe(one_of("end_turn", "max_tokens", "stop_sequence", "tool_use")),
    stop_sequence=maybe(STRING),
    diagnostics=optional(
        object_of("The comparison with the prompt of an earlier message.", cache_miss_reason=_CACHE_MISS_REASON)
    ),
    cache_diagnostics=optional(_CACHE_DIAGNOSTICS),
    usage=_MESSAGE_USAGE,
)
MESSAGE_EVENT = object_of(
    "An event of a streamed message; which fields it has depends on `type`.",
    type=STRING,
    message=optional(MESSAGE),
    index=optional(INTEGER),
    content_block=optional(_BLOCK),
    delta=optional(OBJECT),
    usage=optional(_MESSAGE_USAGE),
    error=optional(OBJECT),
)
_MESSAGES_ERROR_DETAIL = object_of(
    "A description of the error; `code` and `param` are beyond Anthropic's API.",
    type=STRING,
    message=STRING,
    code=maybe(STRING),
    param=maybe(STRING),
)
MESSAGES_ERROR = object_of(
    "Anthropic's error object.", type=one_of("error"), error=_MESSAGES_ERROR_DETAIL, request_id=STRING
)
MESSAGES = Answers(MESSAGE, MESSAGE_EVENT, MESSAGES_ERROR)
TOKEN_COUNT = Answers(object_of("The number of tokens of a conversation.", input_tokens=INTEGER), error=MESSAGES_ERROR)

# -------------------------------------------------------------------------------------------- the model, its tokenizer

MODEL = object_of(
    "The served model. `max_model_len` in tokens; the KV cache has `num_gpu_blocks` x `block_size`.\n\n"
    "`max_num_batched_tokens` is the most that a step computes; `tokenizer` a digest, for routers.",
    id=STRING,
    object=one_of("model"),
    created=INTEGER,  # seconds since 1970
    owned_by=STRING,
    root=STRING,
    parent=NULL,
    **ints("max_model_len block_size num_gpu_blocks max_num_batched_tokens"),
    tokenizer=STRING,
    default_sampling_params=OBJECT,
    exact_reuse=object_of(
        "Whether logits are a function of the prefix alone, bit for bit (docs/invariants.md, 15), "
        "and what prevents it.",
        holds=BOOLEAN,
        exceptions=list_of(STRING),
    ),
)
MODEL_LIST = object_of("The models of a server: one.", object=one_of("list"), data=list_of(MODEL))
TOKENS = object_of(
    "The tokens of a text or of a conversation.",
    **ints("count max_model_len"),
    tokens=list_of(INTEGER),
    token_strs=maybe(list_of(STRING)),
)
SERVER_LOAD = object_of("The number of requests in flight.", server_load=INTEGER)
_NAMED_TOKENS = "bos_token eos_token unk_token pad_token sep_token cls_token mask_token chat_template"
TOKENIZER_INFO = object_of(
    "The special tokens of the tokenizer, null without one, its chat template, and the model's context in tokens.",
    tokenizer_class=STRING,
    **dict.fromkeys(_NAMED_TOKENS.split(), maybe(STRING)),
    model_max_length=INTEGER,
)
TEXT = object_of("The text of token ids.", prompt=STRING)
