"""Which JSON schemas are supported, by llguidance and by the server: support.py [--json FILE] [--docs FILE].

Asks both about every schema of the JSON-Schema-Test-Suite, and whether the server's grammars accept the suite's valid
instances and reject its invalid ones. "Looser": the grammar accepts an invalid instance, so an answer can be invalid.
"Stricter": it rejects a valid instance in every tried form, so the model cannot give that answer.
"""

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.dropped_keywords import loosen_or_refuse_schema
from headstart.openai.structured.grammar_process import shorten_grammar_error
from headstart.openai.structured.grammar_text import grammar_parser_limits, json_schema_grammar
from headstart.openai.structured.structured_fields import read_json_schema
from headstart_lab.structured.checks import KEYWORDS, named_keywords
from headstart_lab.structured.suite import DRAFTS, VERSION, SuiteSchema, fetch_suite, integral, read_suite

UNNAMED = "no keyword"
MOST_REASONS = 3
UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["(.*?)"\]')
OPTIONS = {"lenient": False, "json_allowed_escapes": 'nrbtf"\\'}  # the server's, but for whitespace
PAGE = """# JSON Schema support

Which schemas of the JSON-Schema-Test-Suite the server accepts with `strict: true`, beside llguidance {llguidance}
alone: {counts}. Written on {date}
by `lab/src/headstart_lab/structured/support.py`, from the suite in `jsonschema` {jsonschema}.

A refusal is a 400 that names a keyword of the schema. Without `strict` fewer are refused
([keywords that are dropped](structured-output.md#structured-output)); with it only `uniqueItems` is dropped, and is
named in a header. Formats are always asserted. *Accepts invalid* counts instances that violate the schema and that the
grammar accepts, so an answer can be invalid; *rejects valid* those that satisfy it and that the grammar rejects in
every form tried. Counts in a row with several keywords are those of each.

The server reads some schemas as one that allows the same or a part of it: bounds of numbers are rounded inwards to 15
digits, 15 decimals and 2^53; `date`, `time` and `date-time` are patterns with leap years and leap seconds; whitespace
in patterns (`\\s`, `\\S`) is that of ECMA 262; pydantic's look-ahead for a `Decimal` is a second pattern.

Refused, since it cannot be rewritten: a bound beyond 2^53 from the wrong side, bounds that need rounding beside
`oneOf`, `$id` beside `$ref` without `$schema`, a `$ref` into `const`, `enum`, `default` or `examples`, control
characters in `const`, `enum` and `pattern`, and `minProperties` above the number of required properties and one.

{tables}

## Schemas that llguidance alone accepts, and the server refuses

{stricter}

## Invalid instances that are accepted

{differences}

Not in the suite, and accepted too: numbers beyond the doubles, such as `1e999`, where a number has no bounds;
`0.99999999999999999999`, which is 1.0 as a double, with `exclusiveMaximum: 1`.
"""


class Verdict(NamedTuple):
    """The verdict of the server on a schema; `refusal` is its message, empty if the schema is supported."""

    schema: SuiteSchema
    is_known: bool  # llguidance alone compiles it
    refusal: str
    looser: tuple[str, ...]  # invalid instances that the grammar accepts
    stricter: tuple[str, ...]  # valid instances that it rejects in every form
    reordered: int  # valid instances that it accepts only with their properties in another order


class Grammar:
    """The server's grammar of a schema, over bytes. `error` is the message of the refusal, if any."""

    def __init__(self, schema: Any, tokenizer: LLTokenizer) -> None:
        self._tokenizer, self._matcher, self.error = tokenizer, None, ""
        try:
            text = json_schema_grammar(loosen_or_refuse_schema("schema", read_json_schema("schema", schema), "").schema)
        except InvalidRequestError as error:
            self.error = str(error)
            return
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=grammar_parser_limits())
        if matcher.is_error():
            self.error = shorten_grammar_error(matcher.get_error())
        else:
            self._matcher = matcher

    def accepts(self, text: str) -> bool:
        """Return whether the whole text is an answer of this grammar."""
        assert self._matcher is not None
        matcher = self._matcher.deep_copy()
        tokens = self._tokenizer.tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def forms(value: Any) -> Iterator[str]:
    """Yield JSON texts of a value: compact and spaced, with and without escapes, integral floats as integers."""
    for shape in (value, integral(value)):
        for escaped in (False, True):
            try:
                yield json.dumps(shape, ensure_ascii=escaped, separators=(",", ":"))
                yield json.dumps(shape, ensure_ascii=escaped)
            except UnicodeEncodeError:
                continue


