"""Grammars of calls whose arguments are XML elements (parsers/xml_calls.py): Qwen3-Coder's and GLM's.

A string is raw text. The grammar allows only texts that the parser reads back as a value that the schema allows: none
that contains the end marker, and, where other types are allowed as well, none that is read as a value of those.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.tools.call_grammar import (
    ANNOTATIONS,
    LINE_BREAK,
    CallGrammar,
    TokenId,
    json_value_expression,
    marker_expression,
    ordered_tool_arguments,
    tool_arguments_schema,
    tool_grammar_rules,
    unwritable_arguments_error,
    with_definitions,
)
from headstart.openai.tools.parsers.argument_types import (
    STRING,
    ToolArgumentTypes,
    json_type_of_value,
    resolve_reference,
)
from headstart.openai.tools.parsers.xml_calls import CALL_MARKERS, GLM45_FORM, QWEN3_CODER_FORM, XmlCallFormat
from headstart.openai.tools.tool_fields import Tool, ToolParams

_TEXT = r"/[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*/"
_INTEGER = "-?(?:0|[1-9][0-9]{0,15})"
_PLAIN_VALUES = {  # of types without keywords: what is written
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]{{1,15}})?(?:[eE][+-]?[0-9]{{1,2}})?",
}
_READ_AS = {  # texts that are no strings where the type is allowed as well
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "number": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "array": r"\[.*",
    "object": r"\{.*",
}
_ANY_NUMBER = "-?[0-9].*"  # where a grammar of JSON describes the numbers: one character tells it from a string
_NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"))
_APART = ("$ref", "$dynamicRef", "anyOf", "oneOf", "not", "if")
_MAX_DEPTH = 16
_HOST = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?(?:\\.[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?){0,6}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {  # a part of what each format allows
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9]+(?:[._+-][A-Za-z0-9]+){{0,8}}@{_HOST}",
    "uri": rf"[a-z][a-z0-9+.-]{{1,15}}://{_HOST}(?::[0-9]{{1,4}})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(?:\?[A-Za-z0-9._~=&-]*)?",
    "duration": r"P(?:[0-9]{1,6}W|[0-9]{1,6}D(?:T[0-9]{1,6}H)?|T[0-9]{1,6}[HMS])",
}
_PATTERN_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # of ECMA 262; in Rust they are those of Unicode


@dataclass(slots=True)
class _Values:
    """The texts of one argument."""

    strings: list[str] = field(default_factory=list[str])  # expressions of terminals
    plain: list[str] = field(default_factory=list[str])  # regular expressions of values that are no strings
    schemas: list[Any] = field(default_factory=list[Any])  # of JSON that no regular expression describes
    no_strings: set[str] = field(default_factory=set[str])  # regular expressions of texts that are read otherwise


def qwen3_coder_grammar(tools: ToolParams, token_id: TokenId) -> CallGrammar:
    """Return the grammar of <tool_call>, a line break, <function=f>, and a line for each element."""

    def call(tool: Tool, items: str) -> str:
        return f'{json.dumps(f"<function={tool.name}>")} "\\n" {items} "</function>"'

    return _grammar(tools, QWEN3_CODER_FORM, "\n", token_id, call, '"\\n" object "\\n"')


def glm45_grammar(tools: ToolParams, template: str, token_id: TokenId) -> CallGrammar:
    """Return the grammar of <tool_call>, the name, and the arguments, with line breaks if the template has them."""
    line = "" if "</arg_key><arg_value>" in template else "\n"

    def call(tool: Tool, items: str) -> str:
        return f"{json.dumps(tool.name + line)} {items}"

    return _grammar(tools, GLM45_FORM, line, token_id, call, "object")


def _grammar(
    tools: ToolParams, form: XmlCallFormat, line: str, token_id: TokenId, call: Callable[[Tool, str], str], inner: str
) -> CallGrammar:
    """Return a grammar; `call`: the expression of a call with its arguments, `inner`: what is between the markers."""

    def rules_of(index: int, tool: Tool) -> list[str]:
        rules: list[str] = []
        items = _items(index, tool, form, line, token_id, rules)
        return [*rules, f"object_{index}: {call(tool, items)}"]

    opening, closing = (marker_expression(text, token_id) for text in CALL_MARKERS)
    rules = [*tool_grammar_rules(tools, "object", rules_of), f"behind: {inner} {closing}", f"call: {opening} behind"]
    return CallGrammar(rules, "call", CALL_MARKERS[0], between=LINE_BREAK if line else "SPACE")


def _items(index: int, tool: Tool, form: XmlCallFormat, line: str, token_id: TokenId, rules: list[str]) -> str:
    """Append the rules of a tool's arguments; return the expression of all of them, in the order of the schema."""
    schema = tool_arguments_schema(tool)
    expressions: list[str] = []
    for at, (name, inner, is_required) in enumerate(ordered_tool_arguments(tool, schema, "XML")):
        if not name or set(name) & set("<>\n"):
            raise unwritable_arguments_error(
                tool, f"have the name {name!r}, which XML calls cannot write: use letters and digits"
            )
        if inner is False:
            raise unwritable_arguments_error(tool, f"require {name!r}, which additionalProperties forbids")
        item = f"item_{index}_{at}"
        begin = [*_marked(form.key[0], token_id), json.dumps(name), *_marked(form.key[1], token_id)]
        middle = [json.dumps(line)] if line else []
        begin += [*middle, *_marked(form.value[0], token_id)]
        values = _Reader(tool, schema, name).values(inner)
        rules += _value_rules(f"{index}_{at}", tool, values, form, token_id)
        rules.append(f"{item}: {' '.join(begin)} value_{index}_{at} {' '.join(middle)}".rstrip())
        expressions.append(item if is_required else f"{item}?")
    return " ".join(expressions)


