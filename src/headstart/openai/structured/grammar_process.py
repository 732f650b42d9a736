"""The process that checks grammars: `python -m headstart.openai.structured.grammar_process FD`.

A grammar comes from a request, and compiling it can take any amount of time and memory: see openai/sandbox/.
"""

import json
import re
import time
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from headstart.core.errors import InvalidRequestError
from headstart.openai.sandbox.sandbox_process import Handler, serve
from headstart.openai.structured.grammar_text import TOOL_LINE, grammar_parser_limits

_MESSAGES = {  # a part of a message of llguidance, and the message to send
    "oneOf": "oneOf is supported only if its alternatives exclude each other",
    "not present in a registry": "$schema or $ref names a schema that is not part of this one: {}",
    "Anchor '": "$ref: {}",
    "NoExtensionBias": "no text matches it; a $ref, or a rule, may lead to itself only",
    "ff_tokens": "the text that it begins with is too long; a $ref, or a rule, may require itself",
    "not disjoint": "patternProperties is supported only if no name matches two of its patterns: {}",
    "float range": "minimum, exclusiveMinimum, maximum and exclusiveMaximum: {}",
    "integer range": "minimum, exclusiveMinimum, maximum and exclusiveMaximum: {}",
}
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_TOO_LARGE = InvalidRequestError("the grammar needs too much memory; simplify it")


def compute_first_masks(matcher: LLMatcher) -> None:
    """Compute the first mask, and the one behind the forced tokens; leave an error in a matcher that has no text."""
    matcher.compute_bitmask()
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced)
        matcher.compute_bitmask()


def shorten_grammar_error(message: str, grammar: str = "") -> str:
    """Return the first line of llguidance's message, without advice that only its callers could follow.

    A place in the rules of a tool is given as the name of the tool.
    """
    place = _PLACE.match(message)
    tool = None if place is None else _tool_at(grammar, int(place[1]))
    if place is not None and tool is not None:
        return f"{tool}: {shorten_grammar_error(message[place.end() :])}"
    lines = message.strip().split("\n")
    details = [line for line in lines[1:] if line.startswith("error: ")]  # of a regular expression
    line = " ".join((lines[0], *details))[:300]
    for part, rewritten in _MESSAGES.items():
        if part in line:
            return rewritten.format(line)
    return line


def _tool_at(grammar: str, line: int) -> str | None:
    """Return the tool in whose rules a line of the Lark grammar is, of several of the first; None if it is in none."""
    lark = json.loads(grammar)["grammars"][0].get("lark_grammar", "") if grammar.startswith("{") else grammar
    before = [text for text in lark.split("\n")[:line] if text.startswith(TOOL_LINE)]
    return f"tool {before[-1].removeprefix(TOOL_LINE)}" if before else None


def build(setup: Any) -> Handler:
    """Return the check of grammars for the tokenizer in `setup`: its JSON, the rows of the logits, the EOS ids."""
    text, vocab_size, eos_token_ids, max_seconds = setup
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)

    def check(grammar: Any) -> str:
        """Compile a grammar and begin an answer, as the engine will. Return an empty text."""
        began = time.process_time()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammar_parser_limits())
        if not matcher.is_error():
            compute_first_masks(matcher)
        if matcher.is_error():
            raise InvalidRequestError(shorten_grammar_error(matcher.get_error(), grammar))
        if time.process_time() - began > max_seconds:
            raise InvalidRequestError("it takes too long to compile; simplify it")
        return ""

    return check


if __name__ == "__main__":
    serve(build, _TOO_LARGE)
