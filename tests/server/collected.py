"""An exporter that keeps traces, in place of a collector."""

import threading
from collections.abc import Sequence

from headstart.http.tracing.request_trace import RequestTrace, TraceParent, TraceSpan


class Collected:
    """Keeps what is exported. `answer`: whether it accepts spans; `gate`: what an export waits for."""

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []
        self.answer = True
        self.samples = True
        self.gate = threading.Event()
        self.gate.set()
        self.is_shut_down = False

    def is_sampled(self, trace_id: int, parent: TraceParent | None) -> bool:
        return self.samples if parent is None else parent.is_sampled

    def export(self, traces: Sequence[RequestTrace]) -> bool:
        self.gate.wait()
        if self.answer:
            self.traces.extend(traces)
        return self.answer

    def cancel_exports(self) -> None:
        self.is_shut_down = True
        self.gate.set()


def named(trace: RequestTrace, name: str) -> list[TraceSpan]:
    """The spans of that name."""
    return [span for span in trace.spans if span.name == name]


def texts(trace: RequestTrace) -> str:
    """Everything that a trace says, as one text."""
    return repr([(s.name, s.attributes, s.error, s.events) for s in trace.spans]) + trace.state
