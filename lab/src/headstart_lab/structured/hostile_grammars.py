"""Grammars that are small to send and expensive to compile or to run: JSON schemas, regular expressions, Lark."""

import json
import random
from typing import Any, NamedTuple

from headstart_lab.structured.hostile_texts import larks, regexes

Json = dict[str, Any]


class Case(NamedTuple):
    """A grammar to compile; `kind` is json, regex or lark, `text` its source in that language."""

    name: str
    kind: str
    text: str


def handmade() -> list[Case]:
    """Return the hand-made cases: each multiplies, nests, counts or branches in one way."""
    schemas = {**_products(), **_repetitions(), **_references(), **_strings(), **_sizes(), **_numbers()}
    return [
        *(Case(name, "json", json.dumps(schema)) for name, schema in schemas.items()),
        *(Case(name, "regex", text) for name, text in regexes().items()),
        *(Case(name, "lark", text) for name, text in larks().items()),
    ]


def _one_of(count: int, keys: int = 1) -> Json:
    branch = [{"properties": {f"k{i}_{j}": {"const": i} for j in range(keys)}} for i in range(count)]
    return {"anyOf": branch}


def _products() -> dict[str, Json]:
    strings = [{"type": "string", "pattern": f"^(a|b)*{'ab'[i % 2]}(a|b){{{i}}}$"} for i in range(30)]
    return {
        "allOf of 12 anyOf of 2": {"type": "object", "allOf": [_one_of(2) for _ in range(12)]},
        "allOf of 20 anyOf of 2": {"type": "object", "allOf": [_one_of(2) for _ in range(20)]},
        "allOf of 8 anyOf of 8": {"type": "object", "allOf": [_one_of(8) for _ in range(8)]},
        "allOf of 40 anyOf of 10": {"allOf": [_one_of(10) for _ in range(40)]},
        "allOf of oneOf types": {
            "allOf": [{"oneOf": [{"type": "string", "minLength": i}, {"type": "integer"}]} for i in range(16)]
        },
        "anyOf nested 12 deep by 2": _nested_any(12),
        "intersection of 30 patterns": {"allOf": strings},
        "intersection of 12 patterns": {"allOf": strings[:12]},
        "intersection of 6 patterns": {"allOf": strings[:6]},
        "intersection of distances": {
            "allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in (7, 11, 13, 17, 19, 23)]
        },
        "patternProperties 10 overlapping": {
            "type": "object",
            "patternProperties": {f"a.{{{i}}}b": {"type": "integer"} for i in range(10)},
            "additionalProperties": False,
        },
        "patternProperties 40 overlapping": {
            "type": "object",
            "patternProperties": {f"^.*{chr(97 + i % 26)}.{{{i}}}x": {"type": "string"} for i in range(40)},
        },
        "patternProperties and 500 properties": {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(500)},
            "patternProperties": {"^(a|b)*a(a|b){12}$": {"type": "integer"}},
        },
        "multipleOf product": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103, 107)]},
    }


def _nested_any(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for level in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {f"x{level}": schema}, "required": [f"x{level}"]}]}
    return schema


def _repetitions() -> dict[str, Json]:
    return {
        "string of 100,000 to 200,000": {"type": "string", "minLength": 100_000, "maxLength": 200_000},
        "string of 10**9": {"type": "string", "minLength": 10**9},
        "string up to 10**9": {"type": "string", "maxLength": 10**9},
        "string up to 10**18": {"type": "string", "maxLength": 10**18},
        "array of 10,000": {"type": "array", "minItems": 10_000, "maxItems": 10_000, "items": {"type": "integer"}},
        "array of 10**7": {"type": "array", "minItems": 10**7, "items": {"type": "integer"}},
        "array up to 10**9": {"type": "array", "maxItems": 10**9, "items": {"type": "integer"}},
        "arrays nested 5 by 300": _nested_array(5, 300),
        "arrays nested 60 by 3": _nested_array(60, 3),
        "pattern a{100000}": {"type": "string", "pattern": "^a{100000}$"},
        "pattern (a{1000}){1000}": {"type": "string", "pattern": "^(a{1000}){1000}$"},
        "pattern ((a?){200}){200}": {"type": "string", "pattern": "^((a?){200}){200}$"},
        "pattern (a|aa){1,500}": {"type": "string", "pattern": "^(a|aa){1,500}b$"},
        "pattern .*a.{20}": {"type": "string", "pattern": "^.*a.{20}$"},
        "pattern .*a.{200}": {"type": "string", "pattern": "a.{200}$"},
        "pattern and lengths": {"type": "string", "pattern": "(a|b)*a(a|b){9}", "minLength": 500, "maxLength": 5000},
        "100 strings up to 5,000": {
            "type": "object",
            "properties": {f"s{i}": {"type": "string", "minLength": i, "maxLength": 5000 + i} for i in range(100)},
            "required": [f"s{i}" for i in range(100)],
        },
        "minProperties 50,000": {"type": "object", "minProperties": 50_000},
        "maxProperties 50,000": {"type": "object", "maxProperties": 50_000, "additionalProperties": {"type": "null"}},
        "contains 2,000": {"type": "array", "contains": {"const": 1}, "minContains": 2000, "maxContains": 4000},
        "prefixItems 20,000": {"type": "array", "prefixItems": [{"type": "integer"}] * 20_000, "minItems": 20_000},
        "prefixItems 20,000 optional": {"type": "array", "prefixItems": [{"type": "integer"}] * 20_000},
    }


def _nested_array(depth: int, count: int) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "minItems": count, "maxItems": count + 1, "items": schema}
    return schema


def _chain(length: int, fan: int) -> Json:
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * fan} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "integer"}}}


