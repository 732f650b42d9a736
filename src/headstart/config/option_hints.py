"""Hints for options of vLLM, SGLang, llama.cpp and others that Headstart lacks: the replacement, or the reason.

Names with the same meaning in Headstart and vLLM are options and need no hint. tests/config/test_option_hints.py checks
that every flag named in a hint exists, and that no hint is for an existing option.
"""

_MODEL = "the model is named without a flag: headstart serve MODEL"
_DEVICES = "a model is not split over devices; --replicas N serves it N times behind one router"
_COPIES = "use --replicas N: N servers behind one router that knows their prefix caches"
_LENGTH = "use --max-model-len"
_RUNNING = "use --max-num-seqs"
_CHUNKED = "not needed: prompts are always computed in chunks, of --max-num-batched-tokens tokens at most"
_BUDGET = "use --max-num-batched-tokens, the token budget of a step; prompts are always computed in chunks"
_CACHING = "prefix caching is on; --no-enable-prefix-caching turns it off"
_OFFLOAD = "use --kv-store DIR: blocks on disk that outlive the process"
_KV_DTYPE = "the KV cache has the dtype of the model, see --dtype"
_INT8 = "quantised checkpoints are not loaded; --quantization int8 or int4 quantises weights while it loads them"
_LORA = "LoRA is not supported; merge the adapter into the weights and serve those"
_SPECULATIVE = """draft models are not supported; --speculative-config '{"method": "ngram"}' drafts from known tokens"""
_DRAFT_LENGTH = """use --speculative-config '{"method": "ngram", "num_speculative_tokens": 15}'"""
_TOOLS = "use --tool-call-parser and --reasoning-parser, or leave it out"
_STRUCTURED = "not needed: structured output is always there, by llguidance"
_IN_BODY = "a request has its own schema or grammar: response_format or structured_outputs in its body"
_TRACES = "use --otlp-endpoint http://localhost:4318; traces have all spans always"
_MULTIMODAL = "images and audio are not supported; leave it out"
_EMBEDDING = "only text generation is supported; leave it out"
_REMOTE_CODE = "code from a checkpoint is never run; decoders that Transformers itself knows are served without it"
_TEMPLATE = "the chat template is the model's own: edit chat_template.jinja or tokenizer_config.json in its folder"
_SAFETENSORS = "not needed: weights are read from safetensors files only"
_GRAPHS = "not needed: nothing is captured or compiled at the start"
_ACCESS = "use --access-log all, requests, errors or none"
_STATISTICS = "use --stats-interval SECONDS; 0: no statistics lines"
_NO_LOGS = "not needed: requests are logged without their prompts, see --access-log"
_LOGS = "prompts are never logged, and there are no log levels; see --access-log and --stats-interval"
_TLS = "TLS is not served; put a proxy such as nginx or Caddy in front, and set --api-key"
_CORS = "use --cors-origin"
_METRICS = "not needed: /metrics is always served"
_USAGE = "not needed: every answer counts its cached tokens in usage.prompt_tokens_details"
_ALWAYS = "not needed: it is always on"
_SAMPLING = "a request chooses it, in its own body; leave it out"
_REPLICAS = "use --replica URL, once for each server"

