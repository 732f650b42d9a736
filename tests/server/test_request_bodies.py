"""bodies and requests: the shapes clients send, and the engine requests that come of them."""

import json
import re
import signal
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import BYTE_LEVEL, TEMPLATE, build

import headstart
from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.core.request import DEFAULT_RETENTION, CacheMode, RetentionHint
from headstart.openai.bounds import MAX_JSON_VALUES, RequestBounds
from headstart.openai.engine_requests import (
    RequestOrigin,
    build_requests,
    encode_chat,
    encode_completion,
    encode_prompt,
    salted_domain,
)
from headstart.openai.request_bodies import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from headstart.openai.request_json import MAX_DEPTH, check_json_depth, parse_json, parse_json_object
from headstart.openai.tokenizer.tokenizer import Tokenizer

BOUNDS = RequestBounds(vocab_size=100, max_model_len=64, max_prompts=4, max_messages=5)
USER = {"role": "user", "content": "hi"}
TOKENIZER = Tokenizer(build(BYTE_LEVEL), chat_template=TEMPLATE, eos_token_ids=(1,))
WIDE = RequestBounds(TOKENIZER.vocab_size, 64, (1,), scheduling_policy="priority")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": Infinity}', "invalid_json"),
        (b'{"a": 1e400}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_json"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "invalid_json"),
        (b'{"a": ' * (MAX_DEPTH + 2) + b"1" + b"}" * (MAX_DEPTH + 2), "invalid_json"),
    ],
)
def test_a_body_that_is_no_sound_json_object_is_refused(text: bytes, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json_object(text)
    assert caught.value.code == code and len(str(caught.value)) < 200


@pytest.mark.parametrize("field", ["a", "h\u00e9", "x" * 3000])
def test_a_body_in_latin_1_is_refused_with_the_position_in_the_body(field: str) -> None:
    """The decoder counts from the beginning of a string, and of strings in strings, or names no position."""
    for text in ('{"%s": [{"content": "', '{"%s": 1,\n "messages": [{"role": "user", "content": "Le caf'):
        body = (text % field).encode() + '\u00e9 noir"}]}'.encode("latin-1")
        at = len((text % field).encode())
        for form in (body, bytearray(body), memoryview(body)):
            with pytest.raises(
                InvalidRequestError, match=f"at byte {at} .E9 in hex, line {1 + text.count(chr(10))}.; send"
            ):
                parse_json_object(form)


def test_a_sound_body_is_read() -> None:
    assert parse_json_object('{"a": [1, 2.5, null, "é"]}'.encode()) == {"a": [1, 2.5, None, "é"]}
    assert parse_json_object(b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}")


# What msgspec's own decoder takes 8 to 16 us for, with the interpreter locked: beyond the tables of its fast path.
SLOW_NUMBERS = [b"1e308", b"-1e308", b"1e-320", b"1" * 19 + b"e289", b"2.2250738585072011e-308"]


@pytest.mark.parametrize("number", SLOW_NUMBERS)
def test_other_threads_may_run_while_slow_numbers_are_decoded(number: bytes) -> None:
    """A signal's handler runs where another thread may, not while a decoder holds the interpreter."""
    ticks = 0

    def tick(*_: object) -> None:
        nonlocal ticks
        ticks += 1

    body = b'{"a":[' + b",".join([number] * MAX_JSON_VALUES) + b"]}"
    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)  # of CPU time: other load does not matter
    try:
        values = parse_json(body)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert len(values["a"]) == MAX_JSON_VALUES and values["a"][0] == float(number)
    assert ticks > 2


@pytest.mark.parametrize("number", SLOW_NUMBERS)
def test_fractions_are_bounded_as_other_values_are_while_token_ids_are_not(number: bytes) -> None:
    listed = b'{"a":[' + b",".join([number] * MAX_JSON_VALUES)
    assert len(parse_json_object(listed + b",1,2]}")["a"]) == MAX_JSON_VALUES + 2
    with pytest.raises(
        InvalidRequestError, match=f"more than {MAX_JSON_VALUES} numbers with a fraction or an exponent"
    ):
        parse_json_object(listed + b"," + number + b"]}")


