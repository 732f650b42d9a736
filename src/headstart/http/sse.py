"""Server-sent events in OpenAI's format: `data: <JSON on one line>` and an empty line, LF only."""

from collections.abc import Iterator

from headstart.http.http_errors import error_status_body_headers
from headstart.openai.json_pieces import encode_json, json_fragments
from headstart.openai.responses import Json

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: keeps the connection alive while the request waits
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
WRITE_SECONDS = 60.0  # a client that reads nothing for this long is disconnected


def encode_event(value: object) -> bytes:
    """Return one event."""
    return b"data: " + encode_json(value) + b"\n\n"


def encode_event_in_parts(value: object) -> Iterator[bytes]:
    """Yield the bytes of `event(value)`, each part built on demand."""
    yield b"data: "
    yield from json_fragments(value)
    yield b"\n\n"


def encode_named_event(value: Json) -> bytes:
    """Return one event with its type as its name, as in the Responses and the Messages API."""
    return b"event: " + value["type"].encode() + b"\ndata: " + encode_json(value) + b"\n\n"


def encode_error_event(error: Exception) -> bytes:
    """Return the last event of a failed stream, before DONE.

    It has an event name and an error object, since some clients check the name and others the data.
    """
    _, body, _ = error_status_body_headers(error)
    return b"event: error\ndata: " + encode_json(body) + b"\n\n"
