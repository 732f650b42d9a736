"""Checks of constrained answers: valid values, valid prefixes, and refusals that name the keyword."""

import json
import math
import re
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from headstart.openai.structured.dropped_keywords import loosen_schema
from headstart.openai.structured.schema_rewrites import adapt_schema_for_llguidance
from headstart_lab.structured.suite import SuiteSchema, integral, validator

LARGEST = 1.7976931348623157e308
_ALL_KEYWORDS = """
    $ref $id $anchor $defs $dynamicRef $dynamicAnchor $recursiveRef $vocabulary $schema additionalItems
    additionalProperties allOf anyOf const contains definitions dependencies dependentRequired dependentSchemas else
    enum exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength maxProperties maximum
    minContains minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems
    properties propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems
"""
KEYWORDS = frozenset(_ALL_KEYWORDS.split())


class Answer(NamedTuple):
    """A response to a request with a schema. `text` is the content, or the message of a refusal."""

    status: int
    text: str
    finish_reason: str = ""


class Result(Enum):
    """The result of a check; all but the last four are as they should be."""

    VALID = "valid"
    OVERFLOW = "valid, with a number beyond the doubles"  # 1e999 is JSON, and no finite double
    PREFIX = "cut, valid prefix"
    REFUSED = "refused, keyword named"
    INVALID = "invalid"
    NO_PREFIX = "cut, not a valid prefix"
    UNNAMED = "refused, no keyword named"
    FAILED = "failed"  # neither an answer nor a 400


BROKEN = (Result.INVALID, Result.NO_PREFIX, Result.UNNAMED, Result.FAILED)


class Checker:
    """Checks answers to requests with one schema. `sent` is the schema of the request, perhaps with added bounds."""

    def __init__(self, case: SuiteSchema, sent: Any, folder: Path, tokenizer: LLTokenizer) -> None:
        self._case, self._sent, self._folder, self._tokenizer = case, sent, folder, tokenizer
        self._validator: Any = None

    def check(self, answer: Answer) -> Result:
        """Return the result of one answer."""
        if answer.status == 400:
            return Result.REFUSED if names_keyword(answer.text, self._sent) else Result.UNNAMED
        if answer.status != 200 or answer.finish_reason not in ("stop", "length"):
            return Result.FAILED
        if answer.finish_reason == "length":
            return Result.PREFIX if self._is_prefix(answer.text) else Result.NO_PREFIX
        return self._check_value(answer.text)

    def _check_value(self, text: str) -> Result:
        overflows = False

        def number(digits: str) -> Decimal | float:
            nonlocal overflows
            if not math.isinf(float(digits)):
                try:
                    return Decimal(digits)  # a double would be no multiple of 1.5 any more after 17 digits
                except InvalidOperation:  # an exponent that no Decimal has
                    return float(digits)
            overflows = True
            return math.copysign(LARGEST, float(digits))

        if self._validator is None:
            kept = loosen_schema(self._case.schema).schema  # of a schema that is accepted: without uniqueItems
            self._validator = validator(self._case.draft, kept, self._folder)
        try:
            value = json.loads(text, parse_float=number, parse_constant=_refuse)
        except ValueError:
            return Result.INVALID
        if not self._validator.is_valid(value):
            return Result.INVALID
        return Result.OVERFLOW if overflows else Result.VALID

    def _is_prefix(self, text: str) -> bool:
        # The rewritten schema allows a part of the sent one; llguidance compiles it if the server accepts it.
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(adapt_schema_for_llguidance("schema", integral(self._sent)))
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        tokens = self._tokenizer.tokenize_bytes(text.rstrip("\ufffd").encode())
        return matcher.try_consume_tokens(tokens) == len(tokens)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def names_keyword(message: str, schema: Any) -> bool:
    """Return whether a message contains, as a word, a keyword that the schema uses.

    The word false is enough if the schema contains it, and any keyword if the schema refers to one outside itself.
    """
    return bool(named_keywords(message, schema))


def named_keywords(message: str, schema: Any) -> set[str]:
    """Return the words of a message that `names_keyword` counts."""
    words = set(re.findall(r"[$\w]+", message))
    text = json.dumps(schema)
    is_external = re.search(r'"\$(dynamicR|r)ef": "(?!#)', text) is not None
    return words & (KEYWORDS if is_external else used_keywords(schema)) | (
        words & {"false"} if "false" in text else set()
    )


def used_keywords(schema: Any) -> set[str]:
    """Return the keywords that occur anywhere in a schema."""
    if isinstance(schema, list):
        return set().union(*map(used_keywords, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    return (schema.keys() & KEYWORDS).union(*map(used_keywords, schema.values()))
