"""RequestTrace: the spans of one HTTP request as plain values, and the W3C trace context that it came with.

Times are monotonic seconds, as everywhere; `epoch_ns` places them in the calendar. Nothing here is a prompt, an answer
or a key. https://www.w3.org/TR/trace-context/
"""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
MAX_STATE_CHARS = 512  # of a tracestate; a longer one is not passed on
MAX_SPANS = 64  # of one trace; further ones are left out
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")

Attribute = str | int | float | bool | tuple[str, ...]
Attributes = dict[str, Attribute]


def random_nonzero_id(num_bytes: int) -> int:
    """Return a random id, which is not 0."""
    return int.from_bytes(os.urandom(num_bytes)) or 1


class TraceParent(NamedTuple):
    """The span of a caller. `state` is its tracestate, for the next process only."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> "TraceParent | None":
        """Return the caller's span by the headers of an ASGI scope; None without exactly one valid traceparent."""
        found = [value for name, value in headers if name == TRACEPARENT]
        match = _FORM.fullmatch(found[0].strip()) if len(found) == 1 else None
        if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        if not (trace_id and span_id):
            return None
        state = ",".join(value.decode("latin-1") for name, value in headers if name == TRACESTATE)
        is_usable = len(state) <= MAX_STATE_CHARS and state.isascii() and state.isprintable()
        return cls(trace_id, span_id, bool(int(match[4], 16) & 1), state if is_usable else "")


class SpanEvent(NamedTuple):
    """A moment within a span."""

    name: str
    at: float
    attributes: Attributes


@dataclass(slots=True, eq=False)
class TraceSpan:
    """One interval of a request. `parent_id` 0: it begins a trace. `error` is the value of error.type."""

    name: str
    start: float
    end: float
    parent_id: int
    kind: Literal["server", "client", "internal"] = "internal"
    attributes: Attributes = field(default_factory=dict[str, Attribute])
    error: str = ""
    is_failed: bool = False  # an error of ours, not one of the caller
    events: tuple[SpanEvent, ...] = ()
    span_id: int = field(default_factory=lambda: random_nonzero_id(8))


class RequestTrace:
    """The spans of one request. `root` is the parent of the others, unless they name another one."""

    def __init__(self, root: TraceSpan, trace_id: int, *, is_sampled: bool, state: str = "") -> None:
        self.root = root
        self.trace_id = trace_id
        self.is_sampled = is_sampled
        self.state = state
        self.spans = [root]
        self.epoch_ns = time.time_ns() - time.monotonic_ns()

    @property
    def hex_trace_id(self) -> str:
        """The trace id as it is written; empty for a trace that is not exported."""
        return f"{self.trace_id:032x}" if self.is_sampled else ""

    def add(self, name: str, start: float, end: float, parent: TraceSpan | None = None, **more: Attribute) -> TraceSpan:
        """Add a span and return it; one that would end before it starts has no duration."""
        span = TraceSpan(name, start, max(start, end), (parent or self.root).span_id, attributes=more)
        if self.is_sampled and len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        return span

    def traceparent_header(self, span: TraceSpan) -> str:
        """Return the header by which a request to another process names `span` as its parent."""
        return f"00-{self.trace_id:032x}-{span.span_id:016x}-{int(self.is_sampled):02x}"
