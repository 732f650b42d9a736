"""AccessRecord: the facts of one HTTP request for its access line and metrics. Contains no prompt and no key."""

import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

from headstart.core.batch import PromptTokenBreakdown
from headstart.http.auth import ANYONE, Principal
from headstart.http.tracing.request_trace import RequestTrace

_UNSAFE = re.compile(r"[^A-Za-z0-9._:@/+=-]")
_MAX_LABEL_CHARS = 128
_SCOPE_KEY = "headstart.record"
_PROBES = (  # polled regularly by monitoring and by the live page
    *("/health", "/readyz", "/livez", "/metrics"),
    *("/v1/cache/tree", "/v1/cache/live"),
)


@dataclass(slots=True)
class AccessRecord:
    """Record of one HTTP request, filled in while it is served. Times are monotonic seconds."""

    request_id: str  # the client's x-request-id, sanitized, or a generated one
    method: str
    path: str
    arrival: float = field(default_factory=time.monotonic)
    principal: Principal = ANYONE
    status: int | None = None
    num_prompt_tokens: int | None = None
    breakdown: PromptTokenBreakdown | None = None  # of its prompts
    num_tokens: int | None = None
    received_at: float | None = None  # when its body was there
    submitted_at: float | None = None  # when its prompts were sent to the engine
    scheduled_at: float | None = None  # when the engine scheduled the first of its prompts
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reason: str | None = None
    error: str | None = None  # code
    route: dict[str, object] | None = None  # the router's fields of the access line
    trace: RequestTrace | None = None  # None: nothing is exported

    @classmethod
    def create_in_scope(cls, scope: Any) -> "AccessRecord":
        """Return a record for a new request, and store it in the scope for `access_record_of_scope`."""
        label = dict(scope["headers"][::-1]).get(b"x-request-id", b"")  # the first of them
        cleaned = _UNSAFE.sub("", label[: 4 * _MAX_LABEL_CHARS].decode("latin-1"))[:_MAX_LABEL_CHARS] if label else ""
        record = cls(cleaned or f"req-{os.urandom(16).hex()}", scope["method"], scope["path"])
        scope[_SCOPE_KEY] = record
        return record

    def should_log(self, access_log: str, *, on_terminal: bool) -> bool:
        """Return whether to log an access line for this value of the option `access_log`."""
        has_failed, is_probe = self.status is None or self.status >= 400, self.path in _PROBES
        match ("errors" if on_terminal else "requests") if access_log == "auto" else access_log:
            case "all":
                return True
            case "requests":
                return has_failed or not is_probe
            case "errors":
                return has_failed and not is_probe
            case _:
                return False

    def text(self, now: float) -> str:
        """Return the access line as text for a terminal."""
        outcome = f"{self.method[:16]} {self.path[:_MAX_LABEL_CHARS]} {self.status or '-'} {self.error or ''}".rstrip()
        tokens = ""
        if self.num_prompt_tokens is not None:
            cached = self.breakdown.num_cached if self.breakdown else 0
            tokens = f", {self.num_prompt_tokens:,} prompt tokens ({cached:,} cached), {self.num_tokens or 0:,} output"
        return f"{outcome}{tokens}, {self._since_arrival(now):,} ms, {self.request_id}"

    def fields(self, now: float) -> dict[str, object]:
        """Return the fields of the JSON access line."""
        first, breakdown = self.first_token_at, self.breakdown
        named = {f"{name}_tokens": value for name, value in breakdown._asdict().items()} if breakdown else {}
        return {
            "request_id": self.request_id,
            "tenant": self.principal.label or None,
            "method": self.method[:16],
            "path": self.path[:_MAX_LABEL_CHARS],
            "status": self.status,
            "error": self.error,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": breakdown and breakdown.num_cached,
            **named,
            "completion_tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            **(self.route or {}),
            "queue_ms": self._since_arrival(self.scheduled_at),
            "ttft_ms": self._since_arrival(first),
            "e2e_ms": self._since_arrival(now),
            "trace_id": (self.trace and self.trace.hex_trace_id) or None,
        }

    def server_timing_header(self) -> str:
        """Return the value of a Server-Timing header: the phases so far, in milliseconds."""
        parts: list[str] = []
        start: float | None = self.arrival
        for name, end in self.phase_ends():
            if start is not None and end is not None:
                parts.append(f"{name};dur={max(end - start, 0.0) * 1e3:.1f}")
            start = end
        return ", ".join(parts)

    def phase_ends(self) -> tuple[tuple[str, float | None], ...]:
        """Return the phases of a generation at a server, in order, and when each ended; the first began at arrival."""
        return (
            ("receive", self.received_at),
            ("tokenize", self.submitted_at),
            ("queue", self.scheduled_at),
            ("prefill", self.first_token_at),
            ("decode", self.last_token_at),
        )

    def _since_arrival(self, at: float | None) -> float | None:
        return None if at is None else round((at - self.arrival) * 1000, 1)


def access_record_of_scope(scope: Any) -> AccessRecord:
    """Return the record that AccessRecord.create_in_scope stored in the scope."""
    return scope[_SCOPE_KEY]


def tenant_of_scope(scope: Any) -> str:
    """Return the tenant of a request, "" before it is authorized."""
    return scope[_SCOPE_KEY].principal.tenant if _SCOPE_KEY in scope else ""