def reordered(value: Any, most: int = 5) -> Iterator[Any]:
    """Yield the value with the properties of its outer object, and of objects in it, in all orders."""
    if isinstance(value, list) and len(value) <= most:
        for items in itertools.product(*([*itertools.islice(reordered(item), 6)] for item in value)):
            yield list(items)
    elif isinstance(value, dict) and len(value) <= most:
        for names in itertools.permutations(value):
            inner = [[*itertools.islice(reordered(value[name]), 6)] for name in names]
            for items in itertools.product(*inner):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


def is_known(schema: Any, tokenizer: LLTokenizer) -> bool:
    """Return whether llguidance alone compiles a schema."""
    sent = {} if schema is True else schema
    options = OPTIONS if isinstance(sent, dict) else None  # llguidance applies options to objects only
    try:
        text = LLMatcher.grammar_from_json_schema(json.dumps(sent), overrides=options)
    except ValueError:
        return False
    return not LLMatcher.validate_grammar_with_warnings(text, tokenizer)[0]


def judge(case: SuiteSchema, tokenizer: LLTokenizer) -> Verdict:
    """Return what the server and llguidance make of a schema."""
    grammar, known = Grammar(case.schema, tokenizer), is_known(case.schema, tokenizer)
    if grammar.error:
        return Verdict(case, known, grammar.error, (), (), 0)
    looser, stricter, num_reordered = [], [], 0
    for instance in case.instances:
        accepted = any(grammar.accepts(text) for text in forms(instance.data) if _encodable(text))
        if not instance.valid and accepted:
            looser.append(instance.description)
        elif instance.valid and not accepted:
            orders = itertools.islice(reordered(instance.data), 500)
            if any(grammar.accepts(text) for value in orders for text in forms(value) if _encodable(text)):
                num_reordered += 1
            else:
                stricter.append(instance.description)
    return Verdict(case, known, "", tuple(looser), tuple(stricter), num_reordered)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def refusal_reason(verdict: Verdict) -> str:
    """Return the keywords of the schema that a refusal names; UNNAMED if there are none."""
    if found := UNIMPLEMENTED.search(verdict.refusal):
        return found[1].replace('"', "")
    named = named_keywords(verdict.refusal, verdict.schema.schema)
    return ", ".join(sorted(named & KEYWORDS) or sorted(named)) or UNNAMED


