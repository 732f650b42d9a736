"""JSON schemas of the answers about the prefix cache: statistics, explanations, pinned prefixes. Unit: tokens."""

from headstart.apis.answer_schemas import (
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    OBJECT,
    STRING,
    Optional,
    Schema,
    ints,
    list_of,
    map_of,
    maybe,
    object_of,
    one_of,
    optional,
)

_TENANT = object_of(
    "Prompt tokens of one tenant; those of the prompts that were examined, and the avoidable ones of these.",
    **ints("cached pinned shared store followed computed examined avoidable"),
)
_LOSSES = object_of(
    "Prompt tokens computed again: evicted ones, and avoidable ones of the prompts that were examined, by cause.",
    **ints("evicted_tokens examined_requests examined_tokens avoidable_tokens"),
    avoidable_share=maybe(NUMBER),
    causes=map_of(INTEGER),
)
_STORE = object_of(
    "State and counters of the store on disk.",
    **ints("blocks bytes max_bytes segments pending_blocks"),
    pending_seconds=NUMBER,
    **ints("loading_blocks loaded_blocks loaded_bytes"),
    misses=map_of(INTEGER),
    **ints("written_blocks written_bytes"),
    lost_writes=map_of(INTEGER),
    evicted_blocks=INTEGER,
    degraded=maybe(STRING),
    degradations=INTEGER,
    load_bytes_per_s=NUMBER,
    write_bytes_per_s=NUMBER,
    compute_tokens_per_s=NUMBER,
)
CACHE_STATISTICS = object_of(
    "Counters since the start of the server, and its current state.",
    object=one_of("cache.stats"),
    model=STRING,
    block_size=INTEGER,
    prompt_tokens=object_of(
        "Prompt tokens of all requests, and how they were obtained.",
        **ints("total cached pinned shared store followed computed"),
    ),
    hit_rate=maybe(NUMBER),
    **ints("prefill_tokens ideal_tokens replayed_tokens"),
    prefill_redundancy=maybe(NUMBER),
    **ints("generation_tokens computed_tokens"),
    blocks=object_of(
        "Numbers of KV blocks by state.", **ints("total scratch idle pinned_idle referenced published pinned")
    ),
    evictions=map_of(INTEGER),
    requests=object_of("Numbers of requests.", **ints("running waiting failed")),
    **ints("preemptions promise_skips adoptions steps"),
    step_seconds=NUMBER,
    tenants=map_of(_TENANT),
    losses=_LOSSES,
    store=optional(_STORE),
)
_TOKEN_SOURCES = object_of(
    "The tokens of a prompt by source.",
    **ints("cached_tokens pinned_tokens shared_tokens store_tokens followed_tokens computed_tokens"),
)
_SHOWN_TOKEN = object_of("A token and its text.", id=INTEGER, text=STRING)
_NEAREST_REQUEST = object_of(
    "The recent request with the longest common prefix, and the texts where the prompts diverge.",
    request_id=STRING,
    common_tokens=INTEGER,
    text_before=STRING,
    token=maybe(_SHOWN_TOKEN),
    text=STRING,
    other_token=maybe(_SHOWN_TOKEN),
    other_text=STRING,
    difference=maybe(one_of("timestamp", "uuid", "identifier", "number", "whitespace", "json_order", "order")),
    repeated_tokens=INTEGER,
)
_BLOCK_EVICTION = object_of(
    "The eviction of the first block that was missing.",
    cause=one_of("capacity", "failed", "reset"),
    by=maybe(STRING),
    by_another_tenant=BOOLEAN,
    by_tenant=maybe(STRING),
    seconds_ago=NUMBER,
)
_FINDING = object_of(
    "A difference to an earlier prompt of the prompt log, and the tokens that it costs, estimated.",
    cause=STRING,
    field=STRING,
    **ints("character tokens"),
    rule=STRING,
    message=STRING,
)
CACHE_EXPLANATION = object_of(
    "Why a request had no more prefix cache hits; `message` says it in words.",
    object=one_of("cache.explanation"),
    request_id=maybe(STRING),
    status=maybe(STRING),
    **ints("prompt_tokens block_size reused_tokens"),
    sources=maybe(_TOKEN_SOURCES),
    now=_TOKEN_SOURCES,
    reason=STRING,
    near_match=maybe(_NEAREST_REQUEST),
    eviction=maybe(_BLOCK_EVICTION),
    findings=list_of(_FINDING),
    message=STRING,
)
_RECENT_REQUEST = object_of(
    "The body of a recent request, after the rules for prompts, and the path that it was sent to.",
    path=STRING,
    body=OBJECT,
)
RECENT_REQUESTS = object_of(
    "The caller's own recent requests, the oldest first.", object=one_of("list"), data=list_of(_RECENT_REQUEST)
)
PINNED_PREFIX = object_of(
    "A pinned prefix and what it has saved.",
    name=STRING,
    tenant=STRING,
    state=STRING,
    **ints("tokens blocks hits tokens_saved"),
    last_used=maybe(NUMBER),
    error=maybe(STRING),
)
PINNED_PREFIXES = object_of(
    "All pinned prefixes, the rejected ones last.", object=one_of("list"), data=list_of(PINNED_PREFIX)
)
REMOVED_PREFIX = object_of("The answer to the removal of a prefix.", name=STRING, deleted=one_of(True))
CACHE_TREE = object_of(
    "The published blocks as a tree of runs in preorder; `runs` has the values of `columns`.",
    object=one_of("cache.tree"),
    model=STRING,
    **ints("block_size capacity_tokens tokens num_runs"),
    seconds_ago=NUMBER,
    tenants=map_of(INTEGER),
    columns=list_of(STRING),
    runs=list_of(LIST),
)
_LOSS = object_of(
    "Prompt tokens that were computed for one cause, and how to mend it; evicted ones by tenant that needed the space.",
    cause=STRING,
    tokens=INTEGER,
    remedy=STRING,
    by=optional(map_of(INTEGER)),
)
_TENANT_FIGURES = object_of(
    "A tenant's prompt tokens, and what ends most of its reuse.",
    tenant=STRING,
    **ints("prompt_tokens cached_tokens evicted_tokens"),
    evicted_by=map_of(INTEGER),
    cause=maybe(STRING),
)


def _of_administrators(zero: float, names: str) -> dict[str, Schema]:
    kind = INTEGER if isinstance(zero, int) else NUMBER
    return {name: Optional({"default": zero, **kind}) for name in names.split()}


FIGURES = object_of(
    "One frame of the stream of figures; tenants get the fields without a default only.",
    object=one_of("cache.figures"),
    model=STRING,
    tenant=maybe(STRING),
    ms_per_prompt_token=maybe(NUMBER),
    window_seconds=NUMBER,
    sources=map_of(INTEGER),
    hit_rate=maybe(NUMBER),
    losses=list_of(_LOSS),
    **_of_administrators(0, "running waiting"),
    **_of_administrators(0.0, "prompt_tokens_per_s output_tokens_per_s"),
    ttft_ms=optional(map_of(maybe(NUMBER))),
    kv_tokens=optional(map_of(INTEGER)),
    **_of_administrators(0, "evicted_blocks num_steps"),
    tenants=optional(list_of(_TENANT_FIGURES)),
)
