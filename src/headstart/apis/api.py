"""Api: what HTTP processes know of one generation API. Its requests and answers are in openai/ and anthropic/."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headstart.http.http_errors import ApiHttpRules, error_status_body_headers
from headstart.http.sse import DONE, PING
from headstart.openai.bounds import RequestBounds
from headstart.openai.json_pieces import encode_json
from headstart.openai.responses import Json

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
OBJECT_BEGINNING = re.compile(rb'\s*\{\s*"')


class AnyJsonObject(msgspec.Struct):
    """An answer that is a JSON object."""


def stream_content_type(media_type: str) -> str:
    """Return the Content-Type of a stream; JSON has no parameter for its charset."""
    return f"{media_type}; charset=utf-8" if media_type == EVENTS else media_type


class StoredResponseRef(NamedTuple):
    """A stored response that a request needs, and the field of the request that names it."""

    response_id: str
    param: str


@dataclass(frozen=True, slots=True)
class StreamEnding:
    """The end of a stream of events.

    `last`: finds the last event. `failed` and `refused` return the events that end a stream with an error: with status
    and OpenAI's error object, or with status and body of a replica's refusal, then the request's id, and the number of
    events before.
    """

    last: re.Pattern[bytes]
    failed: Callable[[int, Json, str, int], bytes]
    refused: Callable[[int, bytes, str, int], bytes]
    is_named: bool = False  # events have names and always usage, and there is no [DONE]
    media_type: str = EVENTS  # LINES: one object of JSON on each line, usage always in the last one
    ping: bytes = PING  # keeps a stream alive that has begun

    @property
    def content_type_header(self) -> str:
        """The header of a stream."""
        return stream_content_type(self.media_type)


def _done_after_error(status: int, body: Json, request_id: str, num_events: int) -> bytes:
    return b"event: error\ndata: " + encode_json(body) + b"\n\n" + DONE


def _done_after_refusal(status: int, body: bytes, request_id: str, num_events: int) -> bytes:
    return refusal_as_event(body) + DONE


def refusal_as_event(body: bytes) -> bytes:
    """Return a replica's error object as an event."""
    return b"event: error\ndata: " + body.replace(b"\n", b" ") + b"\n\n"


OPENAI_END = StreamEnding(re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE), _done_after_error, _done_after_refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(ApiHttpRules):
    """One generation API.

    `chat_values` returns the values of a chat request for a body, and raises InvalidRequestError; None: its prompts are
    no chats. `used_response` returns the stored response that a body continues or refers to: its replica has it alone.
    """

    other_paths: tuple[str, ...] = ()  # POST routes that neither use nor fill a cache and answer with JSON objects
    get_paths: tuple[str, ...] = ()  # its GET routes, which a router answers itself
    answer: "msgspec.json.Decoder[Any]"  # of the fields that a whole answer must have
    beginning: re.Pattern[bytes] = OBJECT_BEGINNING  # of an answer, or of the data of an event
    chat_values: Callable[[Mapping[str, Any], RequestBounds], Mapping[str, Any]] | None = None
    used_response: Callable[[Mapping[str, Any]], StoredResponseRef | None] = lambda values: None
    end: StreamEnding = OPENAI_END
    default_max_tokens: int | None = None  # of an answer whose request sets no limit; None: what the context leaves
    streams_by_default: bool = False
    is_stored: bool = False  # its answers can be continued by their ids

    def stream_error_events(self, error: Exception, request_id: str, num_events: int) -> bytes:
        """Return the events that end a stream with an error; `num_events` were sent before."""
        status, body, _ = error_status_body_headers(error)
        return self.end.failed(status, body, request_id, num_events)
