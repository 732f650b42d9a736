"""All options of Headstart as plain values: one field = one `--flag` = one `headstart.toml` key = one `HEADSTART_*`.

Standard library only. The help text of a flag is in the field's metadata, so that CLI, docs and file stay consistent.
This module does not read argv, environment or files: config_file.py and cli/ do.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any, cast

from headstart.core.errors import ConfigError
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler_config import SchedulerConfig

MODEL, COMPUTE, SCHEDULING, LISTENING, CHATS, BOUNDS, LIFE, FLEET, ROUTING, ENVOY, RAY = (
    "Model",
    "Compute and memory",
    "Scheduling and caching",
    "Listening and keys",
    "Tool calls and reasoning",
    "Bounds on requests",
    "Life of the server",
    "Replicas",
    "Routing",
    "Envoy",
    "Ray",
)


_SCHEDULER: dict[str, Any] = {one.name: one.default for one in (*fields(Limits), *fields(SchedulerConfig))}
"""The defaults of the scheduler, which has no others."""


def _option(default: Any, help_text: str, group: str, **extra: Any) -> Any:  # the type dataclasses.field itself has
    """Return a field with metadata: help and group (a panel of --help); optional in `extra`: alias, secret, choices,
    minimum, maximum, switch, json.

    `switch` lets a text option also be used as a switch: its first value stands for `--flag`, true and 1, its second
    for `--no-flag`, false and 0. `json` lets the text of a JSON object also be given as a table of headstart.toml, and
    as a mapping to headstart.LLM.
    """
    return field(default=default, metadata={"help": help_text, "group": group, **extra})


def _table(name: str) -> Any:
    """Return a field that is set only by the [[name]] tables of headstart.toml: it has no flag and no variable."""
    return field(default=(), metadata={"table": name})


PROMPT_RULES = (
    *("tools", "schemas", "json", "drop_reasoning", "keep_reasoning"),
    *("billing_header", "trace_headers", "request_ids", "token_counts", "inline_system", "plain_items"),
    "dates",
)
"""Names of the rules in openai/canonical/."""


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """A [[tenant]] of headstart.toml: keys that share one isolation domain of the cache."""

    name: str  # shown in logs, metrics and /v1/cache/stats
    api_keys: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A [[prefix]] of headstart.toml: a text (of its file if one is named) or messages; or `error` if it is invalid."""

    name: str
    tenant: str = ""  # empty: public
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine process. Names follow vLLM's flags where the meaning is the same."""

    model: str = _option(
        "",
        "Folder, GGUF file, hub id such as Qwen/Qwen3-0.6B, or smollm2-135m. Empty: the bundled intent model.",
        MODEL,
    )
    revision: str | None = _option(None, "Branch, tag or commit on the hub.", MODEL)
    hf_token: str | None = _option(None, "Hub access token (else HF_TOKEN).", MODEL, secret=True)
    offline: bool = _option(False, "Do not contact the hub; use what is already downloaded.", MODEL)
    download_dir: str | None = _option(None, "Folder for downloads (default: the hub's own cache).", MODEL)
    generation_config: str = _option(
        "auto",
        "Source of default sampling parameters: auto (the model's generation_config.json), none, or a folder.",
        MODEL,
    )
    dtype: str = _option(
        "auto",
        "auto: the checkpoint's, with bfloat16 for float16.",
        COMPUTE,
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str = _option(
        "none",
        "int8: weights in half the bytes of bfloat16, int4: in a third; faster, and int8 a little, int4 less exact.",
        COMPUTE,
        choices=("none", "int8", "int4"),
    )
    linear_dispatch: str = _option(
        "auto",
        "Products of plain weights on a CPU: auto, kernels: ours where they exist; torch: reuse may change tokens.",
        COMPUTE,
        choices=("auto", "kernels", "torch"),
    )
    activation_bits: str = _option(
        "16",
        "Bits of activations that GGUF and int4 weights are multiplied by; 8 rounds as llama.cpp does, which makes "
        "prompts faster on CPUs with AVX2 only.",
        COMPUTE,
        choices=("16", "8"),
    )
    device: str = _option("auto", "auto | cpu | cuda | cuda:N.", COMPUTE)
    threads: int = _option(0, "Compute threads; 0: as many as the cgroup grants cores.", COMPUTE, minimum=0)
    attention_backend: str = _option(
        "auto",
        "auto: cpu on a CPU with compiled kernels, triton on a GPU of compute capability 8.0 or more, else reference.",
        COMPUTE,
        choices=("auto", "cpu", "reference", "triton"),
    )
    batch_invariant: bool = _option(
        False,
        "On a GPU: neither other requests nor reuse change a bit of an answer; slower. On a CPU that is the default, "
        "and this flag makes sure of it.",
        COMPUTE,
    )
    block_size: int = _option(16, "Tokens per KV block; a multiple of 16.", COMPUTE, minimum=16)
    num_gpu_blocks_override: int | None = _option(
        None, "Number of KV blocks (CPU or GPU); overrides the memory.", COMPUTE, alias="num-blocks", minimum=1
    )
    kv_cache_memory: str | None = _option(
        None,
        "KV pool size such as 6GiB (default: on a CPU 40 % of what the weights leave, on a GPU all of its share).",
        COMPUTE,
    )
    memory_limit: str | None = _option(
        None, "Memory to use, weights included, such as 8GiB (default: all that is free).", COMPUTE
    )
    gpu_memory_utilization: float | None = _option(
        None,
        "Share of a GPU's memory that this process may use, weights included (default: 0.9).",
        COMPUTE,
        minimum=0.01,
        maximum=1.0,
    )
    tensor_parallel_size: int = _option(
        1, "GPUs that a model is split over: 1. For several GPUs: --replicas.", COMPUTE, minimum=1
    )
    max_model_len: int | None = _option(
        None, "Prompt + output tokens of a request (default: the model's).", SCHEDULING, minimum=2
    )
    max_num_seqs: int = _option(_SCHEDULER["max_seqs"], "Sequences running at once.", SCHEDULING, minimum=1)
    max_num_batched_tokens: int = _option(
        _SCHEDULER["max_batched_tokens"], "Token budget of a step; cached tokens cost nothing.", SCHEDULING, minimum=1
    )
    long_prefill_token_threshold: int = _option(
        _SCHEDULER["long_prefill_threshold"],
        "Cap on one prompt's tokens per step while others wait; 0: none.",
        SCHEDULING,
        minimum=0,
    )
    max_step_time: float | None = _option(
        None,
        "Longest step with prompt tokens, in seconds, so that running requests keep decoding; 0: unbounded "
        "(default: 6 x a decode step, 0.03 to 0.3, on a CPU; unbounded on a GPU, and in headstart.LLM). With "
        "--kv-store at most 0.4, on a GPU 0.2: a kill loses the steps in flight.",
        SCHEDULING,
        minimum=0,
    )
    enable_prefix_caching: bool = _option(
        _SCHEDULER["enable_prefix_caching"], "Reuse KV blocks that earlier requests computed.", SCHEDULING
    )
    scheduling_policy: str = _option(
        _SCHEDULER["policy"],
        "Order of admission: lpm (longest cached prefix, with a bound), fcfs, or priority.",
        SCHEDULING,
        choices=("lpm", "fcfs", "priority"),
    )
    lpm_k: int = _option(
        _SCHEDULER["lpm_k"],
        "lpm: of every K admissions the first is the oldest waiting request; 1 is fcfs.",
        SCHEDULING,
        minimum=1,
    )
    eviction_policy: str = _option(
        _SCHEDULER["eviction_policy"],
        "Which idle blocks are evicted first: lru; 2q, which resists scans of one-off prompts; or lhd, which learns.",
        SCHEDULING,
        choices=("2q", "lru", "lhd"),
    )
    page_aligned_scheduling: bool = _option(
        False, "End every prompt chunk but the last on a block boundary (vLLM #19878).", SCHEDULING
    )
    page_charge: str = _option(
        "exact",
        "Tokens charged for an aligned chunk: exact, or ceil: the whole blocks that it touches.",
        SCHEDULING,
        choices=("exact", "ceil"),
    )
    max_pinned_share: float = _option(
        _SCHEDULER["max_pinned_share"],
        "Largest share of the KV pool that pinned prefixes may hold.",
        SCHEDULING,
        minimum=0,
        maximum=1,
    )
    tenant_cache_floor: float = _option(
        _SCHEDULER["tenant_floor"],
        "Share of the KV pool, split evenly among tenants, that no other tenant can evict.",
        SCHEDULING,
        minimum=0,
        maximum=1,
    )
    kv_store: str | None = _option(
        None,
        "Where KV blocks outlive the process: a folder, redis://host:port/db (unix, rediss, redis+cluster) or DIR,URL.",
        SCHEDULING,
    )
    kv_store_size: str = _option("20GiB", "Size limit of that folder; the least recently used is evicted.", SCHEDULING)
    kv_store_secret: str | None = _option(
        None, "File of the secret that seals blocks in Redis; NEW,OLD: blocks of OLD are read too.", SCHEDULING
    )
    kv_store_password: str | None = _option(
        None, "Password of Redis; set HEADSTART_KV_STORE_PASSWORD instead of this flag.", SCHEDULING, secret=True
    )
    kv_store_ttl: int = _option(
        7 * 86_400, "Seconds after its last use until a block in Redis expires.", SCHEDULING, minimum=60
    )
    kv_events_config: str | None = _option(
        None, "JSON as in vLLM: publish KV events over ZMQ, see docs/kv-events.md.", SCHEDULING, json=True
    )
    speculative_config: str | None = _option(
        None,
        'JSON as in vLLM: {"method": "ngram"} drafts from prompt and earlier outputs, see docs/speculation.md.',
        SCHEDULING,
        json=True,
    )
    seed: int = _option(0, "Sampling seed for requests without one.", SCHEDULING)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the API server."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0: every interface, then set --api-key.", LISTENING)
    port: int = _option(8000, "Port to listen on; 0: any free one (printed).", LISTENING, minimum=0, maximum=65535)
    uds: str | None = _option(None, "Unix socket to listen on, instead of host and port.", LISTENING)
    root_path: str = _option("", "Path prefix under which a proxy passes requests on, as /llm.", LISTENING)
    served_model_name: tuple[str, ...] = _option(
        (), "Name in /v1/models (default: the model's id or folder name); several: all are accepted.", LISTENING
    )
    api_key: tuple[str, ...] = _option(
        (), "Key clients must send; repeat for several, each a tenant that shares no cache.", LISTENING, secret=True
    )
    admin_api_key: tuple[str, ...] = _option(
        (), "Key for /reset_prefix_cache and other admin calls.", LISTENING, secret=True
    )
    allowed_host: tuple[str, ...] = _option(
        (),
        "Host name that clients of a server on 127.0.0.1 without keys may use; repeat for several.",
        LISTENING,
    )
    cors_origin: tuple[str, ...] = _option(
        (), "Origin whose web pages may read answers, as https://example.com, or *; repeat for several.", LISTENING
    )
    page: bool = _option(True, "Serve the live page at /.", LISTENING)
    tool_call_parser: str = _option(
        "auto",
        "Format of the model's tool calls; auto: detected from its chat template.",
        CHATS,
        choices=("auto", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "glm45", "none"),
    )
    enable_auto_tool_choice: bool = _option(False, "Accepted for vLLM's sake; tools are always enabled.", CHATS)
    reasoning_parser: str = _option(
        "auto",
        "Format of the model's reasoning; auto: <think> if its chat template has that.",
        CHATS,
        choices=("auto", "qwen3", "deepseek_r1", "none"),
    )
    extra_properties: str = _option(
        "auto",
        "Properties of JSON objects that a schema neither lists nor forbids; auto: yes, for smollm2-135m no.",
        CHATS,
        choices=("auto", "yes", "no"),
    )
    unreadable_parts: str = _option(
        "placeholder",
        "Images, audio and files in conversations: a placeholder in the prompt, or a refusal.",
        CHATS,
        choices=("placeholder", "refuse"),
    )
    diagnostics_size: int = _option(
        16 * 1024 * 1024,
        "Bytes of prompts (router) or their fingerprints kept for diagnostics of later requests; 0: none.",
        CHATS,
        minimum=0,
    )
    doctor_share: float = _option(
        0.003,
        "Share of the CPU time for estimates of the avoidable share of prompts; 0: none.",
        CHATS,
        minimum=0,
    )
    prompt_rule: tuple[str, ...] = _option(
        (),
        "Rule that gives equal prompts equal text (docs/prompts.md); repeat for several.",
        CHATS,
        choices=PROMPT_RULES,
    )
    prompt_log_size: int = _option(
        0,
        "Bytes of request bodies kept in memory for `headstart lint --against`, by tenant; 0: none.",
        CHATS,
        minimum=0,
    )
    tenants: tuple[TenantEntry, ...] = _table("tenant")
    prefixes: tuple[PrefixEntry, ...] = _table("prefix")
    max_num_queued_reqs: int = _option(
        1024, "Requests that may wait, at a router per replica; more get 429.", BOUNDS, minimum=1
    )
    max_num_queued_tokens: int = _option(2_000_000, "Prompt tokens that may wait; more get 429.", BOUNDS, minimum=1)
    max_body_bytes: int = _option(4 * 1024 * 1024, "Largest request body.", BOUNDS, minimum=1024)
    clamp_max_tokens: bool = _option(
        False, "Lower a max_tokens that exceeds the context to what fits, as /v1/messages does; off: 400.", BOUNDS
    )
    max_n: int = _option(128, "Largest n of a request.", BOUNDS, minimum=1)
    max_prompts: int = _option(64, "Most prompts in one /v1/completions.", BOUNDS, minimum=1)
    max_logprobs: int = _option(20, "Most alternatives per token.", BOUNDS, minimum=0)
    response_store_size: int = _option(
        64 * 1024 * 1024,
        "Bytes of responses kept for previous_response_id; the least recently used is removed; 0: none.",
        BOUNDS,
        minimum=0,
    )
    response_store_ttl: float = _option(86400.0, "Seconds for which a response is kept.", BOUNDS, minimum=0)
    drain_timeout: float = _option(120.0, "Seconds to wait for admitted requests after SIGTERM.", LIFE, minimum=0)
    heartbeat_timeout: float = _option(
        5.0, "Seconds without an engine heartbeat until /health and /livez return 503.", LIFE, minimum=1
    )
    record: str | None = _option(
        None, "File to append a line per request to: lengths, times, block hashes; no text (docs/simulation.md).", LIFE
    )
    otlp_endpoint: str | None = _option(
        None,
        "URL of a collector that takes OTLP over HTTP, as http://localhost:4318, to export traces to (docs/traces.md).",
        LIFE,
        alias="otlp-traces-endpoint",
    )
    stats_interval: float = _option(10.0, "Seconds between statistics lines; 0: none.", LIFE, minimum=0)
    access_log: str = _option(
        "auto",
        "Requests to log on stderr; auto: errors on a terminal, else requests.",
        LIFE,
        choices=("auto", "all", "requests", "errors", "none"),
        switch=("requests", "none"),
    )


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of a router in front of replicas, in addition to its ServerOptions."""

    replica: tuple[str, ...] = _option(
        (), "Address of a replica: URL[,ranks=N][,events=tcp://...][,replay=tcp://...]; repeat for several.", FLEET
    )
    discover: str | None = _option(
        None,
        "List of replicas: file:PATH (watched), dns:NAME:PORT (resolved repeatedly), "
        "kubernetes:inferencepool/[NAMESPACE/]NAME or kubernetes:service/[NAMESPACE/]NAME[:PORT] (watched).",
        FLEET,
    )
    allow_loopback_endpoints: bool = _option(
        False, "Accept loopback addresses from --discover kubernetes: and dns:.", FLEET
    )
    replica_api_key: str | None = _option(None, "Key sent to replicas (default: the client's own).", FLEET, secret=True)
    replicas: int = _option(
        1, "Servers behind one router: on this machine, or on a Ray cluster (--on ray).", FLEET, minimum=1
    )
    health_interval: float = _option(1.0, "Seconds between two probes of a replica's /health.", FLEET, minimum=0.05)
    scrape_interval: float = _option(
        2.0, "Seconds between two scrapes of a replica's /metrics; 0: never.", FLEET, minimum=0
    )
    connect_timeout: float = _option(2.0, "Seconds until a connection must be established.", FLEET, minimum=0.01)
    response_timeout: float = _option(
        600.0, "Seconds without a byte from a replica until the attempt fails.", FLEET, minimum=0.1
    )
    replica_wait: float = _option(
        5.0,
        "Seconds that requests wait for a replica after the last one left; then 503.",
        FLEET,
        minimum=0,
    )
    max_attempts: int = _option(3, "Most replicas tried for one request, until its first token.", FLEET, minimum=1)
    retry_budget: float = _option(
        0.2, "Share of requests in flight that may be retries; retries from dead replicas are free.", FLEET, minimum=0
    )
    routing_policy: str = _option(
        "cost",
        "Choice of the replica: cost (earliest first token), or another policy (docs/routing.md).",
        ROUTING,
        choices=(
            *("cost", "weighted", "work", "llm-d", "dynamo", "smg", "ray", "lmetric", "dualmap"),
            *("prefix-threshold", "least-load", "round-robin"),
        ),
    )
    shadow_policy: tuple[str, ...] = _option(
        (), "Policy that is evaluated but not applied; /metrics shows its regret. Repeat for several.", ROUTING
    )
    learn_at: str = _option(
        "pick", "When a routed prompt counts as cached on its replica.", ROUTING, choices=("pick", "response")
    )
    flow_control: int = _option(
        0,
        "Requests per replica that may be without a first token; others wait in the router, fairly by tenant and by "
        "priority. 0: all are sent at once. Not behind Envoy.",
        ROUTING,
        minimum=0,
    )
    queue_timeout: float = _option(
        0.0,
        "Seconds that a request may wait in the router, then 503; 0: none but the client's x-headstart-timeout-ms. "
        "Not behind Envoy.",
        ROUTING,
        minimum=0,
    )
    tokenizer: str = _option(
        "auto",
        "Folder or hub id of the replicas' tokenizer; auto: theirs, if it is on this machine; none: count in bytes.",
        ROUTING,
    )
    envoy: str = _option(
        "none",
        "Have Envoy serve clients at --host and --port: auto (found in the environment or on the PATH), its path, or "
        "external (only its configuration is written).",
        ENVOY,
        switch=("auto", "none"),
    )
    envoy_folder: str | None = _option(
        None, "Folder of Envoy's configuration and of the router's socket (default: a temporary one).", ENVOY
    )
    ext_proc: str | None = _option(
        None, "HOST:PORT of an endpoint picker for a gateway's Envoy (gRPC), in addition to HTTP.", ENVOY
    )
    on: str = _option(
        "this-machine",
        "Where replicas run: this-machine, or ray: the cluster at RAY_ADDRESS, else a Ray started here.",
        RAY,
        choices=("this-machine", "ray"),
    )
    max_replicas: int | None = _option(
        None, "With --on ray: most replicas under load (default: always --replicas).", RAY, minimum=1
    )
    target_ongoing_requests: float = _option(
        16.0, "Requests per replica beyond which Ray adds replicas, and below which it removes them.", RAY, minimum=0.1
    )
    upscale_delay: float = _option(30.0, "Seconds of load until Ray adds a replica.", RAY, minimum=0)
    downscale_delay: float = _option(600.0, "Seconds without load until Ray removes a replica.", RAY, minimum=0)
    decision_log: str | None = _option(None, "File to append routing decisions to, one JSON line each.", ROUTING)


OptionClass = type[EngineOptions] | type[ServerOptions] | type[RouterOptions]


def flag_fields(options: OptionClass) -> list[Field[Any]]:
    """Return the fields that are flags, keys and variables; the others are set by tables of headstart.toml."""
    return [option for option in fields(options) if "table" not in option.metadata]


def flag_name(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def check_option_values(options: EngineOptions | ServerOptions | RouterOptions) -> None:
    """Raise ConfigError for the first value outside its field's choices, minimum or maximum."""
    for option in fields(options):
        value, allowed = getattr(options, option.name), option.metadata
        if value is None:
            continue
        for one in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if "choices" in allowed and one not in allowed["choices"]:
                raise ConfigError(f"{option.name} is {one!r}; choose one of {', '.join(allowed['choices'])}")
        if "minimum" in allowed and not value >= allowed["minimum"]:
            raise ConfigError(f"{option.name} is {value}; it must be at least {allowed['minimum']}")
        if "maximum" in allowed and not value <= allowed["maximum"]:
            raise ConfigError(f"{option.name} is {value}; it must be at most {allowed['maximum']}")
    if isinstance(options, ServerOptions) and {"drop_reasoning", "keep_reasoning"} <= set(options.prompt_rule):
        raise ConfigError("prompt_rule has both drop_reasoning and keep_reasoning; choose one of them")
