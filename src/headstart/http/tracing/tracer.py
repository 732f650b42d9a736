"""Tracer: begins and ends the traces of one process, and hands them to an exporter in a thread of its own.

Requests never wait: an ended trace is appended to a bounded queue, and dropped and counted if that is full. Queue and
counters need no lock, since each counter is written by one thread.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.core.errors import ConfigError
from headstart.http.access_record import AccessRecord
from headstart.http.logs import ServerLog
from headstart.http.tracing.request_trace import RequestTrace, SpanEvent, TraceParent, TraceSpan, random_nonzero_id

EXPORT_SECONDS = 5.0  # that a span waits at most
BATCH_SPANS = 512  # of one export, which begins once so many wait; each costs a request
MAX_WAITING_SPANS = 8192
CLOSE_SECONDS = 2.0  # for the export of what waits at the end
PROVIDER = "headstart"


class Exporter(Protocol):
    """The collector of traces; implemented by OtlpExporter and by the tests."""

    def is_sampled(self, trace_id: int, parent: TraceParent | None) -> bool:
        """Return whether a trace is exported."""
        ...

    def export(self, traces: Sequence[RequestTrace]) -> bool:
        """Send traces and return whether they were accepted. Blocks; called in the tracer's thread."""
        ...

    def cancel_exports(self) -> None:
        """Make `export` return soon."""
        ...


class Tracer:
    """The traces of one process. `name` is that of the collector in log lines."""

    def __init__(self, exporter: Exporter, log: ServerLog, name: str = "the collector") -> None:
        self.num_exported = self.num_failed = self.num_dropped = 0  # spans
        self._exporter = exporter
        self._log = log
        self._name = name
        self._waiting: deque[RequestTrace] = deque()
        self._num_added = self._num_taken = 0  # spans that have been in the queue
        self._is_lost = False  # the last export failed
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, record: AccessRecord, operation: str, headers: Sequence[tuple[bytes, bytes]]) -> RequestTrace:
        """Return the trace of a request that has just arrived, which continues that of its caller if there is one."""
        parent = TraceParent.from_headers(headers)
        root = TraceSpan(operation, record.arrival, record.arrival, 0 if parent is None else parent.span_id, "server")
        root.attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
        trace_id = random_nonzero_id(16) if parent is None else parent.trace_id
        is_sampled = self._exporter.is_sampled(trace_id, parent)
        return RequestTrace(root, trace_id, is_sampled=is_sampled, state="" if parent is None else parent.state)

    def end_trace(self, record: AccessRecord, now: float) -> None:
        """Complete the trace of a request that has ended, and queue it for export."""
        trace = record.trace
        if trace is None or not trace.is_sampled:
            return
        _complete(trace.root, record, now)
        num_spans = len(trace.spans)
        if self._num_added - self._num_taken + num_spans > MAX_WAITING_SPANS:
            self.num_dropped += num_spans
            return
        self._num_added += num_spans
        self._waiting.append(trace)
        if self._num_added - self._num_taken >= BATCH_SPANS and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Export what waits, for CLOSE_SECONDS at most; blocks."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.cancel_exports()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(EXPORT_SECONDS)
            self._wake.clear()
            self._export()
        self._export()

    def _export(self) -> None:
        while self._waiting:
            batch: list[RequestTrace] = []
            num_spans = 0
            while self._waiting and num_spans < BATCH_SPANS:
                batch.append(self._waiting.popleft())
                num_spans += len(batch[-1].spans)
            try:
                is_accepted = self._exporter.export(batch)
            except Exception as error:  # not expected; later traces may pass
                self._log.log_exception("internal_error", error, "")
                is_accepted = False
            self._num_taken += num_spans
            if is_accepted:
                self.num_exported += num_spans
            else:
                self.num_failed += num_spans
            if is_accepted == self._is_lost:
                self._is_lost = not is_accepted
                text = "accepts spans again" if is_accepted else "does not accept spans; they are dropped until it does"
                self._log.write_line(f"headstart: {self._name} {text}")


class SpanCounts(Collector):
    """The metric of exported and lost spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterable[Metric]:
        tracer = self._tracer
        text = "Spans: exported; failed, not accepted by the collector; dropped, since too many waited."
        family = CounterMetricFamily("headstart:trace_spans", text, labels=("outcome",))
        counts = {"exported": tracer.num_exported, "failed": tracer.num_failed, "dropped": tracer.num_dropped}
        for outcome, count in counts.items():
            family.add_metric([outcome], count)
        yield family


def make_tracer(endpoint: str | None, service: str, log: ServerLog) -> Tracer | None:
    """Return the tracer of a process that exports to an OTLP endpoint, None without one. Raises ConfigError."""
    if endpoint is None:
        return None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"otlp_endpoint is {endpoint!r}; write the URL of a collector that takes OTLP over HTTP, "
            "such as http://localhost:4318"
        )
    try:
        from headstart.http.tracing.otlp_exporter import OtlpExporter
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs {error.name}: pip install 'headstart[otlp]'") from None
    target = endpoint if url.path.strip("/") else url._replace(path="/v1/traces").geturl()
    return Tracer(OtlpExporter(target, service), log, f"the collector at {url.hostname}")


def _complete(root: TraceSpan, record: AccessRecord, now: float) -> None:
    """Set the end, the attributes and the events of a request's own span."""
    root.end, status = now, record.status or 0
    model = root.attributes.get("gen_ai.request.model")
    root.name = f"{root.name} {model}" if model else root.name
    known: dict[str, str | int | float | None] = {
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": status,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.breakdown.num_cached if record.breakdown else None,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "gen_ai.response.time_to_first_chunk": record.first_token_at and record.first_token_at - record.arrival,
        "headstart.request_id": record.request_id,
        "headstart.tenant": record.principal.label or None,
    }
    root.attributes |= {name: value for name, value in known.items() if value is not None}
    if record.finish_reason is not None:
        root.attributes["gen_ai.response.finish_reasons"] = (record.finish_reason,)
    if record.error is not None or status >= 400:
        root.error = record.error or str(status)
        root.is_failed = status >= 500 or status < 400
    events: list[SpanEvent] = []
    if record.scheduled_at is not None:
        sources = {} if record.breakdown is None else record.breakdown._asdict()
        tokens = {f"headstart.prompt_tokens.{source}": count for source, count in sources.items()}
        events.append(SpanEvent("admission", record.scheduled_at, {**tokens}))
    if record.first_token_at is not None:
        events.append(SpanEvent("first_token", record.first_token_at, {}))
    root.events = tuple(events)