def report(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the JSON document: totals, and rows by draft and keyword."""
    rows = []
    for (draft, keyword), group in itertools.groupby(verdicts, lambda v: (v.schema.draft, v.schema.keyword)):
        members = list(group)
        accepted = [verdict for verdict in members if not verdict.refusal]
        rows.append(
            {
                "draft": draft,
                "keyword": keyword,
                "schemas": len(members),
                "known": sum(v.is_known for v in members),
                "supported": len(accepted),
                "refused_for": dict(Counter(refusal_reason(v) for v in members if v.refusal)),
                "refused_but_known": {v.schema.description: v.refusal for v in members if v.refusal and v.is_known},
                "instances": sum(len(v.schema.instances) for v in accepted),
                "looser": {v.schema.description: v.looser for v in accepted if v.looser},
                "stricter": {v.schema.description: v.stricter for v in accepted if v.stricter},
                "other_order": sum(v.reordered for v in accepted),
            }
        )
    return {
        "date": date.today().isoformat(),
        "llguidance": version("llguidance"),
        "jsonschema": VERSION,
        "schemas": len(verdicts),
        "known": sum(v.is_known for v in verdicts),
        "unnamed": sum(refusal_reason(v) == UNNAMED for v in verdicts if v.refusal),
        "supported": sum(not v.refusal for v in verdicts),
        "rows": rows,
    }


def markdown(document: dict[str, Any], draft: str, other: str = "") -> str:
    """Return lists of the keywords that are accepted or refused in full, and a table of the others.

    Keywords that are as in the `other` draft are counted only. Keywords with equal cells, which are those of one of
    them, share a row.
    """
    known = {row["keyword"]: _cells(row) for row in document["rows"] if row["draft"] == other}
    num_same = 0
    full: list[str] = []
    none: list[str] = []
    others: dict[tuple[str, ...], list[str]] = {}
    for row in document["rows"]:
        name, cells = f"`{row['keyword']}`", _cells(row)
        if row["draft"] != draft:
            continue
        if cells == known.get(row["keyword"]):
            num_same += 1
        elif row["supported"] == row["schemas"] and not row["looser"] and not row["stricter"]:
            full.append(name)
        elif not row["supported"] and not row["known"] and _names_itself(row):
            none.append(name)
        else:
            others.setdefault(tuple(cells), []).append(name)
    lines = [
        "| keyword | schemas | llguidance | server | refused, keyword named | accepts invalid | rejects valid |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join([", ".join(names), *cells]) + " |" for cells, names in others.items()),
    ]
    parts = [f"What is not named here is as in {other} ({num_same} names of the suite)."] if num_same else []
    parts += [f"Accepted in full, and read as the standard says: {', '.join(full)}."] if full else []
    parts += [f"Refused in full, as by llguidance: {', '.join(none)}."] if none else []
    return "\n\n".join([*parts, "\n".join(lines)])


def _names_itself(row: dict[str, Any]) -> bool:
    """Return whether refusals of a keyword's schemas name it; the suite's `$defs` is refused for `$dynamicAnchor`."""
    keyword = row["keyword"].removeprefix("optional ").split()[0]
    return any(keyword in named for named in row["refused_for"])


def _cells(row: dict[str, Any]) -> list[str]:
    frequent = Counter(row["refused_for"]).most_common(MOST_REASONS)
    refused = ", ".join(f"`{_cell(name)}` {count}" for name, count in frequent)
    if rest := sum(row["refused_for"].values()) - sum(count for _, count in frequent):
        refused += f", others {rest}"
    looser, stricter = (sum(map(len, row[kind].values())) for kind in ("looser", "stricter"))
    counts = (str(row[key]) for key in ("schemas", "known", "supported"))
    return [*counts, refused, str(looser or ""), str(stricter or "")]


def differences(document: dict[str, Any]) -> str:
    """Return a list of the invalid instances that grammars accept, by keyword."""
    return _list(
        (row, description, _cell(found[0]) + (f"; and {len(found) - 1} more" if found[1:] else ""))
        for row in document["rows"]
        for description, found in row["looser"].items()
    )


def refused(document: dict[str, Any]) -> str:
    """Return a list of the schemas that the server refuses though llguidance compiles them."""
    return _list(
        (row, description, _cell(refusal.partition(";")[0]))  # without the remedy
        for row in document["rows"]
        for description, refusal in row["refused_but_known"].items()
    )


def _list(items: Iterable[tuple[dict[str, Any], str, str]]) -> str:
    """Return a list of (row, description of a schema, text), entries that are equal in several drafts once."""
    drafts: dict[str, list[str]] = {}
    for row, description, text in items:
        drafts.setdefault(f"`{row['keyword']}`, {_cell(description)}: {text}", []).append(row["draft"])
    return "\n".join(f"- {', '.join(names)}: {entry}" for entry, names in drafts.items())


def page(document: dict[str, Any]) -> str:
    """Return the page of the documentation."""
    pairs = zip(DRAFTS, ("", *DRAFTS), strict=False)
    tables = "\n\n".join(f"## {draft}\n\n{markdown(document, draft, other)}" for draft, other in pairs)
    counts = (
        f"of {document['schemas']} schemas llguidance compiles {document['known']}, the server {document['supported']}"
    )
    return PAGE.format(
        **document, counts=counts, stricter=refused(document), differences=differences(document), tables=tables
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the whole report here")
    parser.add_argument("--docs", type=Path, help="write the page of the documentation here")
    options = parser.parse_args()
    folder, tokenizer = fetch_suite(), LLTokenizer("byte")
    document = report([judge(case, tokenizer) for draft in DRAFTS for case in read_suite(folder, draft)])
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.docs:
        options.docs.write_text(page(document), encoding="utf-8")
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}))


if __name__ == "__main__":
    main()
