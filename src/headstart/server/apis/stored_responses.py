"""GET and DELETE /v1/responses/{id}, and the list of a stored response's input items."""

import time

from starlette.requests import Request

from headstart.core.errors import InvalidRequestError
from headstart.http.access_record import record_of
from headstart.openai.responses import Json
from headstart.openai.responses_api.response_memory import ResponseMemory, StoredResponse
from headstart.openai.responses_api.response_objects import deleted, input_item, item_list
from headstart.openai.value_checks import shown, unsupported
from headstart.server.apis.responses_format import response_not_found

MAX_LISTED = 100
DEFAULT_LISTED = 20


def retrieve(memory: ResponseMemory, request: Request) -> Json:
    """Return a stored response. Raises HttpError 404."""
    if request.query_params.get("stream", "false") != "false":
        unsupported("stream", "a stored response is sent whole; leave it out")
    return _stored(memory, request).response


def delete(memory: ResponseMemory, request: Request) -> Json:
    """Remove a stored response and return the confirmation. Raises HttpError 404."""
    response_id = request.path_params["response_id"]
    if not memory.remove(record_of(request.scope).principal.tenant, response_id, time.monotonic()):
        raise response_not_found(response_id, "response_id")
    return deleted(response_id)


def input_items(memory: ResponseMemory, request: Request) -> Json:
    """Return the input items of a stored response, newest first unless `order=asc`. Raises HttpError 404."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_LISTED))
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {shown(order)}; it must be asc or desc", param="order")
    if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:4]) <= MAX_LISTED:
        raise InvalidRequestError(f"limit is {shown(limit)}; it must be between 1 and {MAX_LISTED}", param="limit")
    response_id = request.path_params["response_id"]
    items = _stored(memory, request).items
    listed = [input_item(item, response_id, index) for index, item in enumerate(items)]
    if order == "desc":
        listed.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidRequestError(f"after is {shown(after)}; no item has this id", param="after")
        listed = listed[ids.index(after) + 1 :]
    return item_list(listed[: int(limit)], has_more=len(listed) > int(limit))


def _stored(memory: ResponseMemory, request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    found = memory.get(record_of(request.scope).principal.tenant, response_id, time.monotonic())
    if found is None:
        raise response_not_found(response_id, "response_id")
    return found
