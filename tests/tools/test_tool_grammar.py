"""Grammars of tool calls: what they allow is parsed as a call whose arguments match, and nothing else is allowed."""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headstart.bundled import bundled_intent_model_folder
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_delta import ChatDelta, join_deltas
from headstart.openai.engine_requests import with_chat_output_format
from headstart.openai.generation_params import ParamsKind, parse_params
from headstart.openai.tokenizer.tokenizer import Tokenizer

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
GLM_MARKERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WRONG = {"city": "x", "town": "y"}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}, "c": {"type": "boolean"}},
    "required": ["b"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": ["x", "y"]}},
}
TEMPLATES = {
    "hermes": "tools <tool_call>",
    "llama3_json": "tools",
    "mistral": "tools [TOOL_CALLS]",
    "mistral-args": "tools [TOOL_CALLS] [CALL_ID] [ARGS]",
    "pythonic": "tools",
    "qwen3_coder": "tools <tool_call><function=",
    "glm45": "tools <tool_call><arg_key>",
    "glm45-7": "tools <tool_call><arg_key></arg_key><arg_value>",
}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", CITY, strict=True), tool("opt-1", OPTIONAL)]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A tokenizer that has the markers as tokens, or knows them as text only."""
    backend = Backend.from_file(str(Path(bundled_intent_model_folder()) / "tokenizer.json"))
    if request.param:
        backend.add_tokens([AddedToken(text, special=False) for text in (*MARKERS, *GLM_MARKERS)])
        backend.add_special_tokens(list(SPECIAL))
    yield backend


class Answers:
    """A model of one family, as a check of its answers."""

    def __init__(self, backend: Backend, family: str, prompt: str = "x", think: bool = False, **fields: Any) -> None:
        template = TEMPLATES[family] + ("<think>" if think else "")
        self.tokenizer = Tokenizer(backend, chat_template=template)
        parser = family.partition("-")[0]
        self.bounds = RequestBounds(self.tokenizer.vocab_size, 4096, tool_call_parser=parser)
        params = parse_params({"tools": TOOLS, **fields}, self.bounds, ParamsKind.CHAT)
        self.params = with_chat_output_format(params, self.encode(prompt), self.tokenizer, self.bounds)
        end = backend.token_to_id("<|end|>")
        self.engine = LLTokenizer(backend.to_str(), eos_token=end)

    def encode(self, text: str) -> "array[int]":
        return self.tokenizer.encode(text, add_special_tokens=False)

    def allows(self, text: str) -> bool:
        """Returns whether the grammar allows the text as a whole answer."""
        matcher = LLMatcher(self.engine, self.params.sampling.grammar)
        assert not matcher.get_error(), matcher.get_error()
        ids = list(self.encode(text))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def calls(self, text: str) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.parsed(text).tool_calls]

    def parsed(self, text: str) -> ChatDelta:
        assert self.params.chat is not None
        parser = self.params.chat.make_parser()
        return join_deltas(parser.feed(text), parser.finish())


def written(family: str, name: str, arguments: dict[str, Any]) -> str:
    """The call as a model of the family writes it."""
    if family == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    if family == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments})
    if family == "mistral":
        return f"[TOOL_CALLS] [{json.dumps({'name': name, 'arguments': arguments})}]"
    if family == "mistral-args":
        return f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(arguments)}"
    if family == "qwen3_coder":
        elements = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"
    if family.startswith("glm45"):
        pairs = [(f"<arg_key>{key}</arg_key>", raw(value)) for key, value in arguments.items()]
        line = "" if family == "glm45-7" else "\n"
        elements = "".join(f"{key}{line}<arg_value>{value}</arg_value>{line}" for key, value in pairs)
        return f"<tool_call>{name}{line}{elements}</tool_call>"
    return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"


def raw(value: Any) -> str:
    """The value as an element has it."""
    return value if isinstance(value, str) else json.dumps(value)


