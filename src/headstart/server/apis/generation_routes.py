"""The generation APIs of a server, and the routes beside them: stored responses, and counts of tokens."""

import time

from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import InvalidRequestError
from headstart.http.access_record import access_record_of_scope
from headstart.http.http_errors import json_response
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import Json
from headstart.openai.responses_api.response_memory import StoredResponse, StoredResponses
from headstart.openai.responses_api.response_objects import deletion_response, item_list_response, listed_input_item
from headstart.openai.value_checks import parse_positive_query_count, raise_unsupported, safe_repr
from headstart.server.apis.answer_format import ServedApi
from headstart.server.apis.choice_apis import CHAT, COMPLETIONS
from headstart.server.apis.messages_format import MESSAGES, count_tokens_response
from headstart.server.apis.ollama_format import OLLAMA_CHAT, OLLAMA_GENERATE
from headstart.server.apis.responses_format import make_responses_api, response_not_found_error
from headstart.server.inference import run_with_body
from headstart.server.server_state import ServerState

MAX_LISTED = 100
DEFAULT_LISTED = 20


def served_apis(memory: StoredResponses) -> tuple[ServedApi, ...]:
    """Return all generation APIs; `memory`: where responses are stored."""
    return COMPLETIONS, CHAT, make_responses_api(memory), MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE


class GenerationRoutes:
    """The route handlers. Each may raise HttpError and HeadstartError. Their docstrings are the OpenAPI summaries."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._memory = state.responses

    async def retrieve_response(self, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise_unsupported("stream", "a stored response is sent whole; leave it out")
        return json_response(self._stored(request).response)

    async def delete_response(self, request: Request) -> Response:
        """Delete a stored response."""
        response_id = request.path_params["response_id"]
        if not self._memory.remove(
            access_record_of_scope(request.scope).principal.tenant, response_id, time.monotonic()
        ):
            raise response_not_found_error(response_id, "response_id")
        return json_response(deletion_response(response_id))

    async def input_items(self, request: Request) -> Response:
        """List the input items of a stored response."""  # the newest first unless `order=asc`
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order is {safe_repr(order)}; it must be asc or desc", param="order")
        limit = parse_positive_query_count("limit", query.get("limit", str(DEFAULT_LISTED)), MAX_LISTED)
        response_id, items = request.path_params["response_id"], self._stored(request).items
        listed = [listed_input_item(item, response_id, index) for index, item in enumerate(items)]
        if order == "desc":
            listed.reverse()
        after = query.get("after")
        if after is not None:
            ids = [item["id"] for item in listed]
            if after not in ids:
                raise InvalidRequestError(f"after is {safe_repr(after)}; no item has this id", param="after")
            listed = listed[ids.index(after) + 1 :]
        return json_response(item_list_response(listed[:limit], has_more=len(listed) > limit))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation (Anthropic's Messages API)."""
        model, principal = self._state.loaded_model, access_record_of_scope(request.scope).principal
        origin = RequestOrigin("count", domain=principal.domain, tenant=principal.tenant)

        def work(data: bytes) -> Json:
            return count_tokens_response(parse_json_object(data, model.bounds.max_numbers), model, origin)

        return json_response(await run_with_body(self._state, request, work, renders=True))

    def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        found = self._memory.get(access_record_of_scope(request.scope).principal.tenant, response_id, time.monotonic())
        if found is None:
            raise response_not_found_error(response_id, "response_id")
        return found
