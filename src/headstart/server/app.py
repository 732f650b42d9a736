"""The ASGI application: the routes, wrapped in a Gate that authorizes and logs every request."""

import time
from array import array
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from headstart import __version__
from headstart.anthropic.anthropic_objects import VERSION_HEADER, anthropic_model_from_openai, model_list_page
from headstart.anthropic.messages_request import CountTokensRequest
from headstart.apis import answer_schemas as schema
from headstart.apis.answer_schemas import RouteResponseSchemas
from headstart.apis.api_table import api_of_path
from headstart.apis.ollama_api import OLLAMA_TREE
from headstart.apis.openapi import RouteOperation, openapi_document
from headstart.http.access_record import access_record_of_scope
from headstart.http.gate import AccessMiddleware
from headstart.http.http_errors import HttpError, error_response, json_response
from headstart.http.packed_metrics import metrics_content_type
from headstart.openai import responses
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import chat_for_template, encode_prompt
from headstart.openai.json_pieces import SLICE_ITEMS, iter_json_pieces
from headstart.openai.prefix_tokens import PrefixRequest, parse_prefix
from headstart.openai.request_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from headstart.openai.request_json import parse_json_object
from headstart.openai.tokenizer.handed_tokens import MAX_HANDED_BYTES
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.tool_fields import make_tool_params
from headstart.openai.value_checks import parse_positive_query_count, raise_invalid_value, safe_repr
from headstart.page.live_stream import LiveStreams
from headstart.page.page_files import PageFiles
from headstart.server.apis.answer_format import ServedApi, check_model_name
from headstart.server.apis.generation_routes import GenerationRoutes, served_apis
from headstart.server.apis.ollama_format import OllamaRoutes
from headstart.server.cache_api import cache_schema
from headstart.server.cache_api.cache_routes import (
    fetch_cache_stats_json,
    recent_bodies_response,
    reuse_explanation_response,
)
from headstart.server.cache_api.cache_tree import DEFAULT_RUNS, MAX_RUNS, CacheTreeSnapshot
from headstart.server.cache_api.live_figures import LiveFigures
from headstart.server.inference import generation_response, run_with_body
from headstart.server.server_state import ServerState
from headstart.server.store_metrics import may_see_store

Handler = Callable[[Request], Awaitable[Response]]
_Result = TypeVar("_Result")