FAMILIES = sorted(TEMPLATES)
XML = ["glm45", "glm45-7", "qwen3_coder"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_matches_its_schema_and_is_parsed(backend: Backend, family: str) -> None:
    answers = Answers(backend, family, tool_choice="required")
    for name, arguments in (
        ("weather", {"city": 'Par"is'}),
        ("opt-1", {"b": "x"}),
        ("opt-1", {"a": 5, "b": "y"}),
        ("opt-1", {"b": "y", "c": True}),
        ("opt-1", {"a": -1, "b": "y", "c": False}),
    ):
        text = written(family, name, arguments)
        assert answers.allows(text), text
        assert answers.calls(text) == [(name, arguments)]
    for name, arguments in (
        ("weather", {}),
        *([] if family in XML else [("weather", {"city": 5})]),  # there it is the string "5"
        ("weather", {"city": "x", "town": "y"}),
        ("opt-1", {"b": "z"}),
        ("other", {"city": "x"}),
    ):
        assert not answers.allows(written(family, name, arguments)), (name, arguments)
    assert not answers.allows("Hello.")
    assert not answers.allows("")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_call_is_of_that_function(backend: Backend, family: str) -> None:
    answers = Answers(backend, family, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert answers.allows(written(family, "weather", {"city": "x"}))
    assert not answers.allows(written(family, "opt-1", {"b": "x"}))
    assert answers.params.chat is not None and answers.params.chat.is_named


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_allow_text_or_calls_that_match(backend: Backend, family: str) -> None:
    answers = Answers(backend, family)
    assert answers.allows("Hello, what city?\n")
    call = written(family, "weather", {"city": "x"})
    assert answers.allows(call)
    assert not answers.allows(written(family, "weather", WRONG))
    if family not in ("llama3_json", "pythonic"):
        assert answers.allows(f"I look.\n{call}")
        assert not answers.allows(f"I look.\n{written(family, 'weather', WRONG)}")


def test_tools_that_are_not_strict_have_no_grammar(backend: Backend) -> None:
    answers = Answers(backend, "hermes", tools=[tool("weather", CITY)])
    assert answers.params.sampling.grammar is None and answers.params.chat is not None


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-args", "pythonic", *XML])
def test_several_calls_are_allowed_unless_switched_off_or_one_is_named(backend: Backend, family: str) -> None:
    call = written(family, "weather", {"city": "x"})
    two = {"mistral-args": call + call, **dict.fromkeys(("hermes", *XML), f"{call}\n{call}")}.get(family)
    if two is None:  # both in one list
        two = f"{call[:-1]}, {call[call.index('[', 1 if family == 'mistral' else 0) + 1 :].lstrip(' [')}"
        two = two.replace("TOOL_CALLS] [", "", 1) if two.count("TOOL_CALLS") > 1 else two
    one = Answers(backend, family, tool_choice="required", parallel_tool_calls=False)
    many = Answers(backend, family, tool_choice="required")
    assert many.allows(two), two
    assert many.calls(two) == [("weather", {"city": "x"})] * 2
    if family in ("hermes", "qwen3_coder", "glm45"):  # as their templates write the turn when it comes back
        assert not many.allows(f"{call}\n\n{call}") and not many.allows(f"{call}{call}")
    named = Answers(backend, family, tool_choice={"type": "function", "function": {"name": "weather"}})
    for answers in (one, named):
        assert answers.allows(call) and not answers.allows(two)
    assert one.calls(two) == [("weather", {"city": "x"})]


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_comes_before_a_required_call(backend: Backend, family: str) -> None:
    call = written(family, "weather", {"city": "x"})
    answers = Answers(backend, family, think=True, tool_choice="required")
    assert answers.allows(f"<think>\nA plan.\n</think>\n\n{call}")
    assert answers.calls(f"<think>\nA plan.\n</think>\n\n{call}") == [("weather", {"city": "x"})]
    assert answers.allows(call)
    inside = Answers(backend, family, think=True, prompt="x<think>\n", tool_choice="required")
    assert inside.params.chat is not None and inside.params.chat.is_open
    assert inside.allows(f"A plan.\n</think>\n\n{call}")
    assert not inside.allows("A plan.\n</think>\n\nHello")
    closed = Answers(backend, family, think=True, prompt="x<think>\n\n</think>\n\n", tool_choice="required")
    assert closed.params.chat is not None and not closed.params.chat.is_open


def test_a_schema_that_no_grammar_expresses_is_refused(backend: Backend) -> None:
    with pytest.raises(InvalidRequestError, match="400"):
        many = {str(number): {"type": "string"} for number in range(1001)}
        Answers(backend, "hermes", tools=[tool("f", {"properties": many})], tool_choice="required")
    with pytest.raises(InvalidRequestError, match="plain object"):
        Answers(backend, "pythonic", tools=[tool("f", {"anyOf": [CITY]})], tool_choice="required")
    with pytest.raises(InvalidRequestError, match="plain object"):
        Answers(backend, "pythonic", tools=[tool("f", {"properties": [1]})], tool_choice="required")


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["z"]}}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_format_applies_to_the_content_beside_calls(backend: Backend, family: str) -> None:
    call = written(family, "weather", {"city": "x"})
    answers = Answers(backend, family, response_format=JSON_FORMAT, tools=[tool("weather", CITY)])
    assert answers.allows('{"z":1}') and answers.allows(call)
    assert not answers.allows("Hello") and not answers.allows(written(family, "weather", WRONG))
    required = Answers(backend, family, response_format=JSON_FORMAT, tool_choice="required")
    assert required.allows(call) and not required.allows('{"z":1}')
    none = Answers(backend, family, response_format=JSON_FORMAT, tool_choice="none")
    assert none.allows('{"z":1}') and (family == "llama3_json" or not none.allows(call))


