"""params: every limit, at its border and beyond; what is not built is refused; what is unknown is told."""

import json
import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.shared import ReasoningEffort

from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.openai.bounds import FLOAT32_MAX, RequestBounds
from headstart.openai.generation_params import (
    GenerationParams,
    ParamsKind,
    lower_max_tokens,
    parse_params,
    sampling_params_for_prompt,
)
from headstart.openai.request_bodies import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from headstart.openai.request_json import parse_json_object
from headstart.openai.tools.call_grammar import keywords_dropped_by_tool, tool_arguments_schema

BOUNDS = RequestBounds(vocab_size=100, max_model_len=64, eos_token_ids=(2,), scheduling_policy="priority")
NAN, INF = float("nan"), float("inf")


def completion(**values: Any) -> GenerationParams:
    return parse_params(values, BOUNDS, ParamsKind.COMPLETION)


def chat(**values: Any) -> GenerationParams:
    return parse_params(values, BOUNDS, ParamsKind.CHAT)


SCHEMA_FIELD = "response_format.json_schema.schema"
ACCEPTED = [
    ("n", 1),
    ("n", 128),
    ("best_of", 1),
    ("temperature", 0),
    ("temperature", 2),
    ("top_p", 1),
    ("top_p", 0.001),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 1),
    ("min_p", 0),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 100),
    ("repetition_penalty", FLOAT32_MAX),
    ("repetition_penalty", 1e-38),
    ("repetition_penalty", 5e-324),
    ("seed", 2**63 - 1),
    ("seed", -(2**63)),
    ("max_tokens", 1),
    ("max_tokens", 64),
    ("max_completion_tokens", 3),
    ("min_tokens", 16),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 3),
    ("stop", "x"),
    ("stop", []),
    ("stop", ["x" * 256] * 16),
    ("stop_token_ids", [0, 99]),
    ("logit_bias", {"0": -100, "99": 100}),
    ("logit_bias", {}),
    *(
        (name, value)
        for name in ("user", "safety_identifier", "prompt_cache_key")
        for value in ("x" * 5000, 5, "\udc00")
    ),
    ("cache_salt", "aA0+/=_-"),
    ("cache_salt", "tenant one.two|user:42 é\n"),
    ("priority", -5),
    *(("cache", mode) for mode in ("read-write", "read-only", "bypass")),
    ("cache_priority", 0),
    ("cache_priority", 100),
    ("cache_ttl", 0),
    ("cache_ttl", 86400.0),
    ("prompt_cache_options", {}),
    ("prompt_cache_options", {"mode": "implicit", "ttl": None, "newer": [1]}),
    *(("prompt_cache_options", {"ttl": ttl}) for ttl in ("30m", "1h", "90s", "1800", 1800, 0.5, "24h")),
    *(("prompt_cache_retention", policy) for policy in ("in_memory", "in-memory", "24h", "48h", "", 24, ["24h"])),
    ("stream_options", {"include_usage": True}),  # without stream
    ("response_format", {"type": "text"}),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("modalities", ["text"]),
    ("suffix", ""),
    ("chat_template_kwargs", {"enable_thinking": False, "level": 3, "mode": "x"}),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_a_value_within_its_limits_is_accepted(name: str, value: Any) -> None:
    assert completion(**{name: value}).ignored == ()


@pytest.mark.parametrize("name", sorted({name for name, _ in ACCEPTED} | {"echo", "stream", "audio"}))
def test_null_means_the_default(name: str) -> None:
    assert completion(**{name: None}) == completion()


