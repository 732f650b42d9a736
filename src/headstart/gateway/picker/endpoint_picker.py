"""EndpointPicker: routes requests that another proxy, Envoy, forwards; the counterpart of proxy.py.

It chooses replicas and records outcomes by the same code as the router's own proxy. Envoy sends the request, tries the
next replica of the list if one does not answer, and passes the answer on untouched. The picker sees the head of the
answer, and its end. Replicas that report their usage in the head (http/answer_report.py) correct the index by it; for
others the time of the first token is assumed, and nothing is learned from their answers.
"""

import asyncio
import time
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from headstart.apis.api import EVENTS, LINES
from headstart.apis.api_table import api_of_path
from headstart.core.errors import NoReplicaError
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.ext_proc_messages import CHUNK_BYTES
from headstart.gateway.picker.ext_proc_stream import EXTENSION, ExtProcStream, ReplicaAnswerHead
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.relay import router_headers
from headstart.gateway.proxy.replies import JSON_ROUTES, no_answer_error, no_replicas_error
from headstart.gateway.proxy.sse_reader import ReportedUsage, make_stream_reader
from headstart.gateway.proxy.upstream import (
    AttemptError,
    AttemptFailureReason,
    InvalidReplicaResponseError,
    request_header_changes,
    returned_response_headers,
)
from headstart.http.answer_report import REPORT_HEADER, UsageReportHeader, decode_report_header
from headstart.http.gate import request_id_headers
from headstart.http.http_errors import ClientGoneError, HttpError
from headstart.router.routing_decision import RoutedInFlight, RoutingDecision
from headstart.router.routing_request import ReportedTokenUsage

_STREAMS = frozenset((EVENTS.encode(), LINES.encode()))
_OF_API = _STREAMS | {b"application/json"}
_OF_PROXY = frozenset((502, 503, 504))