_TABLE: dict[tuple[str, ...], str] = {
    ("--model", "--model-path", "--model-id", "--hf-repo", "--model-url", "-m", "-hf", "-hfr"): _MODEL,
    # vLLM, and the equivalents of SGLang and llama.cpp
    ("--mem-fraction-static",): "use --gpu-memory-utilization, or on a CPU --memory-limit 8GiB",
    ("--kv-cache-memory-bytes",): "use --kv-cache-memory 6GiB",
    ("--pipeline-parallel-size", "--decode-context-parallel-size", "-tp", "-pp"): _DEVICES,
    ("--tp-size", "--tp", "--pp-size", "--pp", "--ep-size", "--enable-expert-parallel", "--split-mode"): _DEVICES,
    ("-sm", "--tensor-split", "-ts", "--main-gpu", "-mg", "--nnodes", "--node-rank", "--dist-init-addr"): _DEVICES,
    ("--distributed-executor-backend", "--base-gpu-id", "--enable-dp-attention"): _DEVICES,
    ("--data-parallel-size", "--dp-size", "--dp", "-dp", "--api-server-count", "--workers"): _COPIES,
    ("--context-length", "--ctx-size", "--n-ctx", "--max-seq-len", "-c"): _LENGTH,
    ("--max-running-requests", "--parallel", "-np", "--max-batch-size"): _RUNNING,
    ("--chunked-prefill-size", "--max-prefill-tokens", "--batch-size", "-b", "--ubatch-size", "-ub"): _BUDGET,
    ("--enable-chunked-prefill",): _CHUNKED,
    ("--no-enable-chunked-prefill", "--max-num-partial-prefills"): _BUDGET,
    ("--max-long-partial-prefills",): "use --long-prefill-token-threshold",
    ("--max-total-tokens",): "use --num-blocks, in blocks of --block-size tokens, or --kv-cache-memory",
    ("--history-size",): "removed: the prompt of a chat has the tokenizer's tokens always; leave it out",
    ("--page-size",): "use --block-size",
    ("--schedule-policy",): "use --scheduling-policy lpm, fcfs or priority",
    ("--random-seed",): "use --seed",
    ("--alias", "-a"): "use --served-model-name",
    ("--hf-hub-token", "--hf-tok", "-hft"): "use --hf-token, or set HF_TOKEN",
    ("--n-gpu-layers", "--gpu-layers", "-ngl"): "layers are not split over CPU and GPU; use --device cuda or cpu",
    (
        "--cpu-offload-gb",
        "--offload-backend",
    ): "weights are not offloaded; use --quantization int4, or a smaller model",
    ("--threads-batch", "-tb", "-t"): "use --threads",
    ("--prefix-caching", "--enable-radix-cache", "--cache-prompt", "--prefix-caching-hash-algo"): _CACHING,
    ("--disable-radix-cache", "--no-prefix-caching", "--no-cache-prompt", "--cache-reuse"): _CACHING,
    ("--radix-eviction-policy",): "use --eviction-policy 2q or lru",
    ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--slot-save-path"): _OFFLOAD,
    ("--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size", "--hicache-storage-backend"): _OFFLOAD,
    ("--enable-lmcache", "--cache-ram", "-cram", "--swap-space"): _OFFLOAD,
    ("--kv-cache-dtype", "--calculate-kv-scales", "--cache-type-k", "--cache-type-v", "-ctk", "-ctv"): _KV_DTYPE,
    ("--load-in-8bit", "--load-in-4bit", "--quantize", "--torchao-config", "--modelopt-quant"): _INT8,
    ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--lora-paths", "--lora"): _LORA,
    ("--max-cpu-loras", "--enable-lora-bias", "--max-loras-per-batch", "--lora-scaled"): _LORA,
    ("--speculative-algorithm", "--speculative-draft-model-path", "-md"): _SPECULATIVE,
    ("--speculative-model", "--model-draft"): _SPECULATIVE,
    ("--speculative-num-steps", "--speculative-num-draft-tokens", "--num-speculative-tokens"): _DRAFT_LENGTH,
    ("--draft-max", "--draft"): _DRAFT_LENGTH,
    ("--tool-server",): _TOOLS,
    ("--tool-parser-plugin", "--enable-reasoning", "--reasoning-format", "--reasoning-budget"): _TOOLS,
    ("--structured-outputs-config", "--guided-decoding-backend", "--grammar-backend"): _STRUCTURED,
    ("--guided-decoding-disable-fallback",): _STRUCTURED,
    ("--grammar", "--json-schema", "-j"): _IN_BODY,
    ("--collect-detailed-traces", "--enable-trace", "--oltp-traces-endpoint"): _TRACES,
    ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mmproj", "--enable-multimodal"): _MULTIMODAL,
    ("--allowed-local-media-path", "--media-io-kwargs"): _MULTIMODAL,
    ("--task", "--runner", "--convert", "--is-embedding", "--embedding", "--embeddings", "--reranking"): _EMBEDDING,
    ("--pooling", "--pooler-config", "--override-pooler-config"): _EMBEDDING,
    ("--trust-remote-code",): _REMOTE_CODE,
    ("--chat-template", "--chat-template-file", "--jinja", "--chat-template-content-format"): _TEMPLATE,
    ("--load-format",): "formats are recognised, leave it out; for random weights (dummy): headstart init-model",
    ("--config-format", "--use-safetensors", "--safetensors-load-strategy"): _SAFETENSORS,
    ("--tokenizer-mode", "--tokenizer-path", "--tokenizer-revision"): "the tokenizer is the one in the model's folder",
    ("--hf-overrides", "--rope-scaling", "--rope-theta", "--json-model-override-args", "--hf-config-path"): (
        "edit config.json in a copy of the model's folder"
    ),
    ("--enforce-eager", "--compilation-config", "--enable-torch-compile", "--disable-cuda-graph"): _GRAPHS,
    ("--cuda-graph-max-bs", "--cuda-graph-bs", "--max-seq-len-to-capture", "-O", "--optimization-level"): _GRAPHS,
    ("--disable-uvicorn-access-log", "--disable-access-log-for-endpoints", "--enable-access-log"): _ACCESS,
    ("--decode-log-interval", "--log-stats-interval"): _STATISTICS,
    ("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"): _NO_LOGS,
    ("--enable-log-requests", "--log-requests", "--max-log-len", "--verbose", "-v"): _LOGS,
    ("--log-level", "--uvicorn-log-level", "--log-level-http", "--log-disable", "--log-requests-level"): _LOGS,
    ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-key-file", "--ssl-cert-file"): _TLS,
    ("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials"): _CORS,
    ("--api-prefix", "--fastapi-root-path"): "use --root-path",
    ("--enable-metrics", "--metrics", "--slots"): _METRICS,
    ("--enable-prompt-tokens-details", "--enable-cache-report"): _USAGE,
    ("--cont-batching", "-cb", "--async-scheduling", "--flash-attn", "-fa", "--enable-mixed-chunk"): _ALWAYS,
    ("--enable-request-id-headers",): "not needed: every answer has x-request-id",
    ("--mlock", "--no-mmap", "--numa"): "not needed: weights are copied into memory once, at the start",
    ("--api-key-file",): "keys stand in headstart.toml, or in HEADSTART_API_KEY, separated by commas",
    ("--watchdog-timeout", "--timeout", "-to"): "use --heartbeat-timeout for the engine, --drain-timeout for the end",
    ("--n-predict", "--predict", "-n", "--temp", "--top-k", "--min-p", "--repeat-penalty"): _SAMPLING,
    ("--override-generation-config",): "use --generation-config FOLDER, with a generation_config.json of your own",
    ("--default-chat-template-kwargs",): "a request sends chat_template_kwargs, in its own body; leave it out",
    ("--sampling-backend", "--prefill-attention-backend", "--decode-attention-backend"): "see --attention-backend",
    ("--enable-kv-cache-events",): "use --kv-events-config",
    ("--reload",): "restart the server; with --kv-store DIR its cache is still there",
    # routers
    ("--worker-urls", "--static-backends", "--backends", "--worker-url"): _REPLICAS,
    ("--policy", "--routing-logic"): ("use --routing-policy cost, llm-d, dynamo, smg, ray or round-robin"),
    ("--service-discovery", "--selector"): "use --discover file:PATH, dns:NAME:PORT or kubernetes:...",
    ("--prefill", "--decode", "--pd-disaggregation", "--disaggregation-mode"): "prefill and decode run in one server",
}
HINTS = {flag: hint for flags, hint in _TABLE.items() for flag in flags}
"""Hints by flag, as written in argv."""

_WITH_VALUE = frozenset(
    (
        *("--structured-outputs-config", "--guided-decoding-backend", "--grammar-backend", "--config-format", "-O"),
        *("--safetensors-load-strategy", "--compilation-config", "--cuda-graph-max-bs", "--cuda-graph-bs", "--numa"),
        *("--max-seq-len-to-capture", "--optimization-level"),
    )
)
"""Flags without effect that take a value."""


def is_harmless_flag(flag: str) -> bool:
    """Return whether an unknown flag changes no answer and may be left out."""
    return (hint_for_unknown_flag(flag) or "").startswith("not needed")


def harmless_flag_takes_value(flag: str) -> bool:
    """Return whether a harmless flag is followed by a value."""
    return flag.replace("_", "-") in _WITH_VALUE


def hint_for_unknown_flag(flag: str) -> str | None:
    """Return the hint for an unknown flag, None if there is none. Underscores count as hyphens, as in SGLang."""
    return HINTS.get(flag) or HINTS.get(flag.replace("_", "-"))