def build_app(state: ServerState, figures: LiveFigures | None = None) -> ASGIApp:
    """Return the ASGI application of one server. `figures`: those that someone samples; None: without earlier ones."""
    routes, apis = _Routes(state, figures or LiveFigures(state)), GenerationRoutes(state)
    completions, chat, created_responses, messages, *ollama = served_apis(state.responses)
    operations: list[RouteOperation] = []
    table: list[Route] = []
    explanation = RouteResponseSchemas(cache_schema.CACHE_EXPLANATION)

    def generates(served: ServedApi) -> tuple[Any, ...]:
        async def handler(request: Request) -> Response:
            return await generation_response(state, served, request)

        handler.__name__, handler.__doc__ = served.name, served.summary
        return "POST", served.api.path, handler, served.answers, *served.bodies

    for method, path, handler, answers, *bodies in (
        *map(generates, (completions, chat, created_responses)),
        ("GET", "/v1/responses/{response_id}", apis.retrieve_response, RouteResponseSchemas(schema.RESPONSE)),
        ("DELETE", "/v1/responses/{response_id}", apis.delete_response, RouteResponseSchemas(schema.DELETED_RESPONSE)),
        ("GET", "/v1/responses/{response_id}/input_items", apis.input_items, RouteResponseSchemas(schema.INPUT_ITEMS)),
        generates(messages),
        ("POST", "/v1/messages/count_tokens", apis.count_tokens, schema.TOKEN_COUNT, CountTokensRequest),
        ("GET", "/v1/models", routes.models, RouteResponseSchemas(schema.MODEL_LIST)),
        ("GET", "/v1/models/{model_id:path}", routes.model, RouteResponseSchemas(schema.MODEL)),
        ("POST", "/tokenize", routes.tokenize, RouteResponseSchemas(schema.TOKENS), TokenizeRequest),
        ("POST", "/detokenize", routes.detokenize, RouteResponseSchemas(schema.TEXT), DetokenizeRequest),
        ("GET", "/health", routes.health, RouteResponseSchemas(schema.STATUS)),
        ("GET", "/readyz", routes.health, RouteResponseSchemas(schema.STATUS)),
        ("GET", "/ping", routes.health, RouteResponseSchemas(schema.STATUS)),
        ("GET", "/load", routes.load, RouteResponseSchemas(schema.SERVER_LOAD)),
        ("GET", "/tokenizer_info", routes.tokenizer_info, RouteResponseSchemas(schema.TOKENIZER_INFO)),
        ("GET", "/livez", routes.livez, RouteResponseSchemas(schema.STATUS)),
        ("GET", "/metrics", routes.metrics, RouteResponseSchemas(None)),
        ("GET", "/version", routes.version, RouteResponseSchemas(schema.VERSION)),
        ("POST", "/reset_prefix_cache", routes.reset_prefix_cache, RouteResponseSchemas(schema.STATUS)),
        ("GET", "/v1/prefixes", routes.list_prefixes, RouteResponseSchemas(cache_schema.PINNED_PREFIXES)),
        (
            "POST",
            "/v1/prefixes",
            routes.add_prefix,
            RouteResponseSchemas(cache_schema.PINNED_PREFIX, status=201),
            PrefixRequest,
        ),
        ("DELETE", "/v1/prefixes/{name}", routes.remove_prefix, RouteResponseSchemas(cache_schema.REMOVED_PREFIX)),
        ("GET", "/v1/cache/stats", routes.cache_stats, RouteResponseSchemas(cache_schema.CACHE_STATISTICS)),
        ("GET", "/v1/cache/explain", routes.explain_request, explanation),
        ("GET", "/v1/cache/requests", routes.recent_requests, RouteResponseSchemas(cache_schema.RECENT_REQUESTS)),
        ("GET", "/v1/cache/tree", routes.cache_tree, RouteResponseSchemas(cache_schema.CACHE_TREE)),
        ("GET", "/v1/cache/live", routes.live, RouteResponseSchemas(None, cache_schema.FIGURES)),
        ("POST", "/v1/cache/explain", routes.explain_prompt, explanation, CompletionRequest, ChatRequest),
    ):
        route = Route(path, _guarded(state, handler))
        route.methods = {method}
        table.append(route)
        is_alias = path in ("/readyz", "/ping")
        operation_id = f"{handler.__name__}{path.replace('/', '_')}" if is_alias else handler.__name__
        operations.append(RouteOperation(method, path, operation_id, handler.__doc__ or "", answers, tuple(bodies)))
    # Ollama's routes are documented by Ollama.
    for method, path, handler, *_ in (*map(generates, ollama), *OllamaRoutes(state, routes.card).table()):
        route = Route(path, _guarded(state, handler))
        route.methods = {method}
        table.append(route)
    for path in ("/", "/page/{name}"):
        table.append(Route(path, _guarded(state, routes.page), methods=["GET"]))
    described = cache(lambda: openapi_document("Headstart", __version__, operations))

    async def openapi(request: Request) -> Response:
        return JSONResponse(described())

    app = Starlette(
        routes=[Route("/openapi.json", openapi), *table], exception_handlers={HTTPException: _framework_error}
    )
    app.router.redirect_slashes = False
    return AccessMiddleware(app, state, api_of_path, root_path=state.options.root_path)


def _guarded(state: ServerState, handler: Handler) -> Handler:
    """Return the handler with every exception converted to an error response."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            state.record_request_error(access_record_of_scope(request.scope), error)
            return error_response(
                error, api_of_path(request.scope["path"]), access_record_of_scope(request.scope).request_id
            )

    return guarded


async def _framework_error(request: Request, error: Exception) -> Response:
    """Return the error response for requests that Starlette's router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    api = api_of_path(path) if path.startswith(OLLAMA_TREE) else None
    if error.status_code == 404:
        return error_response(HttpError(404, "there is no such route; see /openapi.json", code="unknown_route"), api)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"this route does not take {request.method[:16]}; use {allow}"
        return error_response(HttpError(405, message, code="method_not_allowed", headers={"allow": allow}), api)
    return error_response(HttpError(error.status_code, "the request was refused", code="invalid_value"), api)


