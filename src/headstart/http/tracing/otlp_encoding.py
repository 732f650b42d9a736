"""The bytes of an OTLP request with spans, written directly: the protobuf messages of an export, field by field.

A span of a request has some ten attributes. As protobuf objects, each of which is made, copied and then written, they
cost ten times as much CPU time. https://github.com/open-telemetry/opentelemetry-proto (trace.proto, common.proto)
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct

from headstart.http.tracing.request_trace import Attribute, RequestTrace, TraceSpan

_KINDS = {"internal": b"\x30\x01", "server": b"\x30\x02", "client": b"\x30\x03"}  # field 6
_LOCAL, _REMOTE = b"\x85\x01\x00\x01\x00\x00", b"\x85\x01\x00\x03\x00\x00"  # field 16: the place of the parent is known
_FAILED, _NOT_FAILED = b"\x7a\x02\x18\x02", b"\x7a\x00"  # field 15: a status with the code of an error, or none
_LENGTHS = [bytes([number]) for number in range(128)]
_TIMES = Struct("<BQBQ").pack  # fields 7 and 8
_TIME = Struct("<BQ").pack
_DOUBLE = Struct("<Bd").pack


def encode_trace_request(
    traces: Iterable[RequestTrace], resource: Mapping[str, Attribute], scope: str, version: str
) -> bytes:
    """Return an ExportTraceServiceRequest with all spans of some traces. Times are those of the calendar, in ns."""
    origin = _message(0x0A, _message(0x0A, scope.encode()) + _message(0x12, version.encode()))
    spans = b"".join(_span(trace, span) for trace in traces for span in trace.spans)
    return _message(0x0A, _message(0x0A, _attributes(0x0A, resource)) + _message(0x12, origin + spans))


def _span(trace: RequestTrace, span: TraceSpan) -> bytes:
    epoch_ns = trace.epoch_ns
    parts = [b"\x0a\x10", trace.trace_id.to_bytes(16), b"\x12\x08", span.span_id.to_bytes(8)]
    if trace.state:
        parts.append(_message(0x1A, trace.state.encode()))
    if span.parent_id:
        parts += b"\x22\x08", span.parent_id.to_bytes(8)
    parts += _message(0x2A, _text(span.name)), _KINDS[span.kind]
    parts.append(_TIMES(0x39, int(span.start * 1e9) + epoch_ns, 0x41, int(span.end * 1e9) + epoch_ns))
    parts.append(_attributes(0x4A, span.attributes))
    if span.error:
        parts.append(_attributes(0x4A, {"error.type": span.error}))
    for event in span.events:
        name = _message(0x12, event.name.encode()) + _attributes(0x1A, event.attributes)
        parts.append(_message(0x5A, _TIME(0x09, int(event.at * 1e9) + epoch_ns) + name))
    parts += _FAILED if span.is_failed else _NOT_FAILED, _REMOTE if span is trace.root and span.parent_id else _LOCAL
    return _message(0x12, b"".join(parts))


def _attributes(tag: int, attributes: Mapping[str, Attribute]) -> bytes:
    """Return attributes as KeyValues, each a field `tag`."""
    parts: list[bytes] = []
    for name, value in attributes.items():
        key, data = _key(name), _value(value)
        size = len(data)
        if len(key) + size < 126:  # a length is one byte
            parts.append(b"%c%c%b\x12%c%b" % (tag, len(key) + size + 2, key, size, data))
        else:
            parts.append(_message(tag, key + _message(0x12, data)))
    return b"".join(parts)


@lru_cache(maxsize=256)  # the names are our own, a closed set
def _key(name: str) -> bytes:
    return _message(0x0A, name.encode())


def _value(value: Attribute) -> bytes:
    """Return an AnyValue."""
    if isinstance(value, str):
        data = value.encode(errors="replace")
        return b"\x0a%c%b" % (len(data), data) if len(data) < 128 else _message(0x0A, data)
    if isinstance(value, float):
        return _DOUBLE(0x21, value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    return _message(0x2A, b"".join([_message(0x0A, _value(one)) for one in value]))


def _message(tag: int, data: bytes) -> bytes:
    """Return a field of known length."""
    size = len(data)
    return b"%c%b%b" % (tag, _LENGTHS[size] if size < 128 else _varint(size), data)


def _text(value: str) -> bytes:
    return value.encode(errors="replace")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