REFUSED = [
    ("n", [0, 129, 1.0, True, "1", [], 10**400]),
    ("best_of", [0, 17, "x"]),
    ("temperature", [-0.1, 2.01, NAN, INF, -INF, True, "1", 10**400, []]),
    ("top_p", [0, -1, 1.01, NAN, False]),
    ("top_k", [-2, 1.5, 2**31, True]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN, "0"]),
    ("frequency_penalty", [-2.1, 2.1, INF]),
    ("repetition_penalty", [0, -1, 3.5e38, NAN]),
    ("seed", [2**63, -(2**63) - 1, 1.0, True, "1"]),
    ("max_tokens", [0, -1, 65, 1.0, True, "5"]),
    ("max_completion_tokens", [0, -1, 65, 2**40]),
    ("min_tokens", [-1, 17, 65, True]),
    ("logprobs", [-1, 21, True, 1.0]),
    ("prompt_logprobs", [-1, 21, False]),
    ("stop", ["", [""], ["x" * 257], ["x"] * 17, 5, [5], {"a": 1}, ["\ud800"], True]),
    ("stop_token_ids", [[-1], [100], [1.0], [True], 5, "x", False, 0, {"a": 1}, list(range(99)) * 2]),
    (
        "logit_bias",
        [
            {"-1": 0},
            {"100": 0},
            {"x": 0},
            {"1.0": 0},
            {" 1": 0},
            {"²": 0},
            {"9" * 5000: 0},
            {"1": 101},
            {"1": NAN},
            {"1": True},
            {"1": None},
            {"1": 10**400},
            [],
            False,
            {str(i): 0 for i in range(1025)},
        ],
    ),
    ("cache", ["", "READ-WRITE", "none", True, 0, [], ["bypass"], {"a": 1}]),
    ("cache_priority", [-1, 101, 50.0, True, "50", 10**400]),
    ("cache_ttl", [-1, 86401, NAN, INF, True, "30m", []]),
    ("prompt_cache_options", ["30m", [], 5, True, {str(i): 0 for i in range(17)}]),
    ("cache_salt", ["", "x" * 129, "\ud800", 5]),
    ("priority", [2**31, 1.0, True]),
    ("echo", ["true", 1, 0]),
    ("stream", ["true", 1]),
    ("ignore_eos", [1]),
    ("skip_special_tokens", ["no"]),
    ("continue_final_message", [1]),
    ("chat_template_kwargs", [{"messages": 1}, {"a b": 1}, {"_x": 1}, {"x": []}, {"x": 1.5}, {"x": None}, 5]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values])
