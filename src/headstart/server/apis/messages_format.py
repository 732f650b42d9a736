"""/v1/messages: preparation of requests from content blocks, and answers as messages; /v1/messages/count_tokens."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headstart.anthropic.message_events import CacheBreakpointSummary, MessageEventBuilder
from headstart.anthropic.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    num_tokens_to_cache_breakpoint,
    translate_messages_body,
)
from headstart.apis import answer_schemas, api_table
from headstart.core.request import CacheMode
from headstart.openai.engine_requests import RequestOrigin, encode_chat, tokenizer_for_request
from headstart.openai.responses import Json
from headstart.reuse.cache_comparison import anthropic_diagnostics
from headstart.server.apis.answer_format import (
    AnswerIdentity,
    PartsAnswerFormatter,
    ServedApi,
    TranslatedChat,
    check_model_name,
)
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.server_state import ServedModel

_HOUR = 3600.0


def _prepare(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
    read = translate_messages_body(MessagesRequest, values, model.bounds)
    chat = TranslatedChat.from_request(read.chat, model, origin, shortens=True)
    fills_context = chat.params.max_tokens != chat.body.params.max_tokens
    num_marked = 0
    if chat.params.cache is CacheMode.READ_WRITE:
        tokenizer, block_size = tokenizer_for_request(model.tokenizer, origin, chat.body.params), model.info.block_size
        num_marked = num_tokens_to_cache_breakpoint(read, chat.requests[0].prompt, tokenizer, model.bounds)
        num_marked = num_marked // block_size * block_size
        if 0 < num_marked < len(chat.requests[0].prompt) // block_size * block_size:  # others may go on from there
            requests = [replace(request, boundary=num_marked) for request in chat.requests]
            chat = chat._replace(requests=requests)
    marks = CacheBreakpointSummary(num_marked, is_long=read.ttl >= _HOUR)
    return chat.to_api_request(read.chat, partial(_format, marks, fills_context))


def _format(
    marks: CacheBreakpointSummary, fills_context: bool, job: GenerationJob, head: AnswerIdentity
) -> PartsAnswerFormatter:
    """Return the format of the answer of one job: a message."""
    events = MessageEventBuilder(head.request_id, head.model.name, marks, fills_context=fills_context)

    def diagnosed(message: Json) -> Json:
        """Add the diagnostics of the prompt cache to a message, before its usage, and return it."""
        diagnosis = job.diagnosis
        if diagnosis is not None and diagnosis.comparison is not None:
            usage = message.pop("usage")
            message["diagnostics"] = anthropic_diagnostics(diagnosis.comparison, diagnosis.block_size)
            message.update(job.diagnostics(), usage=usage)
        return message

    def first() -> list[Json]:
        usage = job.usage()
        objects = events.opening_events({**usage, "completion_tokens": min(usage["completion_tokens"], 1)})
        diagnosed(objects[0]["message"])
        return objects

    return PartsAnswerFormatter(
        api=api_table.MESSAGES,
        parts=events.parts,
        finished=lambda: diagnosed(events.message(job.usage())),
        first=first,
        added=events.add,
        last=lambda: events.closing_events(job.usage()),
    )


MESSAGES = ServedApi(
    api=api_table.MESSAGES,
    id_prefix="msg_",
    prepare=_prepare,
    name="messages",
    summary="Generate the next message of a conversation (Anthropic's Messages API).",
    answers=answer_schemas.MESSAGES,
    bodies=(MessagesRequest,),
)


def count_tokens_response(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> Json:
    """Return the answer of /v1/messages/count_tokens. Raises InvalidRequestError."""
    read = translate_messages_body(CountTokensRequest, values, model.bounds)
    with read.chat.renaming_error_fields():
        body = read.chat.to_chat_body(model.bounds)
        check_model_name(body.model, model)
        tokenizer = tokenizer_for_request(model.tokenizer, origin, body.params)
        return {"input_tokens": len(encode_chat(body, tokenizer, model.bounds))}
