"""The table of the generation APIs. A new one is added here, and to the routes of the server."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headstart.anthropic.anthropic_objects import anthropic_error
from headstart.anthropic.messages_request import MessagesRequest, translate_messages_body
from headstart.apis.api import OPENAI_END, AnyJsonObject, Api, StoredResponseRef, StreamEnding, refusal_as_event
from headstart.apis.ollama_api import OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_TREE
from headstart.http.sse import encode_named_event
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json, error_object
from headstart.openai.responses_api.input_items import first_referenced_response
from headstart.openai.responses_api.response_events import error_event_data
from headstart.openai.responses_api.responses_request import parse_responses, responses_to_chat_request

_CHOICES = re.compile(rb'\s*\{[^{}]{0,2048}"choices"\s*:\s*\[\s*\{')
_LAST_NAMED = re.compile(
    rb"^event:\s*(?:response\.(?:completed|incomplete|failed)|message_stop|error)\s*$", re.MULTILINE
)


def _with_list(field: str) -> "msgspec.json.Decoder[Any]":
    """Return the decoder of answers that have a list."""
    return msgspec.json.Decoder(msgspec.defstruct("Answer", [(field, list[msgspec.Raw])]))


def _response_used(values: Mapping[str, Any]) -> StoredResponseRef | None:
    previous = values.get("previous_response_id")
    if isinstance(previous, str):
        return StoredResponseRef(previous, "previous_response_id")
    referenced = first_referenced_response(values.get("input"))
    return None if referenced is None else StoredResponseRef(referenced, "input")


def _response_failed(status: int, body: Json, request_id: str, num_events: int) -> bytes:
    return encode_named_event(error_event_data(body, num_events))


def _response_refused(status: int, body: bytes, request_id: str, num_events: int) -> bytes:
    """Return the event for a replica's error object with all its fields."""
    try:
        error = parse_json(body)
        error = error.get("error", error)
        message, code, param = (error.get(name) for name in ("message", "code", "param"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        message = code = param = None
    told = error_object(str(message or "the replica refused the request"), status=status, code=code, param=param)
    return _response_failed(status, told, request_id, num_events)


_MESSAGES_END = StreamEnding(
    _LAST_NAMED,
    failed=lambda status, body, request_id, num_events: encode_named_event(anthropic_error(status, body, request_id)),
    refused=lambda status, body, request_id, num_events: refusal_as_event(body),
    is_named=True,
    ping=encode_named_event({"type": "ping"}),
)
COMPLETIONS = Api(
    path="/v1/completions",
    operation="text_completion",
    answer=_with_list("choices"),
    beginning=_CHOICES,
    default_max_tokens=16,
)
CHAT = Api(
    path="/v1/chat/completions",
    answer=_with_list("choices"),
    beginning=_CHOICES,
    chat_values=lambda values, bounds: values,
)
RESPONSES = Api(
    path="/v1/responses",
    answer=_with_list("output"),
    chat_values=lambda values, bounds: responses_to_chat_request(parse_responses(values, bounds), values).values,
    used_response=_response_used,
    end=StreamEnding(_LAST_NAMED, _response_failed, _response_refused, is_named=True),
    is_stored=True,
)
MESSAGES = Api(
    path="/v1/messages",
    other_paths=("/v1/messages/count_tokens",),
    answer=_with_list("content"),
    chat_values=lambda values, bounds: translate_messages_body(MessagesRequest, values, bounds).chat.values,
    error_body=anthropic_error,
    end=_MESSAGES_END,
    takes_x_api_key=True,
    id_header=b"request-id",
)
APIS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE)
OTHER = Api(
    path="",
    operation="",
    other_paths=("/tokenize", "/detokenize"),
    answer=msgspec.json.Decoder(AnyJsonObject),
    end=OPENAI_END,
)
"""Of all other routes, also of routes that only a router's replicas have: errors and streams are OpenAI's."""
_BY_PATH = {path: api for api in (*APIS, OTHER) for path in (api.path, *api.other_paths)}
_GENERATION = {api.path: api for api in APIS}
UNCACHED = frozenset(path for api in (*APIS, OTHER) for path in api.other_paths)
"""Routes that neither use nor fill a cache: any replica will do."""


def api_of_path(path: str) -> Api:
    """Return the API that a path belongs to, else OTHER."""
    return _BY_PATH.get(path, OLLAMA_CHAT if path.startswith(OLLAMA_TREE) else OTHER)


def generation_api_of_path(path: str) -> Api:
    """Return the API whose generation route this path is, else OTHER."""
    return _GENERATION.get(path, OTHER)