def test_a_value_beyond_its_limits_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert name in message and len(message) < 400 and "0x" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("suffix", "x"),
        ("audio", {"voice": "x"}),
        ("chat_template", "{{ 1 }}"),
        ("best_of", 3),
        ("prompt_embeds", "x"),
        ("bad_words", ["x"]),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**{name: value})
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [{"type": "function"}]), ("tool_choice", "required"), ("tool_choice", {"type": "function"})],
)
def test_a_completion_has_no_tools(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{name: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ("json", "invalid_value", "response_format"),
        ({"type": "yaml"}, "invalid_value", "response_format.type"),
        ({"type": "json_schema"}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ({"type": "json_schema", "json_schema": {"schema": 7}}, "invalid_value", SCHEMA_FIELD),
        ({"type": "json_schema", "json_schema": {"schema": False}}, "invalid_value", SCHEMA_FIELD),
    ],
)
def test_a_response_format_that_is_nothing_is_named(value: Any, code: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(response_format=value)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_the_message_names_value_limit_and_remedy() -> None:
    with pytest.raises(InvalidRequestError, match=r"^min_p is 2\.5; it must be between 0 and 1$"):
        completion(min_p=2.5)
    with pytest.raises(InvalidRequestError, match=r"^temperature is 2\.5; it must be between 0 and 2$"):
        completion(temperature=2.5)
    with pytest.raises(InvalidRequestError, match=r"^n is 129; it must be between 1 and 128$"):
        completion(n=129)
    with pytest.raises(InvalidRequestError, match=r"^top_p is 0; it must be above 0 and at most 1$"):
        completion(top_p=0)


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_priority_is_refused_where_it_would_have_no_effect(policy: str) -> None:
    bounds = replace(BOUNDS, scheduling_policy=policy)
    assert parse_params({"priority": 0}, bounds, ParamsKind.CHAT).priority == 0
    with pytest.raises(InvalidRequestError, match=f"Priority scheduling is not enabled.* is {policy};") as caught:
        parse_params({"priority": 1}, bounds, ParamsKind.CHAT)
    assert (caught.value.param, caught.value.code) == ("priority", "unsupported_parameter")
    assert completion(priority=7).priority == 7


def test_unknown_names_are_ignored_and_told() -> None:
    assert completion(zebra=1, store=True, temperature=0).ignored == ("store", "zebra")


def test_defaults_are_those_of_openai() -> None:
    params = completion()
    assert (params.max_tokens, params.n, params.stream, params.stop) == (16, 1, False, ())
    assert (params.sampling.temperature, params.sampling.top_p, params.sampling.logprobs) == (1.0, 1.0, None)
    assert chat().max_tokens is None


def test_end_of_sequence_stops_unless_it_is_ignored() -> None:
    assert completion(stop_token_ids=[7]).sampling.stop_token_ids == (7, 2)
    assert completion(stop_token_ids=[7], ignore_eos=True).sampling.stop_token_ids == (7,)
    assert completion(ignore_eos=True).ignore_eos


def test_switched_off_filters_have_one_value() -> None:
    assert [completion(top_k=k).sampling.top_k for k in (-1, 0, 5, 100, 1000)] == [0, 0, 5, 0, 0]
    assert completion(temperature=1e-9).sampling.temperature == 0.0


def test_logit_bias_is_sorted_by_token() -> None:
    assert completion(logit_bias={"9": 1, "3": -1.5}).sampling.logit_bias == ((3, -1.5), (9, 1.0))


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
def test_every_effort_of_openais_client_is_passed_on(effort: str) -> None:
    assert chat(reasoning_effort=effort).reasoning_effort == effort


def test_chat_asks_for_logprobs_in_two_fields() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(top_logprobs=0).sampling.logprobs is None
    for wrong in ({"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}):
        with pytest.raises(InvalidRequestError):
            chat(**wrong)


def test_nothing_is_generated_only_for_an_echo() -> None:
    params = completion(max_tokens=0, echo=True, logprobs=2)
    assert params.max_tokens == 0
    assert params.sampling.prompt_logprobs == 2
    assert sampling_params_for_prompt(params, 10, BOUNDS).max_tokens == 1  # the engine samples one, which is not sent
    with pytest.raises(InvalidRequestError, match="echo is not supported"):
        chat(echo=True)


def test_logprobs_of_the_prompt_are_not_streamed() -> None:
    assert chat(prompt_logprobs=2).sampling.prompt_logprobs == 2
    with pytest.raises(InvalidRequestError, match="send stream: false"):
        completion(prompt_logprobs=2, stream=True)


def test_both_names_of_max_tokens_must_agree() -> None:
    assert completion(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    with pytest.raises(InvalidRequestError, match="only one of them"):
        completion(max_tokens=3, max_completion_tokens=4)


def test_options_of_a_stream_are_read() -> None:
    params = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True, "new": 1})
    assert params.include_usage and params.continuous_usage_stats
    with pytest.raises(InvalidRequestError, match="include_usage"):
        completion(stream=True, stream_options={"include_usage": 1})


def test_a_message_is_continued_or_a_new_one_begun() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt
    with pytest.raises(InvalidRequestError, match="only one of them"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_prompt_and_output_share_the_context() -> None:
    params = completion(max_tokens=10)
    assert sampling_params_for_prompt(params, 54, BOUNDS).max_tokens == 10
    with pytest.raises(RequestTooLargeError, match=r"length is 64 tokens.*: lower max_tokens to 9 ") as e:
        sampling_params_for_prompt(params, 55, BOUNDS)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(RequestTooLargeError, match="shorten the prompt by 1 tokens"):
        sampling_params_for_prompt(chat(), 64, BOUNDS)


@given(st.integers(1, 64) | st.none(), st.integers(1, 63))
def test_shortened_parameters_fit_and_are_lowered_only_then(max_tokens: int | None, num_prompt_tokens: int) -> None:
    params = chat(max_tokens=max_tokens)
    lowered = lower_max_tokens(params, num_prompt_tokens, BOUNDS)
    room = BOUNDS.max_model_len - num_prompt_tokens
    assert sampling_params_for_prompt(lowered, num_prompt_tokens, BOUNDS).max_tokens == min(max_tokens or room, room)
    assert lowered is params if max_tokens is None or max_tokens <= room else lowered.max_tokens == room


def test_a_prompt_without_room_is_not_shortened_away() -> None:
    for num_prompt_tokens in (64, 65):
        with pytest.raises(RequestTooLargeError):
            sampling_params_for_prompt(
                lower_max_tokens(chat(max_tokens=10), num_prompt_tokens, BOUNDS), num_prompt_tokens, BOUNDS
            )


def test_a_chat_without_max_tokens_may_use_what_is_left() -> None:
    assert sampling_params_for_prompt(chat(), 60, BOUNDS).max_tokens == 4
    with pytest.raises(InvalidRequestError, match="only 4 output tokens fit"):
        sampling_params_for_prompt(chat(min_tokens=5), 60, BOUNDS)


# ------------------------------------------------------------------------------------------------------- 10,000 bodies

_NAMES = sorted(
    {name for name, _ in ACCEPTED + REFUSED}
    | {"prompt", "messages", "model", "tokens", "stream_options", "top_logprobs", "return_token_ids", "tools", "audio"}
)
_ATOMS = [
    *(None, True, False, 0, 1, -1, 2, 16, 17, 99, 100, 2**31, 2**63, 10**30, 0.0, -0.0, 0.5, 1e308, 1e-320, NAN, INF),
    *("", "x", "0", "text", "user", "auto", "json_object", "\ud800", "\x00", "é" * 300, "<|im_end|>", "9" * 30),
]
_KEYS = [
    "type",
    "text",
    "role",
    "content",
    "name",
    "include_usage",
    "0",
    "5",
    "x",
    "tool_calls",
    "function",
    "arguments",
]


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.55:
        return rng.choice(_ATOMS)
    if kind < 0.75:
        return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 70)))]
    if kind < 0.85:
        return [{"role": rng.choice(["user", "system", "tool", 5]), "content": _value(rng, depth - 1)}]
    return {rng.choice(_KEYS): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _body(rng: random.Random) -> dict[str, Any]:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]} if rng.random() < 0.7 else {}
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        good = rng.random() < 0.5
        name, value = rng.choice(ACCEPTED) if good else (rng.choice(_NAMES), _value(rng, 3))
        body[name] = value
    return body


