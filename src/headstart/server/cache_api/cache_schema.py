"""Models of the responses about the prefix cache: statistics, explanations, pinned prefixes. Unit: tokens."""

from typing import Any, Literal

from headstart.openai.api_schema.api_object import ApiObject, CachedTokens


class PromptTokens(ApiObject):
    """Prompt tokens of all requests, and how they were obtained."""

    total: int
    cached: int
    pinned: int
    shared: int
    store: int
    followed: int
    computed: int


class Blocks(ApiObject):
    """Numbers of KV blocks by state."""

    total: int
    scratch: int
    idle: int
    pinned_idle: int
    referenced: int
    published: int
    pinned: int


class Requests(ApiObject):
    """Numbers of requests."""

    running: int
    waiting: int
    failed: int


class TenantTokens(ApiObject):
    """Prompt tokens of one tenant; those of the prompts that were examined, and the avoidable ones of these."""

    cached: int
    pinned: int
    shared: int
    store: int
    followed: int
    computed: int
    examined: int
    avoidable: int


class Losses(ApiObject):
    """Prompt tokens computed again: evicted ones, and avoidable ones of the prompts that were examined, by cause."""

    evicted_tokens: int
    examined_requests: int
    examined_tokens: int
    avoidable_tokens: int
    avoidable_share: float | None
    causes: dict[str, int]


class StoreStatistics(ApiObject):
    """State and counters of the store on disk."""

    blocks: int
    bytes: int
    max_bytes: int
    segments: int
    pending_blocks: int
    pending_seconds: float
    loading_blocks: int
    loaded_blocks: int
    loaded_bytes: int
    misses: dict[str, int]
    written_blocks: int
    written_bytes: int
    lost_writes: dict[str, int]
    evicted_blocks: int
    degraded: str | None
    degradations: int
    load_bytes_per_s: float
    write_bytes_per_s: float
    compute_tokens_per_s: float


class CacheStatistics(ApiObject):
    """Counters since the start of the server, and its current state."""

    object: Literal["cache.stats"]
    model: str
    block_size: int
    prompt_tokens: PromptTokens
    hit_rate: float | None
    prefill_tokens: int
    ideal_tokens: int
    replayed_tokens: int
    prefill_redundancy: float | None
    generation_tokens: int
    computed_tokens: int
    blocks: Blocks
    evictions: dict[str, int]
    requests: Requests
    preemptions: int
    promise_skips: int
    adoptions: int
    steps: int
    step_seconds: float
    tenants: dict[str, TenantTokens]
    losses: Losses
    store: StoreStatistics | None = None


class TokenSources(CachedTokens):
    """The tokens of a prompt by source."""

    computed_tokens: int


class ShownToken(ApiObject):
    """A token and its text."""

    id: int
    text: str


class NearestRequest(ApiObject):
    """The recent request with the longest common prefix, and the texts where the prompts diverge."""

    request_id: str
    common_tokens: int
    text_before: str
    token: ShownToken | None
    text: str
    other_token: ShownToken | None
    other_text: str
    difference: Literal["timestamp", "uuid", "identifier", "number", "whitespace", "json_order", "order"] | None
    repeated_tokens: int


class BlockEviction(ApiObject):
    """The eviction of the first block that was missing."""

    cause: Literal["capacity", "failed", "reset"]
    by: str | None
    by_another_tenant: bool
    seconds_ago: float


class PromptFinding(ApiObject):
    """A difference to an earlier prompt of the prompt log, and the tokens that it costs, estimated."""

    cause: str
    field: str
    character: int
    tokens: int
    rule: str
    message: str


class CacheExplanation(ApiObject):
    """Why a request had no more prefix cache hits; `message` says it in words."""

    object: Literal["cache.explanation"]
    request_id: str | None
    status: str | None
    prompt_tokens: int
    block_size: int
    reused_tokens: int
    sources: TokenSources | None
    now: TokenSources
    reason: str
    near_match: NearestRequest | None
    eviction: BlockEviction | None
    findings: list[PromptFinding]
    message: str


class RecentRequest(ApiObject):
    """The body of a recent request, after the rules for prompts, and the path that it was sent to."""

    path: str
    body: dict[str, Any]


class RecentRequestList(ApiObject):
    """The caller's own recent requests, the oldest first."""

    object: Literal["list"]
    data: list[RecentRequest]


class PinnedPrefix(ApiObject):
    """A pinned prefix and what it has saved."""

    name: str
    tenant: str
    state: str
    tokens: int
    blocks: int
    hits: int
    tokens_saved: int
    last_used: float | None
    error: str | None


class PinnedPrefixList(ApiObject):
    """All pinned prefixes, the rejected ones last."""

    object: Literal["list"]
    data: list[PinnedPrefix]


class RemovedPrefix(ApiObject):
    """The answer to the removal of a prefix."""

    name: str
    deleted: Literal[True]


class TreeAnswer(ApiObject):
    """The published blocks as a tree of runs in preorder; `runs` has the values of `columns`."""

    object: Literal["cache.tree"]
    model: str
    block_size: int
    capacity_tokens: int
    tokens: int
    num_runs: int
    seconds_ago: float
    columns: list[str]
    runs: list[list[Any]]


class Loss(ApiObject):
    """Prompt tokens that were computed for one cause, and how to mend it."""

    cause: str
    tokens: int
    remedy: str


class Figures(ApiObject):
    """One frame of the stream of figures; tenants get the fields without a default only."""

    object: Literal["cache.figures"]
    model: str
    tenant: str | None
    ms_per_prompt_token: float | None
    window_seconds: float
    sources: dict[str, int]
    hit_rate: float | None
    losses: list[Loss]
    running: int = 0
    waiting: int = 0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    ttft_ms: dict[str, float | None] | None = None
    kv_tokens: dict[str, int] | None = None
    evicted_blocks: int = 0
    num_steps: int = 0
