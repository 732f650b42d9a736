"""The export of traces: our bytes against OpenTelemetry's encoder, and the variables, tries and limits of sending."""

import gzip
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="the encoder of OpenTelemetry is not installed")
import trustme
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from headstart.core.errors import ConfigError
from headstart.http.tracing.otlp_encoding import encode_trace_request
from headstart.http.tracing.otlp_exporter import OtlpExporter
from headstart.http.tracing.request_trace import RequestTrace, SpanEvent, TraceSpan

RESOURCE = {"service.name": "s", "service.version": "1"}
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


def slow_twin(traces: list[RequestTrace]) -> ExportTraceServiceRequest:
    """The same request, built by OpenTelemetry from its own spans."""

    def context(trace: RequestTrace, span_id: int, *, is_remote: bool) -> SpanContext:
        state = TraceState.from_header([trace.state]) if trace.state else TraceState()
        return SpanContext(trace.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)

    def read(trace: RequestTrace, span: TraceSpan) -> ReadableSpan:
        def ns(at: float) -> int:
            return int(at * 1e9) + trace.epoch_ns

        return ReadableSpan(
            span.name,
            context(trace, span.span_id, is_remote=False),
            context(trace, span.parent_id, is_remote=span is trace.root) if span.parent_id else None,
            Resource(RESOURCE),
            {**span.attributes, "error.type": span.error} if span.error else span.attributes,
            [Event(event.name, event.attributes, ns(event.at)) for event in span.events],
            kind=KINDS[span.kind],
            status=Status(StatusCode.ERROR if span.is_failed else StatusCode.UNSET),
            start_time=ns(span.start),
            end_time=ns(span.end),
            instrumentation_scope=InstrumentationScope("headstart", "2"),
        )

    return encode_spans([read(trace, span) for trace in traces for span in trace.spans])


NAMES = st.sampled_from(["a", "headstart.tokens", "n" * 200])
TEXTS = st.text(max_size=8) | st.integers(118, 132).map("x".__mul__) | st.integers(16_370, 16_390).map("y".__mul__)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 127, 128, 16_383, 16_384])
VALUES = st.one_of(st.booleans(), NUMBERS, st.floats(allow_nan=False), TEXTS, st.lists(TEXTS, max_size=3).map(tuple))
ATTRIBUTES = st.dictionaries(NAMES, VALUES)
SPANS = st.builds(
    TraceSpan,
    name=st.text(min_size=1, max_size=8),
    start=st.floats(0, 1e6),
    end=st.floats(0, 1e6),
    parent_id=st.integers(0, 2**64 - 1),
    kind=st.sampled_from(sorted(KINDS)),
    attributes=ATTRIBUTES,
    error=st.sampled_from(["", "lost"]),
    is_failed=st.booleans(),
    events=st.lists(st.builds(SpanEvent, st.sampled_from(["first_token"]), st.floats(0, 1e6), ATTRIBUTES)).map(tuple),
    span_id=st.integers(1, 2**64 - 1),
)


@given(st.lists(st.tuples(st.lists(SPANS, min_size=1, max_size=3), st.sampled_from(["", "vendor=1"])), max_size=3))
def test_the_bytes_are_the_messages_of_opentelemetrys_encoder(drawn: list[tuple[list[TraceSpan], str]]) -> None:
    traces: list[RequestTrace] = []
    for spans, state in drawn:
        traces.append(RequestTrace(spans[0], 2**127 + len(traces), is_sampled=True, state=state))
        traces[-1].spans = spans
    data = encode_trace_request(traces, RESOURCE, "headstart", "2")
    expected = slow_twin(traces) if traces else ExportTraceServiceRequest.FromString(data)
    assert ExportTraceServiceRequest.FromString(data) == expected


def test_text_that_is_not_unicode_does_not_lose_the_batch() -> None:
    data = encode_trace_request([trace(model="\ud800")], RESOURCE, "headstart", "2")
    (span,) = ExportTraceServiceRequest.FromString(data).resource_spans[0].scope_spans[0].spans
    assert span.attributes[0].value.string_value == "?"


def trace(**attributes: Any) -> RequestTrace:
    return RequestTrace(TraceSpan("chat", 1.0, 2.0, 0, "server", attributes), 7, is_sampled=True)


class Collector:
    """An OTLP endpoint that answers with the given statuses in turn, then with 200."""

    def __init__(self, *statuses: int, tls: Path | None = None) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        left, collector = list(statuses), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(left.pop(0) if left else 200)
                self.send_header("retry-after", "0")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            authority = trustme.CA()
            authority.cert_pem.write_to_path(str(tls))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("127.0.0.1").configure_cert(context)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collectors() -> Iterator[Callable[..., Collector]]:
    made: list[Collector] = []

    def make(*statuses: int, tls: Path | None = None) -> Collector:
        made.append(Collector(*statuses, tls=tls))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_passing_errors_are_tried_again_with_the_same_bytes(collectors: Callable[..., Collector]) -> None:
    collector = collectors(503, 429)
    assert OtlpExporter(collector.url, "s").export([trace()]) is True
    assert len(collector.bodies) == 3 and len(set(collector.bodies)) == 1


def test_a_refused_batch_is_not_sent_again(collectors: Callable[..., Collector]) -> None:
    collector = collectors(400)
    assert OtlpExporter(collector.url, "s").export([trace()]) is False
    assert len(collector.bodies) == 1


def test_a_shutdown_ends_the_tries(collectors: Callable[..., Collector]) -> None:
    collector = collectors()
    exporter = OtlpExporter(collector.url, "s")
    exporter.cancel_exports()
    assert exporter.export([trace()]) is False and not collector.bodies


def test_a_timeout_bounds_all_tries(monkeypatch: pytest.MonkeyPatch, collectors: Callable[..., Collector]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    collector = collectors(*[503] * 100_000)
    done = threading.Event()

    def export() -> None:
        assert OtlpExporter(collector.url, "s").export([trace()]) is False
        done.set()

    threading.Thread(target=export, daemon=True).start()
    assert done.wait(30)


@pytest.mark.parametrize(("name", "undo"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_bodies_are_compressed_as_the_variable_says(
    name: str, undo: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, collectors: Callable[..., Collector]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=all")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-key=of%20traces,x-other=2")
    collector = collectors()
    assert OtlpExporter(collector.url, "s").export([trace()]) is True
    assert ExportTraceServiceRequest.FromString(undo(collector.bodies[0])).resource_spans
    (found,) = collector.headers
    assert (found["content-encoding"], found["x-key"], found["x-other"]) == (name, "of traces", "2")
    assert found["content-type"] == "application/x-protobuf"


def test_a_collector_is_trusted_by_the_certificate_of_the_variable_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collectors: Callable[..., Collector]
) -> None:
    collector = collectors(tls=tmp_path / "ca.pem")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    assert OtlpExporter(collector.url, "s").export([trace()]) is False and not collector.bodies
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "ca.pem"))
    assert OtlpExporter(collector.url, "s").export([trace()]) is True


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("COMPRESSION", "snappy", "write none, gzip or deflate"),
        ("TIMEOUT", "soon", "write seconds"),
        ("TIMEOUT", "nan", "write seconds"),
        ("CERTIFICATE", "/no/such/file", "cannot be read"),
    ],
)
def test_invalid_variables_are_named(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with pytest.raises(ConfigError, match=message):
        OtlpExporter("https://localhost:4318/v1/traces", "s")
