"""Ingress: the actor that clients reach through Ray's HTTP proxy: the application of a router, placed by Ray.

Keys, limits, errors, routing and relaying are those of `headstart route`; only the choice of a replica passes through
Ray's request router.
"""

from pathlib import Path

import aiohttp
from prometheus_client import disable_created_metrics
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.config.options import RouterOptions, ServerOptions
from headstart.gateway.gateway_app import build_front
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.proxy.replies import session_options
from headstart.gateway.proxy.request_reader import RequestReader
from headstart.gateway.ray.ray_placement import RayPlacement
from headstart.gateway.ray.routing_ticket import RayFleet
from headstart.gateway.run_gateway import KEEPALIVE_SECONDS, router_tokenizer
from headstart.http.decision_log_writer import DecisionLog
from headstart.http.logs import Log


class Ingress:
    """The router of an application. Runs in Ray's event loop for user code."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, router: RouterOptions, server: ServerOptions, replicas: "DeploymentHandle[object]"
    ) -> None:
        """Start routing; return when the first replica runs."""
        disable_created_metrics()
        log = Log()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=10)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, **session_options())
        placement = RayPlacement(replicas)
        reader = RequestReader(router_tokenizer(router.tokenizer), frozenset(server.prompt_rule))
        self._decisions = decisions = DecisionLog(Path(router.decision_log)) if router.decision_log else None
        self._state = state = GatewayState(router, server, self._session, reader, log, decisions, placement.placed)
        if router.tokenizer == "auto":
            state.find_tokenizer(log)
        self._app = _without_request_id(build_front(state))
        await placement.introduce(RayFleet(state.members.changed))
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