def test_json_without_a_type_is_decoded_in_one_place_only() -> None:
    source = Path(headstart.__file__).parent
    untyped = [
        f"{path.relative_to(source)}: {call}"
        for path in source.rglob("*.py")
        for call in re.findall(r"msgspec\.json\.decode\([^()]*\)", path.read_text(encoding="utf-8"))
        if "type=" not in call
    ]
    assert untyped == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("i", [1, 2]),)),
        ([[1], [2, 3]], (array("i", [1]), array("i", [2, 3]))),
        (["a", [1]], ("a", array("i", [1]))),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert parse_completion({"prompt": prompt}, BOUNDS).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        {},
        5,
        True,
        [1.0],
        [True],
        [1, "a"],
        [-1],
        [100],
        [[1], []],
        [None],
        ["a"] * 5,
        "\ud800",
        [["a"]],
    ],
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"prompt": prompt}, BOUNDS)
    assert caught.value.param == "prompt"


def test_a_missing_prompt_is_told_as_missing() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is missing"):
        parse_completion({}, BOUNDS)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_content_is_a_text_or_text_parts(content: Any, expected: str) -> None:
    body = parse_chat({"messages": [{"role": "user", "content": content, "name": "ann", "extra": 1}]}, BOUNDS)
    assert body.messages == [{"role": "user", "content": expected, "name": "ann"}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_placeholders_or_refused(kind: str) -> None:
    content = [{"type": "text", "text": "See "}, {"type": kind, kind: {"url": "http://example.invalid/x.png"}}]
    messages = [{"role": "user", "content": content}]
    named = kind.removesuffix("_url").removeprefix("input_")
    [message] = parse_chat({"messages": messages}, BOUNDS).messages
    assert message["content"].endswith(f"[{named}: not shown, this server reads text only]")
    with pytest.raises(InvalidRequestError, match="--unreadable-parts placeholder") as caught:
        parse_chat({"messages": messages}, replace(BOUNDS, unreadable_parts="refuse"))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages[0].content[1]")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "\udfff"}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [USER] * 6,
    ],
)
def test_any_other_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": messages}, BOUNDS)
    assert (caught.value.param or "").startswith("messages")


def test_calls_of_earlier_turns_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "tool", "content": "5", "tool_call_id": "c1"}
    body = parse_chat(
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]}, BOUNDS
    )
    assert body.messages[1]["content"] == ""
    assert body.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert body.messages[2] == answer


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse_tokenize({"prompt": "hi"}, BOUNDS).prompt == "hi"
    assert parse_tokenize({"messages": [USER]}, BOUNDS).messages == [USER]
    for wrong in ({}, {"prompt": "hi", "messages": [USER]}, {"prompt": 5}, {"prompt": "\ud800"}):
        with pytest.raises(InvalidRequestError):
            parse_tokenize(wrong, BOUNDS)


def test_detokenize_takes_ids_of_the_vocabulary() -> None:
    assert parse_detokenize({"tokens": [1, 99]}, BOUNDS).token_ids == array("i", [1, 99])
    for wrong in (None, 5, "x", [100], [-1], [1.5], [True]):
        with pytest.raises(InvalidRequestError):
            parse_detokenize({"tokens": wrong}, BOUNDS)


def requests_for(**values: Any) -> list[Any]:
    body = parse_completion({"prompt": "the fox", **values}, WIDE)
    origin = RequestOrigin("r", 1.5, b"domain", "tenant")
    return build_requests(encode_completion(body, TOKENIZER, WIDE), body.params, WIDE, origin)


def test_every_prompt_and_choice_is_a_request_of_its_own() -> None:
    requests = requests_for(prompt=["the", "fox"], n=2, seed=7, priority=3)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert [list(request.prompt) for request in requests[::2]] == [list(TOKENIZER.encode(t)) for t in ("the", "fox")]
    assert [request.sampling.seed for request in requests] == [7, 8, 7, 8]
    assert {(r.arrival, r.priority, r.domain, r.tenant) for r in requests} == {(1.5, 3, b"domain", "tenant")}
    assert [request.request_id for request in requests_for()] == ["r"]


