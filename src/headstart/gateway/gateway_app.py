"""The ASGI application of a router. It answers some routes itself and forwards the others to replicas."""

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart import __version__
from headstart.anthropic.anthropic_objects import VERSION_HEADER, anthropic_model_from_openai, model_list_page
from headstart.apis.api_table import CHAT, COMPLETIONS, api_of_path, generation_api_of_path
from headstart.core.errors import DrainingError, InvalidRequestError
from headstart.gateway.gateway_routes import PROXIED, ROUTES, is_forwarded_path
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.held_bytes import ByteReservation, parsed_request_bytes
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.replies import response_replica_gone_error
from headstart.gateway.proxy.request_reader import ParsedRequest, SenderRoutingInfo
from headstart.gateway.proxy.upstream import UnstreamedReplicaAnswer
from headstart.gateway.replicas.replica_address import server_url_of
from headstart.http.access_record import access_record_of_scope, tenant_of_scope
from headstart.http.body_reader import SPOOL_BYTES
from headstart.http.gate import AccessMiddleware
from headstart.http.http_errors import ClientGoneError, HttpError, error_response, json_response
from headstart.http.long_work import InlineOrThreadRunner
from headstart.http.packed_metrics import metrics_content_type
from headstart.http.spooled_body import SpooledBody
from headstart.ollama.ollama_answers import ollama_model_list as ollama_models
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import Json, model_list_response
from headstart.openai.value_checks import safe_repr
from headstart.page.live_stream import MAX_FRAMES, LiveStreams
from headstart.page.page_files import PageFiles

LONG_BODY_BYTES = 16 * 1024  # longer bodies are parsed and tokenized off the event loop, which relays streams
_PREFIX = re.compile(r"/v1/prefixes/[A-Za-z0-9._-]*[A-Za-z0-9_-]")
_STORED = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(?:/input_items)?")
_ADMINISTRATION = {"/v1/prefixes": ("GET", "POST"), "/reset_prefix_cache": ("POST",)}  # sent to every replica
MAX_ID_CHARS = 256
Handler = Callable[[Request], Awaitable[Response]]
Forward = Callable[[ProxiedCall, Scope, Receive, Send], Awaitable[None]]
"""Has a request answered by a replica."""


def build_gateway_app(state: GatewayState, forward: Forward | None = None) -> ASGIApp:
    """Return the complete application of one router.

    `forward` None: the router's own proxy; else one of which the router does not read the answers.
    """
    return AccessMiddleware(_Front(state, forward), state, api_of_path, root_path=state.server_options.root_path)