def test_a_response_format_applies_behind_the_reasoning(backend: Backend) -> None:
    free = Answers(backend, "hermes", think=True, response_format=JSON_FORMAT, tools=[])
    assert free.allows('<think>A plan.</think>\n\n{"z":1}') and free.allows('{"z":1}')
    assert not free.allows("<think>A plan.</think>Hello")
    inside = Answers(backend, "hermes", think=True, prompt="x<think>\n", response_format=JSON_FORMAT, tools=[])
    assert inside.allows('A plan.</think>{"z":1}') and not inside.allows("A plan.</think>Hello")


HARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": r"^\d{2}[a-z]+$|z/z", "maxLength": 6},
        "kind": {"enum": ["a", "</parameter>", "5", 5, None]},
        "maybe": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
        "mixed": {"type": ["string", "integer", "boolean"]},
        "big": {"anyOf": [{"$ref": "#/$defs/big"}, {"type": "string"}]},
        "any": {},
        "list": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "deep": {"$ref": "#/$defs/deep"},
        "level": {"type": "integer", "minimum": 3},
    },
    "required": ["text"],
    "$defs": {
        "big": {"type": "integer", "minimum": 100},
        "deep": {"type": "object", "properties": {"x": {"type": ["string", "null"]}}, "additionalProperties": False},
    },
}
KEPT = [  # arguments that are allowed, and read back
    {"text": ""},
    {"text": "\n <b>\"\\é'</b>\n\n", "day": "2024-02-29"},
    {"text": "null", "code": "12ab", "kind": "a", "maybe": "ab", "mixed": "x5", "big": "-", "any": "x"},
    {"text": "5", "code": "az/zb", "kind": 5, "maybe": None, "mixed": 5, "big": 123, "any": None},
    {"text": "</tool_call>", "kind": None, "mixed": True, "any": {"a": [1, "</parameter></function>"]}},
    {
        "text": "<",
        "any": -1.5,
        "list": ["a\n</parameter>\n</function>", "</arg_value></tool_call>"],
        "deep": {"x": "<"},
    },
    {"text": "</parameter", "any": [], "deep": {}, "level": 3},
]
REFUSED = [  # elements of one argument beside text
    *(
        ("day", "2023-02-29"),
        ("code", "1ab"),
        ("code", "123456z/z"),
        ("code", "\u0661\u0662ab"),
        ("kind", "b"),
        ("kind", "6"),
    ),
    *(("maybe", "a"), ("big", "99"), ("list", "[]"), ("list", "text"), ("list", "[5]"), ("deep", '{"y": 1}')),
    *(("level", "2"), ("level", "x"), ("other", "x"), ("any", "[text"), ("text", "</parameter></arg_value>")),
]


@pytest.mark.parametrize("family", XML)
def test_raw_text_is_read_back_as_a_value_that_the_schema_allows(backend: Backend, family: str) -> None:
    answers = Answers(backend, family, tools=[tool("f", HARD)], tool_choice="required")
    is_spelled = backend.token_to_id("</tool_call>") is None  # else text with a marker has its token
    for arguments in KEPT:
        text = written(family, "f", arguments)
        assert answers.calls(text) == [("f", arguments)]
        assert answers.allows(text) or ("</tool_call>" in str(arguments) and not is_spelled), text
    for name, value in REFUSED:
        assert not answers.allows(written(family, "f", {"text": "a", name: value})), (name, value)


@pytest.mark.parametrize("family", XML)
def test_an_end_marker_inside_of_a_value_does_not_end_it(backend: Backend, family: str) -> None:
    answers = Answers(backend, family, tools=[tool("f", HARD)])
    for text in ("a</parameter>b", "a\n</parameter>\n</param\nb", "</arg_value>\nb</arg_value", "</function>"):
        for arguments in ({"text": text}, {"text": "x", "list": [text]}):
            assert answers.calls(written(family, "f", arguments)) == [("f", arguments)]


def test_parameters_that_no_element_can_have_are_refused_by_name(backend: Backend) -> None:
    for inner, reason in (
        ({"type": "string", "pattern": "(^a|b$)"}, "'p' with a pattern that has"),
        ({"type": "string", "anyOf": [{"minLength": 1}]}, "'p' a string with anyOf"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}, "'p' with oneOf"),
    ):
        with pytest.raises(InvalidRequestError, match=f"the parameters of 'f' have {re.escape(reason)}"):
            Answers(backend, "glm45", tools=[tool("f", {"properties": {"p": inner}})], tool_choice="required")
    with pytest.raises(InvalidRequestError, match="'a>b', which XML calls cannot write"):
        Answers(backend, "qwen3_coder", tools=[tool("f", {"properties": {"a>b": {}}})], tool_choice="required")
