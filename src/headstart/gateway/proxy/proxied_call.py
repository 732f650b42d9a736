"""ProxiedCall: one client request at the router, from admission to its last byte: attempts, failures, outcome."""

import time
from dataclasses import dataclass, field
from math import inf

from headstart.apis.api import Api
from headstart.apis.api_table import generation_api_of_path
from headstart.gateway.held_bytes import LARGE_BYTES, ByteReservation, parsed_request_bytes
from headstart.gateway.proxy.request_reader import ParsedRequest
from headstart.gateway.proxy.upstream import AttemptFailureReason
from headstart.gateway.replicas.replica_address import server_url_of
from headstart.http.protocol.body_writer import BodyWriter
from headstart.http.tracing.request_trace import RequestTrace, TraceSpan
from headstart.router.routing_decision import RoutedInFlight


@dataclass(slots=True)
class ProxiedCall:
    """One client request and its outcome."""

    path: str
    headers: list[tuple[bytes, bytes]]
    sender: str  # address
    reading: ParsedRequest
    request_id: str
    arrival: float = 0.0  # monotonic seconds
    explains: bool = False
    shows_replica: bool = False  # the client is an administrator
    domain: bytes = b""  # of the router's tenant that sent it
    tenant: str = ""  # its name; "": the router has no tenants
    writer: BodyWriter | None = None  # of the answer's parts; None: they are sent as ASGI messages
    only: str | None = None  # the one replica that can answer: it holds the response that this one continues
    reservation: ByteReservation | None = None  # of memory; None: not counted
    num_rest_bytes: int = 0  # of an incomplete event
    is_trimmed: bool = False  # its prompt is too long to be kept for the explainer
    tried: list[str] = field(default_factory=list[str])  # replicas that must not be tried again
    expires_at: float = inf  # monotonic seconds from which on it is sent to no replica
    deadline: float | None = None  # until when it waits for a replica, on time.monotonic; None: it has not waited
    num_attempts: int = 0
    num_losses: int = 0  # attempts in which a replica was lost, perhaps because of this request
    was_late: bool = False  # it was given up at a replica that was judged silent by lateness alone
    in_flight: RoutedInFlight | None = None  # at the last replica it was sent to
    route: bytes = b""  # the reasons of that decision
    is_pending: bool = False  # without a first token, as far as known
    started: bool = False  # the client has received a status line
    committed: bool = False  # and part of an answer
    first_token_at: float | None = None
    output_tokens: int | None = None
    answer_id: str = ""  # the id in the answer that the client receives
    num_events: int = 0  # relayed of a stream of named events
    is_mid_event: bool = False  # a part of an event was relayed: nothing but the rest of it may follow
    failures: list[AttemptFailureReason] = field(default_factory=list[AttemptFailureReason])
    trace: RequestTrace | None = None  # of the router's request
    attempt: TraceSpan | None = None  # the part of the trace at the replica that it was sent to last
    outcome: str = "error"  # or ok; lost: in the middle of a stream; gone: the client disconnected

    @property
    def api(self) -> Api:
        """The API whose generation route it was sent to, else OTHER."""
        return generation_api_of_path(self.path)

    def begin_attempt_span(self) -> None:
        """Begin a span for the attempt at the replica in `in_flight`."""
        if self.trace is None or not self.trace.is_sampled or self.in_flight is None:
            return
        in_flight = self.in_flight
        self.attempt = self.trace.add(f"POST {self.path}", in_flight.sent_at, in_flight.sent_at)
        self.attempt.kind = "client"
        self.attempt.attributes |= {
            "http.request.method": "POST",
            "url.full": server_url_of(in_flight.endpoint.name) + self.path,
            "headstart.route.reason": in_flight.choice.reason,
            "headstart.route.predicted_tokens": in_flight.candidate.hit_tokens,
            "headstart.route.expected_ms": in_flight.flight.expected_ttft_ms,
        }

    def end_attempt_span(self, now: float, failure: AttemptFailureReason | None = None) -> None:
        """End that span; idempotent."""
        if self.attempt is None:
            return
        self.attempt.end = now
        if failure is not None:
            self.attempt.error, self.attempt.is_failed = failure.value, True
        self.attempt = None

    def record_failed_attempt(self, failure: AttemptFailureReason) -> None:
        """Record that an attempt has failed."""
        self.failures.append(failure)
        self.end_attempt_span(time.monotonic(), failure)

    def trace_headers(self) -> dict[str, str]:
        """Return the headers that make the replica's trace a part of this one; none without a trace."""
        if self.trace is None:
            return {}
        state = {"tracestate": self.trace.state} if self.trace.state else {}
        return {"traceparent": self.trace.traceparent_header(self.attempt or self.trace.root), **state}

    def drop_large_prompt(self) -> None:
        """Free the text and tokens of a large request's prompt once its block hashes are computed."""
        if not self.is_trimmed and len(self.reading.body) >= LARGE_BYTES:
            self.is_trimmed = True
            self.reading.request.prompt.drop_tokens()
            self.reading.text = None
            if self.reservation is not None:
                self.reservation.set(parsed_request_bytes(self.reading) + self.num_rest_bytes)

    def drop_body(self) -> None:
        """Free the body: it will not be sent to another replica."""
        num_bytes = len(self.reading.body)
        self.reading.drop_body()
        if self.reservation is not None:
            self.reservation.grow(-num_bytes)

    def reserve_answer_bytes(self, num_bytes: int) -> bool:
        """Count bytes of an answer in one piece; return whether more of it may be kept. Raises QueueFullError."""
        return self.reservation is None or self.reservation.reserve_answer_bytes(num_bytes)

    def release_answer_bytes(self) -> None:
        """Count the bytes of an answer in one piece no longer."""
        if self.reservation is not None:
            self.reservation.release_answer_bytes()

    def reserve_event_bytes(self, num_bytes: int) -> None:
        """Count the bytes kept of an incomplete event. Raises QueueFullError."""
        if self.reservation is not None:
            self.reservation.grow(num_bytes - self.num_rest_bytes)
            self.num_rest_bytes = num_bytes
