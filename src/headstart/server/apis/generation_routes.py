"""Route handlers of the generation APIs and of stored responses."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headstart.http.access_record import record_of
from headstart.http.http_errors import json_response
from headstart.http.spooled_body import SpooledBody, in_memory
from headstart.openai.engine_requests import Origin
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json
from headstart.server.apis import stored_responses
from headstart.server.apis.choice_apis import CHAT, COMPLETIONS
from headstart.server.apis.messages_format import MESSAGES, count_tokens
from headstart.server.apis.responses_format import responses_api
from headstart.server.inference import infer
from headstart.server.server_state import ServerState

_Result = TypeVar("_Result")


class GenerationRoutes:
    """The route handlers. Each may raise HttpError and HeadstartError. Their docstrings are the OpenAPI summaries."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._responses = responses_api(state.responses)

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        return await infer(self._state, COMPLETIONS, request)

    async def chat_completions(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await infer(self._state, CHAT, request)

    async def create_response(self, request: Request) -> Response:
        """Generate a response (OpenAI's Responses API)."""
        return await infer(self._state, self._responses, request)

    async def retrieve_response(self, request: Request) -> Response:
        """Return a stored response."""
        return json_response(stored_responses.retrieve(self._state.responses, request))

    async def delete_response(self, request: Request) -> Response:
        """Delete a stored response."""
        return json_response(stored_responses.delete(self._state.responses, request))

    async def input_items(self, request: Request) -> Response:
        """List the input items of a stored response."""
        return json_response(stored_responses.input_items(self._state.responses, request))

    async def messages(self, request: Request) -> Response:
        """Generate the next message of a conversation (Anthropic's Messages API)."""
        return await infer(self._state, MESSAGES, request)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation (Anthropic's Messages API)."""
        model, principal = self._state.loaded_model, record_of(request.scope).principal
        origin = Origin("count", domain=principal.domain, tenant=principal.tenant)

        def work(data: bytes) -> Json:
            return count_tokens(parse_json(data, model.bounds.max_numbers), model, origin)

        return json_response(await run_with_body(self._state, request, work, renders=True))


async def run_with_body(
    state: ServerState, request: Request, work: Callable[[bytes], _Result], *, renders: bool = False
) -> _Result:
    """Return `work(body)`, run off the event loop if the body is long, or if `renders` and it holds messages."""
    async with state.bodies.held(request) as body:
        waits = renders and (isinstance(body, SpooledBody) or b'"messages"' in body)
        run = partial(state.long_work.run, tenant=record_of(request.scope).principal.tenant, receive=request.receive)
        return await run(len(body), lambda: work(in_memory(body)), waits=waits)
