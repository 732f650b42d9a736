"""/v1/responses: preparation of requests from items and stored responses, and answers as response objects."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from headstart.apis import answer_schemas, api_table
from headstart.http.http_errors import HttpError, error_status_body_headers
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json
from headstart.openai.responses_api.call_forms import ChatTool, special_tools_by_function
from headstart.openai.responses_api.input_items import (
    REFERENCE,
    find_output_item_by_id,
    read_input_item,
    referenced_item_ids,
    response_id_of_item,
)
from headstart.openai.responses_api.response_events import ResponseEventBuilder
from headstart.openai.responses_api.response_memory import (
    ConversationTurn,
    StoredConversation,
    StoredResponse,
    StoredResponses,
)
from headstart.openai.responses_api.response_objects import ResponseTemplate, echoed_request_fields, response_usage
from headstart.openai.responses_api.responses_request import (
    ResponsesRequest,
    parse_responses,
    responses_to_chat_request,
)
from headstart.server.apis.answer_format import (
    AnswerIdentity,
    PartsAnswerFormatter,
    ServedApi,
    TranslatedChat,
    check_model_name,
)
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.request_limits import bytes_of_json_value
from headstart.server.server_state import ServedModel


@dataclass(frozen=True, slots=True)
class ResponseStorageContext:
    """Where a response is stored, and what is stored beside its output. `tenant`: its owner."""

    memory: StoredResponses
    tenant: str
    items: bytes  # JSON of the input
    previous: ConversationTurn | None

    @property
    def held_bytes(self) -> int:
        """The memory that it holds until the response is stored: the earlier turns may be removed meanwhile."""
        return len(self.items) + (0 if self.previous is None else self.previous.chain_bytes)


def make_responses_api(memory: StoredResponses) -> ServedApi:
    """Return the Responses API of a server that stores responses in `memory`."""

    def prepare(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
        fields = parse_responses(values, model.bounds)
        check_model_name(fields.model, model)
        fields = _with_referenced_items(fields, memory, origin.tenant, model.bounds)
        before = _conversation(memory, origin.tenant, fields.previous_response_id)
        translation = responses_to_chat_request(fields, values, before.items if before is not None else ())
        chat = TranslatedChat.from_request(translation, model, origin)
        last = before.last if before is not None else None
        items = msgspec.json.encode(fields.input)
        storing = ResponseStorageContext(memory, origin.tenant, items, last) if fields.store else None
        echo = echoed_request_fields(fields, chat.params.sampling)
        num_extra_bytes = bytes_of_json_value(echo) + (0 if storing is None else storing.held_bytes)
        form = partial(_format, echo, storing, special_tools_by_function(fields.tools))
        return chat.to_api_request(translation, form, num_extra_bytes)

    def num_stored_bytes(values: Mapping[str, Any], tenant: str) -> int:
        referenced = {response_id_of_item(item_id) for item_id in referenced_item_ids(values.get("input"))}
        ids = {name for name in (values.get("previous_response_id"), *referenced) if isinstance(name, str)}
        now = time.monotonic()
        return sum(memory.conversation_bytes(tenant, name, now) for name in ids)

    return ServedApi(
        api=api_table.RESPONSES,
        id_prefix="resp_",
        prepare=prepare,
        num_stored_bytes=num_stored_bytes,
        name="create_response",
        summary="Generate a response (OpenAI's Responses API).",
        answers=answer_schemas.RESPONSES,
        bodies=(ResponsesRequest,),
    )


def _format(
    echo: Json,
    storing: ResponseStorageContext | None,
    tools: Mapping[str, ChatTool],
    job: GenerationJob,
    head: AnswerIdentity,
) -> PartsAnswerFormatter:
    """Return the format of the answer of one job: a response object, which is stored when it is finished.

    `echo`: the fields of the request that the response repeats. `storing` None: it is not stored. `tools`: those with
    calls of their own form.
    """
    shape = ResponseTemplate(head.request_id, head.created, head.model.name, echo, tools)
    events = ResponseEventBuilder(shape, generates=not job.params.prewarm)

    def stored(response: Json) -> Json:
        """Add the diagnostics of the prompt cache before the usage, store the response, and return it."""
        diagnosis = job.diagnosis
        found = None if diagnosis is None else diagnosis.cache_diagnosis(job.breakdown.num_cached, job.evicted.total())
        if found is not None:
            usage = response.pop("usage")
            response["prompt_cache_diagnostics"] = found.openai_json()
            response.update(job.diagnostics(), usage=usage)
        if storing is not None:
            kept = StoredResponse(response, parse_json(storing.items))
            storing.memory.add(storing.tenant, kept, time.monotonic(), storing.previous)
        return response

    def last() -> list[Json]:
        objects, response = events.closing_events_and_response(response_usage(job.usage(), events.parts))
        stored(response)  # before it is sent: clients may continue it at once
        return objects

    def failed(error: Exception) -> list[Json] | None:
        if not events.num_events:  # the stream has no response yet
            return None
        status, body, _ = error_status_body_headers(error)
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        return events.failure_events({"code": code, "message": body["error"]["message"]})

    return PartsAnswerFormatter(
        api=api_table.RESPONSES,
        parts=events.parts,
        finished=lambda: stored(events.finished_response(response_usage(job.usage(), events.parts))),
        first=events.opening_events,
        added=events.add,
        last=last,
        failed=failed,
    )


def _conversation(memory: StoredResponses, tenant: str, response_id: str | None) -> StoredConversation | None:
    """Return the stored conversation. Raises HttpError 404 for an id that is unknown, another tenant's or removed."""
    if response_id is None:
        return None
    found = memory.history(tenant, response_id, time.monotonic())
    if found is None:
        raise response_not_found_error(response_id, "previous_response_id")
    return found


def _with_referenced_items(
    fields: ResponsesRequest, memory: StoredResponses, tenant: str, bounds: RequestBounds
) -> ResponsesRequest:
    """Return the request with stored items in place of references. Raises HttpError 404 for items not stored here."""
    responses: dict[str, Json] = {}
    items: list[Json] = []
    for index, item in enumerate(fields.input):
        if item["type"] != REFERENCE:
            items.append(item)
            continue
        name, item_id = f"input[{index}]", item["id"]
        response_id = response_id_of_item(item_id) or ""
        if response_id not in responses:
            stored = memory.get(tenant, response_id, time.monotonic())
            responses[response_id] = {"output": []} if stored is None else stored.response
        found = find_output_item_by_id(responses[response_id], item_id)
        if found is None:
            raise item_not_found_error(item_id, f"{name}.id")
        items.append(read_input_item(name, found, bounds))
    return fields if not responses else fields.model_copy(update={"input": items})


def item_not_found_error(item_id: str, param: str) -> HttpError:
    """Return the error for a reference to an item that is not stored here."""
    return HttpError(
        404,
        f"item {item_id[:128]!a} is not stored here: it was never, its response is too old, or it was removed to make "
        "room; send the item itself",
        code="item_not_found",
        param=param,
    )


def response_not_found_error(response_id: str, param: str) -> HttpError:
    """Return the error for a response that is not stored here."""
    return HttpError(
        404,
        f"response {response_id[:128]!a} is not stored here: it was never, it is too old, or it was removed to make "
        "room; send the whole conversation as input",
        code="response_not_found",
        param=param,
    )
