"""/v1/messages: preparation of requests from content blocks, and answers as messages; /v1/messages/count_tokens."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from headstart.anthropic.anthropic_errors import anthropic_error
from headstart.anthropic.message_events import PING, CacheMarks, MessageEvents
from headstart.anthropic.messages_request import CountTokensRequest, MessagesRequest, num_marked_tokens, read_body
from headstart.core.request import CacheMode
from headstart.http.http_errors import rendered
from headstart.http.sse import named_event
from headstart.openai.engine_requests import (
    Origin,
    build_requests,
    chat_prompt,
    encode_chat,
    placed_params,
    tokenizer_of,
    with_chat_output,
)
from headstart.openai.generation_params import shortened
from headstart.openai.responses import Json
from headstart.openai.text.generation import Delta
from headstart.reuse.cache_comparison import message_diagnostics
from headstart.server.apis.answer_format import ApiRequest, Head, ServedApi, diagnosis_of
from headstart.server.apis.choice_apis import check_model
from headstart.server.generation_job import GenerationJob
from headstart.server.server_state import Model

_HOUR = 3600.0


class MessageFormat:
    """The answer of one job as a message, whole or as events."""

    ping = named_event(PING)

    def __init__(self, marks: CacheMarks, fills_context: bool, job: GenerationJob, head: Head) -> None:
        self._job = job
        self._events = MessageEvents(head.request_id, head.model.name, marks, fills_context=fills_context)

    def collect(self, choice: int, delta: Delta) -> None:
        """Process a delta of an answer that is sent whole."""
        self._events.parts.add(delta)

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished message."""
        return self._with_diagnostics(self._events.message(self._job.usage()))

    def opening(self) -> bytes:
        """Return message_start."""
        usage = self._job.usage()
        events = self._events.opening({**usage, "completion_tokens": min(usage["completion_tokens"], 1)})
        self._with_diagnostics(events[0]["message"])
        return _encoded(events)

    def events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yield the events of a delta."""
        yield _encoded(self._events.add(delta))

    def closing(self) -> bytes:
        """Return the last events."""
        return _encoded(self._events.closing(self._job.usage()))

    def failure(self, error: Exception) -> bytes:
        """Return the error event."""
        status, body, _ = rendered(error)
        return named_event(anthropic_error(status, body, self._job.record.request_id))

    def _with_diagnostics(self, message: Json) -> Json:
        """Add the diagnostics of the prompt cache to a message, before its usage, and return it."""
        diagnosis = self._job.diagnosis
        if diagnosis is not None and diagnosis.comparison is not None:
            usage = message.pop("usage")
            message["diagnostics"] = message_diagnostics(diagnosis.comparison, diagnosis.block_size)
            message.update(self._job.diagnostics(), usage=usage)
        return message


def _prepare(values: Mapping[str, Any], model: Model, origin: Origin) -> ApiRequest:
    bounds = model.bounds
    read = read_body(MessagesRequest, values, bounds)
    with read.chat.named():
        body = read.chat.parse(bounds)
        check_model(body.model, model)
        tokenizer = tokenizer_of(model.tokenizer, origin, body.params)
        chat = chat_prompt(body, tokenizer, bounds)
        prompt = chat.token_ids
        params = shortened(placed_params(body.params, chat), len(prompt), bounds)
        params = with_chat_output(params, prompt, tokenizer, bounds)
        requests = build_requests([prompt], params, bounds, origin)
    fills_context = params.max_tokens != body.params.max_tokens
    num_marked = 0
    if params.cache is CacheMode.READ_WRITE:
        block_size = model.info.block_size
        num_marked = num_marked_tokens(read, prompt, tokenizer, bounds) // block_size * block_size
    marks = CacheMarks(num_marked, is_long=read.ttl >= _HOUR)
    form = partial(MessageFormat, marks, fills_context)
    diagnosis = diagnosis_of(model, origin, params, prompt, body.messages, read.chat.message_names)
    named = read.chat.without_values().named
    return ApiRequest(params, requests, form, named=named, diagnosis=diagnosis, messages=body.messages)


MESSAGES = ServedApi("msg_", _prepare)


def count_tokens(values: Mapping[str, Any], model: Model, origin: Origin) -> Json:
    """Return the answer of /v1/messages/count_tokens. Raises InvalidRequestError."""
    read = read_body(CountTokensRequest, values, model.bounds)
    with read.chat.named():
        body = read.chat.parse(model.bounds)
        check_model(body.model, model)
        tokenizer = tokenizer_of(model.tokenizer, origin, body.params)
        return {"input_tokens": len(encode_chat(body, tokenizer, model.bounds))}


def _encoded(events: list[Json]) -> bytes:
    return b"".join(named_event(event) for event in events)
