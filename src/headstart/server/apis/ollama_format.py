"""Ollama's API at a server: preparation of requests, answers as lines of JSON, and the routes beside."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headstart import __version__
from headstart.apis.api import LINES
from headstart.http.http_errors import json_response, rendered
from headstart.ollama.ollama_answers import Durations, OllamaAnswer, encoded, error_body, model_description, model_list
from headstart.ollama.ollama_request import is_raw, read_chat, read_generate
from headstart.openai.engine_requests import (
    Origin,
    build_requests,
    chat_prompt,
    encode_completion,
    placed_params,
    tokenizer_of,
    with_chat_output,
)
from headstart.openai.generation_params import shortened
from headstart.openai.request_bodies import parse_completion
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json
from headstart.openai.text.generation import Delta
from headstart.openai.tools.chat_format import chat_format
from headstart.openai.value_checks import unsupported
from headstart.server.apis.answer_format import ApiRequest, Head, ServedApi, diagnosis_of
from headstart.server.apis.choice_apis import check_model
from headstart.server.apis.generation_routes import run_with_body
from headstart.server.generation_job import GenerationJob
from headstart.server.inference import infer
from headstart.server.server_state import Model, ServerState


class OllamaFormat:
    """The answer of one job, whole or as lines."""

    ping = b""  # clients parse every line

    def __init__(self, is_chat: bool, job: GenerationJob, head: Head) -> None:
        self._job = job
        self._answer = OllamaAnswer(head.model.name, head.created, is_chat=is_chat)

    def collect(self, choice: int, delta: Delta) -> None:
        """Process a delta of an answer that is sent whole."""
        self._answer.add(delta)

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer."""
        return self._answer.whole(self._job.usage(), self._durations())

    def opening(self) -> bytes:
        """Return nothing: each line is complete."""
        return b""

    def events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yield the lines of a delta."""
        yield encoded(self._answer.add(delta))

    def closing(self) -> bytes:
        """Return the last lines."""
        return encoded(self._answer.closing(self._job.usage(), self._durations()))

    def failure(self, error: Exception) -> bytes:
        """Return the line of an error."""
        status, body, _ = rendered(error)
        return encoded([error_body(status, body, self._job.record.request_id)])

    def _durations(self) -> Durations:
        record, now = self._job.record, time.monotonic()
        first = now if record.first_token_at is None else record.first_token_at
        scheduled = record.arrival if record.scheduled_at is None else record.scheduled_at
        return Durations(now - record.arrival, first - scheduled, now - first)


def _prepare_chat(values: Mapping[str, Any], model: Model, origin: Origin, *, is_chat: bool) -> ApiRequest:
    bounds = model.bounds
    chat = read_chat(values, bounds) if is_chat else read_generate(values, bounds)
    with chat.named():
        body = chat.parse(bounds)
        check_model(body.model, model)
        tokenizer = tokenizer_of(model.tokenizer, origin, body.params)
        rendered = chat_prompt(body, tokenizer, bounds)
        prompt = rendered.token_ids
        params = shortened(placed_params(body.params, rendered), len(prompt), bounds)
        params = with_chat_output(params, prompt, tokenizer, bounds)
        requests = build_requests([prompt], params, bounds, origin)
    diagnosis = diagnosis_of(model, origin, params, prompt, body.messages, chat.message_names)
    form, named = partial(OllamaFormat, is_chat), chat.without_values().named
    return ApiRequest(params, requests, form, named=named, diagnosis=diagnosis, messages=body.messages)


def _prepare_generate(values: Mapping[str, Any], model: Model, origin: Origin) -> ApiRequest:
    if not is_raw(values):
        return _prepare_chat(values, model, origin, is_chat=False)
    bounds = model.bounds
    read = read_generate(values, bounds)
    with read.named():
        body = parse_completion(read.values, bounds)
        check_model(body.model, model)
        prompts = encode_completion(body, tokenizer_of(model.tokenizer, origin, body.params), bounds)
        params = shortened(body.params, len(prompts[0]), bounds)
        requests = build_requests(prompts, params, bounds, origin)
    diagnosis = diagnosis_of(model, origin, params, prompts[0], None)
    messages = [{"role": "user", "content": read.values["prompt"]}]
    return ApiRequest(params, requests, partial(OllamaFormat, False), diagnosis=diagnosis, messages=messages)


OLLAMA_CHAT = ServedApi("ollama-", partial(_prepare_chat, is_chat=True), media_type=LINES)
OLLAMA_GENERATE = ServedApi("ollama-", _prepare_generate, media_type=LINES)


class OllamaRoutes:
    """The handlers of Ollama's routes. `card` returns the object of the model in /v1/models."""

    def __init__(self, state: ServerState, card: Callable[[], Json]) -> None:
        self._state = state
        self._card = card

    def table(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Return methods, paths and handlers."""
        return [
            ("POST", "/api/chat", self._chat),
            ("POST", "/api/generate", self._generate),
            ("POST", "/api/show", self._show),
            ("GET", "/api/tags", self._tags),
            ("GET", "/api/ps", self._tags),
            ("GET", "/api/version", self._version),
            *(("POST", path, self._no_embeddings) for path in ("/api/embed", "/api/embeddings", "/v1/embeddings")),
        ]

    async def _chat(self, request: Request) -> Response:
        return await infer(self._state, OLLAMA_CHAT, request)

    async def _generate(self, request: Request) -> Response:
        return await infer(self._state, OLLAMA_GENERATE, request)

    async def _show(self, request: Request) -> Response:
        model = self._state.loaded_model

        def work(data: bytes) -> None:
            values = parse_json(data, model.bounds.max_numbers)
            name = values.get("model") or values.get("name")
            check_model(name if isinstance(name, str) else None, model)

        await run_with_body(self._state, request, work)
        bounds, template = model.bounds, model.tokenizer.chat_template or ""
        form = chat_format(template, bounds.tool_call_parser, bounds.reasoning_parser)
        has = {"completion": True, "tools": form.family is not None, "thinking": form.reasoning is not None}
        capabilities = [name for name, is_there in has.items() if is_there]
        return json_response(model_description(self._card(), capabilities, template))

    async def _tags(self, request: Request) -> Response:
        return json_response(model_list([self._card()]))

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _no_embeddings(self, request: Request) -> Response:
        unsupported("embeddings", "this server generates text only; use a server with an embedding model")
