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
from headstart.openai.chat.chat_delta import ChatDelta
from headstart.openai.chat.chat_message import message_parts, new_parts
from headstart.openai.json_pieces import SLICE_ITEMS, Sliced
from headstart.openai.json_pieces import encode as encode
from headstart.openai.text.generation import Delta, Generation
from headstart.openai.text.logprob_table import TokenEntry
from headstart.openai.text.shared_prompt import SharedPrompt
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


def error_object(message: str, *, status: int, code: str | None = None, param: str | None = None) -> Json:
    """Return OpenAI's error object; the type follows from the HTTP status."""
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: HeadstartError) -> tuple[int, Json]:
    """Return the HTTP status and the error object of a HeadstartError; no other message text reaches a client."""
    if isinstance(error, InvalidRequestError):
        status = 404 if error.code == "model_not_found" else 400
        return status, error_object(str(error), status=status, code=error.code, param=error.param)
    if isinstance(error, QueueFullError):
        return 429, error_object(str(error), status=429, code="queue_full")
    if isinstance(error, DrainingError):
        return 503, error_object(str(error), status=503, code="draining")
    if isinstance(error, EngineDeadError):
        return 503, error_object("the engine has stopped; restart the server", status=503, code="engine_dead")
    return 500, error_object("internal error", status=500, code="internal_error")


# --------------------------------------------------------------------------------------------------------------- usage


def usage(num_prompt_tokens: int, num_tokens: int, breakdown: PromptTokenBreakdown, num_written: int = 0) -> Json:
    """Return the usage object; it always has the cached tokens and, beyond OpenAI's API, their sources.

    `num_written`: prompt tokens in full blocks that were computed and published in the cache.
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {
            "cached_tokens": breakdown.cached,
            "cache_write_tokens": num_written,
            **sources(breakdown),
        },
    }


def sources(breakdown: PromptTokenBreakdown) -> dict[str, int]:
    """Return the cached tokens by source; they add up to cached_tokens."""
    return {f"{source}_tokens": getattr(breakdown, source) for source in CACHE_SOURCES}


# --------------------------------------------------------------------------------------------------------- completions


def completion(head: Json, choices: list[Json], usage: Json) -> Json:
    """Return a whole /v1/completions response; `head` is from `head_of`."""
    return {**head, "object": "text_completion", "choices": choices, "usage": usage}


def completion_chunk(head: Json, choices: list[Json], usage: Json | None = None) -> Json:
    """Return one event of a streamed /v1/completions response."""
    return {**head, "object": "text_completion", "choices": choices, "usage": usage}


def completion_choice(index: int, delta: Delta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice: of a chunk from its Delta, of a whole response from `whole(generation)`."""
    choice: Json = {
        "index": index,
        "text": delta.text if delta.echo is None else delta.echo.text + delta.text,
        "logprobs": completion_logprobs(delta.logprobs, tokenizer, delta.echo) if logprobs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    return _with_extras(choice, delta, tokenizer, token_ids=token_ids)


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, echo: SharedPrompt | None = None) -> Json:
    """Return log-probabilities in the completions format: four lists, one item per token, an echoed prompt first."""

    def name(entry: TokenEntry) -> str:
        return token_name(tokenizer, entry.token_id)

    def top(entry: TokenEntry) -> dict[str, float] | None:
        alternatives = {} if entry.logprob is None else {name(entry): entry.logprob}
        for token_id, logprob in entry.top:
            alternatives.setdefault(token_name(tokenizer, token_id), logprob)
        return alternatives or None

    shapes: dict[str, Callable[[TokenEntry], Any]] = {
        "tokens": name,
        "token_logprobs": lambda entry: entry.logprob,
        "top_logprobs": top,
        "text_offset": lambda entry: entry.offset,
    }
    return {key: _listed(entries, shape, echo, key) for key, shape in shapes.items()}


def _listed(
    entries: Sequence[Any], shape: Callable[[Any], Any], echo: SharedPrompt | None = None, key: str = ""
) -> list[Any] | Sliced:
    """Return the JSON list of `shape(entry)`; a long list is a Sliced, built while it is sent."""
    if echo is None and len(entries) <= SLICE_ITEMS:
        return [shape(entry) for entry in entries]
    if echo is None:
        return Sliced((entries,), shape)
    return Sliced((echo, entries), shape, kept=echo.kept, key=key)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, or as OpenAI does "bytes:\\xe2\\x80" if its bytes are not valid UTF-8."""
    written = tokenizer.token_bytes(token_id)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


# ---------------------------------------------------------------------------------------------------------------- chat


def chat_completion(head: Json, choices: list[Json], usage: Json) -> Json:
    """Return a whole /v1/chat/completions response."""
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage}


def chat_choice(index: int, delta: Delta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice of a whole chat response from `whole(generation)`."""
    choice: Json = {
        "index": index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None, **message_parts(delta.chat)},
        "logprobs": chat_logprobs(delta.logprobs, tokenizer) if logprobs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    return _with_extras(choice, delta, tokenizer, token_ids=token_ids)


