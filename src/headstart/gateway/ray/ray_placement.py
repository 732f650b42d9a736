"""RayPlacement: has Ray's request router place each request, and keeps Ray informed of what is under way.

The request itself goes from the ingress to the replica's server over HTTP, as from any router of this package. Beside
it, a call of the replica's actor lasts as long as the request: by these calls Ray scales replicas, and waits before it
stops one. Nothing waits for such a call.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.proxy import Proxy
from headstart.gateway.ray.routing_ticket import Introduction, RayFleet, RoutingTicket
from headstart.router.filters import eligible
from headstart.router.routing_decision import InFlight

PLACE_SECONDS = 2.0  # until Ray has asked for the choice of a replica


class RayPlacement:
    """Places the requests of one ingress by `handle`, that of a deployment whose router is PrefixRequestRouter."""

    def __init__(self, handle: Any) -> None:
        self._hold = handle.options(method_name="hold")
        self._greet = handle.options(method_name="greet")
        self._fleet: RayFleet | None = None

    async def introduce(self, fleet: RayFleet) -> None:
        """Have Ray report its replicas to `fleet` from now on; return when the first replica runs."""
        self._fleet = fleet
        await self._greet.remote(Introduction(fleet))

    @asynccontextmanager
    async def placed(self, proxy: Proxy, call: ProxiedCall) -> AsyncGenerator[InFlight]:
        """Place a request for one attempt. Raises NoReplicaError."""
        fleet = self._fleet
        if fleet is None:
            raise NoReplicaError("Ray has not listed its replicas yet", reasons={})
        _check_candidates(proxy, call)
        ticket = RoutingTicket(call.request_id, fleet, lambda names: proxy.place(call, time.monotonic(), names))
        lease = self._hold.remote(ticket)
        ticket.refused = lease.cancel
        try:
            yield await _decision(proxy, ticket)
        finally:
            lease.cancel()


async def _decision(proxy: Proxy, ticket: RoutingTicket) -> InFlight:
    """Return the decision of a ticket. Raises NoReplicaError, also if Ray does not ask for a decision."""
    try:
        async with asyncio.timeout(PLACE_SECONDS):
            return await ticket.decision
    except TimeoutError:
        raise NoReplicaError(f"Ray did not route the request within {PLACE_SECONDS:g} s", reasons={}) from None
    except asyncio.CancelledError:
        decision = ticket.decision
        if decision.done() and not decision.cancelled() and decision.exception() is None:
            proxy.router.failed(decision.result(), time.monotonic(), blame=False)  # it is not sent any more
        raise


def _check_candidates(proxy: Proxy, call: ProxiedCall) -> None:
    """Raise NoReplicaError if no replica may serve the request: Ray would ask again and again."""
    endpoints = proxy.router.endpoints.values()
    found, excluded = eligible(endpoints, call.reading.request, time.monotonic(), frozenset(call.tried))
    if not found:
        raise NoReplicaError(f"none of {len(endpoints)} replicas may serve this request", reasons=excluded)
