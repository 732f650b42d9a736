"""Grammars of tool calls: what they allow is parsed as a call whose arguments match, and nothing else is allowed."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headstart.bundled import bundled_model
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import Bounds
from headstart.openai.engine_requests import with_chat_output
from headstart.openai.generation_params import Kind, parse_params
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.parsers.chat_parser import joined

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
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
}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", CITY, strict=True), tool("opt-1", OPTIONAL)]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A tokenizer that has the markers as tokens, or knows them as text only."""
    backend = Backend.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    if request.param:
        backend.add_tokens([AddedToken(text, special=False) for text in MARKERS])
        backend.add_special_tokens(list(SPECIAL))
    yield backend


class Answers:
    """A model of one family, as a check of its answers."""

    def __init__(self, backend: Backend, family: str, prompt: str = "x", think: bool = False, **fields: Any) -> None:
        template = TEMPLATES[family] + ("<think>" if think else "")
        self.tokenizer = Tokenizer(backend, chat_template=template)
        parser = family.partition("-")[0]
        self.bounds = Bounds(self.tokenizer.vocab_size, 4096, tool_call_parser=parser)
        params = parse_params({"tools": TOOLS, **fields}, self.bounds, Kind.CHAT)
        self.params = with_chat_output(params, self.encode(prompt), self.tokenizer, self.bounds)
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
        assert self.params.chat is not None
        parser = self.params.chat.parser()
        found = joined(parser.feed(text), parser.finish())
        return [(call.name, json.loads(call.arguments)) for call in found.tool_calls]


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
    return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"


FAMILIES = sorted(TEMPLATES)


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
        ("weather", {"city": 5}),
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
    assert not answers.allows(written(family, "weather", {"city": 5}))
    if family in ("hermes", "mistral", "mistral-args"):
        assert answers.allows(f"I look.\n{call}")
        assert not answers.allows(f"I look.\n{written(family, 'weather', {'city': 5})}")


def test_tools_that_are_not_strict_have_no_grammar(backend: Backend) -> None:
    answers = Answers(backend, "hermes", tools=[tool("weather", CITY)])
    assert answers.params.sampling.grammar is None and answers.params.chat is not None


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-args", "pythonic"])
def test_several_calls_are_allowed_unless_switched_off_or_one_is_named(backend: Backend, family: str) -> None:
    call = written(family, "weather", {"city": "x"})
    two = {"hermes": f"{call}\n{call}", "mistral-args": call + call}.get(family)
    if two is None:  # both in one list
        two = f"{call[:-1]}, {call[call.index('[', 1 if family == 'mistral' else 0) + 1 :].lstrip(' [')}"
        two = two.replace("TOOL_CALLS] [", "", 1) if two.count("TOOL_CALLS") > 1 else two
    one = Answers(backend, family, tool_choice="required", parallel_tool_calls=False)
    many = Answers(backend, family, tool_choice="required")
    assert many.allows(two), two
    assert many.calls(two) == [("weather", {"city": "x"})] * 2
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
    assert not answers.allows("Hello") and not answers.allows(written(family, "weather", {"city": 5}))
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
