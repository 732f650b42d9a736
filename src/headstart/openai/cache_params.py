"""Cache parameters of a request: Headstart's own fields and OpenAI's, both mapped to a mode and a retention.

They are hints, not guarantees: they order the eviction of the sending tenant's blocks and never affect other tenants.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headstart.core.request import DEFAULT_RETENTION, CacheMode, Retention
from headstart.openai.bounds import MAX_SALT_CHARS
from headstart.openai.fields import Fields, bad_value, check_number, shown

MAX_TTL = 24 * 3600  # seconds
DEFAULT_TTL = 1800.0  # minimum lifetime of OpenAI's cache by default
KEYED_PRIORITY = 60  # with a prompt_cache_key: similar requests are expected
TIMED_PRIORITY = 75  # with a requested lifetime
_MODES = tuple(mode.value for mode in CacheMode)
_TTL = re.compile(r"([0-9]{1,6})([smh]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class CacheWishes(NamedTuple):
    """The cache parameters of a request: cache mode, retention of its blocks, and salt that restricts sharing."""

    mode: CacheMode = CacheMode.READ_WRITE
    retention: Retention = DEFAULT_RETENTION
    salt: str | None = None


def cache_wishes(fields: Fields, max_label_chars: int) -> CacheWishes:
    """Return the cache parameters from the fields of a request. Raises InvalidRequestError.

    `cache` overrides OpenAI's mode; `cache_priority` or `cache_ttl` override all of OpenAI's retention hints.
    """
    cache = _choice("cache", fields.take("cache"), *_MODES)
    own = _own_retention(fields)
    hinted_mode, hinted = _openai(fields, max_label_chars)
    mode = hinted_mode if cache is None else CacheMode(cache)
    if own is not None and cache == CacheMode.BYPASS.value:
        name = "cache_ttl" if fields.take("cache_priority") is None else "cache_priority"
        bad_value(name, 'is set beside cache "bypass", which leaves nothing to keep', "send only one of them")
    return CacheWishes(mode, hinted if own is None else own, _salt(fields))


def _own_retention(fields: Fields) -> Retention | None:
    priority = fields.integer("cache_priority", 0, 100)
    value = fields.take("cache_ttl")
    if priority is None and value is None:
        return None
    ttl = 0.0 if value is None else check_number("cache_ttl", value, 0, MAX_TTL)
    if priority is None:
        priority = TIMED_PRIORITY if ttl else DEFAULT_RETENTION.priority
    return Retention(priority, ttl)


def _openai(fields: Fields, max_label_chars: int) -> tuple[CacheMode, Retention]:
    """Return mode and retention from OpenAI's fields. A lifetime overrides a policy, a policy overrides a key."""
    key = fields.string("prompt_cache_key", max_label_chars)
    policy = _choice("prompt_cache_retention", fields.take("prompt_cache_retention"), "in_memory", "in-memory", "24h")
    options = fields.mapping("prompt_cache_options", 16) or {}
    mode = _choice("prompt_cache_options.mode", options.get("mode"), "implicit", "explicit")
    breakpoints = list(_breakpoints(fields.values.get("messages")))
    lifetimes = [_seconds("prompt_cache_options.ttl", options.get("ttl"))]
    lifetimes += [_seconds(f"{name}.ttl", mark.get("ttl")) for name, mark in breakpoints]
    uncached = mode == "explicit" and not breakpoints  # by OpenAI's documentation such a request does not use the cache
    ttl = max(lifetimes)
    retention = DEFAULT_RETENTION
    if ttl:
        retention = Retention(TIMED_PRIORITY, ttl)
    elif policy == "24h":
        retention = Retention(KEYED_PRIORITY, float(MAX_TTL))
    elif key:
        retention = Retention(KEYED_PRIORITY, DEFAULT_TTL)
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
                bad_value(name, f"is {shown(mark)}", 'it must be an object such as {"mode": "explicit"}')
            yield name, mark


def _salt(fields: Fields) -> str | None:
    """Return the salt: any text, since it is only hashed (`narrow_domain`)."""
    salt = fields.string("cache_salt", MAX_SALT_CHARS)
    if salt == "":
        bad_value("cache_salt", "is empty", f"use 1 to {MAX_SALT_CHARS} characters, or leave it out")
    return salt


def _choice(name: str, value: object, *allowed: str) -> str | None:
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    bad_value(name, f"is {shown(value)}", f"it must be one of {', '.join(allowed)}")


def _seconds(name: str, value: object) -> float:
    """Return a lifetime in seconds, 0 for None. Raises InvalidRequestError."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        found = _TTL.fullmatch(value)
        seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    else:
        seconds = check_number(name, value, 0, MAX_TTL, above_low=True)
    if not 0 < seconds <= MAX_TTL:
        bad_value(name, f"is {shown(value)}", f'it must be like "30m" or "1h", or seconds, up to {MAX_TTL} of them')
    return seconds
