"""Cache parameters of a request: Headstart's own fields and OpenAI's, both mapped to a mode and a retention.

They are hints, not guarantees: they order the eviction of the sending tenant's blocks and never affect other tenants.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from headstart.core.request import DEFAULT_RETENTION, CacheMode, RetentionHint
from headstart.openai.bounds import RequestBounds
from headstart.openai.request_model import RequestModel, custom_validator
from headstart.openai.value_checks import raise_invalid_value, safe_repr

MAX_LABEL_CHARS = 256
MAX_ID_CHARS = 128
MAX_TTL = 24 * 3600  # seconds
DEFAULT_TTL = 1800.0  # minimum lifetime of OpenAI's cache by default
KEYED_PRIORITY = 60  # with a prompt_cache_key: similar requests are expected
TIMED_PRIORITY = 75  # with a requested lifetime
_RETENTIONS = ("in_memory", "in-memory", "24h")
_TTL = re.compile(r"([0-9]{1,6})([smh]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def _seconds(name: str, value: Any) -> float:
    """Return a lifetime in seconds. Raises InvalidRequestError."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if isinstance(value, str) and (found := _TTL.fullmatch(value)):
        number = int(found[1]) * _SECONDS[found[2]]
    if not 0 < number <= MAX_TTL:
        raise_invalid_value(
            name, f"is {safe_repr(value)}", f'it must be like "30m" or "1h", or seconds, up to {MAX_TTL} of them'
        )
    return float(number)


Seconds = Annotated[
    float | None,
    custom_validator(lambda value, _: _seconds("prompt_cache_options.ttl", value), str | float),
    Field(description='Minimum lifetime of the blocks: "30m", "1h", or seconds'),
]


def _label(value: object, _: RequestBounds) -> str | None:
    """Return the beginning of a text that no answer depends on; None for any other value."""
    return value[:MAX_LABEL_CHARS].encode("utf-8", "replace").decode() if isinstance(value, str) else None


Label = Annotated[str | None, custom_validator(_label, str)]


class PromptCacheOptions(RequestModel):
    """OpenAI's options of the prompt cache."""

    max_entries = 16
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Seconds = None
    prewarm: bool = Field(False, description="Compute and cache the prompt, generate nothing")
    comparison_response_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="Id of an earlier answer: report what ended the reuse of its prompt"
    )


class CacheFields(RequestModel):
    """The cache parameters of a request body: docs/prefix-caching.md."""

    cache: Literal["read-write", "read-only", "bypass"] | None = Field(None, description="Use of the prefix cache")
    cache_priority: int | None = Field(None, ge=0, le=100, description="Blocks of lower priority are evicted first")
    cache_ttl: float | None = Field(None, ge=0, le=MAX_TTL, description="Seconds for which blocks keep the priority")
    cache_salt: str | None = Field(  # any text, since it is only hashed (`salted_domain`); at most as long as vLLM's
        None, min_length=1, max_length=128, description="Only requests with the same salt share blocks"
    )
    prompt_cache_key: Label = Field(None, description="Similar requests will follow")
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions(prewarm=False, comparison_response_id=None)
    prompt_cache_retention: Annotated[
        str | None, custom_validator(lambda value, _: value if value in _RETENTIONS else None, Literal[_RETENTIONS])
    ] = None


class CacheParams(NamedTuple):
    """The cache parameters of a request: cache mode, retention, salt that restricts sharing, prewarming, comparison."""

    mode: CacheMode = CacheMode.READ_WRITE
    retention: RetentionHint = DEFAULT_RETENTION
    salt: str | None = None
    prewarm: bool = False
    comparison_id: str | None = None  # of an earlier answer


def read_cache_params(fields: CacheFields, messages: object) -> CacheParams:
    """Return the cache parameters from the fields of a request and its conversation. Raises InvalidRequestError.

    `cache` overrides OpenAI's mode; `cache_priority` or `cache_ttl` override all of OpenAI's retention hints.
    """
    own = _own_retention(fields)
    hinted_mode, hinted = _openai(fields, messages)
    mode = hinted_mode if fields.cache is None else CacheMode(fields.cache)
    if own is not None and fields.cache == CacheMode.BYPASS.value:
        name = "cache_ttl" if fields.cache_priority is None else "cache_priority"
        raise_invalid_value(name, 'is set beside cache "bypass", which leaves nothing to keep', "send only one of them")
    options = fields.prompt_cache_options
    if options.prewarm and mode is not CacheMode.READ_WRITE:
        raise_invalid_value(
            "prompt_cache_options.prewarm", f"is true beside cache {mode.value}", "then nothing would be cached"
        )
    retention = hinted if own is None else own
    return CacheParams(mode, retention, fields.cache_salt, options.prewarm, options.comparison_response_id)


def _own_retention(fields: CacheFields) -> RetentionHint | None:
    priority, ttl = fields.cache_priority, fields.cache_ttl
    if priority is None and ttl is None:
        return None
    if priority is None:
        priority = TIMED_PRIORITY if ttl else DEFAULT_RETENTION.priority
    return RetentionHint(priority, ttl or 0.0)


def _openai(fields: CacheFields, messages: object) -> tuple[CacheMode, RetentionHint]:
    """Return mode and retention from OpenAI's fields. A lifetime overrides a policy, a policy overrides a key."""
    options = fields.prompt_cache_options
    breakpoints = list(_breakpoints(messages))
    uncached = options.mode == "explicit" and not breakpoints  # by OpenAI's documentation it does not use the cache
    marked = (_seconds(f"{name}.ttl", mark["ttl"]) for name, mark in breakpoints if mark.get("ttl") is not None)
    ttl = max(options.ttl or 0.0, *marked, 0.0)
    retention = DEFAULT_RETENTION
    if ttl:
        retention = RetentionHint(TIMED_PRIORITY, ttl)
    elif fields.prompt_cache_retention == "24h":
        retention = RetentionHint(KEYED_PRIORITY, float(MAX_TTL))
    elif fields.prompt_cache_key:
        retention = RetentionHint(KEYED_PRIORITY, DEFAULT_TTL)
    return CacheMode.BYPASS if uncached else CacheMode.READ_WRITE, retention


def _breakpoints(messages: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and value of every explicit breakpoint in a conversation. Other shapes are checked elsewhere."""
    for number, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
            mark = part.get("prompt_cache_breakpoint") if isinstance(part, Mapping) else None
            if mark is None:
                continue
            name = f"messages[{number}].content[{index}].prompt_cache_breakpoint"
            if not isinstance(mark, Mapping):
                raise_invalid_value(name, f"is {safe_repr(mark)}", 'it must be an object such as {"mode": "explicit"}')
            yield name, mark
