"""Proxy: one request from its routing decision to its end: attempts at replicas, until one of them answers it.

Until the client has received part of an answer, every failure is retried at another replica: a stream of comments alone
is not yet an answer, and an answer in one piece is kept until it is complete. After that a failure is an error event.

SendWithClientTimeout: aborts a response whose client does not read it.

A timer per message would cost as much as relaying a token; one per request, which checks periodically, costs nothing.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from headstart.config.options import RouterOptions
from headstart.core.errors import NoReplicaError, QueueFullError
from headstart.gateway.held_bytes import HeldBytesBudget
from headstart.gateway.proxy.flow_control import FlowControl, ReplicaWaitQueue, RetryBudget
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.relay import AnswerRelay, Attempt, send_in_slices
from headstart.gateway.proxy.replies import (
    WatchedRoutingDecisions,
    check_if_event_stream,
    client_session_options,
    decision_header,
    no_answer_error,
    no_replicas_error,
    replica_lost_error,
    too_many_losses_error,
)
from headstart.gateway.proxy.silence import SilenceDetector
from headstart.gateway.proxy.upstream import (
    AttemptError,
    AttemptFailureReason,
    classify_client_error,
    forwarded_request_headers,
)
from headstart.gateway.replicas.replica_address import data_parallel_rank_headers, server_url_of
from headstart.http.byte_budget import may_tenant_hold_more
from headstart.http.http_errors import ClientGoneError, HttpError
from headstart.http.protocol.body_writer import writer_of_scope
from headstart.http.protocol.connections import raise_connection_limit
from headstart.http.sse import WRITE_SECONDS
from headstart.openai.tokenizer.handed_tokens import add_tokens_to_body
from headstart.router.router import Router
from headstart.router.routing_decision import RoutedInFlight, RoutingDecision

FILES_PER_REQUEST = 2  # the connections to the client and to a replica
MAX_LOSSES = 2
"""Losses of a replica during one request, after which it is not sent again: it may be the cause.

