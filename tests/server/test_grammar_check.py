"""GrammarChecker: hostile grammars end their process and not the server; accepted ones are remembered."""

import dataclasses
from pathlib import Path

import pytest

from headstart.bundled import bundled_intent_model_folder
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import InvalidRequestError
from headstart.openai.structured import grammar_check
from headstart.openai.structured.grammar_check import GrammarChecker
from headstart.openai.structured.grammar_text import (
    choice_grammar,
    grammar_from_lark,
    json_schema_grammar,
    regex_grammar,
)

FINE = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}})


def info(folder: str) -> EngineInfo:
    return EngineInfo(folder, "tiny", 1536, 64, 4, 199, 0, "float32", "cpu", 1, "reference", (0,))


@pytest.fixture
def check() -> GrammarChecker:
    return GrammarChecker(info(str(bundled_intent_model_folder())), (0,), max_seconds=1.0)


HOSTILE = {
    "a product of multiples": json_schema_grammar(
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103, 107)]}
    ),
    "a long chain of references": json_schema_grammar(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(5000)} | {"d5000": {}},
        }
    ),
    "a long chain of rules": grammar_from_lark(
        "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(9000))
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_checked(check: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check.check("guided_json", HOSTILE[name])
    assert caught.value.param == "guided_json" and not check.was_accepted(HOSTILE[name])
    check.check("guided_json", FINE)
    assert check.was_accepted(FINE)
    check.close()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (json_schema_grammar({"not": {"type": "string"}}), "not"),
        (json_schema_grammar({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "exclude each other"),
        (json_schema_grammar({"patternProperties": {"^a": {}, "^a.": {"type": "null"}}}), "patternProperties"),
        (json_schema_grammar({"$schema": "http://x.y/z"}), r"\$schema"),
        (json_schema_grammar({"$ref": "#"}), r"\$ref"),
        (json_schema_grammar({"required": ["a"], "type": "object", "properties": {"a": {"$ref": "#"}}}), r"\$ref"),
        (json_schema_grammar({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), r"\$ref"),
        (grammar_from_lark('start: "ab" start'), "rule"),
        (regex_grammar("(["), "regex"),
        (grammar_from_lark("start: nothing"), "nothing"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(
    check: GrammarChecker, grammar: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check.check("response_format", grammar)
    assert caught.value.param == "response_format" and "coerce" not in str(caught.value)
    check.close()


def test_accepted_grammars_are_remembered_up_to_a_limit(check: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_REMEMBERED", 3)
    grammars = [choice_grammar([str(number)]) for number in range(5)]
    for grammar in grammars:
        check.check("guided_choice", grammar)
    assert [check.was_accepted(grammar) for grammar in grammars] == [False, False, True, True, True]
    check.close()
    check.check("guided_choice", grammars[-1])  # needs no process


def test_a_model_without_a_tokenizer_file_says_so(tmp_path: Path) -> None:
    check = GrammarChecker(dataclasses.replace(info("."), model=str(tmp_path)), (0,))
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        check.check("guided_json", FINE)
