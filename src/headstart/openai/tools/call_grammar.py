"""Parts of grammars of tool calls that the formats share: markers, JSON values, and the arguments of one tool."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headstart.core.errors import InvalidRequestError
from headstart.openai.structured.dropped_keywords import (
    Dropped,
    loosen_checked_schema,
    loosen_or_refuse_schema,
    loosen_schema,
)
from headstart.openai.structured.grammar_text import TOOL_LINE
from headstart.openai.structured.schema_limits import check_and_adapt_schema
from headstart.openai.structured.schema_rewrites import close_schema_objects
from headstart.openai.tools.tool_fields import Tool, ToolParams

TokenId = Callable[[str], int | None]
ANY_TEXT = r"/(.|\n)*/"
LINE_BREAK = r'"\n"'
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "json_allowed_escapes": 'nrbtf"\\',
}
_PLAIN_KEYWORDS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *DEFINITIONS}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The rules of the calls of one family; `behind` is a call without its opening marker."""

    rules: list[str]
    call: str  # an expression: one call, or a list of them
    opener: str | None  # the marker before it; None: calls begin the answer
    plain: str = ANY_TEXT  # text without calls
    between: str | None = None  # an expression: as templates write it between two calls; None: there is one call


class ToolArgument(NamedTuple):
    """An argument of a tool."""

    name: str
    schema: Any
    is_required: bool


def marker_expression(text: str, token_id: TokenId) -> str:
    """Return the Lark expression of a marker: a token of the vocabulary, or text."""
    number = token_id(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def tool_grammar_rules(tools: ToolParams, rule: str, rules_of: Callable[[int, Tool], list[str]]) -> list[str]:
    """Return the rules of all tools that may be called, and `rule`: one of rule_0, rule_1, ... of each tool.

    Before those of a tool is a comment, by which an error of the compiler is given its name.
    """
    rules: list[str] = []
    for index, tool in enumerate(tools.callable_tools):
        rules += [f"{TOOL_LINE}{tool.name!a}", *rules_of(index, tool)]
    return [*rules, f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(tools.callable_tools)))]


def keywords_dropped_by_tool(tools: ToolParams) -> Dropped:
    """Return the keywords that the grammar of calls does not keep to, by the names of the tools."""
    found = [
        (tool.name, (loosen_checked_schema if tool.strict else loosen_schema)(tool.parameters).dropped)
        for tool in tools.callable_tools
    ]
    return tuple((name, keywords) for name, keywords in found if keywords)


def tool_arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are always an object, as a grammar keeps to it.

    Raises InvalidRequestError, with the names of tool and keyword.
    """
    name = f"tools: function {tool.name!r}"
    try:
        schema = check_and_adapt_schema(name, tool.parameters)
        schema = close_schema_objects(schema) if tool.is_closed else schema
        if tool.strict:
            schema = loosen_or_refuse_schema(name, schema, ", or send strict: false for this tool").schema
        else:
            schema = loosen_schema(schema).schema
    except InvalidRequestError as error:
        error.param = "tools"
        raise
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def json_value_expression(schema: object, tool: Tool) -> str:
    """Return the Lark expression of a JSON value, with the separators that chat templates write."""
    form = {**_JSON_FORM, "coerce_one_of": not tool.strict}
    return f"%json {json.dumps({**schema, 'x-guidance': form} if isinstance(schema, Mapping) else schema)}"


def with_definitions(root: Mapping[str, Any], schema: Any) -> Any:
    """Return a subschema of `root` with the definitions that its $ref may point to."""
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    return {**shared, **schema} if isinstance(schema, Mapping) else schema


def ordered_tool_arguments(tool: Tool, schema: Mapping[str, Any], calls: str) -> list[ToolArgument]:
    """Return the arguments that a schema lists, in its order, for calls without a JSON object around them.

    Raises InvalidRequestError for a schema that is more than a list; `calls`: those that need it.
    """
    properties: Any = schema.get("properties") or {}
    others = sorted(set(schema) - _PLAIN_KEYWORDS)
    if not isinstance(properties, Mapping) or others:
        reason = f", but have {', '.join(others)}" if others else ""
        raise unwritable_arguments_error(
            tool, f"are no plain object, which {calls} calls need{reason}: list its properties"
        )
    must = schema.get("required")
    required = [name for name in (must if isinstance(must, list | tuple) else ()) if isinstance(name, str)]
    more = schema.get("additionalProperties", True)
    listed = [ToolArgument(name, inner, name in required) for name, inner in properties.items()]
    return [*listed, *(ToolArgument(name, more, True) for name in dict.fromkeys(required) if name not in properties)]


def unwritable_arguments_error(tool: Tool, reason: str) -> InvalidRequestError:
    """Return the error for parameters of a tool that calls of this model cannot have."""
    message = f"the parameters of {tool.name!r} {reason}"
    return InvalidRequestError(message, param="tools", code="unsupported_parameter")
