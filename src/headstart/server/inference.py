"""Generation requests of all APIs: body -> engine requests -> one response, or a stream of events.

The status of a stream is sent with its first token, or after PING_SECONDS of waiting. An error before that is an HTTP
error response. When a client disconnects, its request is aborted, whether streaming or not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.apis.api import EVENTS, Api
from headstart.core.request import CacheMode
from headstart.http.access_record import AccessRecord, access_record_of_scope
from headstart.http.answer_report import REPORT_HEADER
from headstart.http.http_errors import ClientGoneError, Headers, json_response
from headstart.http.long_work import wait_for_disconnect
from headstart.http.spooled_body import SpooledBody, body_bytes
from headstart.http.sse import HEADERS, PING, WRITE_SECONDS
from headstart.http.tracing.request_trace import Attributes
from headstart.openai.canonical.prompt_rules import RULES_HEADER, applied_rules_header
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.forms.skipped import SKIPPED_HEADER, SkippedNames, skipped_header
from headstart.openai.json_pieces import iter_json_pieces, regroup_pieces
from headstart.openai.request_json import parse_json_object
from headstart.openai.sandbox.sandbox_pool import WAIT_SECONDS
from headstart.openai.structured.dropped_keywords import DROPPED_HEADER, dropped_keywords_header
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.tokenizer.handed_tokens import split_tokens_from_body
from headstart.server.apis.answer_format import AnswerFormatter, AnswerIdentity, ServedApi
from headstart.server.generation_job import ApiRequest, ChoiceDelta, GenerationJob
from headstart.server.prompt_log import LoggedBody
from headstart.server.request_limits import check_request_size
from headstart.server.server_state import ServedModel, ServerState

_Result = TypeVar("_Result")
PING_SECONDS = 15.0
LONG_PROMPT_TOKENS = 1024  # longer echoed prompts are detokenized off the event loop
LARGE_ANSWER_ENTRIES = 4096  # larger responses are encoded and sent in pieces
FEW_ENTRIES = 64  # of events that are encoded at once: one each, and one per token with log-probabilities


async def generation_response(state: ServerState, api: ServedApi, request: Request) -> Response:
    """Return the response of one request. Raises HttpError, HeadstartError, ClientGoneError before anything is sent."""
    model = state.check_ready()
    record = access_record_of_scope(request.scope)
    origin = RequestOrigin(
        api.id_prefix + uuid4().hex, record.arrival, record.principal.domain, record.principal.tenant
    )
    asked, prompts = await _prepared(state, api, model, origin, request)
    if record.trace is not None and record.trace.is_sampled:
        record.trace.root.attributes |= _attributes(model, asked, origin.request_id)
    job = state.admit_and_submit(asked, prompts, record)
    if job.examined is not None:
        model.doctor.remember_prompt(job.examined)
    form = asked.answer(job, AnswerIdentity(origin.request_id, int(time.time()), model))
    answer = _Answer(state, job, form, api.api)
    watcher = asyncio.create_task(_watch(request.receive, job))
    try:
        if job.params.stream:
            body = answer.events(await answer.next_news())
            headers = HEADERS | _report(request, asked, job, origin.request_id)
            return _Sent(answer, body, watcher, api.api.end.content_type_header, headers)
        whole = await answer.whole()
        headers = _report(request, asked, job, origin.request_id)
    except BaseException:
        watcher.cancel()
        state.close_generation_job(job)
        raise
    if not isinstance(whole, Response):
        return _Sent(answer, whole, watcher, "application/json", headers)
    whole.headers.update(headers)
    watcher.cancel()
    state.close_generation_job(job)
    return whole


def _report(request: Request, asked: ApiRequest, job: GenerationJob, answer_id: str) -> dict[str, str]:
    """Return the headers that state what was changed in the request, and usage and times if requested."""
    applied, dropped = job.params.applied_rules, job.params.dropped
    headers = {"server-timing": job.record.server_timing_header()}
    if applied:
        headers[RULES_HEADER] = applied_rules_header(applied)
    if dropped:
        headers[DROPPED_HEADER] = dropped_keywords_header(dropped)
    if asked.skipped:
        headers[SKIPPED_HEADER] = skipped_header(asked.skipped)
    report = None
    if any(name == REPORT_HEADER for name, _ in request.scope["headers"]):
        report = job.usage_header(answer_id)
    return headers if report is None else {**headers, REPORT_HEADER.decode(): report.encode().decode()}


def _attributes(model: ServedModel, asked: ApiRequest, answer_id: str) -> Attributes:
    """Return what a trace states of a request, in the names of OpenTelemetry's conventions."""
    params, sampling = asked.params, asked.requests[0].sampling
    return {
        "gen_ai.request.model": model.name,
        "gen_ai.response.model": model.name,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.stream": params.stream,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }


async def _prepared(
    state: ServerState, api: ServedApi, model: ServedModel, origin: RequestOrigin, request: Request
) -> tuple[ApiRequest, list[EchoedPrompt]]:
    """Return the client request and its prompts; its body, JSON and messages are not referenced afterwards."""
    num_stored_bytes = api.num_stored_bytes

    def stored(body: bytes | SpooledBody) -> int:
        values = parse_json_object(split_tokens_from_body(body_bytes(body))[0], model.bounds.max_numbers)
        return 0 if num_stored_bytes is None else num_stored_bytes(values, origin.tenant)

    def prepare(body: bytes | SpooledBody) -> ApiRequest:
        data, tokens = split_tokens_from_body(body_bytes(body))
        skipped = SkippedNames()
        reading = replace(model, bounds=replace(model.bounds, skipped=skipped))
        asked = api.prepare(parse_json_object(data, model.bounds.max_numbers), reading, replace(origin, tokens=tokens))
        check_request_size(asked.requests, asked.params, model.bounds)
        if asked.params.cache is not CacheMode.BYPASS:
            state.prompt_log.add(origin.tenant, LoggedBody(request.scope["path"], data, origin.request_id))
        return replace(asked.without_messages(model.doctor, origin), skipped=skipped.counts())

    run = partial(state.long_work.run, tenant=origin.tenant, receive=request.receive)
    async with state.bodies.read_and_hold_body(request) as body:
        access_record_of_scope(request.scope).received_at = time.monotonic()
        more = 0 if num_stored_bytes is None else await run(len(body), partial(stored, body))
        asked = await run(len(body) + more, partial(prepare, body), waits=api.renders)
        params, requests = asked.params, asked.requests
        model.metrics.count_prompt(params.applied_rules, asked.skipped)
        grammar = params.sampling.grammar
        if grammar is not None and not model.grammars.was_accepted(grammar):
            field = params.grammar_field or "grammar"
            async with state.checks.turn(origin.tenant, WAIT_SECONDS):
                with asked.named():
                    await run(0, partial(model.grammars.check, field, grammar, origin.tenant), waits=True)
    prompts = [first.prompt for first in requests[:: params.n]]

    def share() -> list[EchoedPrompt]:
        return [EchoedPrompt(model.tokenizer, prompt, params) for prompt in prompts]

    is_long = params.echo and sum(map(len, prompts)) > LONG_PROMPT_TOKENS
    return asked, await asyncio.to_thread(share) if is_long else share()


async def run_with_body(
    state: ServerState, request: Request, work: Callable[[bytes], _Result], *, renders: bool = False
) -> _Result:
    """Return `work(body)`, run off the event loop if the body is long, or if `renders` and it holds messages."""
    async with state.bodies.read_and_hold_body(request) as body:
        waits = renders and (isinstance(body, SpooledBody) or b'"messages"' in body)
        run = partial(
            state.long_work.run,
            tenant=access_record_of_scope(request.scope).principal.tenant,
            receive=request.receive,
        )
        return await run(len(body), lambda: work(body_bytes(body)), waits=waits)


async def _watch(receive: Receive, job: GenerationJob) -> None:
    """Cancel the job when the client disconnects."""
    await wait_for_disconnect(receive)
    job.fail(ClientGoneError())


class _Answer:
    """Builder of the response of one job, whole or as a stream."""

    def __init__(self, state: ServerState, job: GenerationJob, form: AnswerFormatter, api: Api) -> None:
        self._api = api
        self.state = state
        self.job = job
        self._form = form

    async def whole(self) -> "Response | AsyncIterator[bytes]":
        """Wait for all choices and return one JSON document; a large one as an iterator of pieces."""
        job = self.job
        while not job.is_finished:
            for choice, delta in await job.next_deltas(PING_SECONDS):
                self._form.collect_delta(choice, delta)
        if job.diagnosis is not None:
            job.diagnosis.remember()
        if job.num_logprob_entries + len(job.generations) <= LARGE_ANSWER_ENTRIES:
            return json_response(self._form.whole(in_pieces=False))
        return self.state.turns.yield_pieces(iter_json_pieces(self._form.whole(in_pieces=True)))

    async def next_news(self) -> list[ChoiceDelta]:
        """Return the next deltas to send, or [] after PING_SECONDS without any."""
        deadline = time.monotonic() + PING_SECONDS
        while True:
            news = await self.job.next_deltas(max(deadline - time.monotonic(), 0.001))
            if news or self.job.is_finished or time.monotonic() >= deadline:
                return news

    async def events(self, news: list[ChoiceDelta]) -> AsyncIterator[bytes]:
        """Yield the events of a stream that begins with `news`. Errors but ClientGoneError become an error event."""
        job, form, opened = self.job, self._form, False
        end = self._api.end
        waiting = PING if end.media_type == EVENTS else b""  # while the stream has not begun
        try:
            while True:
                parts = (part for choice, delta in news for part in form.events(choice, delta))
                if not news:
                    yield end.ping if opened else waiting
                elif opened and sum(1 + delta.num_logprob_entries for _, delta in news) <= FEW_ENTRIES:
                    yield b"".join(parts)
                else:
                    if not opened:
                        parts = chain((form.opening_events(),), parts)
                    async for data in self.state.turns.yield_pieces(regroup_pieces(parts)):
                        yield data
                    opened = True
                if job.is_finished:
                    break
                news = await self.next_news()
            if job.diagnosis is not None:
                job.diagnosis.remember()  # before the end is sent: clients may refer to the answer at once
            ending = form.closing_events()
        except ClientGoneError:
            raise
        except Exception as error:
            self.state.record_request_error(job.record, error)
            ending = form.failed_stream_events(error) or self._api.stream_error_events(error, job.record.request_id, 0)
        yield ending


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
        record: AccessRecord = self._answer.job.record
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
            self._answer.state.close_generation_job(self._answer.job)


async def _send(send: Send, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})
