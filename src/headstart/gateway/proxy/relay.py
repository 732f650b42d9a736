"""Relay: sends a replica's answer to the client, and records its progress with the router: first token, usage, end.

Until the client has received part of an answer, failures raise AttemptError, so that another replica is tried.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import aiohttp
from starlette.types import Send

from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.replies import (
    ResponseReplicas,
    begins_like_answer,
    find_answer_id,
    is_first_event_error,
    read_complete_answer,
    replica_lost_error,
)
from headstart.gateway.proxy.silence import Watched
from headstart.gateway.proxy.sse_reader import (
    TAIL_BYTES,
    JSONLinesReader,
    ReportedUsage,
    SSEStreamReader,
    make_stream_reader,
    read_answer_usage,
    read_usage_at_end,
)
from headstart.gateway.proxy.upstream import (
    AttemptError,
    AttemptFailureReason,
    InvalidReplicaResponseError,
    UnstreamedReplicaAnswer,
    classify_client_error,
    classify_error_event,
    classify_refusal,
    returned_response_headers,
)
from headstart.http.protocol.callback_reader import CallbackReader
from headstart.openai.canonical.prompt_rules import RULES_HEADER, applied_rules_header
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight

SLICE_BYTES = 256 << 10  # of an answer in one piece


class Attempt(NamedTuple):
    """A request at one replica, while its answer is awaited."""

    call: ProxiedCall
    in_flight: RoutedInFlight
    watched: Watched


class AnswerRelay:
    """Relays the answers of the replicas of one router.

    `num_pending`: requests without a first token; `pending_of`: those of each tenant that has any.
    """

    def __init__(self, router: Router) -> None:
        self.num_pending = 0
        self.pending_of: Counter[str] = Counter()
        self.on_wait_end: Callable[[], None] = lambda: None
        self.response_owners = ResponseReplicas()
        self._router = router

    def mark_pending(self, call: ProxiedCall) -> None:
        """Count a request as one without a first token."""
        call.is_pending = True
        self.num_pending += 1
        self.pending_of[call.tenant] += 1

    def mark_no_longer_pending(self, call: ProxiedCall) -> None:
        """Count it so no longer. Idempotent."""
        if call.is_pending:
            call.is_pending = False
            self.num_pending -= 1
            self.pending_of[call.tenant] -= 1
            if not self.pending_of[call.tenant]:
                del self.pending_of[call.tenant]
            self.on_wait_end()

    def record_failed_attempt(self, in_flight: RoutedInFlight, failure: AttemptFailureReason) -> None:
        """Record that an attempt has failed."""
        if in_flight.finish is not None:
            return  # an error in the first event of a stream has already been counted
        now, is_draining = time.monotonic(), failure is AttemptFailureReason.DRAINING
        if is_draining or failure is AttemptFailureReason.LOADING:
            in_flight.endpoint.health.record_unavailable(now, absent=not is_draining, draining=is_draining)
        refused = failure in (AttemptFailureReason.REFUSED, AttemptFailureReason.UNREACHED, AttemptFailureReason.HUNG)
        self._router.record_failed(in_flight, now, refused=refused, blame=failure.counts_against_health)

    async def relay_complete_answer(self, attempt: Attempt, response: aiohttp.ClientResponse, send: Send) -> None:
        """Handle an answer in one piece, or a refusal."""
        call, in_flight, (activity, wait) = attempt
        call.release_answer_bytes()  # of an earlier attempt
        router, answer = self._router, await read_complete_answer(response, call.path, call.reserve_answer_bytes)
        activity.record_response(wait, time.monotonic(), is_progress=answer.status < 300)
        failure = classify_refusal(response.status, answer.body)
        if failure is not None:
            raise AttemptError(failure, f"the replica answered {response.status}", answer)
        if response.status < 300:
            self._note_id(call, in_flight, answer.body)
            if not answer.is_whole:
                await self._relay_long(attempt, answer, response, send)
                return
            self._answered(call, in_flight, read_answer_usage(call.api.end, answer.body))
        else:
            router.record_failed(in_flight, time.monotonic(), blame=response.status >= 500)
        await self.send_complete_answer(call, answer, send)

    def _answered(self, call: ProxiedCall, in_flight: RoutedInFlight, reported: ReportedUsage) -> None:
        """Record a complete answer in one piece."""
        now = time.monotonic()
        call.output_tokens = reported.output_tokens
        if reported.output_tokens != 1:  # otherwise its end is its first token
            self._router.assume_first_token(in_flight, now)
        self._end(call, in_flight, now, reported)
        self._first_token(call, now)
        call.outcome = "ok"

    async def _relay_long(
        self, attempt: Attempt, answer: UnstreamedReplicaAnswer, response: aiohttp.ClientResponse, send: Send
    ) -> None:
        """Relay an answer that is too long to be kept until its end, as it arrives.

        Raises HttpError if the replica is lost before the end; then the client's connection must be cut.
        """
        call, in_flight, _ = attempt
        call.committed = True
        call.drop_body()
        self._first_token(call, time.monotonic())
        await self._start(call, answer.status, answer.headers, send)
        piece, tail = answer.body, b""
        answer.body = b""
        try:
            while piece:
                await send_in_slices(send, piece)
                tail = (tail + piece)[-TAIL_BYTES:]
                del piece
                call.release_answer_bytes()
                piece = await response.content.readany()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            self.record_failed_attempt(in_flight, classify_client_error(error))
            call.record_failed_attempt(classify_client_error(error))
            call.outcome = "lost"
            raise replica_lost_error() from error
        self._answered(call, in_flight, read_usage_at_end(tail))
        await send_in_slices(send, b"", more=False)

    def assume_first_token(self, call: ProxiedCall, in_flight: RoutedInFlight) -> None:
        """Assume the first token of an answer in one piece, at its expected time."""
        self._router.assume_first_token(in_flight, time.monotonic())
        self.mark_no_longer_pending(call)

    async def relay_stream(self, attempt: Attempt, response: aiohttp.ClientResponse, send: Send) -> None:
        """Relay a stream of events as they arrive."""
        call, in_flight, _ = attempt
        stream, writer = make_stream_reader(call.api.end, hides_usage=call.reading.hides_usage), call.writer

        def relay_now(piece: bytes) -> bool:
            """Relay a piece while the client already reads the answer and its connection takes more."""
            if writer is None or not (call.started and call.committed and writer.is_ready) or stream.is_done:
                return False
            passed = self._read(attempt, stream, piece)
            if passed:
                writer.write(passed)
            return True

        with closing(CallbackReader(response, relay_now)) as reader:
            while True:
                try:
                    piece = await reader.read_untaken()
                except aiohttp.ClientError:
                    if stream.is_done:  # a failure after the last event does not matter
                        break
                    raise
                if not piece:
                    break
                passed = self._read(attempt, stream, piece)
                if not passed or not (call.committed or call.reading.stream):
                    continue  # a client that requested no stream gets no comments
                if not call.started:
                    await self._start(
                        call,
                        200,
                        returned_response_headers(response.raw_headers, call.api.end.content_type_header.encode()),
                        send,
                    )
                await send({"type": "http.response.body", "body": passed, "more_body": True})
        rest = stream.flush()
        if not call.committed and (stream.is_done or stream.has_data):
            raise InvalidReplicaResponseError("a stream without an event")
        if not stream.is_done:
            raise aiohttp.ClientPayloadError("the stream ended without its last event")
        self._finished(call, in_flight, stream)
        await send_in_slices(send, rest, more=False)

    def _read(self, attempt: Attempt, stream: SSEStreamReader | JSONLinesReader, piece: bytes) -> bytes:
        """Record the progress that a piece of a stream shows; return the bytes that may be relayed."""
        call, in_flight, (activity, wait) = attempt
        passed = stream.feed_and_take_relayable(piece)
        call.num_events, call.is_mid_event = stream.num_events, stream.is_mid_event
        if stream.num_rest_bytes or call.num_rest_bytes:
            call.reserve_event_bytes(stream.num_rest_bytes)
        activity.heard_at = now = time.monotonic()
        if not stream.num_comment_bytes:  # the last event was data
            activity.progress_at = now
            if call.committed and in_flight.finish is None and not stream.is_mid_event:
                self._router.record_later_token(in_flight, now)
        if stream.has_data and not call.committed:
            self._begin(call, in_flight, stream, passed)
            activity.record_response(wait, now)
        if stream.is_done:
            self._finished(call, in_flight, stream)  # before it is relayed: clients disconnect after it
        return passed

    def _begin(
        self, call: ProxiedCall, in_flight: RoutedInFlight, stream: SSEStreamReader | JSONLinesReader, passed: bytes
    ) -> None:
        """Handle the first event. Raises AttemptError if it is an error that another replica may not have."""
        now = time.monotonic()
        if stream.is_mid_event and not begins_like_answer(stream.first, call.api):
            raise InvalidReplicaResponseError("the replica's first event does not begin like one of this route")
        if stream.is_mid_event or not is_first_event_error(stream.first):
            call.committed = True
            call.drop_body()
            self._note_id(call, in_flight, passed)
            self._router.record_first_token(in_flight, now)
            self._first_token(call, now)
            return
        failure, status = classify_error_event(stream.first)
        if failure is not None:
            answer = UnstreamedReplicaAnswer(status, [(b"content-type", b"application/json")], stream.first)
            raise AttemptError(failure, f"the replica answered with an error, as {status}", answer)
        call.committed = True
        self._router.record_failed(in_flight, now, blame=status >= 500)

    def _finished(
        self, call: ProxiedCall, in_flight: RoutedInFlight, stream: SSEStreamReader | JSONLinesReader
    ) -> None:
        """Record that the answer is complete; only the first call counts."""
        if in_flight.finish is None:
            call.output_tokens, call.outcome = stream.reported.output_tokens, "ok"
            self._end(call, in_flight, time.monotonic(), stream.reported)

    def _end(self, call: ProxiedCall, in_flight: RoutedInFlight, now: float, reported: ReportedUsage) -> None:
        """Tell the router what was reported; of several answers to one request the counts mean nothing to it."""
        if call.reading.is_single:
            self._router.record_finished(in_flight, now, reported.usage, num_output=reported.output_tokens or 0)
        else:
            self._router.record_finished(in_flight, now)

    def _note_id(self, call: ProxiedCall, in_flight: RoutedInFlight, beginning: bytes) -> None:
        """Note the id in the answer, before the client sees it: it may continue the response at once."""
        call.answer_id = find_answer_id(beginning)
        if call.api.is_stored:
            self.response_owners.add(call.answer_id, in_flight.endpoint.name, call.domain)

    def _first_token(self, call: ProxiedCall, now: float) -> None:
        if call.first_token_at is None:
            call.first_token_at = now
        self.mark_no_longer_pending(call)

    async def _start(self, call: ProxiedCall, status: int, headers: "list[tuple[bytes, bytes]]", send: Send) -> None:
        call.started = True
        assert call.in_flight is not None, "no replica was selected"
        own = router_headers(call, status, call.in_flight.endpoint.name)
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def send_complete_answer(self, call: ProxiedCall, answer: UnstreamedReplicaAnswer, send: Send) -> None:
        """Send a complete answer or refusal, as an event if the client already reads a stream."""
        if call.started:  # a stream had begun with comments: the client now reads events
            ending = call.api.end.refused(answer.status, answer.body, call.request_id, call.num_events)
            await send_in_slices(send, ending, more=False)
            return
        length = (b"content-length", str(len(answer.body)).encode())
        await self._start(call, answer.status, [*answer.headers, length], send)
        call.drop_body()
        await send_in_slices(send, answer.body, more=False)


def router_headers(call: ProxiedCall, status: int, replica: str) -> list[tuple[bytes, bytes]]:
    """Return the router's own headers of an answer: the rules that applied to the prompt.

    For administrators also the replica and the reasons for it.
    """
    applied, in_flight = call.reading.applied_rules, call.in_flight
    own = [(RULES_HEADER.encode(), applied_rules_header(applied).encode())] if applied else []
    if in_flight is not None:
        own.append((b"server-timing", f"route;dur={(in_flight.sent_at - call.arrival) * 1e3:.1f}".encode()))
    if not call.shows_replica or status in (401, 403):  # a refused key gets no addresses, from any server
        return own
    own.append((b"x-headstart-replica", replica.encode("latin-1")))
    return [*own, (b"x-headstart-route", call.route)] if call.route else own


async def send_in_slices(send: Send, data: bytes, *, more: bool = True) -> None:
    """Send in slices: the HTTP server copies what its socket does not take at once."""
    for start in range(0, max(len(data), 1), SLICE_BYTES):
        end = start + SLICE_BYTES
        await send({"type": "http.response.body", "body": data[start:end], "more_body": more or end < len(data)})