class EndpointPicker:
    """Chooses the replicas of one router for the requests of Envoy. `max_attempts`: the longest list of replicas."""

    def __init__(self, state: GatewayState, addresses: ReplicaIpAddresses) -> None:
        self._state = state
        self._addresses = addresses
        self._proxy = state.proxy
        self._router = state.router

    async def forward(self, call: ProxiedCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Have one request answered. Raises HttpError and ClientGoneError if nothing was sent yet."""
        proxy, stream = self._proxy, scope["extensions"][EXTENSION]
        proxy.check_queue()
        proxy.budget.num_active += 1
        proxy.relay.mark_pending(call)
        try:
            await self._forward(call, stream, send)
        except asyncio.CancelledError:
            call.outcome = call.outcome if call.outcome == "ok" else "gone"
            raise
        finally:
            proxy.budget.num_active -= 1
            proxy.relay.mark_no_longer_pending(call)

    async def _forward(self, call: ProxiedCall, stream: ExtProcStream, send: Send) -> None:
        if stream.subset is not None:
            names = frozenset(url for address in stream.subset if (url := self._addresses.url(address)) is not None)
            call.reading.request = replace(call.reading.request, subset=names)
        in_flight = await self._sent(call, stream)
        try:
            timer = self._first_token_timer(call, in_flight) if not call.reading.stream else None
            try:
                head = await stream.read_answer_head()
            finally:
                if timer is not None:
                    timer.cancel()
            if head is None:
                call.outcome = "gone"
                raise ClientGoneError
            in_flight = self._served(call, in_flight, head)
            await self._answered(call, in_flight, head, stream, send)
        finally:
            if in_flight.finish is None:
                self._router.record_client_disconnect(in_flight, time.monotonic())

    async def _chosen(self, call: ProxiedCall, now: float) -> tuple[RoutingDecision, float]:
        """Choose a replica, at once or when one is there again; return the time of it too. Raises HttpError 503."""
        while True:
            try:
                return self._proxy.choose(call, now), now
            except NoReplicaError as error:
                if not await self._proxy.wait_until_replica_is_up(call):
                    raise no_replicas_error(error) from error
                now = time.monotonic()

    async def _sent(self, call: ProxiedCall, stream: ExtProcStream) -> RoutedInFlight:
        """Have the request sent to the best replica. Raises HttpError 503."""
        decision, now = await self._chosen(call, time.monotonic())
        if len(call.reading.body) > CHUNK_BYTES:  # others may be chosen for meanwhile
            in_flight = self._proxy.record_sent(call, decision, now)
            try:
                await self._forwarded(call, decision, stream)
            except BaseException:
                self._router.record_client_disconnect(in_flight, time.monotonic())
                raise
            return in_flight
        await self._forwarded(call, decision, stream)  # first of all: Envoy waits for it
        return self._proxy.record_sent(call, decision, now)

    async def _forwarded(self, call: ProxiedCall, decision: RoutingDecision, stream: ExtProcStream) -> None:
        names = (decision.endpoint.name, *decision.fallbacks)[: self._state.options.max_attempts]
        own = {"x-request-id": call.request_id, **call.trace_headers(), REPORT_HEADER.decode(): "1"}
        if self._state.options.replica_api_key is not None:
            own["authorization"] = f"Bearer {self._state.options.replica_api_key}"
        changed, removed = request_header_changes(call.headers, own)
        addresses = [address for name in names if (address := self._addresses.address(name)) is not None]
        body = call.reading.body
        told = [
            *request_id_headers(api_of_path(call.path), call.request_id),
            *router_headers(call, 200, decision.endpoint.name),
        ]
        shown = {name.decode("latin-1"): value.decode("latin-1") for name, value in told}
        call.reading.body = b""  # the picker sends it once; Envoy keeps it for its own retries
        try:
            await stream.forward(addresses, body, changed, removed, shown)
        finally:
            call.reading.body = body
            call.drop_body()

    def _first_token_timer(self, call: ProxiedCall, in_flight: RoutedInFlight) -> asyncio.TimerHandle:
        """Assume the first token of an answer in one piece at its expected time."""
        seconds = in_flight.flight.expected_ttft_ms / 1e3
        return asyncio.get_running_loop().call_later(seconds, self._proxy.relay.assume_first_token, call, in_flight)

    def _served(self, call: ProxiedCall, in_flight: RoutedInFlight, head: ReplicaAnswerHead) -> RoutedInFlight:
        """Return the request at the replica that answered, after recording the failures of those tried before it."""
        url = self._addresses.url(head.served)
        names = [candidate.name for candidate in in_flight.choice.ranked]
        if url is None or url == in_flight.endpoint.name:
            return in_flight
        now = time.monotonic()
        call.record_failed_attempt(AttemptFailureReason.LOST)
        self._proxy.relay.record_failed_attempt(in_flight, AttemptFailureReason.LOST)
        if url not in names:
            return in_flight  # Envoy's own choice
        for name in names[1 : names.index(url)]:
            endpoint = self._router.endpoints.get(name)
            call.num_attempts += 1
            call.failures.append(AttemptFailureReason.LOST)
            if endpoint is not None:
                endpoint.health.record_failed(now, sent_at=in_flight.sent_at)
        call.num_attempts += 1
        call.in_flight = sent = self._router.record_sent(in_flight, now, url)
        call.begin_attempt_span()
        self._router.assume_first_token(sent, now)  # when it was sent is not known
        return sent

    async def _answered(
        self, call: ProxiedCall, in_flight: RoutedInFlight, head: ReplicaAnswerHead, stream: ExtProcStream, send: Send
    ) -> None:
        """Pass an answer on, and record it. Raises HttpError in place of one that is not meant for clients."""
        now = time.monotonic()
        kind = _content_type(head)
        is_json, is_of_api = kind == b"application/json", kind in _OF_API or call.path not in JSON_ROUTES
        if not (200 <= head.status < 300 or 400 <= head.status < 600) or head.status == 407:
            raise self._refused(call, in_flight, AttemptFailureReason.GARBLED)
        if head.status in _OF_PROXY and not is_json:
            raise self._refused(call, in_flight, AttemptFailureReason.LOST)  # Envoy's own answer: no replica gave one
        if head.status < 300 and not is_of_api:
            raise self._refused(call, in_flight, AttemptFailureReason.GARBLED)
        report = None
        if head.status >= 300:
            self._failed(in_flight, head.status)
            if not is_json:  # of another program
                raise HttpError(head.status, f"the replica answered {head.status}", code="replica_error")
        else:
            report = decode_report_header(head.headers)
            self._begun(call, in_flight, report, is_stream=_is_stream(head), now=now)
        kept = [*returned_response_headers(head.headers), *router_headers(call, head.status, in_flight.endpoint.name)]
        await send({"type": "http.response.start", "status": head.status, "headers": kept})
        call.started = call.committed = True
        await stream.release_answer_head(head)
        if in_flight.finish is not None:
            call.outcome = "ok" if head.status < 500 else call.outcome
        await self._pass_body(call, in_flight, head, report, stream)

    async def _pass_body(
        self,
        call: ProxiedCall,
        in_flight: RoutedInFlight,
        head: ReplicaAnswerHead,
        report: UsageReportHeader | None,
        stream: ExtProcStream,
    ) -> None:
        is_stream = _is_stream(head) and head.status < 300
        events = (
            make_stream_reader(call.api.end, hides_usage=False) if is_stream and stream.receives_answer_bodies else None
        )
        if is_stream and report is None and events is None and in_flight.first_token is None:
            timer = self._first_token_timer(call, in_flight)
        else:
            timer = None

        def read(piece: bytes) -> None:
            nonlocal events
            if events is None or not piece:
                return
            try:
                events.feed_and_take_relayable(piece)
            except InvalidReplicaResponseError:  # Envoy passes it on all the same
                events = None
                return
            if in_flight.finish is not None or not events.has_data or events.num_comment_bytes:
                return
            now = time.monotonic()
            if in_flight.first_token is None:
                self._router.record_first_token(in_flight, now)
                self._first_token(call, now)
            else:
                self._router.record_later_token(in_flight, now)

        is_whole = head.is_whole
        try:
            is_whole = is_whole or await stream.relay_answer_body(read)
        finally:  # also when Envoy cancels the stream, as it may at the end of any answer
            if timer is not None:
                timer.cancel()
            if in_flight.finish is None and (is_whole or not stream.receives_answer_bodies):
                call.outcome = "ok"
                is_read = events is not None and call.reading.is_single
                reported = events.reported if events is not None and is_read else ReportedUsage()
                usage, num_output = reported.usage or _usage(call, report), reported.output_tokens or 0
                self._router.assume_first_token(in_flight, time.monotonic())
                self._router.record_finished(in_flight, time.monotonic(), usage, num_output=num_output)
        if in_flight.finish is None:
            call.outcome = "gone"

    def _begun(
        self,
        call: ProxiedCall,
        in_flight: RoutedInFlight,
        report: UsageReportHeader | None,
        *,
        is_stream: bool,
        now: float,
    ) -> None:
        """Record the beginning of an answer."""
        if report is not None:
            call.answer_id = report.answer_id
            if call.api.is_stored:
                self._proxy.relay.response_owners.add(report.answer_id, in_flight.endpoint.name, call.domain)
        if is_stream and report is not None:  # such a head comes with the first token
            self._router.record_first_token(in_flight, now)  # its usage counts at its end, as in the router's own proxy
            self._first_token(call, now)
        elif not is_stream:  # such a head comes when the answer is complete
            self._first_token(call, now)
            self._router.assume_first_token(in_flight, now)
            self._router.record_finished(in_flight, now, _usage(call, report))

    def _first_token(self, call: ProxiedCall, now: float) -> None:
        call.first_token_at = call.first_token_at or now
        self._proxy.relay.mark_no_longer_pending(call)

    def _failed(self, in_flight: RoutedInFlight, status: int) -> None:
        if status == 429:
            self._proxy.relay.record_failed_attempt(in_flight, AttemptFailureReason.BUSY)
        else:
            self._router.record_failed(in_flight, time.monotonic(), blame=status >= 500)

    def _refused(self, call: ProxiedCall, in_flight: RoutedInFlight, failure: AttemptFailureReason) -> HttpError:
        call.record_failed_attempt(failure)
        self._proxy.relay.record_failed_attempt(in_flight, failure)
        return no_answer_error(AttemptError(failure, "no answer"), max(call.num_attempts, 1))


def _is_stream(head: ReplicaAnswerHead) -> bool:
    return _content_type(head) in _STREAMS


def _content_type(head: ReplicaAnswerHead) -> bytes:
    found = next((value for name, value in head.headers if name == b"content-type"), b"")
    return found.partition(b";")[0].strip().lower()


def _usage(call: ProxiedCall, report: UsageReportHeader | None) -> ReportedTokenUsage | None:
    if report is None or not call.reading.is_single:
        return None
    return ReportedTokenUsage(report.prompt_tokens, report.cached_tokens)
