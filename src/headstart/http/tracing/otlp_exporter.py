"""OtlpExporter: traces to a collector by OTLP over HTTP. Needs the extra [otlp], for samplers and resources.

OpenTelemetry's own variables apply: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _CLIENT_CERTIFICATE, _CLIENT_KEY,
_COMPRESSION and _TIMEOUT, each also as OTEL_EXPORTER_OTLP_TRACES_..., OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG.
"""

import gzip
import os
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.util.re import parse_env_headers

from headstart import __version__
from headstart.core.errors import ConfigError
from headstart.http.tracing.otlp_encoding import encode_trace_request
from headstart.http.tracing.request_trace import Attribute, RequestTrace, TraceParent

_SECONDS = 10.0  # of an export, with all its tries
_PASSING = frozenset({429, 502, 503, 504})  # statuses after which OTLP has the same request sent again
_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


class OtlpExporter:
    """An exporter to the URL of an OTLP endpoint; `service` is the name of the service unless a variable names it."""

    def __init__(self, url: str, service: str) -> None:
        """Raises ConfigError for a variable with an invalid value."""
        self._resource = _resource(service)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # that of the variables
        self._url = url
        self._seconds = _timeout()
        compression = _variable("COMPRESSION").strip().lower()
        if compression not in ("", "none", *_COMPRESSIONS):
            raise ConfigError(f"OTEL_EXPORTER_OTLP_COMPRESSION is {compression!r}; write none, gzip or deflate")
        self._compress = _COMPRESSIONS.get(compression)
        encoding = {} if self._compress is None else {"content-encoding": compression}
        own = {"content-type": "application/x-protobuf", "user-agent": f"headstart/{__version__}", **encoding}
        self._headers = {**own, **parse_env_headers(_variable("HEADERS"), liberal=True)}
        self._tls = _tls() if url.startswith("https:") else None
        self._is_closed = threading.Event()

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
        data = encode_trace_request(traces, self._resource, "headstart", __version__)
        data, deadline, pause = self._compress(data) if self._compress else data, time.monotonic() + self._seconds, 1.0
        while not self._is_closed.is_set():
            left = deadline - time.monotonic()
            try:
                request = Request(self._url, data, self._headers, method="POST")
                with urlopen(request, timeout=left, context=self._tls) as answer:
                    return 200 <= answer.status < 300
            except HTTPError as error:
                if error.code not in _PASSING:
                    return False
                asked = error.headers.get("retry-after", "")
                wait = float(asked) if asked.isdecimal() else pause
            except (OSError, HTTPException):
                wait = pause
            if wait >= deadline - time.monotonic():
                return False
            self._is_closed.wait(wait)
            pause *= 2
        return False

    def cancel_exports(self) -> None:
        """Make `export` return soon."""
        self._is_closed.set()


def _variable(name: str) -> str:
    """Return the value of a variable of OpenTelemetry's exporters, that for traces before that for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _timeout() -> float:
    try:
        seconds = float(_variable("TIMEOUT") or _SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT is {_variable('TIMEOUT')!r}; write seconds, more than 0")
    return seconds


def _tls() -> ssl.SSLContext:
    certificate, key = _variable("CLIENT_CERTIFICATE"), _variable("CLIENT_KEY")
    try:
        context = ssl.create_default_context(cafile=_variable("CERTIFICATE") or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except OSError as error:
        raise ConfigError(f"the certificates of OTEL_EXPORTER_OTLP_... cannot be read: {error}") from None
    return context


def _resource(service: str) -> Mapping[str, Attribute]:
    found = Resource.create({SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid4())}).attributes
    is_named = not str(found.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    return cast(Mapping[str, Attribute], {**found} if is_named else {**found, SERVICE_NAME: service})
