"""Random grammars, legal or not, and changed hand-made ones (hostile_grammars.py)."""

import json
import random
from collections.abc import Iterator
from typing import Any

from headstart_lab.structured.hostile_grammars import Case, Json, handmade


def drawn(rng: random.Random, count: int) -> Iterator[Case]:
    """Yield `count` random cases of all kinds, half of them variations of the hand-made ones."""
    fixed = handmade()
    for number in range(count):
        draw = rng.random()
        if draw < 0.3:
            case = rng.choice(fixed)
            yield Case(f"{case.name} changed {number}", case.kind, _changed(rng, case.text))
        elif draw < 0.75:
            yield Case(f"schema {number}", "json", json.dumps(random_schema(rng, rng.choice((2, 3, 4)))))
        elif draw < 0.9:
            yield Case(f"regex {number}", "regex", random_regex(rng, rng.choice((2, 4, 6))))
        else:
            yield Case(f"lark {number}", "lark", random_lark(rng))


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a random schema, legal or not, of keywords that multiply."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(
            (
                True,
                False,
                {},
                {"type": "string"},
                {"type": "integer", "minimum": rng.randrange(99)},
                {"const": None},
                {"enum": [rng.randrange(9), "x", [1]]},
                {"type": "number", "multipleOf": rng.choice((0.1, 7, 0, -1))},
                {"type": "string", "pattern": random_regex(rng, 3)},
                {"$ref": "#"},
                {"$ref": "#/$defs/a"},
                7,
                None,
                "x",
                [],
                {"type": "string", "format": rng.choice(("date", "email", "uri", "uuid", "ipv6", "no", 7))},
                {
                    "type": "string",
                    "minLength": rng.choice((0, 5, -1, 10**6)),
                    "maxLength": rng.choice((3, 10**7, 1.5)),
                },
            )
        )
    schema: Json = {}
    some = lambda: [random_schema(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 8)))]  # noqa: E731
    named = lambda: {rng.choice("abcdef"): random_schema(rng, depth - 1) for _ in range(rng.randrange(5))}  # noqa: E731
    one = lambda: random_schema(rng, depth - 1)  # noqa: E731
    makers = {
        "type": lambda: rng.choice(("object", "array", "string", ["object", "null"], "no", 7)),
        "anyOf": some, "oneOf": some, "allOf": some, "not": one, "if": one, "then": one, "else": one,
        "properties": named, "additionalProperties": one, "patternProperties": lambda: {random_regex(rng, 2): one()},
        "required": lambda: rng.sample("abcdef", rng.randrange(4)), "items": one, "prefixItems": some,
        "minItems": lambda: rng.choice((0, 2, 300, -1, 10**9)), "maxItems": lambda: rng.choice((0, 3, 500, "x")),
        "contains": one, "uniqueItems": lambda: True, "minProperties": lambda: rng.choice((0, 3, 1000)),
        "maxProperties": lambda: rng.choice((0, 3, 1000)), "propertyNames": one, "dependentSchemas": named,
        "$defs": named, "unevaluatedProperties": one, "$ref": lambda: rng.choice(("#", "#/$defs/a", "#/x", "http://a/b")),
        "x-guidance": lambda: rng.choice(({"lenient": True}, {"whitespace_pattern": ".*"}, 7)), "$anchor": lambda: "a",
    }  # fmt: skip
    for keyword in rng.sample(list(makers), rng.randrange(1, 6)):
        schema[keyword] = makers[keyword]()
    return schema


def random_regex(rng: random.Random, depth: int) -> str:
    """Return a random regular expression, legal or not."""
    if depth == 0:
        return rng.choice(("a", "b", ".", "[a-z]", "\\d", "\\w", "\\p{L}", "[^ab]", "é", "^", "$", "\\b", "(?i)", "\\"))
    inner = lambda: random_regex(rng, depth - 1)  # noqa: E731
    count = lambda: rng.choice(("*", "+", "?", "{3}", "{2,9}", "{300}", "{0,2000}", "{5,}", "{9,2}", "*?"))  # noqa: E731
    return rng.choice(
        (
            lambda: inner() + inner(),
            lambda: inner() + inner() + inner(),
            lambda: f"({inner()}|{inner()}){count()}",
            lambda: f"({inner()}){count()}",
            lambda: f".*{inner()}.{count()}",
            lambda: f"(?={inner()}){inner()}",
        )
    )()


def random_lark(rng: random.Random) -> str:
    """Return a random Lark grammar of up to eight rules, most of them ambiguous."""
    names = [f"r{i}" for i in range(rng.randrange(1, 8))]

    def part() -> str:
        atom = rng.choice(
            (rng.choice(names), '"a"', '"ab"', '""', f"/{random_regex(rng, 2)}/", f'({rng.choice(names)} | "x")')
        )
        return atom + rng.choice(("", "", "", "*", "+", "?", "{2,50}", "{1,3000}"))

    rules = [
        f"{name}: "
        + " | ".join(" ".join(part() for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4)))
        for name in names
    ]
    return "\n".join([f"start: {names[0]}", *rules])


def _changed(rng: random.Random, text: str) -> str:
    """Return `text` with one to three places deleted, doubled or replaced."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((1, 3, 20)))
        middle = rng.choice(
            ("", text[start:end] * rng.choice((2, 50)), rng.choice(('"', "}", "*", "9", "é", "|", ":")))
        )
        text = text[:start] + middle + text[end:]
    return text