def _marked(text: str, token_id: TokenId) -> list[str]:
    return [marker_expression(text, token_id)] if text else []


def _value_rules(label: str, tool: Tool, values: _Values, form: XmlCallFormat, token_id: TokenId) -> list[str]:
    """Return the rules of value_<label>: a value with its end marker.

    Strings, their end marker and plain values are one terminal, since the lexer does not go back behind a longer text.
    """
    closing = form.value[1]
    is_token = token_id(closing) is not None
    before = json.dumps("\n") if form.is_padded else ""
    ending = (
        f"{before} {marker_expression(closing, token_id)}" if is_token else json.dumps("\n" * form.is_padded + closing)
    )
    choices: list[str] = []
    rules: list[str] = []
    if values.strings:
        texts = " | ".join(f"({expression})" for expression in values.strings)
        excluded = [rf"[ \t\r\n]*(?:{one})[ \t\r\n]*" for one in sorted(values.no_strings)]
        excluded.append(f".*{re.escape(closing)}.*")
        strings = " & ".join((f"({texts})", *(f"~{_literal(f'(?s:{one})')}" for one in excluded)))
        whole = " | ".join((f"({strings})", *map(_literal, values.plain)))
        rules.append(f"TEXT_{label}: ({whole})" + ("" if is_token else f" {ending}"))
        choices.append(f"TEXT_{label}" + (f" {ending}" if is_token else ""))
    for at, schema in enumerate(values.schemas):
        rules.append(f"json_{label}_{at}: {json_value_expression(schema, tool)}")
        choices.append(f"json_{label}_{at} {ending}")
    return [*rules, f"value_{label}: {' | '.join(choices)}"]


