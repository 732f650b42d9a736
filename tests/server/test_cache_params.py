"""cache_params: what the cache fields of a request come to, ours and OpenAI's, alone and together."""

from typing import Any

import pytest

from headstart.core.errors import InvalidRequestError
from headstart.core.request import DEFAULT_RETENTION, CacheMode, RetentionHint
from headstart.openai.bounds import RequestBounds
from headstart.openai.cache_params import CacheFields, CacheParams, read_cache_params
from headstart.openai.request_model import validate_as

BOUNDS = RequestBounds(vocab_size=100, max_model_len=64)
READ_WRITE, READ_ONLY, BYPASS = CacheMode.READ_WRITE, CacheMode.READ_ONLY, CacheMode.BYPASS
MARK = {"mode": "explicit"}


def wishes(**values: Any) -> CacheParams:
    return read_cache_params(validate_as(CacheFields, values, BOUNDS), values.get("messages"))


def chat(*marks: Any) -> list[dict[str, Any]]:
    """A conversation of one message whose parts carry these breakpoints."""
    parts = [{"type": "text", "text": "x", "prompt_cache_breakpoint": mark} for mark in marks]
    return [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]


def test_without_any_field_a_request_reads_writes_and_hints_nothing() -> None:
    assert wishes() == CacheParams(READ_WRITE, DEFAULT_RETENTION, None)


@pytest.mark.parametrize("mode", list(CacheMode))
def test_cache_names_the_mode(mode: CacheMode) -> None:
    assert wishes(cache=mode.value) == CacheParams(mode)


@pytest.mark.parametrize(
    ("values", "retention"),
    [
        ({"cache_priority": 0}, RetentionHint(0, 0.0)),
        ({"cache_priority": 90}, RetentionHint(90, 0.0)),
        ({"cache_priority": 90, "cache_ttl": 60}, RetentionHint(90, 60.0)),
        ({"cache_ttl": 60}, RetentionHint(75, 60.0)),  # a lifetime alone must mean something
        ({"cache_ttl": 0}, DEFAULT_RETENTION),
        ({"prompt_cache_key": "agent-7"}, RetentionHint(60, 1800.0)),
        ({"prompt_cache_key": ""}, DEFAULT_RETENTION),
        ({"prompt_cache_retention": "24h"}, RetentionHint(60, 86400.0)),
        ({"prompt_cache_retention": "in_memory"}, DEFAULT_RETENTION),
        ({"prompt_cache_retention": "in-memory"}, DEFAULT_RETENTION),
        ({"prompt_cache_options": {"ttl": "30m"}}, RetentionHint(75, 1800.0)),
        ({"prompt_cache_options": {"ttl": "1h"}}, RetentionHint(75, 3600.0)),
        ({"prompt_cache_options": {"ttl": "90s"}}, RetentionHint(75, 90.0)),
        ({"prompt_cache_options": {"ttl": "90"}}, RetentionHint(75, 90.0)),
        ({"prompt_cache_options": {"ttl": 90}}, RetentionHint(75, 90.0)),
        ({"prompt_cache_options": {"mode": "implicit"}}, DEFAULT_RETENTION),
    ],
)
def test_every_hint_becomes_a_retention(values: dict[str, Any], retention: RetentionHint) -> None:
    assert wishes(**values) == CacheParams(READ_WRITE, retention)


def test_the_strongest_hint_of_openai_decides_and_ours_set_them_aside() -> None:
    openai: dict[str, Any] = {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    assert wishes(**openai).retention == RetentionHint(60, 86400.0)
    openai["prompt_cache_options"] = {"ttl": "30m"}
    assert wishes(**openai).retention == RetentionHint(75, 1800.0)
    assert wishes(**openai, cache_priority=10).retention == RetentionHint(10, 0.0)
    assert wishes(**openai, cache_ttl=0).retention == DEFAULT_RETENTION


def test_explicit_mode_without_a_breakpoint_does_not_use_the_cache() -> None:
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    assert wishes(**explicit).mode is BYPASS
    assert wishes(**explicit, messages=[{"role": "user", "content": "x"}]).mode is BYPASS
    assert wishes(**explicit, messages=chat(None)).mode is BYPASS
    assert wishes(**explicit, messages=chat(None, MARK)).mode is READ_WRITE
    assert wishes(**explicit, cache="read-only").mode is READ_ONLY  # our field wins


def test_a_breakpoint_brings_its_own_lifetime_and_the_longest_counts() -> None:
    assert wishes(messages=chat(MARK)).retention == DEFAULT_RETENTION
    long = chat({**MARK, "ttl": "12h"}, {**MARK, "ttl": "30m"})
    assert wishes(messages=long).retention == RetentionHint(75, 43200.0)
    assert wishes(messages=long, prompt_cache_options={"ttl": "24h"}).retention == RetentionHint(75, 86400.0)


@pytest.mark.parametrize("values", [{"cache_priority": 80}, {"cache_ttl": 60}, {"cache_priority": 80, "cache_ttl": 60}])
def test_a_bypass_that_wants_to_be_kept_is_a_contradiction(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="leaves nothing to keep") as caught:
        wishes(cache="bypass", **values)
    assert caught.value.param == next(iter(values))
    assert wishes(cache="bypass", prompt_cache_key="k").mode is BYPASS  # a label says nothing of keeping


@pytest.mark.parametrize(
    "ttl", ["", "m", "0m", "0", "25h", "1441m", "86401", "1d", "-1s", "1.5h", " 1h", "1h\n", "1 h"]
)
def test_a_lifetime_that_is_none_is_refused_with_the_forms_that_are(ttl: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'like "30m" or "1h", or seconds, up to 86400') as caught:
        wishes(prompt_cache_options={"ttl": ttl})
    assert caught.value.param == "prompt_cache_options.ttl"


@pytest.mark.parametrize("ttl", [0, -1, 86400.5, True, float("nan"), [], {}, "٣m", "9" * 7 + "s"])
def test_a_lifetime_of_another_kind_is_refused(ttl: Any) -> None:
    with pytest.raises(InvalidRequestError):
        wishes(prompt_cache_options={"ttl": ttl})
    with pytest.raises(InvalidRequestError) as caught:
        wishes(messages=chat({**MARK, "ttl": ttl}))
    assert caught.value.param == "messages[1].content[0].prompt_cache_breakpoint.ttl"


@pytest.mark.parametrize("mode", ["", "Explicit", 1, True, [], {}])
def test_a_mode_that_is_none_is_refused(mode: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wishes(prompt_cache_options={"mode": mode})
    assert caught.value.param == "prompt_cache_options.mode"


@pytest.mark.parametrize("mark", ["x", 5, True, [], [{}]])
def test_a_breakpoint_that_is_no_object_is_refused(mark: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_cache_breakpoint is"):
        wishes(messages=chat(mark))


@pytest.mark.parametrize("messages", ["x", 5, {}, [5], [[]], [{"content": 5}], [{"content": [5, [], "x"]}]])
def test_messages_of_any_shape_are_left_to_those_who_check_them(messages: Any) -> None:
    assert wishes(messages=messages) == CacheParams()
