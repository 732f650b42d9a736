"""Grammars of tool calls, in llguidance's Lark syntax and in the model family's own format.

The chat template and the parser of the family fit to what a grammar allows, and the arguments of every call match the
schema of their tool. A marker that is one token of the vocabulary is written as that token, since the tokenizer library
of llguidance takes such tokens for special ones, which no text matches.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.tools.chat_format import ChatFormat, ChatOutput
from headstart.openai.tools.parsers.reasoning_reader import THINK_MARKERS
from headstart.openai.tools.parsers.tool_formats import HERMES_MARKERS, LLAMA3_MARKERS, MISTRAL_MARKERS
from headstart.openai.tools.tool_fields import Tool, ToolParams

TokenId = Callable[[str], int | None]
_ANY = r"/(.|\n)*/"
_SPACE = r"/[ \n\r\t]*/"
_PLAIN_KEYWORDS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
        "$schema",
        "title",
        "description",
    )
)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The rules of the calls of one family; `behind` is a call without its opening marker."""

    rules: list[str]
    calls: str  # an expression: one or more calls
    opener: str | None  # the marker before each of them; None: calls begin the answer
    plain: str = _ANY  # text without calls


def tool_grammar(tools: ToolParams, form: ChatFormat, output: ChatOutput, token_id: TokenId) -> str:
    """Return the Lark text for an answer. Raises InvalidRequestError if the family cannot express a schema."""
    assert output.family is not None
    grammar = _FAMILIES[output.family.name](tools, form, token_id)
    lines = ["%llguidance {}", *grammar.rules, f"calls: {grammar.calls}", f"ANY: {_ANY}", f"SPACE: {_SPACE}"]
    body = "calls" if tools.choice.mode == "required" else "free"
    if body == "free":
        lines += _free(grammar, tools, token_id)
    think = _think(output, token_id, lines)
    return "\n".join([*lines[:1], f"start: {think}{body}", *lines[1:], ""])


def _free(grammar: CallGrammar, tools: ToolParams, token_id: TokenId) -> list[str]:
    """Return the rule `free`: text, and calls behind the family's marker, or in place of text if it has none."""
    if grammar.opener is None:
        marker = token_id(LLAMA3_MARKERS[0])
        tagged = "" if marker is None else f" | PLAIN? <[{marker}]> calls"
        return [f"free: calls | PLAIN{tagged}", f"PLAIN: {grammar.plain}"]
    repeat = "*" if tools.parallel else "?"
    number = token_id(grammar.opener)
    if number is not None:
        return [f"free: (ANY calls){repeat} ANY"]
    # Without a token of its own the marker is found in the text, so `calls` begins behind it.
    escaped = "".join("\\" + char if char in r"\/[](){}.*+?|^$" else char for char in grammar.opener)
    return [f"free: (head rest){repeat} ANY", f"head[lazy]: /(.|\\n)*{escaped}/", "rest: behind"]


def _think(output: ChatOutput, token_id: TokenId, lines: list[str]) -> str:
    """Append the rules of the reasoning to `lines`; return the expression before the body."""
    if not output.is_reasoning:
        return ""
    opening, closing = THINK_MARKERS
    number = token_id(closing)
    if number is None:
        lines.append(r"thought[lazy]: /(.|\n)*<\/think>/")
    else:
        lines.append(f"thought: ANY <[{number}]>")
    if output.is_open:
        return "thought SPACE "
    return f"(SPACE {_marker(opening, token_id)} thought SPACE)? "


