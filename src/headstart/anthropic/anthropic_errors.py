"""Error objects of the Messages API, made from OpenAI's."""

from headstart.openai.responses import Json

THREAD_NOT_FOUND = "thread_not_found"  # Anthropic's clients send the whole conversation then
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, body: Json, request_id: str) -> Json:
    """Return the error object for an HTTP status and OpenAI's error object.

    `code` and `param` are beyond Anthropic's API; routers read the code.
    """
    error = body["error"]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    shaped = {"type": kind, "message": error["message"], "code": error["code"], "param": error["param"]}
    if error["code"] == THREAD_NOT_FOUND:
        shaped["details"] = {"error_code": THREAD_NOT_FOUND}
    return {"type": "error", "error": shaped, "request_id": request_id}
