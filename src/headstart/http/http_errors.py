"""HttpError, and the conversion of any exception to an error response: in one place, so no internal text leaks.

Messages contain only limits and what the client itself sent: no paths, no addresses, no tracebacks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response

from headstart.core.errors import DrainingError, HeadstartError, QueueFullError, RequestFailedError
from headstart.openai.json_pieces import encode_json
from headstart.openai.responses import Json, error_object, error_status_and_object

Headers = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiHttpRules:
    """The rules of an API that hold before its requests are read.

    `error_body` returns the body of an error for status, OpenAI's error object and the request's id.
    """

    path: str  # of generation
    operation: str = "chat"  # gen_ai.operation.name of the traces of `path`; empty: there are none
    takes_x_api_key: bool = False  # a key may also be in x-api-key
    id_header: bytes | None = None  # of the request's id, beside x-request-id
    error_body: Callable[[int, Json, str], Json] = lambda status, body, request_id: body


class HttpError(Exception):
    """An error response of the HTTP layer, with status, code and headers."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: Headers | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


class ClientGoneError(Exception):
    """The client closed the connection."""


def error_status_body_headers(error: Exception) -> tuple[int, Json, Headers]:
    """Return the HTTP status, error object and headers for any exception."""
    if isinstance(error, HttpError):
        body = error_object(str(error), status=error.status, code=error.code, param=error.param)
        return error.status, body, error.headers
    if isinstance(error, RequestFailedError):
        message = "this request failed in the engine, and it alone; the server's log has the reason"
        return 500, error_object(message, status=500, code="request_failed"), {"x-should-retry": "false"}
    if isinstance(error, ClientGoneError):
        return 499, error_object("the client closed the connection", status=499, code="client_closed"), {}
    if not isinstance(error, HeadstartError):
        error = HeadstartError("internal error")
    status, body = error_status_and_object(error)
    headers: Headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(max(round(error.retry_after), 1))
    elif isinstance(error, DrainingError):
        headers["retry-after"] = "1"
    elif status == 500:
        headers["x-should-retry"] = "false"  # the work may have been done; a retry would repeat it
    return status, body, headers


def json_response(value: object, status: int = 200, headers: Headers | None = None) -> Response:
    """Return a JSON response."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: Exception, api: ApiHttpRules | None = None, request_id: str = "") -> Response:
    """Return the error response for `error`, in the form of an API; None: OpenAI's."""
    status, body, headers = error_status_body_headers(error)
    body = body if api is None else api.error_body(status, body, request_id)
    return json_response(body, status, headers)