def _marker(text: str, token_id: TokenId) -> str:
    number = token_id(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are always an object."""
    schema = dict(tool.parameters)
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _objects(tools: ToolParams, key: str) -> list[str]:
    """Return the rules of `object`: a JSON object of name and arguments for any of the tools."""
    rules: list[str] = []
    for index, tool in enumerate(tools.callable_tools):
        begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules.append(f'object_{index}: {begin} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool))}")
    return [*rules, "object: " + " | ".join(f"object_{index}" for index in range(len(tools.callable_tools)))]


def _hermes(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    opening, closing = (_marker(marker, token_id) for marker in HERMES_MARKERS)
    rules = [*_objects(tools, "arguments"), f"call: {opening} behind", f"behind: SPACE object SPACE {closing}"]
    calls = "call (SPACE call)*" if tools.parallel and tools.choice.mode == "required" else "call"
    return CallGrammar(rules, calls, HERMES_MARKERS[0])


def _llama3_json(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    # One call: Llama's templates refuse a history with several in one message.
    return CallGrammar(_objects(tools, "parameters"), "object", None, r"/[ \n\r\t]*[^{ \n\r\t](.|\n)*/")


def _mistral(tools: ToolParams, form: ChatFormat, token_id: TokenId) -> CallGrammar:
    opening, call_id, arguments = (_marker(marker, token_id) for marker in MISTRAL_MARKERS)
    if MISTRAL_MARKERS[2] not in form.template:
        more = ' (", " object)*' if tools.parallel else ""
        array = [*_objects(tools, "arguments"), f'behind: SPACE "[" object{more} "]"']
        return CallGrammar(array, f"{opening} behind", MISTRAL_MARKERS[0])
    with_id = f"{call_id} /[a-zA-Z0-9]{{9}}/ " if MISTRAL_MARKERS[1] in form.template else ""
    rules: list[str] = []
    for index, tool in enumerate(tools.callable_tools):
        rules.append(f"named_{index}: {json.dumps(tool.name)} {with_id}{arguments} arguments_{index}")
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool))}")
    rules.append("behind: " + " | ".join(f"named_{index}" for index in range(len(tools.callable_tools))))
    one = f"{opening} behind"
    calls = f"({one})+" if tools.parallel and tools.choice.mode == "required" else one
    return CallGrammar(rules, calls, MISTRAL_MARKERS[0])


def _pythonic(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    rules: list[str] = []
    for index, tool in enumerate(tools.callable_tools):
        rules += _python_call(index, tool)
    rules.append("object: " + " | ".join(f"object_{index}" for index in range(len(tools.callable_tools))))
    more = ' (", " object)*' if tools.parallel else ""
    return CallGrammar(rules, f'"[" object{more} "]"', None, r"/[ \n\r\t]*[^\[ \n\r\t](.|\n)*/")


def _python_call(index: int, tool: Tool) -> list[str]:
    """Return the rules of one call: keyword arguments in the order of the schema, their values in JSON."""
    schema = _schema(tool)
    properties: Any = schema.get("properties") or {}
    is_plain = isinstance(properties, Mapping) and not set(schema) - _PLAIN_KEYWORDS
    if not is_plain or not all(name.isidentifier() and name.isascii() for name in properties):
        message = f"the parameters of {tool.name!r} are no plain object, which pythonic calls need: list its properties"
        raise InvalidRequestError(message, param="tools", code="unsupported_parameter")
    must = schema.get("required")
    required = {name for name in properties if isinstance(must, list | tuple) and name in must}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = [f'object_{index}: {json.dumps(tool.name + "(")} first_{index}_0 ")"']
    for at, (name, inner) in enumerate(properties.items()):
        item, rest = f"item_{index}_{at}", f"rest_{index}_{at + 1}"
        inner = {**shared, **inner} if isinstance(inner, Mapping) else inner
        rules.append(f"{item}: {json.dumps(name + '=')} %json {json.dumps(inner)}")
        skip = "" if name in required else f" | first_{index}_{at + 1}"
        rules.append(f"first_{index}_{at}: {item} {rest}{skip}")
        optional = "" if name in required else "?"
        rules.append(f'rest_{index}_{at}: (", " {item}){optional} {rest}')
    end = len(properties)
    return [*rules, f'first_{index}_{end}: ""', f'rest_{index}_{end}: ""']


_FAMILIES: Mapping[str, Callable[[ToolParams, ChatFormat, TokenId], CallGrammar]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