def test_ten_thousand_random_bodies_raise_nothing_but_invalid_requests() -> None:
    rng = random.Random(0)
    parsers = (parse_completion, parse_chat, parse_tokenize, parse_detokenize)
    outcomes: dict[bool, int] = {True: 0, False: 0}
    for number in range(10_000):
        body = _body(rng)
        try:
            parsed = parsers[number % 4](body, BOUNDS)
        except InvalidRequestError as error:
            outcomes[False] += 1
            assert 0 < len(str(error)) < 500 and "0x" not in str(error), str(error)
            continue
        outcomes[True] += 1
        if number % 4 < 2:
            sampling = (
                sampling_params_for_prompt(parsed.params, 1, BOUNDS)
                if (parsed.params.max_tokens or 1) < 64
                else parsed.params.sampling
            )
            assert sampling.max_tokens >= 1 and 0 <= sampling.temperature <= 2
            assert all(0 <= token < 100 for token in (*sampling.stop_token_ids, *dict(sampling.logit_bias)))
    assert min(outcomes.values()) > 1000  # both ends are really met


def test_ten_thousand_damaged_texts_raise_nothing_but_invalid_requests() -> None:
    rng = random.Random(1)
    good = json.dumps({"prompt": ["é", [1, 2]], "logit_bias": {"5": 1.5}, "stream_options": None}).encode()
    parsed = 0
    for _ in range(10_000):
        damaged = bytearray(good)
        for _ in range(rng.choice((0, 1, 2, 5))):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1, 3))] = rng.randbytes(rng.choice((0, 1, 2)))
        try:
            parse_completion(parse_json_object(bytes(damaged)), BOUNDS)
            parsed += 1
        except InvalidRequestError as error:
            assert "0x" not in str(error)
    assert 1000 < parsed < 9000


def grammar_of(**values: Any) -> str | None:
    return chat(**values).sampling.grammar