def test_the_largest_seed_wraps_around() -> None:
    assert [request.sampling.seed for request in requests_for(n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]


def test_cache_mode_and_retention_reach_every_request() -> None:
    wished = requests_for(n=2, cache="read-only", cache_priority=80, cache_ttl=60)
    assert {(request.cache, request.retention) for request in wished} == {
        (CacheMode.READ_ONLY, RetentionHint(80, 60.0))
    }
    assert [(r.cache, r.retention) for r in requests_for()] == [(CacheMode.READ_WRITE, DEFAULT_RETENTION)]


def test_a_prompt_computed_for_its_logprobs_is_reused_by_others() -> None:
    assert requests_for(echo=True, logprobs=1)[0].cache is CacheMode.READ_WRITE
    assert requests_for(prompt_logprobs=1, cache="bypass")[0].cache is CacheMode.BYPASS


def test_a_salt_only_narrows_its_own_tenants_domain() -> None:
    salted = requests_for(cache_salt="s")[0]
    assert (salted.domain, salted.tenant) == (salted_domain(b"domain", "s"), "tenant")
    assert salted_domain(b"a", None) == b"a"
    assert salted_domain(b"a", "bc") != salted_domain(b"ab", "c")
    assert len({salted_domain(d, s) for d in (b"a", b"b", b"") for s in (None, "x", "y")} | {b"x"}) == 10


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        requests_for(prompt="")


@pytest.mark.parametrize("text", ["the fox " * 40, "x" * 1_000_000])
def test_a_prompt_that_cannot_fit_is_refused(text: str) -> None:
    with pytest.raises(RequestTooLargeError, match="64"):
        requests_for(prompt=text)


def test_a_chat_is_rendered_and_encoded_without_further_special_tokens() -> None:
    body = parse_chat({"messages": [USER]}, WIDE)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(encode_chat(body, TOKENIZER, WIDE), skip_special_tokens=False) == text


def test_a_chat_that_cannot_fit_names_its_messages() -> None:
    body = parse_chat({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, WIDE)
    with pytest.raises(RequestTooLargeError) as caught:
        encode_chat(body, TOKENIZER, WIDE)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'""', b'"\\""', b'[{"a":[]}]'])
def test_a_body_of_too_many_values_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch, unit: bytes) -> None:
    built: list[int] = []
    monkeypatch.setattr("msgspec.json.decode", lambda text: built.append(len(text)))
    body = b'{"prompt":[' + b",".join([unit] * 140_000) + b"]}"
    with pytest.raises(InvalidRequestError, match="more than 131072 strings, lists and objects"):
        parse_json_object(body)
    assert not built


def test_checking_the_depth_of_many_token_ids_copies_none_of_them() -> None:
    values = {"prompt": [0] * 1_000_000}  # 8 MB
    tracemalloc.start()
    try:
        check_json_depth(values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_without_an_end_is_read_once(end: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json_object(b'{"prompt":"' + b'\\"' * 1_000_000 + end)


@pytest.mark.parametrize("text", ["[{" * 200_000, '"' * 300_000, "\\" * 300_000 + '"[', "\n\u20ac[" * 150_000])
def test_brackets_and_quotes_within_a_text_are_no_values(text: str) -> None:
    assert parse_json_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    assert parse_json_object(b'{"prompt":[' + b"7," * 300_000 + b"7]}")["prompt"] == [7] * 300_001


def test_more_numbers_than_any_valid_request_has_are_refused_before_they_are_objects() -> None:
    body = b'{"prompt":[' + b"70000," * 300_000 + b"7]}"
    assert len(parse_json_object(body, 300_001)["prompt"]) == 300_001
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLargeError, match="more than 300000 numbers") as caught:
            parse_json_object(body, 300_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "context_length_exceeded" and peak < 200_000
    assert parse_json_object(json.dumps({"prompt": "1,2,-3.5e7 " * 9000}).encode(), 10)["prompt"]
    assert parse_json_object(json.dumps({"a": [[1, -2.5e3], {"b": 4, "5,6": "7,8"}]}).encode(), 3)
    many = json.dumps({"prompt": [7] * (BOUNDS.max_model_len * BOUNDS.max_prompts)}).encode()
    assert parse_json_object(many, BOUNDS.max_numbers)
    assert BOUNDS.max_numbers >= 16 * BOUNDS.max_model_len, "/detokenize takes that many"


def test_of_a_text_that_is_much_too_long_only_the_beginning_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = TOKENIZER.encode

    def watched(text: str, **options: Any) -> "array[int]":
        read.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", watched)
    monkeypatch.setattr(TOKENIZER, "max_token_chars", 0)
    bounds = RequestBounds(TOKENIZER.vocab_size, 3000)
    with pytest.raises(RequestTooLargeError, match="tokens of the first 24000 of 1000000 characters"):
        encode_prompt("ab cd " * 166_666 + "abcd", TOKENIZER, bounds, add_special_tokens=True)
    assert read == [24_000]
    read.clear()
    text = "fox" + " " * 100  # whatever the tokens, what fits in the end is tokenized whole and taken
    assert list(encode_prompt(text, TOKENIZER, bounds, add_special_tokens=True)) == list(encode(text))
    assert read == [len(text)] * 1
