"""Errors and models in the form of Anthropic's API, made from OpenAI's.

Its clients request models with the header `anthropic-version`.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from headstart.openai.responses import Json

VERSION_HEADER = "anthropic-version"
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


def anthropic_model_from_openai(model: Json) -> Json:
    """Return one model, from OpenAI's object."""
    created = datetime.fromtimestamp(model.get("created") or 0, UTC)
    context = model.get("max_model_len")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def model_list_page(models: Iterable[Json]) -> Json:
    """Return the list of models: one page with all of them."""
    data = [anthropic_model_from_openai(model) for model in models]
    ids = [model["id"] for model in data]
    return {"data": data, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