def test_fields_of_other_servers_constrain_the_output_too() -> None:
    """SGLang's regex and json_schema, llama.cpp's json_schema and schema beside a type, and a grammar in Lark."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert grammar_of(regex="a+") == grammar_of(guided_regex="a+") is not None
    for sent in (
        {"json_schema": schema},
        {"json_schema": json.dumps(schema)},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_schema", "schema": schema}},
    ):
        assert grammar_of(**sent) == grammar_of(guided_json=schema) is not None
    assert grammar_of(grammar='start: "a"') == grammar_of(guided_grammar='start: "a"') is not None
    for name, sent, reason in (
        ("grammar", {"grammar": 'root ::= "a"'}, "GBNF"),
        ("guided_grammar", {"guided_grammar": 'root ::= "a"'}, "GBNF"),
        ("grammar", {"grammar": {"type": "json", "value": {}}}, "must be a string"),
        ("ebnf", {"ebnf": 'root ::= "a"'}, "write it in Lark"),
        ("structural_tag", {"structural_tag": {"type": "structural_tag"}}, "strict: true"),
        ("json_schema", {"json_schema": [1]}, "as an object"),
    ):
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            chat(**sent)
        assert caught.value.param == name


def test_one_grammar_by_two_names_is_one() -> None:
    lark = '%llguidance {}\nstart: "a"'
    both = chat(guided_grammar=lark, structured_outputs={"grammar": lark})  # as guidance's client of vLLM sends it
    assert both.sampling.grammar == grammar_of(guided_grammar=lark)
    assert (
        grammar_of(guided_json={}, response_format={"type": "json_schema", "json_schema": {"schema": {}}}) is not None
    )
    for other in ({"structured_outputs": {"grammar": 'start: "b"'}}, {"guided_regex": "a"}, {"regex": "a"}):
        with pytest.raises(InvalidRequestError, match="only one of"):
            chat(guided_grammar=lark, **other)


def test_objects_are_closed_by_an_option_or_a_field() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = {**schema, "additionalProperties": False}
    option = replace(BOUNDS, closes_objects=True)
    wanted = parse_params({"guided_json": closed}, BOUNDS, ParamsKind.CHAT).sampling.grammar
    assert wanted != parse_params({"guided_json": schema}, BOUNDS, ParamsKind.CHAT).sampling.grammar
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for values in (
        {"guided_json": schema},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        assert parse_params(values, option, ParamsKind.CHAT).sampling.grammar == wanted
    field = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
    assert parse_params(field, BOUNDS, ParamsKind.CHAT).sampling.grammar == wanted
    tools = parse_params({"tools": [tool]}, option, ParamsKind.CHAT).tools
    assert tools is not None and tool_arguments_schema(tools.tools[0]) == closed


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}, {"strict": True}], ids=str)
def test_a_schema_is_strict_only_if_it_says_so_in_formats_as_in_tools(strict: dict[str, Any]) -> None:
    """OpenAI's default of `strict` is false, in response formats as in tools. A set is never refused."""

    def of_format(schema: dict[str, Any]) -> tuple[Any, Any]:
        params = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema, **strict}})
        return params.sampling.grammar, dict(params.dropped).get("response_format")

    def of_tool(schema: dict[str, Any]) -> tuple[Any, Any]:
        function = {"type": "function", "function": {"name": "f", "parameters": schema, **strict}}
        given = parse_params({"tools": [function], "tool_choice": "required"}, BOUNDS, ParamsKind.CHAT).tools
        assert given is not None
        return tool_arguments_schema(given.tools[0]), dict(keywords_dropped_by_tool(given)).get("f")

    loosened = {"type": "object", "properties": {"a": {"type": "array"}}}
    for keyword, value in (("uniqueItems", True), ("contains", {})):
        schema = {"type": "object", "properties": {"a": {"type": "array", keyword: value}}}
        if strict.get("strict") and keyword == "contains":
            for refused in (of_format, of_tool):
                with pytest.raises(InvalidRequestError, match=keyword):
                    refused(schema)
        else:
            assert of_format(schema) == (grammar_of(guided_json=loosened), (keyword,))
            assert of_tool(schema) == (loosened, (keyword,))


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
def test_a_set_of_pydantic_is_taken_by_every_field(field: str) -> None:
    params = chat(**{field: {"type": "array", "items": {"type": "string"}, "uniqueItems": True}})
    assert params.dropped == ((field, ("uniqueItems",)),)
    assert params.sampling.grammar == grammar_of(guided_json={"type": "array", "items": {"type": "string"}})
