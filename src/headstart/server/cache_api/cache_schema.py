"""JSON schemas of the answers about the prefix cache: statistics, explanations, pinned prefixes. Unit: tokens."""

from headstart.apis.answer_schemas import (
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    OBJECT,
    STRING,
    OptionalProperty,
    Schema,
    array_schema,
    enum_schema,
    integer_properties,
    map_schema,
    nullable_schema,
    object_schema,
    optional_property,
)

_TENANT = object_schema(
    "Prompt tokens of one tenant; those of the prompts that were examined, and the avoidable ones of these.",
    **integer_properties("cached pinned shared store followed computed examined avoidable"),
)
_LOSSES = object_schema(
    "Prompt tokens computed again: evicted ones, and avoidable ones of the prompts that were examined, by cause.",
    **integer_properties("evicted_tokens examined_requests examined_tokens avoidable_tokens"),
    avoidable_share=nullable_schema(NUMBER),
    causes=map_schema(INTEGER),
)
_STORE = object_schema(
    "State and counters of the store on disk.",
    **integer_properties("blocks bytes max_bytes segments pending_blocks"),
    pending_seconds=NUMBER,
    **integer_properties("loading_blocks loaded_blocks loaded_bytes"),
    misses=map_schema(INTEGER),
    **integer_properties("written_blocks written_bytes"),
    lost_writes=map_schema(INTEGER),
    evicted_blocks=INTEGER,
    degraded=nullable_schema(STRING),
    degradations=INTEGER,
    load_bytes_per_s=NUMBER,
    write_bytes_per_s=NUMBER,
    compute_tokens_per_s=NUMBER,
)
CACHE_STATISTICS = object_schema(
    "Counters since the start of the server, and its current state.",
    object=enum_schema("cache.stats"),
    model=STRING,
    block_size=INTEGER,
    prompt_tokens=object_schema(
        "Prompt tokens of all requests, and how they were obtained.",
        **integer_properties("total cached pinned shared store followed computed"),
    ),
    hit_rate=nullable_schema(NUMBER),
    **integer_properties("prefill_tokens ideal_tokens replayed_tokens"),
    prefill_redundancy=nullable_schema(NUMBER),
    **integer_properties("generation_tokens computed_tokens"),
    blocks=object_schema(
        "Numbers of KV blocks by state.",
        **integer_properties("total scratch idle pinned_idle referenced published pinned"),
    ),
    evictions=map_schema(INTEGER),
    requests=object_schema("Numbers of requests.", **integer_properties("running waiting failed")),
    **integer_properties("preemptions promise_skips adoptions steps"),
    step_seconds=NUMBER,
    tenants=map_schema(_TENANT),
    losses=_LOSSES,
    store=optional_property(_STORE),
)
_TOKEN_SOURCES = object_schema(
    "The tokens of a prompt by source.",
    **integer_properties("cached_tokens pinned_tokens shared_tokens store_tokens followed_tokens computed_tokens"),
)
_SHOWN_TOKEN = object_schema("A token and its text.", id=INTEGER, text=STRING)
_NEAREST_REQUEST = object_schema(
    "The recent request with the longest common prefix, and the texts where the prompts diverge.",
    request_id=STRING,
    common_tokens=INTEGER,
    text_before=STRING,
    token=nullable_schema(_SHOWN_TOKEN),
    text=STRING,
    other_token=nullable_schema(_SHOWN_TOKEN),
    other_text=STRING,
    difference=nullable_schema(
        enum_schema("timestamp", "uuid", "identifier", "number", "whitespace", "json_order", "order")
    ),
    repeated_tokens=INTEGER,
)
_BLOCK_EVICTION = object_schema(
    "The eviction of the first block that was missing.",
    cause=enum_schema("capacity", "failed", "reset"),
    by=nullable_schema(STRING),
    by_another_tenant=BOOLEAN,
    by_tenant=nullable_schema(STRING),
    seconds_ago=NUMBER,
)
_FINDING = object_schema(
    "A difference to an earlier prompt of the prompt log, and the tokens that it costs, estimated.",
    cause=STRING,
    field=STRING,
    **integer_properties("character tokens"),
    rule=STRING,
    message=STRING,
)
CACHE_EXPLANATION = object_schema(
    "Why a request had no more prefix cache hits; `message` says it in words.",
    object=enum_schema("cache.explanation"),
    request_id=nullable_schema(STRING),
    status=nullable_schema(STRING),
    **integer_properties("prompt_tokens block_size reused_tokens"),
    sources=nullable_schema(_TOKEN_SOURCES),
    now=_TOKEN_SOURCES,
    reason=STRING,
    near_match=nullable_schema(_NEAREST_REQUEST),
    eviction=nullable_schema(_BLOCK_EVICTION),
    findings=array_schema(_FINDING),
    message=STRING,
)
_RECENT_REQUEST = object_schema(
    "The body of a recent request, after the rules for prompts, and the path that it was sent to.",
    path=STRING,
    body=OBJECT,
)
RECENT_REQUESTS = object_schema(
    "The caller's own recent requests, the oldest first.",
    object=enum_schema("list"),
    data=array_schema(_RECENT_REQUEST),
)
PINNED_PREFIX = object_schema(
    "A pinned prefix and what it has saved.",
    name=STRING,
    tenant=STRING,
    state=STRING,
    **integer_properties("tokens blocks hits tokens_saved"),
    last_used=nullable_schema(NUMBER),
    error=nullable_schema(STRING),
)
PINNED_PREFIXES = object_schema(
    "All pinned prefixes, the rejected ones last.", object=enum_schema("list"), data=array_schema(PINNED_PREFIX)
)
REMOVED_PREFIX = object_schema("The answer to the removal of a prefix.", name=STRING, deleted=enum_schema(True))
CACHE_TREE = object_schema(
    "The published blocks as a tree of runs in preorder; `runs` has the values of `columns`.",
    object=enum_schema("cache.tree"),
    model=STRING,
    **integer_properties("block_size capacity_tokens tokens num_runs"),
    seconds_ago=NUMBER,
    tenants=map_schema(INTEGER),
    columns=array_schema(STRING),
    runs=array_schema(LIST),
)
_LOSS = object_schema(
    "Prompt tokens that were computed for one cause, and how to mend it; evicted ones by tenant that needed the space.",
    cause=STRING,
    tokens=INTEGER,
    remedy=STRING,
    by=optional_property(map_schema(INTEGER)),
)
_TENANT_FIGURES = object_schema(
    "A tenant's prompt tokens, and what ends most of its reuse.",
    tenant=STRING,
    **integer_properties("prompt_tokens cached_tokens evicted_tokens"),
    evicted_by=map_schema(INTEGER),
    cause=nullable_schema(STRING),
)


def _of_administrators(zero: float, names: str) -> dict[str, Schema]:
    kind = INTEGER if isinstance(zero, int) else NUMBER
    return {name: OptionalProperty({"default": zero, **kind}) for name in names.split()}


FIGURES = object_schema(
    "One frame of the stream of figures; tenants get the fields without a default only.",
    object=enum_schema("cache.figures"),
    model=STRING,
    tenant=nullable_schema(STRING),
    ms_per_prompt_token=nullable_schema(NUMBER),
    window_seconds=NUMBER,
    sources=map_schema(INTEGER),
    hit_rate=nullable_schema(NUMBER),
    losses=array_schema(_LOSS),
    **_of_administrators(0, "running waiting"),
    **_of_administrators(0.0, "prompt_tokens_per_s output_tokens_per_s"),
    ttft_ms=optional_property(map_schema(nullable_schema(NUMBER))),
    kv_tokens=optional_property(map_schema(INTEGER)),
    **_of_administrators(0, "evicted_blocks num_steps"),
    tenants=optional_property(array_schema(_TENANT_FIGURES)),
)
