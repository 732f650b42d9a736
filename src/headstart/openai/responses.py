"""Response bodies: OpenAI's objects as plain dicts, encoded by `encode`. Only shapes, no decisions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.errors import (
    DrainingError,
    EngineDeadError,
    HeadstartError,
    InvalidRequestError,
    QueueFullError,
)
from headstart.core.request import SamplingDefaults
from headstart.openai.json_pieces import SLICE_ITEMS, LazilyEncodedList
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.tokenizer.tokenizer import NAMED_TOKENS, Tokenizer

Json = dict[str, Any]
CACHE_SOURCES = ("pinned", "shared", "store", "followed")  # sources of cached prompt tokens; the others are computed

# -------------------------------------------------------------------------------------------------------------- errors

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

_OF_ERRORS = (  # class, status, code; and the message, "" if it is that of the error
    (QueueFullError, 429, "queue_full", ""),
    (DrainingError, 503, "draining", ""),
    (EngineDeadError, 503, "engine_dead", "the engine has stopped; restart the server"),
)


def error_object(message: str, *, status: int, code: str | None = None, param: str | None = None) -> Json:
    """Return OpenAI's error object; the type follows from the HTTP status."""
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_status_and_object(error: HeadstartError) -> tuple[int, Json]:
    """Return the HTTP status and the error object of a HeadstartError; no other message text reaches a client."""
    if isinstance(error, InvalidRequestError):
        status = 404 if error.code == "model_not_found" else 400
        return status, error_object(str(error), status=status, code=error.code, param=error.param)
    for kind, status, code, message in _OF_ERRORS:
        if isinstance(error, kind):
            return status, error_object(message or str(error), status=status, code=code)
    return 500, error_object("internal error", status=500, code="internal_error")


# --------------------------------------------------------------------------------------------------------------- usage


def usage_object(
    num_prompt_tokens: int, num_tokens: int, breakdown: PromptTokenBreakdown, num_written: int = 0
) -> Json:
    """Return the usage object; it always has the cached tokens and, beyond OpenAI's API, their sources.

    `num_written`: prompt tokens in full blocks that were computed and published in the cache.
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {
            "cached_tokens": breakdown.num_cached,
            "cache_write_tokens": num_written,
            **cached_tokens_by_source(breakdown),
        },
    }


def cached_tokens_by_source(breakdown: PromptTokenBreakdown) -> dict[str, int]:
    """Return the cached tokens by source; they add up to cached_tokens."""
    return {f"{source}_tokens": getattr(breakdown, source) for source in CACHE_SOURCES}


# -------------------------------------------------------------------------------------------------------------- others


def json_list_lazy_if_long(
    entries: Sequence[Any], shape: Callable[[Any], Any], echo: EchoedPrompt | None = None, key: str = ""
) -> list[Any] | LazilyEncodedList:
    """Return the JSON list of `shape(entry)`; a long list is a Sliced, built while it is sent."""
    if echo is None and len(entries) <= SLICE_ITEMS:
        return [shape(entry) for entry in entries]
    if echo is None:
        return LazilyEncodedList((entries,), shape)
    return LazilyEncodedList((echo, entries), shape, kept=echo.kept, key=key)


def token_text_or_bytes(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, or as OpenAI does "bytes:\\xe2\\x80" if its bytes are not valid UTF-8."""
    written = tokenizer.token_bytes(token_id)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def model_object(
    name: str,
    created: int,
    max_model_len: int,
    *,
    block_size: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    tokenizer: str,
    defaults: SamplingDefaults,
    exceptions: Sequence[str],
) -> Json:
    """Return the object of one model; `max_model_len` in tokens, as in vLLM; of `defaults` those that the model sets.

    `exceptions` are those of the model from exact reuse. `tokenizer`: the digest of one that takes token ids from
    routers (tokenizer/handed_tokens.py). The size of the KV pool and the tokens of a step are included
    for routers, which need them also where /metrics is for administrators only.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headstart",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_gpu_blocks": num_blocks,
        "max_num_batched_tokens": max_num_batched_tokens,
        "tokenizer": tokenizer,
        "default_sampling_params": {name: value for name, value in asdict(defaults).items() if value is not None},
        "exact_reuse": {"holds": not exceptions, "exceptions": list(exceptions)},
    }


def model_list_response(models: list[Json]) -> Json:
    """Return the response of /v1/models."""
    return {"object": "list", "data": models}


def tokenizer_info_response(tokenizer: Tokenizer, max_model_len: int) -> Json:
    """Return the response of /tokenizer_info, as in vLLM: the names of tokenizer_config.json."""
    tokens = dict.fromkeys(NAMED_TOKENS) | tokenizer.named_tokens
    shown = {"chat_template": tokenizer.chat_template, "model_max_length": max_model_len}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **shown}


def tokenize_response(token_ids: Sequence[int], tokenizer: Tokenizer, max_model_len: int, *, with_texts: bool) -> Json:
    """Return the response of /tokenize."""
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": json_list_lazy_if_long(token_ids, int),
        "token_strs": json_list_lazy_if_long(token_ids, tokenizer.token_text) if with_texts else None,
    }


def detokenization_response(text: str) -> Json:
    """Return the response of /detokenize."""
    return {"prompt": text}
