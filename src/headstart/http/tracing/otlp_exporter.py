"""OtlpExporter: traces to a collector by OTLP over HTTP, with OpenTelemetry's SDK. Needs the extra [otlp].

OpenTelemetry's own variables apply: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _COMPRESSION and _TIMEOUT,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG.
"""

import logging
from collections.abc import Iterator, Sequence
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from headstart import __version__
from headstart.http.tracing.request_trace import Attributes, RequestTrace, TraceParent, TraceSpan

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SCOPE = InstrumentationScope("headstart", __version__)


class OtlpExporter:
    """An exporter to the URL of an OTLP endpoint; `service` is the name of the service unless a variable names it."""

    def __init__(self, url: str, service: str) -> None:
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # the tracer reports what is lost
        self._resource = _resource(service)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # that of the variables
        self._exporter = OTLPSpanExporter(endpoint=url)

    def is_sampled(self, trace_id: int, parent: TraceParent | None) -> bool:
        """Return whether a trace is exported: as its caller decided, else as the sampler decides."""
        context = None
        if parent is not None:
            flags = TraceFlags(parent.is_sampled)
            context = set_span_in_context(
                NonRecordingSpan(SpanContext(trace_id, parent.span_id, is_remote=True, trace_flags=flags))
            )
        return self._sampler.should_sample(context, trace_id, "").decision.is_sampled()

    def export(self, traces: Sequence[RequestTrace]) -> bool:
        """Send traces and return whether they were accepted; blocks for OTEL_EXPORTER_OTLP_TIMEOUT (10 s) at most."""
        spans = [span for trace in traces for span in self._spans(trace)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Make `export` return soon."""
        self._exporter.shutdown()

    def _spans(self, trace: RequestTrace) -> Iterator[ReadableSpan]:
        state = TraceState.from_header([trace.state]) if trace.state else TraceState()
        flags = TraceFlags(TraceFlags.SAMPLED)

        def context(span_id: int, *, is_remote: bool) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote, flags, state)

        def ns(at: float) -> int:
            return int(at * 1e9) + trace.epoch_ns

        for span in trace.spans:
            is_remote = span is trace.root
            yield ReadableSpan(
                span.name,
                context(span.span_id, is_remote=False),
                context(span.parent_id, is_remote=is_remote) if span.parent_id else None,
                self._resource,
                _attributes(span),
                [Event(event.name, event.attributes, ns(event.at)) for event in span.events],
                kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR if span.is_failed else StatusCode.UNSET),
                start_time=ns(span.start),
                end_time=ns(span.end),
                instrumentation_scope=_SCOPE,
            )


def _attributes(span: TraceSpan) -> Attributes:
    return {**span.attributes, "error.type": span.error} if span.error else {**span.attributes}


def _resource(service: str) -> Resource:
    found = Resource.create({SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid4())})
    is_named = not str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: service}))
