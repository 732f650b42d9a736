"""/v1/completions and /v1/chat/completions: body -> engine requests -> one response, or a stream of events.

The status of a stream is sent with its first token, or after PING_SECONDS of waiting. An error before that is an HTTP
error response. When a client disconnects, its request is aborted, whether streaming or not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.core.errors import InvalidRequestError
from headstart.core.request import Request as EngineRequest
from headstart.http.access_record import RequestRecord, record_of
from headstart.http.http_errors import ClientGoneError, Headers, json_response
from headstart.http.spooled_body import SpooledBody, in_memory
from headstart.http.sse import DONE, HEADERS, PING, WRITE_SECONDS, error_event, event
from headstart.openai import responses
from headstart.openai.engine_requests import (
    Origin,
    Prepared,
    build_requests,
    encode_chat,
    encode_completion,
    tokenizer_of,
    with_chat_output,
)
from headstart.openai.generation_params import GenerationParams
from headstart.openai.request_bodies import parse_chat, parse_completion
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json
from headstart.openai.text.generation import Delta
from headstart.openai.text.shared_prompt import SharedPrompt
from headstart.server.generation_job import GenerationJob, News
from headstart.server.request_limits import check_size
from headstart.server.server_state import Model, ServerState

PING_SECONDS = 15.0
LONG_PROMPT_TOKENS = 1024  # longer echoed prompts are detokenized off the event loop
LARGE_ANSWER_ENTRIES = 4096  # larger responses are encoded and sent in pieces
KEPT_ECHO_ENTRIES = 512 * 1024  # up to this size, the JSON of an echo is built once for all choices
FEW_CHUNKS = 32  # events that are encoded without yielding to the event loop


@dataclass(frozen=True, slots=True)
class Api:
    """The names and JSON builders of one of the two APIs."""

    id_prefix: str
    prepare: Callable[[Mapping[str, Any], Model, Origin], tuple[GenerationParams, list[EngineRequest]]]
    answer: Callable[[Json, Any, Json], Json]
    choice: Callable[..., Json]
    chunk: Callable[[Json, Any, Json | None], Json]
    chunk_choice: Callable[..., Json]
    first_choice: Callable[[int], Json] | None


def _prepare_completion(
    values: Mapping[str, Any], model: Model, origin: Origin
) -> tuple[GenerationParams, list[EngineRequest]]:
    body = parse_completion(values, model.bounds)
    check_model(body.model, model)
    prompts = encode_completion(body, tokenizer_of(model.tokenizer, origin, body.params), model.bounds)
    return body.params, build_requests(prompts, body.params, model.bounds, origin)


def _prepare_chat(
    values: Mapping[str, Any], model: Model, origin: Origin
) -> tuple[GenerationParams, list[EngineRequest]]:
    body = parse_chat(values, model.bounds)
    check_model(body.model, model)
    prompt = encode_chat(body, tokenizer_of(model.tokenizer, origin, body.params), model.bounds)
    params = with_chat_output(body.params, prompt, model.tokenizer, model.bounds)
    try:
        return params, build_requests([prompt], params, model.bounds, origin)
    except InvalidRequestError as error:
        error.param = "messages" if error.param == "prompt" else error.param
        raise


COMPLETIONS = Api(
    "cmpl-",
    _prepare_completion,
    responses.completion,
    responses.completion_choice,
    responses.completion_chunk,
    responses.completion_choice,
    None,
)
CHAT = Api(
    "chatcmpl-",
    _prepare_chat,
    responses.chat_completion,
    responses.chat_choice,
    responses.chat_chunk,
    responses.chat_chunk_choice,
    responses.chat_first_choice,
)


def check_model(name: str | None, model: Model) -> None:
    """Raise InvalidRequestError (model_not_found) for another model's name; None is accepted."""
    if name is not None and name != model.name:
        shown = ascii(name if len(name) <= 60 else name[:60] + "...")
        raise InvalidRequestError(
            f"model {shown} is not served here; this server has {model.name!r}", param="model", code="model_not_found"
        )


async def infer(state: ServerState, api: Api, request: Request) -> Response:
    """Return the response of one request. Raises HttpError, HeadstartError, ClientGoneError before anything is sent."""
    model = state.check_ready()
    record = record_of(request.scope)
    origin = Origin(api.id_prefix + uuid4().hex, record.arrival, record.principal.domain, record.principal.tenant)
    job = state.admit(await _prepared(state, api, model, origin, request), record)
    head = responses.head_of(origin.request_id, int(time.time()), model.name)
    answer = _Answer(state, model, api, job, head)
    watcher = asyncio.create_task(_watch(request.receive, job))
    try:
        if job.params.stream:
            body = answer.events(await answer.next_news())
            return _Sent(answer, body, watcher, "text/event-stream; charset=utf-8", HEADERS)
        whole = await answer.whole()
    except BaseException:
        watcher.cancel()
        state.release(job)
        raise
    if not isinstance(whole, Response):
        return _Sent(answer, whole, watcher, "application/json", {})
    watcher.cancel()
    state.release(job)
    return whole


