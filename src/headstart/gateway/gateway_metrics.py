"""Metrics of a router in Prometheus' text format. Labels have closed value sets: replicas, routes, kinds, policies."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.http.packed_metrics import Histogram, expose_metrics, method_label
from headstart.http.tracing.tracer import SpanCounts, Tracer

if TYPE_CHECKING:
    from headstart.gateway.gateway_state import GatewayState

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 300.0)
_DECIDE = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
STATES = ("new", "up", "loading", "draining", "absent")


class GatewayMetrics:
    """The metrics of one router, in their own registry."""

    def __init__(self, routes: Iterable[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._routes = frozenset(routes)
        self._http = self._counter("http_requests", "HTTP requests.", "route", "method", "status")
        self._requests = self._counter("router_requests", "Requests by replica and outcome.", "replica", "outcome")
        self._failures = self._counter("router_failures", "Attempts without an answer.", "reason")
        self._retries = Counter("headstart:router_retries", "Attempts after the first one.", registry=self._registry)
        self._predicted = self._counter("router_predicted_tokens", "Prompt tokens predicted to be cached.", "replica")
        self._cached = self._counter("router_cached_tokens", "Prompt tokens cached, as reported.", "replica")
        self._prompt = self._counter("router_prompt_tokens", "Prompt tokens routed, by the router's count.", "replica")
        self._reported = self._counter(
            "router_reported_prompt_tokens", "Prompt tokens by the replicas' count, cached or not.", "replica"
        )
        self._rules = self._counter("router_prompt_rules", "Requests that a rule for prompts changed.", "rule")
        self.ttft = self._histogram("router_ttft_seconds", "From arrival to the first token.", _TTFT)
        self.decide = self._histogram("router_decision_seconds", "Time to read a prompt and select a replica.", _DECIDE)

    def watch_state(self, state: "GatewayState") -> None:
        """Add the router's state to every scrape."""
        self._registry.register(_Collector(state))

    def count_answer(self, path: str, method: str, status: int) -> None:
        """Count an HTTP request; unknown paths and methods share one label."""
        is_stored = path.startswith("/v1/responses/")
        route = path if path in self._routes else "/v1/responses/{id}" if is_stored else "other"
        self._http.add((route, method_label(method), str(status)))

    def count_call_outcome(self, call: ProxiedCall) -> None:
        """Count the attempts, failures and outcome of a request."""
        for failure in call.failures:
            self._failures.add((failure.value,))
        if call.num_attempts > 1:
            self._retries.inc(call.num_attempts - 1)
        for rule, _ in call.reading.applied_rules:
            self._rules.add((rule,))
        decision = call.in_flight
        if decision is None:
            return
        name = decision.endpoint.name
        self._requests.add((name, call.outcome))
        if decision.cached_tokens is not None:
            self._predicted.add((name,), decision.candidate.hit_tokens)
            self._cached.add((name,), decision.cached_tokens)
            self._reported.add((name,), decision.reported_tokens)
            self._prompt.add((name,), decision.view.num_prompt_tokens)

    def watch_tracer(self, tracer: Tracer) -> None:
        """Add the counts of exported and lost spans to every scrape."""
        self._registry.register(SpanCounts(tracer))

    def expose(self, accept: str = "", *, with_replicas: bool = True) -> bytes:
        """Return all metrics in a format of the Accept header; those by replica are for administrators only."""
        return expose_metrics(accept, self._registry if with_replicas else _WithoutReplicas(self._registry))

    def _counter(self, name: str, text: str, *labels: str) -> "_Counts":
        counts = _Counts(f"headstart:{name}", text, labels)
        self._registry.register(counts)
        return counts

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"headstart:{name}", text, buckets, {})
        self._registry.register(histogram)
        return histogram


class _Counts(Collector):
    """A counter with labels as plain numbers: all counting happens on one event loop, so it needs no lock."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], amount: int = 1) -> None:
        """Count `amount` more under these values of the labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class _WithoutReplicas(Collector):
    """The metrics without a replica's address in a label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if not any("replica" in sample.labels for sample in family.samples):
                yield family


class _Collector(Collector):
    def __init__(self, state: "GatewayState") -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        state, router = self._state, self._state.router
        states: dict[str, int] = dict.fromkeys(STATES, 0)
        for member in state.members.members.values():
            states[member.state] = states.get(member.state, 0) + 1
        yield _gauge("replicas", "Replicas by state.", "state", states)
        ends = router.endpoints.values()
        yield _gauge(
            "pending",
            "Requests without a first token.",
            "replica",
            {e.name: e.load.num_awaiting_first_token for e in ends},
        )
        yield _gauge("streams", "Answers in flight.", "replica", {e.name: e.load.num_streams for e in ends})
        yield _gauge("shadow_blocks", "Blocks predicted to be cached.", "replica", {e.name: len(e.index) for e in ends})
        ejections = {e.name: e.health.num_ejections for e in ends}
        yield _count("ejections", "Times a replica was ejected after failures.", "replica", ejections)
        yield _single("queued", "Client requests without a first token.", state.num_awaiting_first_token)
        held = state.flow.queue
        yield _single("held", "Requests that flow control holds in the router.", held.num_waiting)
        text = "Uncached prompt tokens of these; a signal for autoscaling."
        yield _single("held_tokens", text, held.num_tokens)
        yield _total("expired", "Requests that were not sent before their deadline.", state.flow.num_expired)
        yield _single(
            "requests_in_flight",
            "Requests sent to replicas that have not ended; a signal for autoscaling.",
            sum(e.load.num_requests for e in ends),
        )
        yield _total("blind_replicas", "Replicas whose KV events are ignored: none was usable.", router.num_blind)
        yield _total("retries_refused", "Retries that the budget did not allow.", state.budget.num_refused)
        yield _total("reports", "Answers that reported their cached tokens.", router.num_reported)
        text = "Tokens predicted as cached that were not, or the reverse."
        yield _total("prediction_error_tokens", text, router.prediction_error)
        regrets = {name: regret.total_ms / 1e3 for name, regret in router.regrets.items()}
        if regrets:
            text = "Estimated extra cost of a shadow policy's decisions."
            yield _gauge("regret_seconds", text, "policy", regrets)
            agreed = {name: regret.agreed for name, regret in router.regrets.items()}
            yield _count("agreements", "Decisions in which a shadow policy agreed.", "policy", agreed)
        events = state.listening.event_counts()
        if events:
            family = CounterMetricFamily("headstart:router_kv_events", "KV events.", labels=("replica", "kind"))
            for name, counts in events.items():
                for kind, value in counts.items():
                    family.add_metric([name, kind], value)
            yield family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"headstart:router_{name}", text, labels=(label,)), values)


def _count(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _filled(CounterMetricFamily(f"headstart:router_{name}", text, labels=(label,)), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _single(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headstart:router_{name}", text, value=value)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"headstart:router_{name}", text, value=value)