Each loss is retried over a new connection, so connections that replicas closed while idle cause at most one.
"""


Placed = Callable[["ReplicaProxy", ProxiedCall], AbstractAsyncContextManager[RoutedInFlight]]
"""Places a request for one attempt, by `ReplicaProxy.choose_and_record`; the context ends with the attempt. Raises
NoReplicaError."""


@asynccontextmanager
async def place_by_own_router(proxy: "ReplicaProxy", call: ProxiedCall) -> AsyncGenerator[RoutedInFlight]:
    """Place a request with no one else involved."""
    yield proxy.choose_and_record(call, time.monotonic())


class ReplicaProxy:
    """Sends requests to the replicas of one router. Everything happens on one event loop."""

    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        options: RouterOptions,
        max_pending: int,
        budget: RetryBudget,
        placed: Placed = place_by_own_router,
    ) -> None:
        """`max_pending`: requests without a first token per replica; more are refused."""
        self.router = router
        self.budget = budget
        self.silence = SilenceDetector(router)
        self.replica_wait = ReplicaWaitQueue(router, options.replica_wait)
        self.held = HeldBytesBudget()
        self.relay = AnswerRelay(router)
        self.flow = FlowControl(router, self.relay, options.flow_control, options.queue_timeout)
        self.decisions = WatchedRoutingDecisions()
        self._session = session
        self._fresh = aiohttp.ClientSession(  # a new connection for each request: none of them has been idle
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=10), **client_session_options()
        )
        self._options = options
        self._max_pending = max_pending
        # of all replicas together, so that there are connections for answers too:
        self._max_pending_in_all = raise_connection_limit(files_each=FILES_PER_REQUEST) // 2
        self._placed = placed
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.connect_timeout, sock_read=options.response_timeout
        )

    async def close(self) -> None:
        """Close the proxy's own connections."""
        await self._fresh.close()

    @property
    def num_awaiting_first_token(self) -> int:
        """The number of requests without a first token."""
        return self.relay.num_pending

    def check_queue(self, tenant: str = "") -> None:
        """Raise QueueFullError while too many requests wait for their first token, of those beyond a tenant's share."""
        if self.num_awaiting_first_token < min(self._max_pending, self._max_pending_in_all):
            return
        endpoints = self.router.endpoints.values()
        num_serving = sum(not (one.health.absent or one.health.draining) for one in endpoints)
        limit = min(self._max_pending * max(num_serving, 1), self._max_pending_in_all)
        pending = self.relay.pending_of
        own = pending[tenant] if tenant else self.num_awaiting_first_token
        if not may_tenant_hold_more(self.num_awaiting_first_token, own, 1, limit, len(pending.keys() | {tenant})):
            wait = min((endpoint.backlog_ms(time.monotonic()) for endpoint in endpoints), default=0.0) / 1e3
            raise QueueFullError(
                f"{self.num_awaiting_first_token} requests are waiting: try again later", retry_after=min(wait, 60.0)
            )

    async def wait_until_replica_is_up(self, call: ProxiedCall) -> bool:
        """Wait until a replica is up; return False if the request may wait no longer."""
        now = time.monotonic()
        if call.deadline is None:
            call.deadline = self.replica_wait.deadline(call, now)
        return now < call.deadline and await self.replica_wait.wait_until_replica_up(call.deadline)

    def choose_and_record(self, call: ProxiedCall, now: float, among: Collection[str] | None = None) -> RoutedInFlight:
        """Choose the best replica that the request did not try yet, and record that it is sent there.

        `among`: the names of the candidates; None: all replicas. Raises NoReplicaError.
        """
        return self.record_sent(call, self.choose(call, now, among), now)

    def choose(self, call: ProxiedCall, now: float, among: Collection[str] | None = None) -> RoutingDecision:
        """Choose the best replica that the request did not try yet. Raises NoReplicaError."""
        router = self.router
        others = set() if call.only is None else router.endpoints.keys() - {call.only}
        if among is not None:
            others |= router.endpoints.keys() - among
        decision = router.pick(
            call.reading.request, now, tried=frozenset((*call.tried, *others)), before=call.in_flight
        )
        if call.explains:
            call.route = decision_header(decision)
        self.decisions.record_if_watched(decision, now)
        return decision

    def record_sent(self, call: ProxiedCall, decision: RoutingDecision, now: float) -> RoutedInFlight:
        """Record that the request is sent to the chosen replica."""
        call.drop_large_prompt()
        call.in_flight = in_flight = self.router.record_sent(decision, now)
        call.tried.append(in_flight.endpoint.name)
        call.num_attempts += 1
        call.begin_attempt_span()
        return in_flight

    async def serve(self, call: ProxiedCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises HttpError, NoReplicaError and ClientGoneError if nothing was sent yet."""
        self.check_queue(call.tenant)
        self.budget.num_active += 1
        self.relay.mark_pending(call)
        call.writer = writer_of_scope(scope)
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        timed_send = SendWithClientTimeout(send, task, WRITE_SECONDS)
        try:
            await self.flow.wait(call)
            await self._serve(call, timed_send)
        except asyncio.CancelledError:
            if not (is_gone or timed_send.is_over):
                raise
            task.uncancel()
            call.outcome = call.outcome if call.outcome == "ok" else "gone"
            raise ClientGoneError from None
        finally:
            watcher.cancel()
            timed_send.close()
            self.budget.num_active -= 1
            self.relay.mark_no_longer_pending(call)

    # ------------------------------------------------------------------------------------------------------ attempts

    async def _serve(self, call: ProxiedCall, send: Send) -> None:
        retrying = again = False
        last: AttemptError | None = None
        try:
            while True:
                late = self.flow.deadline_error(call)
                if late is not None:
                    await self._give_up(call, late, send)
                    return
                try:
                    await self._attempt(call, send)
                    return
                except AttemptError as error:
                    call.record_failed_attempt(error.failure)
                    call.num_losses += error.may_have_killed_replica
                    if call.num_losses >= MAX_LOSSES:
                        await self._give_up(call, too_many_losses_error(call.request_id, call.num_losses), send)
                        return
                    if not self._may_retry(call, error.failure, retrying):
                        await self._give_up(call, error, send)
                        return
                    retrying = retrying or not error.failure.costs_no_retry
                    last = error
                except NoReplicaError as error:
                    if not again and any(failure.is_connection_failure for failure in call.failures):
                        again = True
                        _retry_failed_connections(call)
                    elif await self.wait_until_replica_is_up(call):
                        call.tried.clear()
                    else:
                        await self._give_up(call, last or error, send)
                        return
        finally:
            if retrying:
                self.budget.give_back()

    def _may_retry(self, call: ProxiedCall, failure: AttemptFailureReason, retrying: bool) -> bool:
        if call.num_attempts >= self._options.max_attempts:
            return False
        return failure.costs_no_retry or retrying or self.budget.take()

    async def _attempt(self, call: ProxiedCall, send: Send) -> None:
        """Send the request to the best replica that was not tried yet. Raises AttemptError and NoReplicaError."""
        async with self._placed(self, call) as in_flight:
            await self._attempt_at(call, in_flight, send)

    async def _attempt_at(self, call: ProxiedCall, in_flight: RoutedInFlight, send: Send) -> None:
        activity, wait = self.silence.begin(call, in_flight, in_flight.sent_at)
        try:
            await self._send(Attempt(call, in_flight, (activity, wait)), send)
        except AttemptError as error:
            self.relay.record_failed_attempt(in_flight, error.failure)
            raise
        except asyncio.CancelledError as error:
            if not wait.absorb_cancel():
                raise
            await self._broken(call, in_flight, AttemptFailureReason.HUNG, error, send)
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            await self._broken(
                call,
                in_flight,
                AttemptFailureReason.HUNG if wait.is_given_up else classify_client_error(error),
                error,
                send,
            )
        finally:
            wait.absorb_cancel()
            self.silence.end(activity, wait)
            if in_flight.finish is None:  # the client disconnected, or the router stops: not the replica's fault
                self.router.record_client_disconnect(in_flight, time.monotonic())

    async def _broken(
        self,
        call: ProxiedCall,
        in_flight: RoutedInFlight,
        failure: AttemptFailureReason,
        error: BaseException,
        send: Send,
    ) -> None:
        """Record that no complete answer arrived. Raises AttemptError if the client has received nothing of it."""
        self.relay.record_failed_attempt(in_flight, failure)
        if not call.committed:
            raise AttemptError(failure, f"{type(error).__name__}") from error
        call.record_failed_attempt(failure)
        call.outcome = "lost"
        if call.is_mid_event:
            raise replica_lost_error() from error  # the client's connection is cut
        await self._end_stream(call, replica_lost_error(), send)

    async def _send(self, attempt: Attempt, send: Send) -> None:
        call, in_flight, _ = attempt
        replica = in_flight.endpoint.name
        own = {"x-request-id": call.request_id, **call.trace_headers(), **data_parallel_rank_headers(replica)}
        if self._options.replica_api_key is not None:
            own["authorization"] = f"Bearer {self._options.replica_api_key}"
        body, timer, tokenizer = call.reading.body, None, call.reading.tokenizer
        if not isinstance(body, bytes):
            own["content-length"] = str(len(body))
        elif tokenizer and tokenizer == in_flight.endpoint.tokenizer:
            body = add_tokens_to_body(body, call.reading.request.prompt.token_ids)
        if not call.reading.stream:  # its head arrives only with the complete answer
            timer = asyncio.get_running_loop().call_later(
                in_flight.flight.expected_ttft_ms / 1e3, self.relay.assume_first_token, call, in_flight
            )
        try:
            session = self._fresh if AttemptFailureReason.LOST in call.failures else self._session
            async with session.post(
                server_url_of(replica) + call.path,
                data=body if isinstance(body, bytes) else body.pieces(),
                headers=forwarded_request_headers(call.headers, own, call.sender),
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                if check_if_event_stream(response, call.path):
                    await self.relay.relay_stream(attempt, response, send)
                else:
                    await self.relay.relay_complete_answer(attempt, response, send)
        finally:
            if timer is not None:
                timer.cancel()

    async def _give_up(self, call: ProxiedCall, error: AttemptError | NoReplicaError | HttpError, send: Send) -> None:
        """Send the client the last replica's refusal if there is one, else an error of the router."""
        if isinstance(error, AttemptError) and error.answer is not None:
            await self.relay.send_complete_answer(call, error.answer, send)
            return
        if isinstance(error, HttpError):
            failure = error
        else:
            failure = (
                no_replicas_error(error)
                if isinstance(error, NoReplicaError)
                else no_answer_error(error, call.num_attempts)
            )
        if not call.started:
            raise failure
        await self._end_stream(call, failure, send)

    async def _end_stream(self, call: ProxiedCall, error: HttpError, send: Send) -> None:
        await send_in_slices(send, call.api.stream_error_events(error, call.request_id, call.num_events), more=False)


def _retry_failed_connections(call: ProxiedCall) -> None:
    """Let a request that tried every replica be sent once more to those whose connection failed, over new connections.

    A connection may have been idle for too long, or was accepted too late for a router without CPU time. Replicas that
    refused a connection are tried last: no server was listening a moment ago.
    """
    failed = list(zip(call.tried, call.failures, strict=True))
    kept = [
        name for name, failure in failed if not failure.is_connection_failure or failure is AttemptFailureReason.REFUSED
    ]
    if len(kept) == len(failed):
        kept = [name for name, failure in failed if not failure.is_connection_failure]
    call.tried[:] = kept


class SendWithClientTimeout:
    """Sends as `send` does. Cancels `task`, and sets `is_over`, once the client has read nothing for `seconds`.

    Detection may take a quarter longer. The creator closes it.
    """

    def __init__(self, send: Send, task: "asyncio.Task[Any]", seconds: float) -> None:
        self.is_over = False
        self._send, self._task, self._seconds = send, task, seconds
        self._loop = task.get_loop()
        self._since: float | None = None  # while a message is being sent
        self._timer = self._loop.call_later(seconds / 4, self._check)

    async def __call__(self, message: Message) -> None:
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def close(self) -> None:
        """Stop the periodic check."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._seconds:
            self.is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds / 4, self._check)
