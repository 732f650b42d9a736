"""FlowControl: holds requests in the router while the replicas have enough, and sheds those that come too late.

A replica has enough while `limit` requests per replica are without a first token; the rest wait here, where their order
can still be changed: fairly between tenants, by priority within one (router/flow_queue.py). A request whose deadline
has passed is never sent. Limit 0: every request is sent at once, as far as its deadline allows.

ReplicaWaitQueue: requests wait while no replica is available for a moment, as when the only one of a model restarts.

They wait from the moment when the last replica left, so a fleet that stays down refuses requests at once again.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection
from math import inf

from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.relay import AnswerRelay
from headstart.http.http_errors import HttpError
from headstart.router.endpoint import Endpoint
from headstart.router.filters import matches_model_and_subset
from headstart.router.flow_queue import FairQueue, WaitingRequest
from headstart.router.router import Router

TIMEOUT_HEADER = b"x-headstart-timeout-ms"
PRIORITY_HEADER = b"x-headstart-priority"
MAX_PRIORITY = 2**31
MIN_RETRIES = 3  # at once; a share of few requests is less than one


class FlowControl:
    """The requests of one router that are not sent yet; `relay` counts all without a first token, held here or sent.

    `limit` is per replica; `timeout` in seconds from a request's arrival, 0: none but its own.
    """

    def __init__(self, router: Router, relay: AnswerRelay, limit: int, timeout: float) -> None:
        self.queue = FairQueue()
        self.num_expired = 0
        self._router = router
        self._relay = relay
        relay.on_wait_end = self.release_held_requests
        self._limit = limit
        self._timeout = timeout or inf
        self._turns: dict[WaitingRequest, asyncio.Event] = {}

    async def wait(self, call: ProxiedCall) -> None:
        """Wait until a request may be sent, or its deadline passes. The relay has counted it as pending."""
        headers = dict(call.headers[::-1])  # the first of several
        call.expires_at = call.arrival + min(self._timeout, _number(headers.get(TIMEOUT_HEADER), inf) / 1e3)
        if not self._limit or (not self.queue.num_waiting and self._has_room(0)):
            return
        priority = int(max(min(_number(headers.get(PRIORITY_HEADER), 0.0), MAX_PRIORITY), -MAX_PRIORITY))
        request = self.queue.add(call.tenant, priority, self._uncached_tokens(call))
        turn = self._turns[request] = asyncio.Event()
        left = call.expires_at - time.monotonic()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if left == inf else left):
                    await turn.wait()
        finally:
            self._turns.pop(request, None)
            self.queue.remove(request)

    def release_held_requests(self) -> None:
        """Release as many requests as there is room for, or all while no replica is up: they wait for one elsewhere."""
        while self.queue.num_waiting and self._has_room(1):
            request = self.queue.pop()
            assert request is not None, "a request waits and is not in the queue"
            self._turns[request].set()

    def deadline_error(self, call: ProxiedCall) -> HttpError | None:
        """Return the error of a request whose deadline has passed, and count it; None: it may be sent."""
        if time.monotonic() < call.expires_at:
            return None
        self.num_expired += 1
        message = "no replica could take the request before its deadline"
        return HttpError(503, message, code="deadline_exceeded", headers={"x-should-retry": "false"})

    def _has_room(self, num_more: int) -> bool:
        """Return whether `num_more` requests may be sent; those that were sent may be too many already."""
        now = time.monotonic()
        healths = [endpoint.health for endpoint in self._router.endpoints.values()]
        num_up = sum(not (health.absent or health.draining) and health.is_up(now) for health in healths)
        num_sent = self._relay.num_pending - self.queue.num_waiting
        return not num_up or num_sent + num_more <= self._limit * num_up

    def _uncached_tokens(self, call: ProxiedCall) -> int:
        """Return the tokens of the prompt that no replica is expected to have."""
        request = call.reading.request
        try:
            candidates = self._router.pick(request, time.monotonic()).view.candidates
        except NoReplicaError:
            return request.prompt.num_tokens
        return request.prompt.num_tokens - max(candidate.hit_tokens for candidate in candidates)


def _number(value: bytes | None, default: float) -> float:
    """Return the number in a header; the default if it has none."""
    try:
        number = float(value) if value is not None else default
    except ValueError:
        return default
    return default if number != number else number


class ReplicaWaitQueue:
    """The requests of one router that wait for a replica, for at most `seconds`."""

    def __init__(self, router: Router, seconds: float) -> None:
        self.num_waiting = 0
        self._router = router
        self._seconds = seconds
        self._removed_at = -inf
        self._up = asyncio.Event()

    def on_replica_up(self) -> None:
        """Wake the waiting requests: a probe found a replica ready."""
        if self.num_waiting:
            self._up.set()
            self._up = asyncio.Event()

    def on_replica_removing(self, url: str) -> None:
        """Note that a replica is about to be removed; another one may take its place, as in a rolling update."""
        if url in self._router.endpoints:
            self._removed_at = time.monotonic()

    def expects_a_replica(self, now: float) -> bool:
        """Return whether a replica left a moment ago, so that requests may wait for it or another one."""
        return now < self._last_left(self._router.endpoints.values()) + self._seconds

    def deadline(self, call: ProxiedCall, now: float) -> float:
        """Return until when a request may wait for a replica, on time.monotonic; a time in the past: not at all.

        A request waits only after failures that say nothing about the request and after which the replica returns.
        """
        if not all(failure.is_transient for failure in call.failures):
            return -inf
        endpoints = [
            one for one in self._router.endpoints.values() if matches_model_and_subset(one, call.reading.request)
        ]
        return (now if call.failures and endpoints else self._last_left(endpoints)) + self._seconds

    def _last_left(self, endpoints: Collection[Endpoint]) -> float:
        removed_at = -inf if self._router.endpoints else self._removed_at
        return max((one.health.left_at for one in endpoints), default=removed_at)

    async def wait_until_replica_up(self, deadline: float) -> bool:
        """Wait until a replica is up; return False if none was until the deadline."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._up.wait()
        except TimeoutError:
            return False
        finally:
            self.num_waiting -= 1
        return True


class RetryBudget:
    """At most `share` of the requests in flight may be retries. A retry counts until its request ends."""

    def __init__(self, share: float) -> None:
        self.num_active = 0  # requests in flight
        self.num_retrying = 0  # of these, requests that were sent again
        self.num_refused = 0
        self._share = share

    def take(self) -> bool:
        """Return whether one more request may be sent again; if so, it counts until `give_back`."""
        if self.num_retrying >= max(self._share * self.num_active, MIN_RETRIES if self._share else 0):
            self.num_refused += 1
            return False
        self.num_retrying += 1
        return True

    def give_back(self) -> None:
        """Count a retried request as ended."""
        self.num_retrying -= 1
