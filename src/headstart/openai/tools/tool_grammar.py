"""Grammars of tool calls, in llguidance's Lark syntax and in the model family's own format.

The chat template and the parser of the family fit to what a grammar allows, and the arguments of every call match the
schema of their tool. A marker that is one token of the vocabulary is written as that token, since the tokenizer library
of llguidance takes such tokens for special ones, which no text matches.
"""

import json
from collections.abc import Callable, Mapping

from headstart.openai.structured.grammar_text import grammar_from_lark
from headstart.openai.tools.call_grammar import (
    ANY_TEXT,
    DEFINITIONS,
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
from headstart.openai.tools.chat_format import ChatFormat, ChatOutputFormat
from headstart.openai.tools.parsers.chat_parser import THINK_MARKERS
from headstart.openai.tools.parsers.tool_formats import HERMES_MARKERS, LLAMA3_MARKERS, MISTRAL_MARKERS
from headstart.openai.tools.tool_fields import Tool, ToolParams
from headstart.openai.tools.xml_grammar import glm45_grammar, qwen3_coder_grammar

CONTENT = "@content"  # the grammar of the content, inside that of an answer
_SPACE = r"/[ \n\r\t]{0,4}/"  # bounded, so that no model can go on writing spaces


def answer_grammar(
    tools: ToolParams | None, form: ChatFormat, output: ChatOutputFormat, token_id: TokenId, content: str | None
) -> str | None:
    """Return the grammar of an answer in llguidance's form; None if it is free.

    `content`: the grammar that the request sets for the content; calls may take its place unless one is required.
    Raises InvalidRequestError if a schema is too large, or the family cannot express it.
    """
    lines = ["%llguidance {}"]
    if tools is None or output.family is None or not (tools.is_constrained or content is not None):
        if content is None:
            return None
        body = CONTENT
    else:
        grammar = _FAMILIES[output.family.name](tools, form, token_id)
        lines += [*grammar.rules, f"calls: {_calls(grammar, tools, content)}"]
        is_required = tools.choice.mode == "required"
        body = "calls" if is_required else "free" if content is None else f"(calls | {CONTENT})"
        if body == "free":
            lines += _free(grammar, tools, token_id)
    lines += [f"ANY: {ANY_TEXT}", f"SPACE: {_SPACE}"]
    think = _think(output, token_id, lines)
    text = "\n".join([lines[0], f"start: {think}{body}", *lines[1:], ""])
    return _with_content(text, content) if CONTENT in body else grammar_from_lark(text)


def _calls(grammar: CallGrammar, tools: ToolParams, content: str | None) -> str:
    """Return the expression of all calls. Calls with text between them are repeated by `free`."""
    is_free = tools.choice.mode != "required" and content is None
    if grammar.between is None or not tools.parallel or is_free:
        return grammar.call
    return f"{grammar.call} ({grammar.between} {grammar.call})*"


def _with_content(answer: str, content: str | None) -> str:
    """Return a grammar in which CONTENT refers to the grammar `content`, a text of Lark or of JSON."""
    assert content is not None
    named = [{"lark_grammar": content}] if not content.startswith("{") else json.loads(content)["grammars"]
    return json.dumps(
        {"grammars": [{"name": "answer", "lark_grammar": answer}, {**named[0], "name": CONTENT[1:]}, *named[1:]]}
    )


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


def _think(output: ChatOutputFormat, token_id: TokenId, lines: list[str]) -> str:
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
    return f"(SPACE {marker_expression(opening, token_id)} thought SPACE)? "


def _objects(tools: ToolParams) -> list[str]:
    """Return the rules of `object`: a JSON object of name and arguments for any of the tools."""

    def rules_of(index: int, tool: Tool) -> list[str]:
        begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return [
            f'object_{index}: {begin} arguments_{index} "}}"',
            f"arguments_{index}: {json_value_expression(tool_arguments_schema(tool), tool)}",
        ]

    return tool_grammar_rules(tools, "object", rules_of)


def _hermes(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    opening, closing = (marker_expression(text, token_id) for text in HERMES_MARKERS)
    rules = [*_objects(tools), f"call: {opening} behind", f"behind: SPACE object SPACE {closing}"]
    return CallGrammar(rules, "call", HERMES_MARKERS[0], between=LINE_BREAK)


def _llama3_json(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    # One call: Llama's templates refuse a history with several in one message. It is JSON as a whole, so that a
    # response_format, which may be JSON as well, has the same lexemes.
    def rules_of(index: int, tool: Tool) -> list[str]:
        schema = tool_arguments_schema(tool)
        shared = {key: schema[key] for key in DEFINITIONS if key in schema}
        call = {"name": {"const": tool.name}, "parameters": schema}
        required = {"required": list(call), "additionalProperties": False}
        wanted = {**shared, "type": "object", "properties": call, **required}
        return [f"object_{index}: {json_value_expression(wanted, tool)}"]

    return CallGrammar(tool_grammar_rules(tools, "object", rules_of), "object", None, r"/[ \n\r\t]*[^{ \n\r\t](.|\n)*/")


def _mistral(tools: ToolParams, form: ChatFormat, token_id: TokenId) -> CallGrammar:
    opening, call_id, arguments = (marker_expression(text, token_id) for text in MISTRAL_MARKERS)
    if MISTRAL_MARKERS[2] not in form.template:
        more = ' (", " object)*' if tools.parallel else ""
        array = [*_objects(tools), f'behind: SPACE "[" object{more} "]"']
        return CallGrammar(array, f"{opening} behind", MISTRAL_MARKERS[0])
    with_id = f"{call_id} /[a-zA-Z0-9]{{9}}/ " if MISTRAL_MARKERS[1] in form.template else ""

    def rules_of(index: int, tool: Tool) -> list[str]:
        return [
            f"behind_{index}: {json.dumps(tool.name)} {with_id}{arguments} arguments_{index}",
            f"arguments_{index}: {json_value_expression(tool_arguments_schema(tool), tool)}",
        ]

    return CallGrammar(
        tool_grammar_rules(tools, "behind", rules_of), f"{opening} behind", MISTRAL_MARKERS[0], between="SPACE"
    )


def _pythonic(tools: ToolParams, _: ChatFormat, token_id: TokenId) -> CallGrammar:
    more = ' (", " object)*' if tools.parallel else ""
    rules = tool_grammar_rules(tools, "object", _python_call)
    return CallGrammar(rules, f'"[" object{more} "]"', None, r"/[ \n\r\t]*[^\[ \n\r\t](.|\n)*/")


def _python_call(index: int, tool: Tool) -> list[str]:
    """Return the rules of one call: keyword arguments in the order of the schema, their values in JSON."""
    schema = tool_arguments_schema(tool)
    arguments = ordered_tool_arguments(tool, schema, "pythonic")
    for name, _, _ in arguments:
        if not (name.isidentifier() and name.isascii()):
            raise unwritable_arguments_error(
                tool, f"have the name {name!r}, which pythonic calls cannot write: use letters and digits"
            )
    rules = [f'object_{index}: {json.dumps(tool.name + "(")} first_{index}_0 ")"']
    for at, (name, inner, is_required) in enumerate(arguments):
        item, rest = f"item_{index}_{at}", f"rest_{index}_{at + 1}"
        rules.append(f"{item}: {json.dumps(name + '=')} {json_value_expression(with_definitions(schema, inner), tool)}")
        skip = "" if is_required else f" | first_{index}_{at + 1}"
        rules.append(f"first_{index}_{at}: {item} {rest}{skip}")
        optional = "" if is_required else "?"
        rules.append(f'rest_{index}_{at}: (", " {item}){optional} {rest}')
    end = len(arguments)
    return [*rules, f'first_{index}_{end}: ""', f'rest_{index}_{end}: ""']


_FAMILIES: Mapping[str, Callable[[ToolParams, ChatFormat, TokenId], CallGrammar]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "qwen3_coder": lambda tools, form, token_id: qwen3_coder_grammar(tools, token_id),
    "glm45": lambda tools, form, token_id: glm45_grammar(tools, form.template, token_id),
}