class _Reader:
    """The reader of one argument's schema."""

    def __init__(self, tool: Tool, root: Mapping[str, Any], name: str) -> None:
        self._tool, self._root, self._name = tool, root, name
        self._types = ToolArgumentTypes(root)

    def values(self, schema: Any) -> _Values:
        """Return the texts of the argument. Raises InvalidRequestError."""
        values = _Values()
        if "string" in self._types.types_of_schema(schema):
            self._collect(schema, values, 0)
        else:
            values.schemas.append(with_definitions(self._root, schema))
        return values

    def _collect(self, schema: Any, values: _Values, depth: int) -> None:
        if schema is False or depth > _MAX_DEPTH:
            raise self._refused("whose schema has no value or refers to itself")
        part: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        keys = set(part) - ANNOTATIONS
        if keys == {"$ref"}:
            self._collect(resolve_reference(self._root, part["$ref"]), values, depth + 1)
            return
        for key in ("anyOf", "oneOf", "allOf"):
            branches = part.get(key)
            if keys == {key} and isinstance(branches, list) and (key != "allOf" or len(branches) == 1):
                if key == "oneOf":
                    self._check_disjoint(branches)
                for branch in branches:
                    self._collect(branch, values, depth + 1)
                return
        types = self._types.types_of_schema(part)
        if "string" in types:
            values.strings.append(self._string(part))
        for one in sorted(types - STRING - ({"integer"} if "number" in types else set())):
            self._collect_other(part, one, values)

    def _check_disjoint(self, branches: list[Any]) -> None:
        types = [self._types.types_of_schema(branch) for branch in branches]
        is_listed = all(isinstance(one, Mapping) and ("const" in one or "enum" in one) for one in branches)
        if not is_listed and sum(map(len, types)) > len(frozenset[str]().union(*types)):
            raise self._refused("with oneOf of one type: use anyOf or enum")

    def _collect_other(self, part: Mapping[str, Any], one: str, values: _Values) -> None:
        """Add the values of one type that is not string, beside strings."""
        no_string = _READ_AS[one]
        listed = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(listed, list) and one in _PLAIN_VALUES:
            matching = [
                value
                for value in listed
                if json_type_of_value(value) == one or (one, json_type_of_value(value)) == ("number", "integer")
            ]
            values.plain += [re.escape(json.dumps(value)) for value in matching]
        elif one in ("null", "boolean") or (
            one in _PLAIN_VALUES and not set(part) & {*_NUMBER_KEYWORDS, *_APART, "allOf"}
        ):
            values.plain.append(_PLAIN_VALUES[one])
        else:
            values.schemas.append(with_definitions(self._root, {**part, "type": one}))
            no_string = _ANY_NUMBER if one in _PLAIN_VALUES else no_string
        if one in ("null", "boolean") and set(part) & {*_APART, "allOf"}:
            raise self._refused("with $ref, anyOf or allOf beside other keywords: list them apart")
        values.no_strings.add(no_string)

    def _string(self, part: Mapping[str, Any]) -> str:
        """Return the expression of the strings that a subschema allows."""
        for key in _APART:
            if key in part:
                raise self._refused(f"a string with {key} beside other keywords: list them apart")
        conditions = [_TEXT]
        listed = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(listed, list):
            conditions.append(
                " | ".join(json.dumps(text, ensure_ascii=False) for text in listed if isinstance(text, str))
            )
        if isinstance(pattern := part.get("pattern"), str):
            conditions.append(_literal(self._searched(pattern)))
        if "minLength" in part or "maxLength" in part:
            conditions.append(f"/(?s:.{{{part.get('minLength', 0)},{part.get('maxLength', '')}}})/")
        if isinstance(chosen := part.get("format"), str):
            if chosen not in _FORMATS:
                raise self._refused(f"with format {chosen!r}, which XML calls cannot keep to: leave it out")
            conditions.append(_literal(_FORMATS[chosen]))
        for other in others if isinstance(others := part.get("allOf"), list) else ():
            conditions.append(self._string(other if isinstance(other, Mapping) else {}))
        return " & ".join(f"({condition})" for condition in conditions)

    def _searched(self, pattern: str) -> str:
        """Return a regular expression for whole texts in which `pattern`, in the dialect of ECMA 262, is found."""
        alternatives: list[list[str]] = [[]]
        depth = 0
        for token in _PATTERN_TOKEN.findall(pattern):
            depth += (token == "(") - (token == ")")
            if token == "|" and not depth:
                alternatives.append([])
                continue
            for escape, chars in _CLASSES.items():
                if token in (escape, escape.upper()):
                    token = f"[{chars}]" if token == escape else f"[^{chars}]"
                elif token[0] == "[":
                    token = token.replace(escape, chars)
            alternatives[-1].append(token)
        whole: list[str] = []
        for tokens in alternatives:
            begin, end = tokens[:1] == ["^"], tokens[-1:] == ["$"]
            inner = tokens[begin : len(tokens) - end]
            if "^" in inner or "$" in inner:
                raise self._refused(f"with a pattern that has ^ or $ inside, {pattern!r}: anchor only its ends")
            whole.append(("" if begin else "(?s:.*)") + "(?:" + "".join(inner) + ")" + ("" if end else "(?s:.*)"))
        return "|".join(whole)

    def _refused(self, reason: str) -> InvalidRequestError:
        return unwritable_arguments_error(self._tool, f"have {self._name!r} {reason}")


def _literal(regex: str) -> str:
    """Return a regular expression in Lark."""
    inner = "".join("\\/" if token == "/" else token for token in _PATTERN_TOKEN.findall(regex))
    return "/" + inner.replace("\n", r"\n").replace("\r", r"\r") + "/"
