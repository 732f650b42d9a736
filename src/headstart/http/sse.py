"""Server-sent events as OpenAI's clients read them: `data: <JSON on one line>` and an empty line, LF only."""

from headstart.http.http_errors import rendered
from headstart.openai.responses import encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: keeps the connection alive while the request waits
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
WRITE_SECONDS = 60.0  # a client that takes nothing for so long is gone


def event(value: object) -> bytes:
    """Return one event."""
    return b"data: " + encode(value) + b"\n\n"


def error_event(error: Exception) -> bytes:
    """Return the event that ends a failed stream; named, since some clients look at the name and others at the data.

    The stream's DONE still follows.
    """
    _, body, _ = rendered(error)
    return b"event: error\ndata: " + encode(body) + b"\n\n"
