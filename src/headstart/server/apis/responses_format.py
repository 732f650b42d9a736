"""/v1/responses: preparation of requests from items and stored responses, and answers as response objects."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from headstart.http.http_errors import HttpError, rendered
from headstart.http.sse import PING, named_event
from headstart.openai.bounds import Bounds
from headstart.openai.engine_requests import Origin, chat_requests, tokenizer_of
from headstart.openai.request_json import json_value
from headstart.openai.responses import Json
from headstart.openai.responses_api.call_forms import ChatTool, called_tools
from headstart.openai.responses_api.input_items import read_item
from headstart.openai.responses_api.item_references import REFERENCE, output_item, referenced_items, response_of
from headstart.openai.responses_api.response_events import ResponseEvents, error_data
from headstart.openai.responses_api.response_memory import Conversation, ResponseMemory, StoredResponse, Turn
from headstart.openai.responses_api.response_objects import ResponseShape, echo_of, response_usage
from headstart.openai.responses_api.responses_request import ResponsesRequest, parse_responses, translate_responses
from headstart.openai.text.generation import Delta
from headstart.server.apis.answer_format import ApiRequest, Head, ServedApi, diagnosis_of
from headstart.server.apis.choice_apis import check_model
from headstart.server.generation_job import GenerationJob
from headstart.server.request_limits import object_bytes
from headstart.server.server_state import Model


@dataclass(frozen=True, slots=True)
class Storing:
    """Where a response is stored, and what is stored beside its output. `tenant`: its owner."""

    memory: ResponseMemory
    tenant: str
    items: bytes  # JSON of the input
    previous: Turn | None

    @property
    def num_bytes(self) -> int:
        """The memory that it holds until the response is stored: the earlier turns may be removed meanwhile."""
        return len(self.items) + (0 if self.previous is None else self.previous.chain_bytes)


class ResponsesFormat:
    """The answer of one job as a response object, whole or as events; stored when it is finished."""

    ping = PING

    def __init__(
        self, echo: Json, storing: Storing | None, tools: Mapping[str, ChatTool], job: GenerationJob, head: Head
    ) -> None:
        """`echo`: the fields of the request that the response repeats. `storing` None: it is not stored.

        `tools`: those with calls of their own form.
        """
        self._job = job
        self._storing = storing
        shape = ResponseShape(head.request_id, head.created, head.model.name, echo, tools)
        self._events = ResponseEvents(shape, generates=not job.params.prewarm)
        self._is_open = False

    def collect(self, choice: int, delta: Delta) -> None:
        """Process a delta of an answer that is sent whole."""
        self._events.parts.add(delta)

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished response, and store it."""
        response = self._diagnosed(self._events.response(self._usage()))
        self._store(response)
        return response

    def opening(self) -> bytes:
        """Return response.created and response.in_progress."""
        self._is_open = True
        return _encoded(self._events.opening())

    def events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yield the events of a delta."""
        yield _encoded(self._events.add(delta))

    def closing(self) -> bytes:
        """Return the last events, and store the response: clients may continue it at once."""
        events, response = self._events.closing(self._usage())
        self._store(self._diagnosed(response))
        return _encoded(events)

    def failure(self, error: Exception) -> bytes:
        """Return response.failed, or an error event if the stream has no response yet."""
        status, body, _ = rendered(error)
        details = body["error"]
        if not self._is_open:
            return _encoded([error_data(body)])
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        return _encoded(self._events.failed({"code": code, "message": details["message"]}))

    def _store(self, response: Json) -> None:
        storing = self._storing
        if storing is not None:
            stored = StoredResponse(response, json_value(storing.items))
            storing.memory.add(storing.tenant, stored, time.monotonic(), storing.previous)

    def _usage(self) -> Json:
        return response_usage(self._job.usage(), self._events.parts)

    def _diagnosed(self, response: Json) -> Json:
        """Add the diagnostics of the prompt cache to a response, before its usage, and return it."""
        job, diagnosis = self._job, self._job.diagnosis
        found = None if diagnosis is None else diagnosis.found(job.breakdown.cached, job.num_evicted_tokens)
        if found is not None:
            usage = response.pop("usage")
            response["prompt_cache_diagnostics"] = found.openai()
            response.update(job.diagnostics(), usage=usage)
        return response


def responses_api(memory: ResponseMemory) -> ServedApi:
    """Return the Responses API of a server that stores responses in `memory`."""

    def prepare(values: Mapping[str, Any], model: Model, origin: Origin) -> ApiRequest:
        fields = parse_responses(values, model.bounds)
        check_model(fields.model, model)
        fields = _with_referenced_items(fields, memory, origin.tenant, model.bounds)
        before = _conversation(memory, origin.tenant, fields.previous_response_id)
        translation = translate_responses(fields, values, before.items if before is not None else ())
        with translation.named():
            body = translation.parse(model.bounds)
            tokenizer = tokenizer_of(model.tokenizer, origin, body.params)
            params, requests = chat_requests(body, tokenizer, model.bounds, origin)
        last = before.last if before is not None else None
        items = msgspec.json.encode(fields.input)
        storing = Storing(memory, origin.tenant, items, last) if fields.store else None
        echo = echo_of(fields, params.sampling)
        prompt, names = requests[0].prompt, translation.message_names
        return ApiRequest(
            params=params,
            requests=requests,
            answer=partial(ResponsesFormat, echo, storing, called_tools(fields.tools)),
            num_extra_bytes=object_bytes(echo) + (0 if storing is None else storing.num_bytes),
            named=translation.without_values().named,
            diagnosis=diagnosis_of(model, origin, params, prompt, body.messages, names),
            messages=body.messages,
        )

    def num_stored_bytes(values: Mapping[str, Any], tenant: str) -> int:
        referenced = {response_of(item_id) for item_id in referenced_items(values.get("input"))}
        ids = {name for name in (values.get("previous_response_id"), *referenced) if isinstance(name, str)}
        now = time.monotonic()
        return sum(memory.conversation_bytes(tenant, name, now) for name in ids)

    return ServedApi("resp_", prepare, num_stored_bytes=num_stored_bytes)


def _conversation(memory: ResponseMemory, tenant: str, response_id: str | None) -> Conversation | None:
    """Return the stored conversation. Raises HttpError 404 for an id that is unknown, another tenant's or removed."""
    if response_id is None:
        return None
    found = memory.history(tenant, response_id, time.monotonic())
    if found is None:
        raise response_not_found(response_id, "previous_response_id")
    return found


