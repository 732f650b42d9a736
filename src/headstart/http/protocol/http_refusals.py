"""Refusals by the HTTP protocol itself, before there is a request: the limits, and the bytes of the responses."""

from uuid import uuid4

from headstart.openai.json_pieces import encode_json
from headstart.openai.responses import error_object

MAX_HEAD_BYTES = 64 * 1024  # of request line and headers; of trailers; of excess chunk framing
MAX_HEADERS = 256
TOO_LARGE = (431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes; send less")
TOO_MANY = (431, f"the request has more than {MAX_HEADERS} headers; send fewer")
FRAMING = (
    431,
    f"the trailers, or what frames the chunks of the body, are longer than {MAX_HEAD_BYTES} bytes; send larger chunks "
    "and no trailers",
)
UPGRADE = (400, "the body of a request with an Upgrade is not read here; send it as HTTP/1.1, without Upgrade")
INVALID = (400, "this is not a valid HTTP/1.1 request")
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_CODES = {408: "timeout", 431: "headers_too_large", 503: "too_many_connections"}


def refusal_response(status: int, message: str) -> bytes:
    """Return a whole response with an OpenAI error object and `connection: close`."""
    body = encode_json(error_object(message, status=status, code=_CODES.get(status, "invalid_http")))
    retry = "retry-after: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: req-{uuid4().hex}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body
