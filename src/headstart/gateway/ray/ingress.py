"""Ingress: the actor that clients reach through Ray's HTTP proxy: the application of a router, placed by Ray.

Keys, limits, errors, routing and relaying are those of `headstart route`; only the choice of a replica passes through
Ray's request router.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import disable_created_metrics
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import NoReplicaError
from headstart.gateway.gateway_app import build_gateway_app
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.proxy import ReplicaProxy
from headstart.gateway.proxy.replies import client_session_options
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.gateway.ray.placement_ticket import PlacementRequest, RayReplicaListNotifier, RayRouterWarmupCall
from headstart.gateway.run_gateway import KEEPALIVE_SECONDS, load_router_tokenizer
from headstart.http.decision_log_writer import DecisionLog
from headstart.http.logs import ServerLog
from headstart.router.filters import filter_endpoints_with_reasons
from headstart.router.routing_decision import RoutedInFlight

PLACE_SECONDS = 2.0  # until Ray has asked for the choice of a replica


class Ingress:
    """The router of an application. Runs in Ray's event loop for user code."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, router: RouterOptions, server: ServerOptions, replicas: "DeploymentHandle[object]"
    ) -> None:
        """Start routing; return when the first replica runs."""
        disable_created_metrics()
        log = ServerLog()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=10)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, **client_session_options())
        placement = RayRequestPlacer(replicas)
        reader = RequestParser(load_router_tokenizer(router.tokenizer), frozenset(server.prompt_rule))
        self._decisions = decisions = DecisionLog(Path(router.decision_log)) if router.decision_log else None
        self._state = state = GatewayState(
            router, server, self._session, reader, log, decisions, placement.hold_replica_for_attempt
        )
        if router.tokenizer == "auto":
            state.load_tokenizer_when_known(log)
        self._app = _without_request_id(build_gateway_app(state))
        await placement.report_replicas_to(RayReplicaListNotifier(state.members.on_replicas_changed))
        await state.members.seen.wait()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        return self._app

    async def __del__(self) -> None:
        """Stop probing and close all connections; requests have ended."""
        await self._state.close()
        await self._session.close()
        if self._decisions is not None:
            self._decisions.close()


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Return the application without the response header x-request-id: Ray's proxy adds the same one."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_rest)

    return serve


class RayRequestPlacer:
    """Places the requests of one ingress by `handle`, that of a deployment whose router is PrefixRequestRouter.

    A request goes from the ingress to the replica's server over HTTP, as from any router of this package. Beside it, a
    call of the replica's actor lasts as long as the request: by these calls Ray scales replicas, and waits before it
    stops one. Nothing waits for such a call.
    """

    def __init__(self, handle: Any) -> None:
        self._hold = handle.options(method_name="hold")
        self._greet = handle.options(method_name="greet")
        self._fleet: RayReplicaListNotifier | None = None

    async def report_replicas_to(self, fleet: RayReplicaListNotifier) -> None:
        """Have Ray report its replicas to `fleet` from now on; return when the first replica runs."""
        self._fleet = fleet
        await self._greet.remote(RayRouterWarmupCall(fleet))

    @asynccontextmanager
    async def hold_replica_for_attempt(self, proxy: ReplicaProxy, call: ProxiedCall) -> AsyncGenerator[RoutedInFlight]:
        """Place a request for one attempt. Raises NoReplicaError."""
        fleet = self._fleet
        if fleet is None:
            raise NoReplicaError("Ray has not listed its replicas yet", reasons={})
        _check_candidates(proxy, call)
        ticket = PlacementRequest(
            call.request_id, fleet, lambda names: proxy.choose_and_record(call, time.monotonic(), names)
        )
        lease = self._hold.remote(ticket)
        ticket.refused = lease.cancel
        try:
            yield await _decision(proxy, ticket)
        finally:
            lease.cancel()


async def _decision(proxy: ReplicaProxy, ticket: PlacementRequest) -> RoutedInFlight:
    """Return the decision of a ticket. Raises NoReplicaError, also if Ray does not ask for a decision."""
    try:
        async with asyncio.timeout(PLACE_SECONDS):
            return await ticket.decision
    except TimeoutError:
        raise NoReplicaError(f"Ray did not route the request within {PLACE_SECONDS:g} s", reasons={}) from None
    except asyncio.CancelledError:
        decision = ticket.decision
        if decision.done() and not decision.cancelled() and decision.exception() is None:
            proxy.router.record_failed(decision.result(), time.monotonic(), blame=False)  # it is not sent any more
        raise


def _check_candidates(proxy: ReplicaProxy, call: ProxiedCall) -> None:
    """Raise NoReplicaError if no replica may serve the request: Ray would ask again and again."""
    endpoints = proxy.router.endpoints.values()
    found, excluded = filter_endpoints_with_reasons(
        endpoints, call.reading.request, time.monotonic(), frozenset(call.tried)
    )
    if not found:
        raise NoReplicaError(f"none of {len(endpoints)} replicas may serve this request", reasons=excluded)