def _with_referenced_items(
    fields: ResponsesRequest, memory: ResponseMemory, tenant: str, bounds: Bounds
) -> ResponsesRequest:
    """Return the request with stored items in place of references. Raises HttpError 404 for items not stored here."""
    responses: dict[str, Json] = {}
    items: list[Json] = []
    for index, item in enumerate(fields.input):
        if item["type"] != REFERENCE:
            items.append(item)
            continue
        name, item_id = f"input[{index}]", item["id"]
        response_id = response_of(item_id) or ""
        if response_id not in responses:
            stored = memory.get(tenant, response_id, time.monotonic())
            responses[response_id] = {"output": []} if stored is None else stored.response
        found = output_item(responses[response_id], item_id)
        if found is None:
            raise item_not_found(item_id, f"{name}.id")
        items.append(read_item(name, found, bounds))
    return fields if not responses else fields.model_copy(update={"input": items})


def item_not_found(item_id: str, param: str) -> HttpError:
    """Return the error for a reference to an item that is not stored here."""
    return HttpError(
        404,
        f"item {item_id[:128]!a} is not stored here: it was never, its response is too old, or it was removed to make "
        "room; send the item itself",
        code="item_not_found",
        param=param,
    )


def response_not_found(response_id: str, param: str) -> HttpError:
    """Return the error for a response that is not stored here."""
    return HttpError(
        404,
        f"response {response_id[:128]!a} is not stored here: it was never, it is too old, or it was removed to make "
        "room; send the whole conversation as input",
        code="response_not_found",
        param=param,
    )


def _encoded(events: list[Json]) -> bytes:
    return b"".join(named_event(event) for event in events)