def chat_chunk(head: Json, choices: list[Json], usage: Json | None = None) -> Json:
    """Return one event of a streamed chat response."""
    return {**head, "object": "chat.completion.chunk", "choices": choices, "usage": usage}


def chat_first_choice(index: int) -> Json:
    """Return the first choice of a streamed message: the role and empty text."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chat_chunk_choice(index: int, delta: Delta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice of a streamed chat response."""
    choice: Json = {
        "index": index,
        "delta": new_parts(ChatDelta(delta.text) if delta.chat is None else delta.chat),
        "logprobs": chat_logprobs(delta.logprobs, tokenizer) if logprobs else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason:
        choice["stop_reason"] = delta.stop_reason
    return _with_extras(choice, delta, tokenizer, token_ids=token_ids)


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> Json:
    """Return log-probabilities in the chat format: an object per token, with its bytes."""

    def shape(entry: TokenEntry) -> Json:
        top = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        return {**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}

    return {"content": _listed(entries, shape), "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


# -------------------------------------------------------------------------------------------------------------- others


def head_of(request_id: str, created: int, model: str) -> Json:
    """Return the common fields of all objects of one response: id, created (seconds since 1970), model."""
    return {"id": request_id, "created": created, "model": model, "system_fingerprint": None}


def whole(generation: Generation) -> Delta:
    """Return a finished generation as one Delta."""
    return Delta(
        generation.output_text,
        tuple(generation.token_ids),
        generation.logprobs,
        generation.finish_reason,
        generation.stop_reason,
        error=generation.error,
        echo=generation.echo,
        prompt_logprobs=generation.prompt.logprobs if generation.wants_prompt_logprobs else (),
        chat=generation.chat,
    )


def model_object(
    name: str,
    created: int,
    max_model_len: int,
    *,
    block_size: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    defaults: SamplingDefaults,
    exceptions: Sequence[str],
) -> Json:
    """Return the object of one model; `max_model_len` in tokens, as in vLLM; of `defaults` those that the model sets.

    `exceptions` are those of the model from exact reuse. The size of the KV pool and the tokens of a step are included
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
        "default_sampling_params": {name: value for name, value in asdict(defaults).items() if value is not None},
        "exact_reuse": {"holds": not exceptions, "exceptions": list(exceptions)},
    }


def model_list(models: list[Json]) -> Json:
    """Return the response of /v1/models."""
    return {"object": "list", "data": models}


def tokenizer_info(tokenizer: Tokenizer, max_model_len: int) -> Json:
    """Return the response of /tokenizer_info, as in vLLM: the names of tokenizer_config.json."""
    tokens = dict.fromkeys(NAMED_TOKENS) | tokenizer.named_tokens
    shown = {"chat_template": tokenizer.chat_template, "model_max_length": max_model_len}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **shown}


def tokenize_answer(token_ids: Sequence[int], tokenizer: Tokenizer, max_model_len: int, *, with_texts: bool) -> Json:
    """Return the response of /tokenize."""
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": _listed(token_ids, int),
        "token_strs": _listed(token_ids, tokenizer.token_text) if with_texts else None,
    }


def detokenize_answer(text: str) -> Json:
    """Return the response of /detokenize."""
    return {"prompt": text}


def prompt_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> list[Json | None] | Sliced:
    """Return vLLM's format: null for the first token, then per position the token and its best alternatives by id."""

    def shape(entry: TokenEntry | None) -> Json | None:
        if entry is None:
            return None
        candidates = dict(entry.top) | {entry.token_id: entry.logprob}
        return {str(i): {"logprob": p, "decoded_token": token_name(tokenizer, i)} for i, p in candidates.items()}

    if len(entries) <= SLICE_ITEMS:
        return [None, *map(shape, entries)]
    return Sliced(((None,), entries), shape)


def _with_extras(choice: Json, delta: Delta, tokenizer: Tokenizer, *, token_ids: bool) -> Json:
    """Add the requested extensions of OpenAI's API to `choice`, under vLLM's names, and return it."""
    if token_ids:
        choice["token_ids"] = delta.token_ids
    if len(delta.prompt_logprobs):
        choice["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, tokenizer)
    return choice
