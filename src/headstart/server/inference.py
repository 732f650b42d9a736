"""/v1/completions and /v1/chat/completions: body -> engine requests -> one answer, or a stream of events.

The status of a stream is decided when its first token is there, or after PING_SECONDS of waiting: until then an error
is an HTTP error. Whoever hangs up is aborted, whether streaming or not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.core.errors import InvalidRequestError
from headstart.core.request import Request as EngineRequest
from headstart.server import protocol
from headstart.server.bodies import parse_chat, parse_completion, parse_json
from headstart.server.generation import Delta
from headstart.server.http_errors import ClientGoneError, json_response
from headstart.server.job import Job, News
from headstart.server.params import GenerationParams
from headstart.server.protocol import Json
from headstart.server.record import RequestRecord, record_of
from headstart.server.requests import Origin, build_requests, encode_chat, encode_completion
from headstart.server.sse import DONE, HEADERS, PING, WRITE_SECONDS, error_event, event
from headstart.server.state import Model, ServerState

PING_SECONDS = 15.0
LONG_BODY_BYTES = 32 * 1024  # from here on, parsing and tokenizing leave the event loop; rendering always does


@dataclass(frozen=True, slots=True)
class Api:
    """How one of the two APIs names and shapes things."""

    id_prefix: str
    prepare: Callable[[Mapping[str, Any], Model, Origin], tuple[GenerationParams, list[EngineRequest]]]
    answer: Callable[[Json, list[Json], Json], Json]
    choice: Callable[..., Json]
    chunk: Callable[[Json, list[Json], Json | None], Json]
    chunk_choice: Callable[..., Json]
    first_choice: Callable[[int], Json] | None


def _prepare_completion(
    values: Mapping[str, Any], model: Model, origin: Origin
) -> tuple[GenerationParams, list[EngineRequest]]:
    body = parse_completion(values, model.bounds)
    check_model(body.model, model)
    prompts = encode_completion(body, model.tokenizer, model.bounds)
    return body.params, build_requests(prompts, body.params, model.bounds, origin)


def _prepare_chat(
    values: Mapping[str, Any], model: Model, origin: Origin
) -> tuple[GenerationParams, list[EngineRequest]]:
    body = parse_chat(values, model.bounds)
    check_model(body.model, model)
    prompts = [encode_chat(body, model.tokenizer, model.bounds)]
    try:
        return body.params, build_requests(prompts, body.params, model.bounds, origin)
    except InvalidRequestError as error:
        error.param = "messages" if error.param == "prompt" else error.param
        raise


COMPLETIONS = Api(
    "cmpl-",
    _prepare_completion,
    protocol.completion,
    protocol.completion_choice,
    protocol.completion_chunk,
    protocol.completion_choice,
    None,
)
CHAT = Api(
    "chatcmpl-",
    _prepare_chat,
    protocol.chat_completion,
    protocol.chat_choice,
    protocol.chat_chunk,
    protocol.chat_chunk_choice,
    protocol.chat_first_choice,
)


def check_model(name: str | None, model: Model) -> None:
    """Raises InvalidRequestError (model_not_found) for another model's name; leaving it out is fine."""
    if name is not None and name != model.name:
        shown = ascii(name if len(name) <= 60 else name[:60] + "...")
        raise InvalidRequestError(
            f"model {shown} is not served here; this server has {model.name!r}", param="model", code="model_not_found"
        )


async def infer(state: ServerState, api: Api, request: Request) -> Response:
    """Answers one request. Raises HttpError, HeadstartError and ClientGoneError until anything was sent."""
    model = state.check_ready()
    record = record_of(request.scope)
    body = await state.bodies.read(request)
    origin = Origin(api.id_prefix + uuid4().hex, record.arrival, record.principal.domain, record.principal.tenant)

    def prepare() -> tuple[GenerationParams, list[EngineRequest]]:
        return api.prepare(parse_json(body), model, origin)

    params, requests = await asyncio.to_thread(prepare) if api is CHAT or len(body) > LONG_BODY_BYTES else prepare()
    job = state.admit(requests, params, record)
    head = protocol.head_of(origin.request_id, int(time.time()), model.name)
    answer = _Answer(state, model, api, job, head)
    watcher = asyncio.create_task(_watch(request.receive, job))
    if not params.stream:
        try:
            return await answer.whole()
        finally:
            watcher.cancel()
            state.release(job)
    try:
        first = await answer.next_news()
    except BaseException:
        watcher.cancel()
        state.release(job)
        raise
    return _Stream(answer, first, watcher)


async def _watch(receive: Receive, job: Job) -> None:
    """Cancels the job when the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    job.cancel(ClientGoneError())


class _Answer:
    """Shapes what a job brings."""

    def __init__(self, state: ServerState, model: Model, api: Api, job: Job, head: Json) -> None:
        self.state = state
        self.job = job
        self._tokenizer = model.tokenizer
        self._api = api
        self._head = head

    async def whole(self) -> Response:
        """Waits for everything and returns it in one document."""
        job = self.job
        while not job.is_finished:
            await job.news(PING_SECONDS)
        choices = [
            self._choice(self._api.choice, index, protocol.whole(generation))
            for index, generation in enumerate(job.generations)
        ]
        return json_response(self._api.answer(self._head, choices, job.usage()))

    async def next_news(self) -> list[News]:
        """News worth an event, or [] after PING_SECONDS without any."""
        deadline = time.monotonic() + PING_SECONDS
        while True:
            news = await self.job.news(max(deadline - time.monotonic(), 0.001))
            if news or self.job.is_finished or time.monotonic() >= deadline:
                return news

    async def events(self, news: list[News]) -> AsyncIterator[bytes]:
        """Yields the events of a stream that begins with `news`; never raises but for its consumer's reasons."""
        job, opened = self.job, False
        try:
            while True:
                if not news:
                    yield PING
                else:
                    opening = b"" if opened else self._opening()
                    opened = True
                    yield opening + b"".join(self._chunk(choice, delta) for choice, delta in news)
                if job.is_finished:
                    break
                news = await self.next_news()
            if job.params.include_usage:
                yield event(self._api.chunk(self._head, [], job.usage()))
        except ClientGoneError:
            raise
        except Exception as error:
            self.state.note(job.record, error)
            yield error_event(error)
        yield DONE

    def _opening(self) -> bytes:
        first = self._api.first_choice
        if first is None:
            return b""
        return b"".join(
            event(self._api.chunk(self._head, [first(index)], self._usage_now()))
            for index in range(len(self.job.generations))
        )

    def _chunk(self, index: int, delta: Delta) -> bytes:
        choice = self._choice(self._api.chunk_choice, index, delta)
        return event(self._api.chunk(self._head, [choice], self._usage_now()))

    def _usage_now(self) -> Json | None:
        return self.job.usage() if self.job.params.continuous_usage_stats else None

    def _choice(self, shape: Callable[..., Json], index: int, delta: Delta) -> Json:
        params = self.job.params
        return shape(index, delta, self._tokenizer, logprobs=params.wants_logprobs, token_ids=params.return_token_ids)


class _Stream(Response):
    """The response that carries the events; releases the job however it ends."""

    def __init__(self, answer: _Answer, first: list[News], watcher: "asyncio.Task[None]") -> None:
        super().__init__(None, 200, HEADERS, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._answer = answer
        self._first = first
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = self._answer.job.record
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._answer.events(self._first):
                if self._watcher.done():
                    raise ClientGoneError
                await _send(send, data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, TimeoutError):
            record.error = "client_closed"
        finally:
            self._watcher.cancel()
            self._answer.state.release(self._answer.job)


async def _send(send: Send, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})
