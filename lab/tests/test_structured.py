"""benchmarks/structured: bounds, checks of answers, the reading of the suite, and cases that hang or crash."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
from llguidance import LLMatcher, LLTokenizer

from headstart_lab.structured.bounded import bounded
from headstart_lab.structured.checks import Answer, Checker, Result, names_keyword
from headstart_lab.structured.cost import KINDS, new_grammar
from headstart_lab.structured.fuzz_structured import is_valid, requests
from headstart_lab.structured.gaps import percentiles
from headstart_lab.structured.hostile_grammars import Case, handmade
from headstart_lab.structured.probe import Workers
from headstart_lab.structured.random_grammars import drawn
from headstart_lab.structured.suite import Instance, SuiteSchema, read_suite, validator
from headstart_lab.structured.support import judge, markdown, page, refusal_reason, report

BYTES = LLTokenizer("byte")
SCHEMAS: tuple[Any, ...] = (
    True,
    {},
    {"type": "string"},
    {"type": "integer", "minimum": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a", 1, None]}], "items": False},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"const": {"x": [1]}}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"type": "string", "minLength": 9}, {"type": "array", "items": {"type": "string", "pattern": "^a+$"}}]},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"type": "string", "format": "ipv4"},
    {"type": ["number", "null"], "exclusiveMinimum": 0, "multipleOf": 0.5},
)


def case_of(schema: Any, *instances: Instance) -> SuiteSchema:
    return SuiteSchema("draft2020-12", "made", "made", schema, instances)


def check(schema: Any, *answer: Any) -> Result:
    return Checker(case_of(schema), schema, Path(), BYTES).check(Answer(*answer))


def walk(schema: Any, rng: random.Random, num_bytes: int = 150) -> tuple[str, bool]:
    """A random text of llguidance's grammar, and whether it ended; bytes that end a value are likelier."""
    matcher, text = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(num_bytes):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask >> BYTES.eos_token & 1:
            return text.decode(), True
        allowed = [byte for byte in range(32, 127) if mask >> byte & 1] or [b for b in range(256) if mask >> b & 1]
        ends = [byte for byte in allowed if byte in b'"]}']
        byte = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return text.decode(errors="replace"), False


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(schema)[:60] for schema in SCHEMAS])
def test_values_of_bounded_schemas_end_and_are_values_of_the_original(schema: Any) -> None:
    rng, results = random.Random(5), []
    for _ in range(60):
        text, ended = walk(bounded(schema), rng)
        results.append(check(schema, 200, text, "stop" if ended else "length"))
    assert set(results) <= {Result.VALID, Result.PREFIX}
    assert results.count(Result.VALID) >= 40


def test_bounds_are_not_added_below_one_of_and_not() -> None:
    for schema in ({"oneOf": [{"type": "string"}, {}]}, {"not": {"type": "string"}}, False, {"const": "long enough"}):
        assert bounded(schema) == schema


def test_answers_are_judged() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert check(schema, 200, '{"a": 1}', "stop") is Result.VALID
    assert check(schema, 200, '{"a": "1"}', "stop") is Result.INVALID
    assert check(schema, 200, '{"\\u0061": "x", "a": 1}', "stop") is Result.VALID  # the last of equal names counts
    assert check(schema, 200, '{"a": 1} and more', "stop") is Result.INVALID
    assert check({}, 200, "NaN", "stop") is Result.INVALID
    assert check({}, 200, "1e999", "stop") is Result.OVERFLOW
    assert check({"multipleOf": 1.5}, 200, "2259507269254652370547103554.5", "stop") is Result.VALID
    assert check({"multipleOf": 1.5}, 200, "2259507269254652370547103554.6", "stop") is Result.INVALID
    assert check({"maxLength": 2.0}, 200, '"a', "length") is Result.PREFIX
    assert check(schema, 200, '{"a": 1', "length") is Result.PREFIX
    assert check(schema, 200, '{"b": 1', "length") is Result.NO_PREFIX
    assert check({"maximum": 2**64}, 200, '{"a":', "length") is Result.PREFIX  # llguidance alone cannot compile it
    assert check({"type": "string"}, 200, '"caf\ufffd', "length") is Result.PREFIX  # cut within a character
    assert check(schema, 400, "`required` is not supported", "") is Result.REFUSED
    assert check(schema, 400, "this schema is not supported", "") is Result.UNNAMED
    assert check(schema, 500, "internal error", "") is Result.FAILED
    assert check(schema, 200, '{"a": 1}', "error") is Result.FAILED
    assert check({"type": "string", "format": "date"}, 200, '"2021-02-29"', "stop") is Result.INVALID


def test_a_refusal_names_a_keyword_of_the_schema_as_a_word() -> None:
    assert names_keyword(
        'unsupported keyword "uniqueItems" at #/properties/a', {"properties": {"a": {"uniqueItems": 1}}}
    )
    assert not names_keyword("unsupported keyword uniqueItems", {"type": "string"})
    assert not names_keyword("the type_of this is notable", {"type": "string", "not": {}})