class _Routes:
    """The route handlers. Each may raise HttpError and HeadstartError. Their docstrings are the OpenAPI summaries."""

    def __init__(self, state: ServerState, figures: LiveFigures) -> None:
        self._state = state
        self._figures = figures
        self._tree = CacheTreeSnapshot(state.engine)
        self._streams = LiveStreams()
        self._files = PageFiles(is_on=state.options.page)

    async def models(self, request: Request) -> Response:
        """List the served model."""
        models = [self.card(name) for name in self._state.loaded_model.names]
        is_anthropic = VERSION_HEADER in request.headers
        return json_response(model_list_page(models) if is_anthropic else responses.model_list_response(models))

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
        name = request.path_params["model_id"]
        check_model_name(name, self._state.loaded_model)
        model = self.card(name)
        return json_response(anthropic_model_from_openai(model) if VERSION_HEADER in request.headers else model)

    async def tokenize(self, request: Request) -> Response:
        """Convert a text or a conversation to token ids."""
        model = self._state.loaded_model
        principal = access_record_of_scope(request.scope).principal
        tokenizer = model.tokenizer.for_domain(principal.tenant, principal.domain)

        def work(data: bytes) -> responses.Json:
            body = parse_tokenize(parse_json_object(data, model.bounds.max_numbers), model.bounds)
            check_model_name(body.model, model)
            token_ids = _tokenized(body, tokenizer, model.bounds)
            return responses.tokenize_response(
                token_ids, model.tokenizer, model.bounds.max_model_len, with_texts=body.return_token_strs
            )

        answer = await run_with_body(self._state, request, work, renders=True)
        if answer["count"] <= SLICE_ITEMS:
            return json_response(answer)
        return StreamingResponse(
            self._state.turns.yield_pieces(iter_json_pieces(answer)), media_type="application/json"
        )

    async def detokenize(self, request: Request) -> Response:
        """Convert token ids to text."""
        model = self._state.loaded_model

        def work(data: bytes) -> responses.Json:
            body = parse_detokenize(parse_json_object(data, model.bounds.max_numbers), model.bounds)
            check_model_name(body.model, model)
            return responses.detokenization_response(model.tokenizer.decode(body.token_ids))

        return json_response(await run_with_body(self._state, request, work))

    async def health(self, request: Request) -> Response:
        """Readiness: 200 if requests are admitted; 503 while loading or draining, or with a dead or silent engine."""
        self._state.check_ready()
        return json_response({"status": "ok"})

    async def load(self, request: Request) -> Response:
        """The number of requests in flight, under vLLM's name."""
        return json_response({"server_load": self._state.num_jobs})

    async def tokenizer_info(self, request: Request) -> Response:
        """The special tokens and the chat template of the tokenizer."""
        model = self._state.loaded_model
        return json_response(responses.tokenizer_info_response(model.tokenizer, model.bounds.max_model_len))

    async def livez(self, request: Request) -> Response:
        """Liveness: 200 if the engine is alive (also while busy, loading or draining), else 503."""
        if not self._state.is_alive(time.monotonic()):
            raise HttpError(503, "the engine has not been heard for too long", code="engine_dead")
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the Prometheus text format, or in OpenMetrics' if that is accepted. `?load`: of the load alone."""
        principal = access_record_of_scope(request.scope).principal
        metrics = self._state.loaded_model.metrics
        if "load" in request.query_params:
            return Response(metrics.render_load_metrics(), media_type=metrics_content_type(""))
        sees_all = may_see_store(principal)
        accept = request.headers.get("accept", "") if sees_all else ""  # exemplars are of single requests
        text = metrics.expose(accept, with_tenants=principal.is_admin, with_store=sees_all)
        return Response(text, media_type=metrics_content_type(accept))

    async def version(self, request: Request) -> Response:
        """The version of the server."""
        return json_response({"version": __version__})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Reset the prefix cache; ?pinned=true: prefixes too; ?reset_external=true: the store too. 503 if busy."""
        self._state.check_ready()
        argument = {"pinned": _switch(request, "pinned"), "external": _switch(request, "reset_external")}
        if not await self._state.engine.call("reset_prefix_cache", argument):
            message = "requests are running, and they hold cached blocks; try again when they are done"
            raise HttpError(503, message, code="busy", headers={"retry-after": "1"})
        return json_response({"status": "ok"})

    async def list_prefixes(self, request: Request) -> Response:
        """List the pinned prefixes. Administrators only."""
        self._state.check_ready()
        return json_response({"object": "list", "data": await self._state.prefixes.list_prefixes()})

    async def add_prefix(self, request: Request) -> Response:
        """Pin a prefix and respond when it is computed. Administrators only."""
        model = self._state.check_ready()
        body = await run_with_body(
            self._state,
            request,
            lambda data: parse_prefix(parse_json_object(data, model.bounds.max_numbers), model.bounds),
        )
        return json_response(await self._state.prefixes.add(body, model.tokenizer, model.bounds), 201)

    async def remove_prefix(self, request: Request) -> Response:
        """Unpin a prefix: its blocks become evictable. Administrators only."""
        self._state.check_ready()
        name = request.path_params["name"]
        if not await self._state.prefixes.remove(name):
            message = f"there is no prefix {safe_repr(name)}; GET /v1/prefixes lists them"
            raise HttpError(404, message, code="prefix_not_found", param="name")
        return json_response({"name": name, "deleted": True})

    async def cache_stats(self, request: Request) -> Response:
        """Counters of the prefix cache since the start, and its current state."""
        return json_response(await fetch_cache_stats_json(self._state, access_record_of_scope(request.scope).principal))

    async def explain_request(self, request: Request) -> Response:
        """Explain why a recent request (`request_id`: the id of its response) had no more prefix cache hits."""
        return json_response(await reuse_explanation_response(self._state, request))

    async def recent_requests(self, request: Request) -> Response:
        """List the caller's own recent request bodies (`last`: how many). Empty unless the server keeps them."""
        return json_response(await recent_bodies_response(self._state, request))

    async def cache_tree(self, request: Request) -> Response:
        """The published blocks of the prefix cache as a tree of runs (`max_runs`: how many, the largest first)."""
        model, principal = self._state.check_ready(), access_record_of_scope(request.scope).principal
        max_runs = parse_positive_query_count(
            "max_runs", request.query_params.get("max_runs", str(DEFAULT_RUNS)), MAX_RUNS
        )
        return json_response(await self._tree.tree_json(model, principal, max_runs))

    async def live(self, request: Request) -> Response:
        """A stream of figures, one frame each second (`frames`: how many)."""
        principal = access_record_of_scope(request.scope).principal
        return await self._streams.stream_response(
            request, principal.label, lambda: self._figures.live_frame(principal)
        )

    async def page(self, request: Request) -> Response:
        """The files of the live page."""
        return self._files.file_response(request)

    async def explain_prompt(self, request: Request) -> Response:
        """Explain why a completion or chat with this body would have no more prefix cache hits."""
        return json_response(await reuse_explanation_response(self._state, request))

    def card(self, name: str | None = None) -> responses.Json:
        """Return the object of the served model under one of its names, by default the first."""
        model = self._state.loaded_model
        info = model.info
        return responses.model_object(
            name or model.name,
            model.created,
            model.bounds.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_batched_tokens=info.max_num_batched_tokens,
            tokenizer=model.tokenizer.digest if self._state.options.max_body_bytes >= MAX_HANDED_BYTES else "",
            defaults=model.bounds.defaults,
            exceptions=info.exceptions,
        )


def _tokenized(body: TokenizeRequest, tokenizer: Tokenizer, bounds: RequestBounds) -> "array[int]":
    """Return the token ids of a text, or of a conversation rendered as one prompt."""
    text, special = body.prompt or "", body.add_special_tokens is None or body.add_special_tokens
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        messages, tools, _ = chat_for_template(
            body.messages, make_tool_params(body.tools, None, True), tokenizer, bounds
        )
        text = tokenizer.render_chat_text(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools,
        )
    return encode_prompt(text, tokenizer, bounds, special) if text else array("i")


def _switch(request: Request, name: str) -> bool:
    """Return a boolean query parameter, by default False. Raises InvalidRequestError."""
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise_invalid_value(name, f"is {safe_repr(value)}", "it must be true or false")
    return value == "true"