async def _prepared(state: ServerState, api: Api, model: Model, origin: Origin, request: Request) -> Prepared:
    """Return the client request in the engine's form; its body and JSON are not referenced afterwards."""

    def prepare(body: bytes | SpooledBody) -> tuple[GenerationParams, list[EngineRequest]]:
        params, requests = api.prepare(parse_json(in_memory(body), model.bounds.max_numbers), model, origin)
        check_size(requests, params, model.bounds)
        return params, requests

    async with state.bodies.held(request) as body:
        params, requests = await state.long_work.run(len(body), partial(prepare, body), waits=api is CHAT)
    grammar = params.sampling.grammar
    if grammar is not None and not model.grammars.is_accepted(grammar):
        await asyncio.to_thread(model.grammars.check, params.grammar_field or "grammar", grammar)
    prompts = [first.prompt for first in requests[:: params.n]]

    def share() -> list[SharedPrompt]:
        return [SharedPrompt(model.tokenizer, prompt, params) for prompt in prompts]

    is_long = params.echo and sum(map(len, prompts)) > LONG_PROMPT_TOKENS
    return Prepared(params, requests, await asyncio.to_thread(share) if is_long else share())


async def _watch(receive: Receive, job: GenerationJob) -> None:
    """Cancel the job when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    job.cancel(ClientGoneError())


class _Answer:
    """Builder of the response of one job, whole or as a stream."""

    def __init__(self, state: ServerState, model: Model, api: Api, job: GenerationJob, head: Json) -> None:
        self.state = state
        self.job = job
        self._tokenizer = model.tokenizer
        self._api = api
        self._head = head

    async def whole(self) -> "Response | AsyncIterator[bytes]":
        """Wait for all choices and return one JSON document; a large one as an iterator of pieces."""
        job = self.job
        while not job.is_finished:
            await job.news(PING_SECONDS)
        if job.num_entries + len(job.generations) <= LARGE_ANSWER_ENTRIES:
            return json_response(self._api.answer(self._head, list(self._choices()), job.usage()))
        return self.state.turns.pieces(self._api.answer(self._head, self._choices(), job.usage()))

    def _choices(self) -> Iterator[Json]:
        """Yield the choices of a whole response. The JSON of an echo is kept while its prompt's choices are encoded."""
        n = self.job.params.n
        for index, generation in enumerate(self.job.generations):
            prompt = self.job.prompts[index // n]
            if index % n == 0 and _keeps_echo(self.job, [prompt]):
                prompt.kept = {}
            yield self._choice(self._api.choice, index, responses.whole(generation))
            if index % n == n - 1:
                prompt.kept = None

    async def next_news(self) -> list[News]:
        """Return the next deltas to send, or [] after PING_SECONDS without any."""
        deadline = time.monotonic() + PING_SECONDS
        while True:
            news = await self.job.news(max(deadline - time.monotonic(), 0.001))
            if news or self.job.is_finished or time.monotonic() >= deadline:
                return news

    async def events(self, news: list[News]) -> AsyncIterator[bytes]:
        """Yield the events of a stream that begins with `news`. Errors but ClientGoneError become an error event."""
        job, opened = self.job, False
        if _keeps_echo(job, job.prompts):  # choices of all prompts are interleaved
            for prompt in job.prompts:
                prompt.kept = {}
        try:
            while True:
                if not news:
                    yield PING
                elif opened and len(news) <= FEW_CHUNKS:
                    yield b"".join(self._chunk(choice, delta) for choice, delta in news)
                else:
                    async for data in self._many_chunks(news, b"" if opened else self._opening()):
                        yield data
                    opened = True
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

    async def _many_chunks(self, news: list[News], data: bytes) -> AsyncIterator[bytes]:
        """Yield `data` and an event per delta; a delta with an echo of the prompt may be long and comes in pieces."""
        for number, (choice, delta) in enumerate(news):
            if delta.echo is None:
                data += self._chunk(choice, delta)
                if number % FEW_CHUNKS == FEW_CHUNKS - 1:
                    yield data
                    data = b""
                    await asyncio.sleep(0)
                continue
            yield data + b"data: "
            shaped = self._choice(self._api.chunk_choice, choice, delta)
            async for piece in self.state.turns.pieces(self._api.chunk(self._head, iter([shaped]), self._usage_now())):
                yield piece
            data = b"\n\n"
        if data:
            yield data

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


def _keeps_echo(job: GenerationJob, prompts: Sequence[SharedPrompt]) -> bool:
    """Return whether to keep the JSON of the echo of these prompts, so that it is built once for all choices."""
    width = 1 + (job.params.sampling.prompt_logprobs or 0)
    return job.params.n > 1 and sum(map(len, prompts)) * width <= KEPT_ECHO_ENTRIES


class _Sent(Response):
    """A response whose body comes in pieces; releases the job at the end, also after an error."""

    def __init__(
        self,
        answer: _Answer,
        body: AsyncIterator[bytes],
        watcher: "asyncio.Task[None]",
        media_type: str,
        headers: Headers,
    ) -> None:
        super().__init__(None, 200, headers, media_type)
        del self.headers["content-length"]
        self._answer = answer
        self._body = body
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = self._answer.job.record
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._body:
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