def test_suite_is_read_with_remote_files_and_optional_folders(tmp_path: Path) -> None:
    group = {"description": "d", "schema": {"type": "null"}, "tests": [{"description": "t", "data": 1, "valid": False}]}
    for place in ("tests/draft7/type.json", "tests/draft7/optional/x.json", "tests/draft7/optional/format/date.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(json.dumps([group]))
    (tmp_path / "remotes").mkdir()
    (tmp_path / "remotes" / "other.json").write_text('{"type": "integer"}')
    cases = [*read_suite(tmp_path, "draft7")]
    assert [case.keyword for case in cases] == ["type", "optional x", "format date"]
    assert cases[0].instances == (Instance("t", 1, False),)
    remote = validator("draft7", {"$ref": "http://localhost:1234/other.json"}, tmp_path)
    assert remote.is_valid(1) and not remote.is_valid("1")


def test_support_counts_refusals_by_keyword_and_finds_what_is_looser() -> None:
    contains = judge(case_of({"contains": {}}), BYTES)
    assert refusal_reason(contains) == "contains" and not contains.is_known
    repeated = Instance("a repeated item", [1, 1], False)
    assert judge(case_of({"type": "array", "uniqueItems": True}, repeated), BYTES).looser == ("a repeated item",)
    many = judge(case_of({"type": "object", "minProperties": 7}), BYTES)
    assert refusal_reason(many) == "minProperties" and many.is_known
    spaces = (Instance("a space only by ECMA 262", "\u180e", False), Instance("a space", " ", True))
    space = judge(case_of({"type": "string", "pattern": "^.$"}, *spaces), BYTES)
    assert space.looser == ("a space only by ECMA 262",) and not space.stricter
    order = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
    assert judge(case_of(order, Instance("other order", {"b": 1, "a": 2}, True)), BYTES).reordered == 1
    document = report([contains, many, space])
    assert (document["schemas"], document["known"], document["supported"], document["unnamed"]) == (3, 2, 1, 0)
    row = "| `made` | 3 | 2 | 1 | `contains` 1, `minProperties` 1 | 1 |  |"
    assert row in markdown(document, "draft2020-12")
    assert "made: schema has minProperties 7" in page(document)
    assert "| `made` | 1 | 0 | 0 |" in markdown(report([contains]), "draft2020-12")
    own = contains._replace(schema=contains.schema._replace(keyword="contains"))
    assert markdown(report([own]), "draft2020-12").startswith("Refused in full, as by llguidance: `contains`.")


def test_a_case_that_hangs_or_crashes_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    folder = tokenizer_folders.write(tmp_path, tokenizer_folders.BYTE_LEVEL)
    workers = Workers(str(folder), {}, 3, 2.0)
    cases = {case.name: case for case in handmade()}
    assert workers.run(cases["multipleOf product"])["hang"] == 2.0
    assert workers.run(cases["refs 10,000 in a chain"])["crash"] < 0
    fine = workers.run(Case("fine", "regex", "a+"))
    assert "error" not in fine and fine["num_masks"] > 0
    assert "error" in workers.run(Case("wrong", "regex", "((("))


@pytest.mark.long
def test_a_third_of_the_fuzzed_requests_have_tools_and_all_are_repeatable() -> None:
    first, second = ([*requests(random.Random(3), 600)] for _ in range(2))
    assert first == second and len(first) == 600
    kinds = [kind for _, kind, _ in first]
    assert set(kinds) == {"json", "regex", "lark", "tools"} and kinds.count("tools") > 100
    assert all(("tools" in json.loads(body)) == (kind == "tools") for _, kind, body in first)


@pytest.mark.parametrize(
    "change",
    [
        {"num_failures": 1},
        {"distrusted_blocks": 1.0},
        {"unfinished": 1.0},
        {"growth_mb": 301.0},
        {"gaps_ms": {"count": 9, "failures": [], "engine": {"max": 501.0}, "server": {"max": 9.0}}},
        {"gaps_ms": {"count": 9, "failures": [], "engine": {"max": 9.0}, "server": {"max": 501.0}}},
        {"gaps_ms": {"count": 0, "failures": [], "engine": {"max": 0.0}, "server": {"max": 0.0}}},
        {"gaps_ms": {"count": 9, "failures": ["lost"], "engine": {"max": 5.0}, "server": {"max": 9.0}}},
    ],
)
def test_a_run_of_the_fuzz_is_judged(change: dict[str, Any]) -> None:
    fine = {"num_failures": 0, "distrusted_blocks": 0.0, "unfinished": 0.0, "growth_mb": 20.0}
    fine["gaps_ms"] = {"count": 9, "failures": [], "engine": {"max": 499.0}, "server": {"max": 499.0}}
    assert is_valid(fine) and not is_valid({**fine, **change})


def test_percentiles_are_in_milliseconds() -> None:
    found = percentiles(tuple(number / 1000 for number in range(1001)))
    assert found == {"p50": 500.0, "p99": 990.0, "p99.9": 999.0, "max": 1000.0}


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_of_the_cost_are_all_different_and_compile(kind: str) -> None:
    grammars = {new_grammar(kind, number) for number in range(32)}
    assert len(grammars) == 32
    assert all(LLMatcher.validate_grammar(grammar) == "" for grammar in grammars)


def test_drawn_cases_are_repeatable_and_of_all_kinds() -> None:
    first, second = ([*drawn(random.Random(3), 200)] for _ in range(2))
    assert first == second and {case.kind for case in first} == {"json", "regex", "lark"}
