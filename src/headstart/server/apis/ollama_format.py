"""Ollama's API at a server: preparation of requests, answers as lines of JSON, and the routes beside it."""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headstart import __version__
from headstart.apis import ollama_api
from headstart.http.http_errors import json_response
from headstart.ollama.ollama_answers import (
    OllamaAnswerBuilder,
    RequestDurations,
    ollama_model_description,
    ollama_model_list,
)
from headstart.ollama.ollama_request import is_raw_completion, translate_chat_body, translate_generate_body
from headstart.openai.engine_requests import RequestOrigin, build_requests, encode_completion, tokenizer_for_request
from headstart.openai.generation_params import lower_max_tokens
from headstart.openai.request_bodies import parse_completion
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import Json
from headstart.openai.tools.chat_format import find_chat_format
from headstart.openai.value_checks import raise_unsupported
from headstart.server.apis.answer_format import (
    AnswerIdentity,
    PartsAnswerFormatter,
    ServedApi,
    TranslatedChat,
    check_model_name,
    make_answer_diagnosis,
)
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.inference import run_with_body
from headstart.server.server_state import ServedModel, ServerState


def _format(is_chat: bool, job: GenerationJob, head: AnswerIdentity) -> PartsAnswerFormatter:
    """Return the format of the answer of one job: lines, each of them complete."""
    answer = OllamaAnswerBuilder(head.model.name, head.created, is_chat=is_chat)

    def durations() -> RequestDurations:
        record, now = job.record, time.monotonic()
        first = now if record.first_token_at is None else record.first_token_at
        scheduled = record.arrival if record.scheduled_at is None else record.scheduled_at
        return RequestDurations(now - record.arrival, first - scheduled, now - first)

    return PartsAnswerFormatter(
        api=ollama_api.OLLAMA_CHAT,
        parts=answer.parts,
        finished=lambda: answer.whole(job.usage(), durations()),
        added=answer.add,
        last=lambda: answer.closing_events(job.usage(), durations()),
    )


def _prepare_chat(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
    chat = translate_chat_body(values, model.bounds)
    return TranslatedChat.from_request(chat, model, origin, shortens=True).to_api_request(chat, partial(_format, True))


def _prepare_generate(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
    bounds = model.bounds
    read = translate_generate_body(values, bounds)
    if not is_raw_completion(values):
        return TranslatedChat.from_request(read, model, origin, shortens=True).to_api_request(
            read, partial(_format, False)
        )
    with read.renaming_error_fields():
        body = parse_completion(read.values, bounds)
        check_model_name(body.model, model)
        prompts = encode_completion(body, tokenizer_for_request(model.tokenizer, origin, body.params), bounds)
        params = lower_max_tokens(body.params, len(prompts[0]), bounds)
        requests = build_requests(prompts, params, bounds, origin)
    diagnosis = make_answer_diagnosis(model, origin, params, requests[0], None)
    messages = [{"role": "user", "content": read.values["prompt"]}]
    return ApiRequest(params, requests, partial(_format, False), diagnosis=diagnosis, messages=messages)


OLLAMA_CHAT = ServedApi(api=ollama_api.OLLAMA_CHAT, id_prefix="ollama-", prepare=_prepare_chat)
OLLAMA_GENERATE = ServedApi(api=ollama_api.OLLAMA_GENERATE, id_prefix="ollama-", prepare=_prepare_generate)


class OllamaRoutes:
    """The handlers of Ollama's routes. `card` returns the object of the model in /v1/models."""

    def __init__(self, state: ServerState, card: Callable[[], Json]) -> None:
        self._state = state
        self._card = card

    def table(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Return methods, paths and handlers."""
        return [
            ("POST", "/api/show", self._show),
            ("GET", "/api/tags", self._tags),
            ("GET", "/api/ps", self._tags),
            ("GET", "/api/version", self._version),
            *(("POST", path, self._no_embeddings) for path in ("/api/embed", "/api/embeddings", "/v1/embeddings")),
        ]

    async def _show(self, request: Request) -> Response:
        model = self._state.loaded_model

        def work(data: bytes) -> None:
            values = parse_json_object(data, model.bounds.max_numbers)
            name = values.get("model") or values.get("name")
            check_model_name(name if isinstance(name, str) else None, model)

        await run_with_body(self._state, request, work)
        bounds, template = model.bounds, model.tokenizer.chat_template or ""
        form = find_chat_format(template, bounds.tool_call_parser, bounds.reasoning_parser)
        has = {"completion": True, "tools": form.family is not None, "thinking": form.reasoning is not None}
        capabilities = [name for name, is_there in has.items() if is_there]
        return json_response(ollama_model_description(self._card(), capabilities, template))

    async def _tags(self, request: Request) -> Response:
        return json_response(ollama_model_list([self._card()]))

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _no_embeddings(self, request: Request) -> Response:
        raise_unsupported("embeddings", "this server generates text only; use a server with an embedding model")
