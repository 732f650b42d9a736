"""The parsers of tool calls and reasoning: each format, malformed calls, and any split of a text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta, join_deltas
from headstart.openai.tools.parsers.call_writer import ToolCallRules
from headstart.openai.tools.parsers.chat_parser import ChatParser, ReadCalls
from headstart.openai.tools.parsers.tool_formats import (
    read_hermes_calls,
    read_llama3_json_calls,
    read_mistral_calls,
    read_pythonic_calls,
)
from headstart.openai.tools.parsers.xml_calls import read_glm45_calls, read_qwen3_coder_calls

READERS: dict[str, ReadCalls] = {
    "hermes": read_hermes_calls,
    "llama3_json": read_llama3_json_calls,
    "mistral": read_mistral_calls,
    "pythonic": read_pythonic_calls,
    "qwen3_coder": read_qwen3_coder_calls,
    "glm45": read_glm45_calls,
}
NAMES = frozenset(("f", "g"))
TYPES = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "b": {"type": "boolean"},
            "l": {"type": "array"},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
}


def parse(
    family: str, pieces: list[str], *, first_only: bool = False, is_cut: bool = False, **reasoning: Any
) -> ChatDelta:
    rules = ToolCallRules(NAMES, lambda: "id", first_only=first_only, parameters=TYPES)
    parser = ChatParser(READERS[family], rules, **reasoning)
    return join_deltas(*(parser.feed(piece) for piece in pieces), parser.finish(is_cut=is_cut))


def elements(**texts: str) -> str:
    """The call of f as Qwen3-Coder writes it."""
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def pairs(**texts: str) -> str:
    """The call of f as GLM-4.6 writes it."""
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
    return f"<tool_call>f\n{inner}</tool_call>"


def calls_of(delta: ChatDelta) -> list[tuple[str, str]]:
    assert [call.call_index for call in delta.tool_calls] == list(range(len(delta.tool_calls)))
    return [(call.name, call.arguments) for call in delta.tool_calls]


F = ("f", '{"a": "}\\"{"}')
G = ("g", "{}")
# family, text, content, calls
CASES = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>', "", [F]),
    ("hermes", 'Hm.\n<tool_call>{"name": "g"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n', "Hm.", [G, G]),
    ("hermes", '<tool_call>{"arguments": {"a": "}\\"{"}, "name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "g", "arguments": "{}"}</tool_call> done', "done", [G]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null, "id": [1, "]"]}', "", [G]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}\\"', "", [("f", '{"a": "}\\"')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": "}\\"{"}}', "", [F]),
    ("llama3_json", ' {"type": "function", "name": "g", "parameters": {}}; {"name": "g"}', "", [G, G]),
    ("llama3_json", 'Hm. <|python_tag|>{"name": "other", "parameters": {}}', "Hm.", [("other", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}\\"{"}}, {"name": "g", "arguments": {}}]',
        "",
        [F, G],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"a": "}\\"{"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', "Hm.", [F, G]),
    ("mistral", '[TOOL_CALLS]f{"a": "}\\"{"}', "", [F]),
    ("mistral", '[TOOL_CALLS]{"name": "g", "arguments": {}}', "", [G]),
    ("pythonic", "[f(a='}\"{'), g()]", "", [F, G]),
    ("pythonic", "[f(a=1, b=[-1.5, (None,), {'x': True}], c='\\u00e9')]", "", None),
    ("pythonic", "Hm. <|python_start|>[other()]<|python_end|>", "Hm.", [("other", "{}")]),
    ("qwen3_coder", elements(a='}"{'), "", [F]),
    ("qwen3_coder", "Hm.\n" + elements(a='}"{') + "\n" + elements() + " done", "Hm. done", [F, ("f", "{}")]),
    ("qwen3_coder", "<function=f>\n<parameter=n>5</parameter></function>\n</tool_call>", "", [("f", '{"n": 5}')]),
    (
        "qwen3_coder",
        elements(b="True", l="['x', None]", m="None"),
        "",
        [("f", '{"b": true, "l": ["x", null], "m": null}')],
    ),
    ("qwen3_coder", elements(n="x", b="5", l="5", m="5"), "", [("f", '{"n": "x", "b": 5, "l": 5, "m": "5"}')]),
    ("qwen3_coder", elements(o="[1]", p="x"), "", [("f", '{"o": [1], "p": "x"}')]),
    ("qwen3_coder", elements(a="x\n</parameter>\ny"), "", [("f", '{"a": "x\\n</parameter>\\ny"}')]),
    ("qwen3_coder", elements(a="x").removesuffix("</function>\n</tool_call>"), "", [("f", '{"a": "x"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n", "", [("f", '{"a": "x"}')]),
    ("qwen3_coder", elements(a="x").replace("</tool_call>", "<function=g>\n</function>"), "", [("f", '{"a": "x"}'), G]),
    ("glm45", pairs(a='}"{'), "", [F]),
    ("glm45", "Hm.\n" + pairs(a='}"{') + "\n<tool_call>g\n</tool_call> done", "Hm. done", [F, G]),
    ("glm45", pairs(n="5", m="null", l='["</arg_value></tool_call>"]'), "", None),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_calls_are_found_and_the_text_around_them_is_content(
    family: str, text: str, content: str, calls: list[tuple[str, str]] | None
) -> None:
    found = parse(family, [text])
    assert found.content == content
    if calls is None and family == "glm45":
        assert calls_of(found) == [("f", '{"n": 5, "m": null, "l": ["</arg_value></tool_call>"]}')]
    elif calls is None:
        assert json.loads(found.tool_calls[0].arguments) == {"a": 1, "b": [-1.5, [None], {"x": True}], "c": "é"}
    else:
        assert calls_of(found) == calls


MALFORMED = [
    ("hermes", "<tool_call>"),
    ("hermes", "a <tool_call>{oops}</tool_call> b"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "other", "parameters": {}}'),
    ("llama3_json", '{"answer": {"name": "f"}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", 'The call is {"name": "f", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] oops"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]f[ARGS] 5"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(a=" + "[" * 500 + "]" * 500 + ")]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=" + "9" * 5000 + ")]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("qwen3_coder", "<tool_call>oops</tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=f>\noops"),
    ("qwen3_coder", "<tool_call>\n<function=two words>\n</function>"),
    ("qwen3_coder", "Write <function=other>x</function>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a\n>x"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>x</tool_call>"),
]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_what_is_no_call_is_content_as_it_is(family: str, text: str) -> None:
    assert parse(family, [text]) == ChatDelta(content=text)


def test_text_behind_the_arguments_of_a_call_that_goes_wrong_is_content() -> None:
    found = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": 1} oops</tool_call>'])
    assert calls_of(found) == [("f", '{"a": 1}')] and found.content == "oops</tool_call>"
    found = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": 1}, </tool_call>'])
    assert calls_of(found) == [("f", '{"a": 1}')] and found.content == ", </tool_call>"


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    text = '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert calls_of(parse("hermes", [text], first_only=True)) == [G]


def test_arguments_arrive_while_the_model_writes_them() -> None:
    parser = ChatParser(read_hermes_calls, ToolCallRules(NAMES, lambda: "id"))
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == ChatDelta()
    assert parser.feed('{"a": "b') == ChatDelta(tool_calls=(ToolCallDelta(0, "id", "f", '{"a": "b'),))
    assert parser.feed(' c"}') == ChatDelta(tool_calls=(ToolCallDelta(0, arguments=' c"}'),))
    assert parser.feed("}</tool_call>") == parser.finish() == ChatDelta()


def test_strings_arrive_while_the_model_writes_them_and_other_values_when_they_are_complete() -> None:
    rules = ToolCallRules(NAMES, lambda: "id", parameters=TYPES)
    parser = ChatParser(read_qwen3_coder_calls, rules)
    assert parser.feed("<tool_call>\n<function=f>\n<parameter=a>\nb") == ChatDelta(
        tool_calls=(ToolCallDelta(0, "id", "f", '{"a": "b'),)
    )
    assert parser.feed(' "c\n</para') == ChatDelta(tool_calls=(ToolCallDelta(0, arguments=' \\"c'),))
    assert parser.feed("meter>\n<parameter=n>\n1") == ChatDelta(tool_calls=(ToolCallDelta(0, arguments='"'),))
    assert parser.feed("2\n</parameter>\n</function>") == ChatDelta(
        tool_calls=(ToolCallDelta(0, arguments=', "n": 12}'),)
    )
    assert parser.feed("\n</tool_call>") == parser.finish() == ChatDelta()


WHOLE = {  # two calls
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}}, {"name": "g", "arguments": {}}]',
    "pythonic": "[f(a='b'), g()]",
    "qwen3_coder": elements(a="b", l="[5]") + "\n" + elements(),
    "glm45": pairs(a="b", l="[5]") + "\n" + pairs(),
}


@pytest.mark.parametrize("family", WHOLE)
def test_nothing_of_a_call_that_is_cut_is_content(family: str) -> None:
    text = WHOLE[family]
    for end in range(2, len(text)):
        found = parse(family, [text[:end]], is_cut=True)
        assert found.content in ("", "<"), text[:end]  # a single character is no marker
        for call in found.tool_calls[:-1]:
            json.loads(call.arguments)
    named = "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}"
    for end in range(2, len(named)):
        assert parse("mistral", [named[:end]], is_cut=True).content == ""


@pytest.mark.parametrize("family", sorted(READERS))
def test_text_that_is_cut_stays_content(family: str) -> None:
    for text in ("Hello", "a <", '{"answer": "x', "[1, 2", "a\n", "<tool_call>oops <b", "[TOOL_CALLS] 5 [1"):
        assert parse(family, [text], is_cut=True).content == text, text


def test_a_forced_call_that_is_cut_has_no_content() -> None:
    for family, text in WHOLE.items():
        for end in range(1, 20):
            parser = ChatParser(READERS[family], ToolCallRules(NAMES, lambda: "id", is_forced=True))
            assert join_deltas(parser.feed(text[:end]), parser.finish(is_cut=True)).content == ""


def test_special_tokens_of_the_format_are_never_content() -> None:
    rules = ToolCallRules(NAMES, lambda: "id", special=("<|python_tag|>",))
    parser = ChatParser(read_llama3_json_calls, rules)
    assert join_deltas(parser.feed("a <|python_tag|>search(x)"), parser.finish()).content == "a search(x)"


# ------------------------------------------------------------------------------------------------------------ reasoning

REASONING = [
    ("<think>\nA plan.\n</think>\n\nHello", False, "A plan.", "Hello"),
    ("A plan.\n</think>\n\nHello", True, "A plan.", "Hello"),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("  Hello <think> you", False, "", "  Hello <think> you"),
    ("<think>A plan, not finish", False, "A plan, not finish", ""),
    ("A </thin", True, "A </thin", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), REASONING)
def test_reasoning_is_split_from_content(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for at in range(len(text) + 1):
        assert parse("hermes", [text[:at], text[at:]], is_reasoning=True, is_open=is_open) == ChatDelta(
            content, reasoning
        )


def test_a_call_follows_reasoning_and_one_inside_it_is_reasoning() -> None:
    call = '<tool_call>{"name": "g"}</tool_call>'
    found = parse("hermes", [f"<think>Say {call}?</think>\n{call}"], is_reasoning=True)
    assert found.reasoning == f"Say {call}?" and found.content == "" and calls_of(found) == [G]


# ---------------------------------------------------------------------------------------------- every split is the same


@pytest.mark.parametrize(("family", "text"), [(case[0], case[1]) for case in CASES] + MALFORMED[:20])
def test_no_split_of_a_text_changes_the_result(family: str, text: str) -> None:
    for before in ("", "<think>Ü\n</think>\n"):
        whole = parse(family, [before + text], is_reasoning=True)
        for at in range(len(before + text) + 1):
            assert parse(family, [(before + text)[:at], (before + text)[at:]], is_reasoning=True) == whole
        assert parse(family, list(before + text), is_reasoning=True) == whole


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f", "arguments": {', '{"name": "g"}', '"parameters"', "f("),
        *(
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            '"',
            "'",
            "\\",
            ":",
            ",",
            ";",
            " ",
            "\n",
            "f",
            "g",
            "a=1",
            "null",
            "é",
            "日",
            "1",
        ),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=20).map("".join)


@given(family=st.sampled_from(sorted(READERS)), text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=8))
@settings(max_examples=1500, deadline=None)
def test_any_text_is_parsed_alike_however_it_is_split(family: str, text: str, cuts: list[int]) -> None:
    whole = parse(family, [text], is_reasoning=True, is_open=len(text) % 2 == 0)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    assert parse(family, pieces, is_reasoning=True, is_open=len(text) % 2 == 0) == whole


@given(family=st.sampled_from(sorted(READERS)), text=TEXTS)
@settings(max_examples=1500, deadline=None)
def test_a_text_without_calls_is_content_as_it_is(family: str, text: str) -> None:
    found = parse(family, [text])
    if not found.tool_calls:
        assert found.content == text
    for call in found.tool_calls:
        assert call.call_id and call.name


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=8,
)


@given(
    values=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), LITERALS, max_size=4), as_json=st.booleans()
)
@settings(max_examples=500, deadline=None)
def test_python_and_json_literals_become_the_same_json(values: dict[str, Any], as_json: bool) -> None:
    write = json.dumps if as_json else repr
    text = "[f(" + ", ".join(f"{name}={write(value)}" for name, value in values.items()) + ")]"
    found = parse("pythonic", [text])
    assert json.loads(found.tool_calls[0].arguments) == values and found.content == ""


@given(arguments=st.dictionaries(st.text(), LITERALS, max_size=4), family=st.sampled_from(["hermes", "mistral"]))
@settings(max_examples=300, deadline=None)
def test_arguments_are_those_that_the_model_wrote(arguments: dict[str, Any], family: str) -> None:
    written = json.dumps(arguments)
    call = f'{{"name": "f", "arguments": {written}}}'
    text = f"<tool_call>{call}</tool_call>" if family == "hermes" else f"[TOOL_CALLS] [{call}]"
    assert calls_of(parse(family, [text])) == [("f", written)]