class _Front:
    """Dispatches requests to their handlers and turns errors into responses."""

    def __init__(self, state: GatewayState, forward: Forward | None) -> None:
        self._state = state
        self._forward = forward or state.proxy.serve
        self._reads_answers = forward is None
        self._streams = LiveStreams()
        self._files = PageFiles(is_on=state.server_options.page)
        self._long_work = InlineOrThreadRunner(LONG_BODY_BYTES, SPOOL_BYTES)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/models": ("GET", self._models),
            "/v1/fleet": ("GET", self._fleet),
            "/v1/cache/explain": ("GET", self._explain),
            "/v1/cache/stats": ("GET", self._cache_stats),
            "/v1/cache/tree": ("GET", self._cache_tree),
            "/v1/cache/live": ("GET", self._live),
            "/": ("GET", self._page),
            "/health": ("GET", self._health),
            "/readyz": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/livez": ("GET", self._livez),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", self._version),
            "/api/version": ("GET", self._version),
            **dict.fromkeys(("/api/tags", "/api/ps"), ("GET", self._ollama_models)),
            "/load": ("GET", self._load),
            "/tokenizer_info": ("GET", self._tokenizer_info),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = access_record_of_scope(scope)
        try:
            await self._dispatch(scope, receive, send)
        except Exception as error:
            self._state.record_request_error(record, error)
            if record.status is not None:
                if isinstance(error, ClientGoneError):
                    return
                raise  # part of the answer has been sent: the connection must be cut
            await error_response(error, api_of_path(record.path), record.request_id)(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        known = self._routes.get(path)
        if method in _ADMINISTRATION.get(path, ()) or (method == "DELETE" and _PREFIX.fullmatch(path)):
            await (await self._administer(Request(scope, receive, send)))(scope, receive, send)
            return
        if path == "/v1/cache/explain" and method == "POST":
            known = ("POST", self._explain_prompt)
        if known is not None and method == known[0]:
            response = await known[1](Request(scope, receive, send))
            await response(scope, receive, send)
        elif path.startswith("/page/") and method == "GET":
            await (await self._page(Request(scope, receive, send)))(scope, receive, send)
        elif path.startswith("/v1/models/") and method == "GET":
            await self._model(path.removeprefix("/v1/models/"), scope)(scope, receive, send)
        elif (found := _STORED.fullmatch(path)) is not None and method in ("GET", "DELETE"):
            await (await self._stored_response(Request(scope, receive, send), found[1]))(scope, receive, send)
        elif known is not None or (path in PROXIED and method != "POST"):
            allow = known[0] if known else "POST"
            message = f"this route does not take {method[:16]}; use {allow}"
            raise HttpError(405, message, code="method_not_allowed", headers={"allow": allow})
        elif method == "POST" and is_forwarded_path(path, is_admin=(is_admin := self._is_admin(scope))):
            with self._state.proxy.held.open_reservation(tenant_of_scope(scope)) as reservation:
                await self._proxy(scope, receive, send, reservation, is_admin=is_admin)
        else:
            others = "other paths under /v1 are passed on for administrators only"
            message = f"a router has no such route; it has {', '.join(ROUTES)}; {others}"
            raise HttpError(404, message, code="unknown_route")

    def _is_admin(self, scope: Scope) -> bool:
        return self._state.auth.is_admin(access_record_of_scope(scope).principal, scope)

    # ------------------------------------------------------------------------------------------------------- proxied

    async def _proxy(
        self, scope: Scope, receive: Receive, send: Send, reservation: ByteReservation, *, is_admin: bool
    ) -> None:
        state, record = self._state, access_record_of_scope(scope)
        state.check_admission()
        state.proxy.check_queue(record.principal.tenant)
        path, headers = scope["path"], scope["headers"]
        sender = state.sender_of_request(record.principal, headers, reads_answer=self._reads_answers)
        body = await state.bodies.read_spooling_if_large(Request(scope, receive, send))
        start, record.received_at = time.perf_counter(), time.monotonic()
        watched = receive if self._reads_answers else None  # a picker hears of its client later
        reading = await self._read(path, body, sender, reservation, watched)
        del body  # the body that is forwarded may differ
        explains = is_admin and (b"x-headstart-explain", b"1") in headers
        principal = record.principal
        call = ProxiedCall(
            path,
            headers,
            _sender(scope),
            reading,
            record.request_id,
            record.arrival,
            explains=explains,
            shows_replica=is_admin,
            domain=principal.domain,
            tenant=principal.tenant,
            trace=record.trace,
        )
        del reading  # the call frees what it no longer needs
        try:
            reservation.set(parsed_request_bytes(call.reading))
            self._check_model(call.reading)
            used = call.reading.used
            if used is not None:
                call.only = self._holder(used.response_id, principal.domain, used.param)
            call.reservation = reservation
            state.metrics.decide.observe(time.perf_counter() - start)
            with state.count_in_flight():
                try:
                    await self._forward(call, scope, receive, send)
                finally:
                    state.record_end(record, call)
        finally:
            call.drop_body()

    async def _read(
        self,
        path: str,
        body: bytes | SpooledBody,
        sender: SenderRoutingInfo,
        reservation: ByteReservation,
        receive: Receive | None = None,
    ) -> ParsedRequest:
        """Parse a body, unless the client is gone. If it is in a file and that fails, the file is closed."""
        reader, run = self._state.reader, partial(self._long_work.run, receive=receive)
        if isinstance(body, SpooledBody):
            try:
                reservation.set(len(body))
                return await run(len(body), lambda: reader.read_spooled(path, body, sender))
            except BaseException:
                body.close()
                raise
        reservation.set(len(body))  # other requests may be served while it is parsed
        renders = generation_api_of_path(path).chat_values is not None and reader.tokenizer is not None
        return await run(len(body), lambda: reader.read(path, body, sender), waits=renders)

    def _check_model(self, reading: ParsedRequest) -> None:
        """Reject a model that no replica serves. Any model is accepted until all replicas have listed their models."""
        served, name = self._state.reader.served, reading.request.model
        if name and served and name not in served and self._state.members.knows_all_models:
            known = ", ".join(list(served)[:16])
            raise InvalidRequestError(
                f"model {safe_repr(name)} is served by no replica; there are {known}",
                param="model",
                code="model_not_found",
            )

    def _holder(self, response_id: str, domain: bytes, param: str) -> str:
        """Return the URL of the replica that holds a stored response of the tenant with this domain.

        Raises HttpError 404 if there is none, or the replica does not serve any more.
        """
        url = server_url_of(self._state.proxy.relay.response_owners.find(response_id, domain, param))
        if url not in self._state.server_urls_of_up_replicas:
            raise response_replica_gone_error(response_id, param)
        return url

    async def _stored_response(self, request: Request, response_id: str) -> Response:
        """Send the request to the replica that holds the response."""
        scope = request.scope
        replica = self._holder(response_id, access_record_of_scope(scope).principal.domain, "response_id")
        answer = await self._state.broadcast_to_urls([replica], request.method, _target(request), scope["headers"])
        return _response_of(answer)

    async def _administer(self, request: Request) -> Response:
        """Send the request to every replica. The gate has already rejected everyone but administrators."""
        answer = await self._state.broadcast_admin_request(
            request.method, _target(request), request.scope["headers"], await self._state.bodies.read(request)
        )
        return _response_of(answer)

    # ------------------------------------------------------------------------------------------------------ answered

    async def _models(self, request: Request) -> Response:
        models = [dict(card.fields) for card in self._state.members.distinct_model_cards()]
        return json_response((model_list_page if VERSION_HEADER in request.headers else model_list_response)(models))

    async def _ollama_models(self, request: Request) -> Response:
        return json_response(ollama_models([card.fields for card in self._state.members.distinct_model_cards()]))

    def _model(self, name: str, scope: Scope) -> Response:
        for card in self._state.members.distinct_model_cards():
            if card.id == name:
                model = dict(card.fields)
                return json_response(
                    anthropic_model_from_openai(model) if VERSION_HEADER in Request(scope).headers else model
                )
        return error_response(
            InvalidRequestError(
                f"model {safe_repr(name)} is served by no replica", param="model", code="model_not_found"
            )
        )

    async def _fleet(self, request: Request) -> Response:
        return json_response(self._state.describe())

    async def _explain(self, request: Request) -> Response:
        request_id = request.query_params.get("request_id", "")
        if not 0 < len(request_id) <= MAX_ID_CHARS:
            message = f"give the id of an answer, at most {MAX_ID_CHARS} characters: ?request_id=chatcmpl-..."
            raise InvalidRequestError(message, param="request_id")
        return json_response(
            self._state.memory.explain_reuse(request_id, access_record_of_scope(request.scope).principal)
        )

    async def _explain_prompt(self, request: Request) -> Response:
        state, principal = self._state, access_record_of_scope(request.scope).principal
        body = await state.bodies.read(request)
        path = (CHAT if "messages" in parse_json_object(body) else COMPLETIONS).path
        with state.proxy.held.open_reservation(principal.tenant) as reservation:
            reading = await self._read(
                path, body, state.sender_of_request(principal, request.scope["headers"]), reservation
            )
            reading.drop_body()
            return json_response(state.memory.explain_unsent_prompt(path, reading, principal))

    async def _cache_stats(self, request: Request) -> Response:
        principal = access_record_of_scope(request.scope).principal
        return json_response(await self._state.cache_stats(principal, request.scope["headers"]))

    async def _cache_tree(self, request: Request) -> Response:
        """Ask the replica that the query names, by default the first that is up."""
        urls = self._state.server_urls_of_up_replicas
        chosen = request.query_params.get("replica", urls[0] if urls else "")
        if urls and chosen not in urls:
            raise InvalidRequestError(f"replica {safe_repr(chosen)} is not up; there are {len(urls)}", param="replica")
        asked = urlencode({name: value for name, value in request.query_params.items() if name != "replica"})
        target = request.scope["path"] + (f"?{asked}" if asked else "")
        return _response_of(
            await self._state.broadcast_to_urls(urls and [chosen], "GET", target, request.scope["headers"])
        )

    async def _live(self, request: Request) -> Response:
        async def frame() -> Json:
            if self._state.draining:
                raise DrainingError("the router is shutting down")
            return self._state.live_frame()

        # a front that does not read answers, Envoy's picker, sends them whole
        limit = MAX_FRAMES if self._reads_answers else 1
        return await self._streams.stream_response(
            request, access_record_of_scope(request.scope).principal.label, frame, max_frames=limit
        )

    async def _page(self, request: Request) -> Response:
        return self._files.file_response(request)

    async def _health(self, request: Request) -> Response:
        self._state.check_ready()
        return json_response({"status": "ok"})

    async def _livez(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        principal = access_record_of_scope(request.scope).principal
        sees_all = principal.is_admin or not principal.tenant
        accept = request.headers.get("accept", "") if sees_all else ""  # exemplars are of single requests
        text = self._state.metrics.expose(accept, with_replicas=principal.is_admin)
        return Response(text, media_type=metrics_content_type(accept))

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": self._state.num_in_flight})

    async def _tokenizer_info(self, request: Request) -> Response:
        """Ask a replica: replicas of one fleet have one tokenizer."""
        replicas = list(self._state.server_urls_of_up_replicas)[:1]
        return _response_of(
            await self._state.broadcast_to_urls(replicas, "GET", _target(request), request.scope["headers"])
        )

    async def _version(self, request: Request) -> Response:
        version: Json = {"version": __version__}
        return json_response(version)


def _response_of(answer: UnstreamedReplicaAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers.extend(answer.headers)
    return response


def _target(request: Request) -> str:
    query = request.url.query
    return request.scope["path"] + (f"?{query}" if query else "")


def _sender(scope: Scope) -> str:
    """Return the client's address: replicas must not take the request for one from their own machine."""
    client = scope.get("client")
    return client[0] if client else "unknown"
