"""Metrics in the Prometheus text format: vLLM's names where the meaning is the same, others under `headstart:`.

Every label value comes from a closed set, so clients cannot create series. Counters and gauges of the engine are read
from its last heartbeat at scrape time; only histograms and HTTP counters are kept here.
"""

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine_info import EngineInfo, EngineStats
from headstart.engine.engine_client import EngineClient
from headstart.http.packed_metrics import Counter, Histogram, MetricFamilyFactory, expose_metrics, method_label
from headstart.http.tracing.tracer import SpanCounts, Tracer
from headstart.openai.canonical.prompt_rules import PLACEMENT_TEXTS, RULE_TEXTS, AppliedRules
from headstart.openai.forms.skipped import KNOWN, SkippedCounts, skipped_name_label
from headstart.openai.responses import CACHE_SOURCES
from headstart.reuse.causes import CAUSES
from headstart.server.apis.answer_diagnosis import FingerprintCache
from headstart.server.prompt_doctor import AvoidableTextEstimator
from headstart.server.store_metrics import StoreCollector

FINISH_REASONS = ("stop", "length", "abort", "error")
MAX_EVICTORS = 64  # of a tenant, by name
OTHER = "(others)"  # further ones, requests without a tenant, and no request

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKEN_TIME = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, routes: Iterable[str]) -> None:
        self._of_load = CollectorRegistry(auto_describe=False)
        self._registry = CollectorRegistry(auto_describe=False)
        self._by_tenant = CollectorRegistry()
        self._of_store = CollectorRegistry()
        self._model_name = model_name
        self._routes = frozenset(routes)
        row = self._histogram
        self.time_to_first_token = row("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.inter_token_latency = row("inter_token_latency_seconds", "Between two tokens.", _TOKEN_TIME)
        self.time_per_output_token = row(
            "request_time_per_output_token_seconds", "Per token after the first, by request.", _TOKEN_TIME
        )
        self.e2e_latency = row("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY)
        self.queue_time = row("request_queue_time_seconds", "From arrival to the first step.", _LATENCY)
        self.prefill_time = row("request_prefill_time_seconds", "From the first step to the first token.", _LATENCY)
        self.inference_time = row("request_inference_time_seconds", "From the first step to the last token.", _LATENCY)
        self.decode_time = row("request_decode_time_seconds", "From the first token to the last.", _LATENCY)
        self.prompt_tokens = row("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.prefill_computed = row(
            "request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were computed, not read from the cache.",
            _TOKENS,
        )
        self.generation_tokens = row("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.params_n = row("request_params_n", "Choices requested.", _CHOICES)
        self.params_max_tokens = row("request_params_max_tokens", "Tokens allowed for an answer.", _TOKENS)
        self.iteration_tokens = row("iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS)
        self._of_prompts = PromptRuleCollector(model_name)
        self._registry.register(self._of_prompts)
        self.count_prompt = self._of_prompts.count_request
        self._http = self._counter("headstart:http_requests", "HTTP requests.", "route", "method", "status")
        self._finished = self._counter(
            "vllm:request_success", "Requests by how they ended.", "model_name", "finished_reason"
        )
        self._rejected = self._counter(
            "vllm:admission_rejections", "Requests refused: too much was waiting.", "model_name"
        )
        for reason in FINISH_REASONS:
            self._finished.add((model_name, reason), 0)
        self._rejected.add((model_name,), 0)
        self.tenants: dict[str, PromptTokenBreakdown] = {}  # tokens of their prompts, by tenant
        self.evicted_of_tenants: dict[
            str, Mapping[str, int]
        ] = {}  # those in evicted blocks, by the tenant that evicted

    def register_engine_collectors(self, engine: EngineClient) -> None:
        """Add the engine's own counters and gauges to every scrape."""
        self._of_load.register(_LoadCollector(engine, self._model_name))
        self._registry.register(_EngineCollector(engine, self._model_name))
        self._by_tenant.register(_TenantCollector(self._model_name, self.tenants))
        self._of_store.register(StoreCollector(lambda: engine.stats, self._model_name))

    def watch_prompt_doctor(self, memory: FingerprintCache | None, doctor: AvoidableTextEstimator) -> None:
        """Add the memory of prompts' fingerprints and the estimate of the avoidable share to every scrape."""
        self._of_prompts.fingerprints, self._of_prompts.doctor = memory, doctor

    def watch_tracer(self, tracer: Tracer) -> None:
        """Add the counts of exported and lost spans to every scrape."""
        self._registry.register(SpanCounts(tracer))

    def record_prompt_tokens(
        self, tenant: str, breakdown: PromptTokenBreakdown, evicted: Mapping[str | None, int] | None = None
    ) -> None:
        """Add the prompt token breakdown of one client request; `tenant` is that of a configured key, or empty.

        `evicted`: tokens that were computed because their blocks had been evicted, by the tenant that needed the space.
        Of each tenant the first MAX_EVICTORS of them are told apart.
        """
        if tenant:
            rows = dict(self.evicted_of_tenants.get(tenant, {}))  # a copy, so that samples may keep the rows of before
            for name, tokens in (evicted or {}).items() if any((evicted or {}).values()) else ():
                by = OTHER if not name or (name not in rows and len(rows) >= MAX_EVICTORS) else name
                rows[by] = rows.get(by, 0) + tokens
            self.evicted_of_tenants[tenant] = rows
            before = self.tenants.get(tenant, PromptTokenBreakdown())
            self.tenants[tenant] = PromptTokenBreakdown(*map(sum, zip(before, breakdown, strict=True)))

    def record_finished(self, reason: str) -> None:
        """Count a finished engine request."""
        reason = "stop" if reason == "tool_calls" else reason  # why the engine finished it
        self._finished.add((self._model_name, reason if reason in FINISH_REASONS else "error"))

    def count_rejected(self) -> None:
        """Count a client request rejected at admission: queue or byte budget full."""
        self._rejected.add((self._model_name,))

    def count_answer(self, path: str, method: str, status: int) -> None:
        """Count an HTTP request; unknown paths and methods share one label."""
        trees = (f"{tree}{{id}}" for tree in ("/v1/models/", "/v1/responses/") if path.startswith(tree))
        route = path if path in self._routes else next(trees, "other")
        self._http.add((route, method_label(method), str(status)))

    def expose(self, accept: str = "", *, with_tenants: bool = True, with_store: bool = True) -> bytes:
        """Return all metrics in a format of the Accept header, with or without those by tenant and of the store."""
        shown = {self._of_load: True, self._registry: True, self._by_tenant: with_tenants, self._of_store: with_store}
        return expose_metrics(accept, *(registry for registry, is_shown in shown.items() if is_shown))

    def render_load_metrics(self) -> bytes:
        """Return the metrics that routers read every few seconds: all of them take milliseconds."""
        return expose_metrics("", self._of_load)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, bounds, {"model_name": self._model_name})
        self._registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, labels)
        self._registry.register(counter)
        return counter


_COUNTERS = {  # of the engine's Counters
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests whose first token is out."),
    "cached_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens read from the prefix cache."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "forced_tokens": ("headstart:forced_tokens", "Output tokens that a grammar forced."),
    "num_drafts": ("headstart:spec_decode_num_drafts", "Drafts verified."),
    "num_draft_tokens": ("headstart:spec_decode_num_draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("headstart:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Prompt tokens found."),
    "num_preemptions": ("vllm:num_preemptions", "Preempted sequences."),
    "num_row_errors": ("vllm:corrupted_requests", "Requests that failed alone."),
    "num_recomputes": (
        "headstart:recomputed_requests",
        "Requests computed again because KV that they shared with others might not be finite.",
    ),
    "num_promise_skips": (
        "headstart:promise_skips",
        "Times a request waited for blocks that another request was computing.",
    ),
    "num_adoptions": ("headstart:adoptions", "Times a running prefill reused new blocks."),
    "evicted_tokens": (
        "headstart:evicted_prompt_tokens",
        "Prompt tokens computed again because their blocks had been evicted.",
    ),
    "prefill_tokens": ("headstart:prefill_tokens", "Prompt tokens computed, replays too."),
    "ideal_tokens": ("headstart:ideal_tokens", "Tokens that an infinite, shared cache would compute."),
    "replayed_tokens": ("headstart:replayed_tokens", "Tokens computed again after preemptions."),
}


class _HeartbeatCollector(Collector):
    """Metrics that are read from the engine's last heartbeat."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._families = MetricFamilyFactory(model_name, "")


class _LoadCollector(_HeartbeatCollector):
    """The engine's load and its cache."""

    def collect(self) -> Iterable[Metric]:
        stats, families = self._engine.stats, self._families
        pool = stats.pool
        usage = 1 - pool.num_free / pool.num_blocks if pool.num_blocks else 0.0
        yield families.make_gauge("vllm:num_requests_running", "Sequences in the engine's batch.", stats.num_running)
        yield families.make_gauge("vllm:num_requests_waiting", "Requests in the waiting queue.", stats.num_waiting)
        yield families.make_gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", usage)
        text = "Prefill tokens, to ideal tokens: 1 is best."
        yield families.make_gauge("headstart:prefill_redundancy", text, prefill_redundancy(stats))
        if self._engine.info is not None:
            yield _cache_config(self._engine.info, families.model)


class _EngineCollector(_HeartbeatCollector):
    """The engine's other counters and gauges."""

    def collect(self) -> Iterable[Metric]:
        stats, families = self._engine.stats, self._families
        for field, (name, text) in _COUNTERS.items():
            yield families.make_counter(name, text, getattr(stats.counters, field))
        yield families.make_counter("headstart:steps", "Steps of the engine.", stats.num_steps)
        yield families.make_counter("headstart:step_seconds", "Seconds spent computing.", stats.step_seconds)
        yield families.make_gauge("headstart:pinned_blocks", "Blocks of pinned prefixes.", stats.pool.num_pinned)
        age = time.monotonic() - self._engine.last_heard
        yield families.make_gauge("headstart:heartbeat_age_seconds", "Seconds since the engine was last heard.", age)
        yield from self._by_label(stats)

    def _by_label(self, stats: EngineStats) -> Iterable[Metric]:
        counters, families = stats.counters, self._families
        sources = {source: getattr(counters, f"{source}_tokens") for source in CACHE_SOURCES}
        text, computed = "Prompt tokens by where their KV came from.", counters.prompt_computed_tokens
        yield families.labelled_counter("headstart:prompt_tokens", text, "source", {**sources, "computed": computed})
        text = "Prompt tokens by source, in vLLM's words."
        vllm = {
            "local_compute": computed,
            "local_cache_hit": counters.cached_tokens - counters.store_tokens,
            "external_kv_transfer": counters.store_tokens,
        }
        yield families.labelled_counter("vllm:prompt_tokens_by_source", text, "source", vllm)
        text = "Prompt and output tokens, computed or not."
        tokens = {"computed": counters.computed_tokens, "cached": counters.cached_tokens}
        yield families.labelled_counter("headstart:tokens", text, "source", tokens)
        text = "Evicted cached blocks by cause."
        yield families.labelled_counter("headstart:evictions", text, "cause", stats.pool.evictions_by_cause)
        yield families.labelled_gauge("headstart:kv_blocks", "KV blocks by state.", "state", blocks_by_state(stats))


def prefill_redundancy(stats: EngineStats) -> float:
    """Return the computed prompt tokens divided by those that a perfect cache would compute; 1.0 before any request."""
    return stats.counters.prefill_tokens / stats.counters.ideal_tokens if stats.counters.ideal_tokens else 1.0


def blocks_by_state(stats: EngineStats) -> dict[str, int]:
    """Return the number of KV blocks in each state; every usable block is in exactly one state."""
    pool = stats.pool
    return {
        "scratch": pool.num_scratch,
        "idle": pool.num_idle,
        "pinned_idle": pool.num_pinned_idle,
        "referenced": pool.num_blocks - pool.num_free - pool.num_pinned_idle,
    }


def _cache_config(info: EngineInfo, model_name: str) -> Metric:
    tokens = info.num_blocks * info.block_size
    values = {
        "model_name": model_name,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "cache_dtype": info.dtype,
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": f"{tokens / info.max_model_len:.2f}",
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is laid out.", labels=tuple(values))
    family.add_metric(list(values.values()), 1)
    return family


class _TenantCollector(Collector):
    """Prompt tokens of each tenant by source."""

    def __init__(self, model_name: str, tenants: Mapping[str, PromptTokenBreakdown]) -> None:
        self._tenants = tenants
        self._model = [model_name]

    def collect(self) -> Iterable[Metric]:
        if not self._tenants:
            return
        text, labels = "Prompt tokens by tenant and source; for administrators.", ("model_name", "tenant", "source")
        family = CounterMetricFamily("headstart:tenant_prompt_tokens", text, labels=labels)
        for tenant, breakdown in self._tenants.items():
            for source, value in breakdown._asdict().items():
                family.add_metric([*self._model, tenant, source], value)
        yield family


class PromptRuleCollector(Collector):
    """Requests by the rules that applied and by what was left out; fingerprints and the doctor's sample, if watched."""

    def __init__(self, model_name: str) -> None:
        self._families = MetricFamilyFactory(model_name)
        self._rules = dict.fromkeys(RULE_TEXTS | PLACEMENT_TEXTS, 0)
        self._skipped = dict.fromkeys(KNOWN, 0)
        self.fingerprints: FingerprintCache | None = None
        self.doctor: AvoidableTextEstimator | None = None

    def count_request(self, applied: AppliedRules, skipped: SkippedCounts) -> None:
        """Count a request."""
        for rule, _ in applied:
            self._rules[rule] += 1
        for name, count in skipped:
            self._skipped[skipped_name_label(name)] += count

    def collect(self) -> Iterable[Metric]:
        families, memory = self._families, self.fingerprints
        text = "Requests that a rule for prompts changed, or reported about."
        yield families.labelled_counter("prompt_rules", text, "rule", self._rules)
        text = "Fields, tools, items, parts and reasoning of requests that were left out of prompts (docs/agents.md)."
        yield families.labelled_counter("skipped", text, "kind", self._skipped)
        if self.doctor is None:  # the model is still loading
            return
        text, num_bytes = "Fingerprints of prompts kept for comparisons.", 0 if memory is None else memory.num_bytes
        yield families.make_gauge("fingerprints", text, 0 if memory is None else len(memory))
        yield families.make_gauge("fingerprint_bytes", "Memory held for fingerprints.", num_bytes)
        counts = self.doctor.counts
        text = "Prompt tokens of the sample that was examined."
        yield families.make_counter("examined_prompt_tokens", text, counts.prompt_tokens)
        text = "Of those, computed tokens that other prompts with the same text would have spared."
        yield families.make_counter("avoidable_tokens", text, counts.avoidable_tokens)
        text = "Avoidable tokens by cause: those behind its first occurrence in a prompt, so causes overlap."
        causes = {cause: counts.causes[cause] for cause in CAUSES}
        yield families.labelled_counter("avoidable_tokens_by_cause", text, "cause", causes)
        text = "Avoidable tokens, to all prompt tokens of the sample: 0 is best."
        yield families.make_gauge("avoidable_share", text, counts.share or 0.0)
