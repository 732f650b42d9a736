"""Grammar text: the form in which llguidance compiles a JSON Schema, a regular expression, choices or a Lark grammar.

Building the text checks little: whether it compiles is known only after compilation (grammar_check.py, and the engine).
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from headstart.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

TOOL_LINE = "// tool "  # a comment before the rules of a tool, whose name follows: errors of the compiler name it
# Of compiled grammars, the same in the check and in the engine: they bound the time and memory of a mask.
MAX_LEXER_STATES = 20_000  # about 2 KB each
STEP_LEXER_FUEL = 100_000  # of one mask: about 7 ms
STEP_MAX_ITEMS = 20_000  # of one mask: about 1 ms
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema_grammar(schema: Mapping[str, Any], *, whitespace: str | None = None, is_strict: bool = True) -> str:
    """Return the grammar of the JSON documents that a schema allows.

    `whitespace`: a regular expression for the text between two tokens of JSON. None: no whitespace, so that more tokens
    have one continuation only, and no model can go on writing spaces. `is_strict`: else oneOf may be read as anyOf.
    """
    options: JsonCompileOptions = {
        "whitespace_flexible": False,
        "lenient": False,  # a keyword that is not supported is an error
        "coerce_one_of": not is_strict,
        "json_allowed_escapes": 'nrbtf"\\',  # without \u: "\u0061" would be another way to write the property "a"
    }
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON Schema cannot be read: {str(error)[:200]}") from None


def regex_grammar(regex: str) -> str:
    """Return the grammar of the texts that match a whole regular expression, in the syntax of Rust's regex crate."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of these texts, none of which is empty."""
    return grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def grammar_from_lark(grammar: str) -> str:
    """Return the grammar of a text in llguidance's dialect of Lark."""
    return LLMatcher.grammar_from_lark(grammar)


def grammar_parser_limits() -> LLParserLimits:
    """Return the limits of compiled grammars."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )
