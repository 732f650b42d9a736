"""Metrics in the Prometheus text format: vLLM's names where the meaning is the same, others under `headstart:`.

Every label value comes from a closed set, so clients cannot create series. Counters and gauges of the engine are read
from its last heartbeat at scrape time; only histograms and HTTP counters are kept here.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine import EngineInfo, EngineStats
from headstart.http.packed_metrics import Counter, Histogram, expose, method_label
from headstart.http.tracing.tracer import Exported, SpanCounts
from headstart.openai.responses import CACHE_SOURCES
from headstart.server.apis.answer_diagnosis import FingerprintMemory
from headstart.server.prompt_doctor import PromptDoctor
from headstart.server.prompt_metrics import DoctorCollector, FingerprintCollector, RuleCounts, SkippedTotals
from headstart.server.store_metrics import StoreCollector

FINISH_REASONS = ("stop", "length", "abort", "error")

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
_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "time_to_first_token": ("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT),
    "inter_token_latency": ("vllm:inter_token_latency_seconds", "Between two tokens.", _TOKEN_TIME),
    "time_per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "Per token after the first, by request.",
        _TOKEN_TIME,
    ),
    "e2e_latency": ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY),
    "queue_time": ("vllm:request_queue_time_seconds", "From arrival to the first step.", _LATENCY),
    "prefill_time": ("vllm:request_prefill_time_seconds", "From the first step to the first token.", _LATENCY),
    "inference_time": ("vllm:request_inference_time_seconds", "From the first step to the last token.", _LATENCY),
    "decode_time": ("vllm:request_decode_time_seconds", "From the first token to the last.", _LATENCY),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "prefill_computed": (
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of a prompt that were computed, not read from the cache.",
        _TOKENS,
    ),
    "generation_tokens": ("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS),
    "params_n": ("vllm:request_params_n", "Choices requested.", _CHOICES),
    "params_max_tokens": ("vllm:request_params_max_tokens", "Tokens allowed for an answer.", _TOKENS),
    "iteration_tokens": ("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS),
}


class EngineView(Protocol):
    """The engine state that a scrape reads; implemented by EngineClient. `info` is None until the engine has loaded."""

    info: EngineInfo | None
    stats: EngineStats
    last_heard: float


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, routes: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._by_tenant = CollectorRegistry()
        self._of_store = CollectorRegistry()
        self._model_name = model_name
        self._routes = frozenset(routes)
        histograms = {field: self._histogram(*row) for field, row in _HISTOGRAMS.items()}
        self.time_to_first_token = histograms["time_to_first_token"]
        self.inter_token_latency = histograms["inter_token_latency"]
        self.time_per_output_token = histograms["time_per_output_token"]
        self.e2e_latency = histograms["e2e_latency"]
        self.queue_time = histograms["queue_time"]
        self.prefill_time = histograms["prefill_time"]
        self.inference_time = histograms["inference_time"]
        self.decode_time = histograms["decode_time"]
        self.prompt_tokens = histograms["prompt_tokens"]
        self.prefill_computed = histograms["prefill_computed"]
        self.generation_tokens = histograms["generation_tokens"]
        self.params_n = histograms["params_n"]
        self.params_max_tokens = histograms["params_max_tokens"]
        self.iteration_tokens = histograms["iteration_tokens"]
        self.prompt_rules = RuleCounts("headstart:prompt_rules", model_name)
        self._registry.register(self.prompt_rules)
        self.skipped = SkippedTotals("headstart:skipped", model_name)
        self._registry.register(self.skipped)
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

    def watch(self, engine: EngineView) -> None:
        """Add the engine's own counters and gauges to every scrape."""
        self._registry.register(_EngineCollector(engine, self._model_name))
        self._by_tenant.register(_TenantCollector(self._model_name, self.tenants))
        self._of_store.register(StoreCollector(lambda: engine.stats, self._model_name))

    def watch_fingerprints(self, memory: FingerprintMemory | None) -> None:
        """Add the memory of prompts' fingerprints to every scrape."""
        self._registry.register(FingerprintCollector(memory, self._model_name))

    def watch_tracer(self, tracer: Exported) -> None:
        """Add the counts of exported and lost spans to every scrape."""
        self._registry.register(SpanCounts(tracer))

    def watch_doctor(self, doctor: PromptDoctor) -> None:
        """Add the estimate of the avoidable share to every scrape."""
        self._registry.register(DoctorCollector(doctor, self._model_name))

    def prompts(self, tenant: str, breakdown: PromptTokenBreakdown) -> None:
        """Add the prompt token breakdown of one client request; `tenant` is that of a configured key, or empty."""
        if tenant:
            before = self.tenants.get(tenant, PromptTokenBreakdown())
            self.tenants[tenant] = PromptTokenBreakdown(*map(sum, zip(before, breakdown, strict=True)))

    def finished(self, reason: str) -> None:
        """Count a finished engine request."""
        reason = "stop" if reason == "tool_calls" else reason  # why the engine finished it
        self._finished.add((self._model_name, reason if reason in FINISH_REASONS else "error"))

    def rejected(self) -> None:
        """Count a client request rejected at admission: queue or byte budget full."""
        self._rejected.add((self._model_name,))

    def answered(self, path: str, method: str, status: int) -> None:
        """Count an HTTP request; unknown paths and methods share one label."""
        trees = (f"{tree}{{id}}" for tree in ("/v1/models/", "/v1/responses/") if path.startswith(tree))
        route = path if path in self._routes else next(trees, "other")
        self._http.add((route, method_label(method), str(status)))

    def expose(self, accept: str = "", *, with_tenants: bool = True, with_store: bool = True) -> bytes:
        """Return all metrics in a format of the Accept header, with or without those by tenant and of the store."""
        shown = {self._registry: True, self._by_tenant: with_tenants, self._of_store: with_store}
        return expose(accept, *(registry for registry, is_shown in shown.items() if is_shown))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, bounds, {"model_name": self._model_name})
        self._registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, labels)
        self._registry.register(counter)
        return counter


class _EngineCollector(Collector):
    """The engine's counters and gauges, read from its last heartbeat."""

    def __init__(self, engine: EngineView, model_name: str) -> None:
        self._engine = engine
        self._model = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        counters, pool = stats.counters, stats.pool
        usage = 1 - pool.num_free / pool.num_blocks if pool.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the engine's batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the waiting queue.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", usage)
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests whose first token is out.", counters.prompt_tokens
        )
        yield self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens read from the prefix cache.", counters.cached_tokens
        )
        yield self._counter("vllm:generation_tokens", "Tokens generated.", counters.generation_tokens)
        yield self._counter("headstart:forced_tokens", "Output tokens that a grammar forced.", counters.forced_tokens)
        yield self._counter("headstart:spec_decode_num_drafts", "Drafts verified.", counters.num_drafts)
        drafted, accepted = counters.num_draft_tokens, counters.num_accepted_tokens
        yield self._counter("headstart:spec_decode_num_draft_tokens", "Draft tokens verified.", drafted)
        yield self._counter("headstart:spec_decode_num_accepted_tokens", "Draft tokens accepted.", accepted)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", counters.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Preempted sequences.", counters.num_preemptions)
        yield self._counter("vllm:corrupted_requests", "Requests that failed alone.", counters.num_row_errors)
        recomputed = "Requests computed again because KV that they shared with others might not be finite."
        yield self._counter("headstart:recomputed_requests", recomputed, counters.num_recomputes)
        yield self._counter("headstart:steps", "Steps of the engine.", stats.num_steps)
        yield self._counter("headstart:step_seconds", "Seconds spent computing.", stats.step_seconds)
        yield self._counter(
            "headstart:promise_skips",
            "Times a request waited for blocks that another request was computing.",
            counters.num_promise_skips,
        )
        yield self._counter("headstart:adoptions", "Times a running prefill reused new blocks.", counters.num_adoptions)
        evicted = "Prompt tokens computed again because their blocks had been evicted."
        yield self._counter("headstart:evicted_prompt_tokens", evicted, counters.evicted_tokens)
        yield self._counter("headstart:prefill_tokens", "Prompt tokens computed, replays too.", counters.prefill_tokens)
        yield self._counter(
            "headstart:ideal_tokens",
            "Tokens that an infinite, shared cache would compute.",
            counters.ideal_tokens,
        )
        yield self._counter(
            "headstart:replayed_tokens", "Tokens computed again after preemptions.", counters.replayed_tokens
        )
        redundancy = prefill_redundancy(stats)
        yield self._gauge("headstart:prefill_redundancy", "Prefill tokens, to ideal tokens: 1 is best.", redundancy)
        yield self._gauge("headstart:pinned_blocks", "Blocks of pinned prefixes.", pool.num_pinned)
        age = time.monotonic() - self._engine.last_heard
        yield self._gauge("headstart:heartbeat_age_seconds", "Seconds since the engine was last heard.", age)
        yield from self._by_label(stats)
        if self._engine.info is not None:
            yield _cache_config(self._engine.info, self._model[0])

    def _by_label(self, stats: EngineStats) -> Iterable[Metric]:
        counters, pool = stats.counters, stats.pool
        sources = {source: getattr(counters, f"{source}_tokens") for source in CACHE_SOURCES}
        prompt = {**sources, "computed": counters.prompt_computed_tokens}
        yield self._labelled("headstart:prompt_tokens", "Prompt tokens by where their KV came from.", "source", prompt)
        vllm = {
            "local_compute": counters.prompt_computed_tokens,
            "local_cache_hit": counters.cached_tokens - counters.store_tokens,
            "external_kv_transfer": counters.store_tokens,
        }
        yield self._labelled(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source, in vLLM's words.", "source", vllm
        )
        tokens = {"computed": counters.computed_tokens, "cached": counters.cached_tokens}
        yield self._labelled("headstart:tokens", "Prompt and output tokens, computed or not.", "source", tokens)
        evictions = "Evicted cached blocks by cause."
        yield self._labelled("headstart:evictions", evictions, "cause", pool.evictions)
        family = GaugeMetricFamily("headstart:kv_blocks", "KV blocks by state.", labels=("model_name", "state"))
        for state, value in blocks_by_state(stats).items():
            family.add_metric([*self._model, state], value)
        yield family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", label))
        for value, count in values.items():
            family.add_metric([*self._model, value], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric(self._model, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric(self._model, value)
        return family


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