def _references() -> dict[str, Json]:
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(24)}
    objects = {
        f"d{i}": {
            "type": "object",
            "properties": {"l": {"$ref": f"#/$defs/d{i + 1}"}, "r": {"$ref": f"#/$defs/d{i + 1}"}},
        }
        for i in range(40)
    }
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#"}}}
    return {
        "refs 10,000 in a chain": _chain(10_000, 1),
        "refs 1,000 in a chain": _chain(1_000, 1),
        "refs 100 in a chain by 2": _chain(100, 2),
        "refs doubled by allOf 24 deep": {"$ref": "#/$defs/d0", "$defs": {**doubled, "d24": {"type": "integer"}}},
        "refs doubled by properties 40 deep": {"$ref": "#/$defs/d0", "$defs": {**objects, "d40": {"type": "integer"}}},
        "ref to itself": {"$ref": "#"},
        "refs in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "allOf of itself": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        "anyOf of itself twice": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        "allOf of a tree and itself": {"$defs": {"t": tree}, "allOf": [{"$ref": "#/$defs/t"}, {"$ref": "#"}]},
        "allOf of two recursive trees": {
            "$defs": {
                "a": {"properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/b"}}},
                "b": {"properties": {"x": {"$ref": "#/$defs/b"}, "z": {"$ref": "#/$defs/a"}}},
            },
            "type": "object",
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        "recursive anyOf array": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "string"}]},
        "remote reference": {"$ref": "http://example.com/schema.json"},
        "file reference": {"$ref": "file:///etc/passwd"},
        "objects nested 300 deep": _nested_object(300),
        "objects nested 100 deep": _nested_object(100),
        "not nested 100 deep": _nested_not(100),
    }


def _nested_object(depth: int) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _nested_not(depth: int) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def _strings() -> dict[str, Json]:
    return {
        "format and pattern": {"type": "string", "format": "date-time", "pattern": "^.*1.{15}$"},
        "formats all": {"allOf": [{"type": "string", "format": f} for f in ("date-time", "email", "uri", "uuid")]},
        "email up to 3,000": {"type": "string", "format": "email", "minLength": 2000, "maxLength": 3000},
        "uri up to 3,000": {"type": "string", "format": "uri", "minLength": 2000, "maxLength": 3000},
        "unicode class repeated": {"type": "string", "pattern": "^\\p{L}{300}\\p{N}{300}$"},
        "unicode classes alternated": {"type": "string", "pattern": "^(\\p{Lu}|\\w|\\p{Han}|[^\\s]){1,400}$"},
        "negated classes": {
            "type": "string",
            "pattern": "^" + "".join(f"[^{chr(i)}]{{0,40}}" for i in range(97, 117)) + "$",
        },
        "lookahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b)(?=.*c).{8,}$"},
        "propertyNames pattern": {"type": "object", "propertyNames": {"pattern": "^(a|b)*a(a|b){14}$"}},
        "const of 1 MB": {"const": "x" * 1_000_000},
        "property name of 200,000": {"type": "object", "properties": {"k" * 200_000: {"type": "integer"}}},
    }


def _sizes() -> dict[str, Json]:
    rng = random.Random(7)
    names = ["".join(rng.choice("abcdef") for _ in range(12)) for _ in range(50_000)]
    return {
        "enum of 50,000": {"enum": names},
        "enum of 100,000 numbers": {"enum": list(range(100_000))},
        "enum of 3,000 objects": {"enum": [{"a": i, "b": [i, {"c": str(i)}]} for i in range(3_000)]},
        "1,000 optional properties": {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(1_000)},
            "additionalProperties": False,
        },
        "10,000 optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}},
        "5,000 enums of 100": {
            "type": "object",
            "properties": {f"p{i}": {"enum": names[i : i + 100]} for i in range(5_000)},
        },
        "2,000 patterns": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50}}}x*$"} for i in range(2_000)},
        },
        "anyOf of 5,000 patterns": {"anyOf": [{"type": "string", "pattern": f"^.*{name}$"} for name in names[:5_000]]},
        "anyOf of 300 patterns": {"anyOf": [{"type": "string", "pattern": f"^.*{name}.*$"} for name in names[:300]]},
        "anyOf of 3,000 similar objects": {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "string"}, f"b{i}": {"type": "integer"}}}
                for i in range(3_000)
            ]
        },
        "anyOf of 400 same arrays": {
            "anyOf": [{"type": "array", "items": {"type": "array", "items": {"enum": [i, "x"]}}} for i in range(400)]
        },
        "dependentRequired 500": {"type": "object", "dependentRequired": {f"a{i}": [f"b{i}"] for i in range(500)}},
        "not of an enum": {"type": "string", "not": {"enum": names[:2_000]}},
    }


def _numbers() -> dict[str, Json]:
    return {
        "range of 300 digits": {"type": "integer", "minimum": -(10**300), "maximum": 10**300 + 7},
        "range of floats": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
        "range of near floats": {
            "type": "number",
            "exclusiveMinimum": 0.1234567890123,
            "exclusiveMaximum": 0.1234567890124,
        },
        "multipleOf 999,983": {"type": "integer", "multipleOf": 999_983},
        "multipleOf 10**9+7": {"type": "integer", "multipleOf": 10**9 + 7},
        "multipleOf 1e-300": {"type": "number", "multipleOf": 1e-300},
        "multipleOf 0.0001 in a range": {"type": "number", "multipleOf": 0.0001, "minimum": 0.5, "maximum": 1e9},
        "multipleOf 3,001 in a range": {"type": "integer", "multipleOf": 3_001, "minimum": 5, "maximum": 10**40},
        "1,000 ranges": {
            "type": "object",
            "properties": {f"n{i}": {"type": "number", "minimum": i / 7, "maximum": 10.0**i / 3} for i in range(300)},
        },
    }
