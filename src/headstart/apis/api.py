"""The APIs that a router understands, by path: ends and errors of their streams, and their prompts as chats."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headstart.anthropic.anthropic_errors import anthropic_error
from headstart.anthropic.messages_request import MessagesRequest, read_body
from headstart.http.http_errors import rendered
from headstart.http.sse import DONE, error_event, named_event
from headstart.openai.bounds import Bounds
from headstart.openai.request_json import json_value
from headstart.openai.responses import Json, error_object
from headstart.openai.responses_api.item_references import first_referenced_response
from headstart.openai.responses_api.response_events import error_data
from headstart.openai.responses_api.responses_request import parse_responses, translate_responses

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CHAT_PATHS = frozenset((CHAT, RESPONSES, MESSAGES))  # their prompts are rendered by the chat template
NAMED = frozenset((RESPONSES, MESSAGES))  # their streams have named events, always with usage, and no [DONE]
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE)
_NAMED_END = re.compile(
    rb"^event:\s*(?:response\.(?:completed|incomplete|failed)|message_stop|error)\s*$", re.MULTILINE
)


def stream_end(path: str) -> re.Pattern[bytes]:
    """Return the pattern of the last event of a stream."""
    return _NAMED_END if path in NAMED else _DONE


def error_ending(path: str, error: Exception, request_id: str, num_events: int) -> bytes:
    """Return the events that end a stream with an error; `num_events` were sent before."""
    if path not in NAMED:
        return error_event(error) + DONE
    status, body, _ = rendered(error)
    return _named_error(path, status, body, request_id, num_events)


def refusal_ending(path: str, status: int, body: bytes, request_id: str, num_events: int) -> bytes:
    """Return the same for a replica's error object, as it was received."""
    if path == RESPONSES:
        return _named_error(path, status, _error_object(status, body), request_id, num_events)
    line = b"event: error\ndata: " + body.replace(b"\n", b" ") + b"\n\n"
    return line if path in NAMED else line + DONE


def chat_values(path: str, values: Mapping[str, Any], bounds: Bounds) -> Mapping[str, Any]:
    """Return the values of a chat request for a body of any of CHAT_PATHS. Raises InvalidRequestError."""
    if path == RESPONSES:
        return translate_responses(parse_responses(values, bounds), values).values
    return read_body(MessagesRequest, values, bounds).chat.values if path == MESSAGES else values


class UsedResponse(NamedTuple):
    """A stored response that a request needs, and the field of the request that names it."""

    response_id: str
    param: str


def used_response(path: str, values: Mapping[str, Any]) -> UsedResponse | None:
    """Return the stored response that a request continues, or whose items it refers to. Its replica has it alone."""
    if path != RESPONSES:
        return None
    previous = values.get("previous_response_id")
    if isinstance(previous, str):
        return UsedResponse(previous, "previous_response_id")
    referenced = first_referenced_response(values.get("input"))
    return None if referenced is None else UsedResponse(referenced, "input")


def _named_error(path: str, status: int, body: Json, request_id: str, num_events: int) -> bytes:
    if path == MESSAGES:
        return named_event(anthropic_error(status, body, request_id))
    return named_event(error_data(body, num_events))


def _error_object(status: int, body: bytes) -> Json:
    """Return a replica's error object with all its fields."""
    try:
        error = json_value(body)
        error = error.get("error", error)
        message, code, param = (error.get(name) for name in ("message", "code", "param"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        message = code = param = None
    return error_object(str(message or "the replica refused the request"), status=status, code=code, param=param)
