"""Known nonces: lines of system prompts that differ in each request and are not meant for the model. A table."""

import re
from collections import Counter
from typing import NamedTuple

from headstart.openai.canonical.prompt_rules import PromptRules
from headstart.reuse.causes import TOKEN_COUNTS


class KnownNonce(NamedTuple):
    """Lines that a rule removes. `moves`: they are written again behind the last message, since a model may need them.

    `words`: one of them is in each such line, in lower case. `source`: where the form is documented.
    """

    rule: str
    words: tuple[str, ...]
    lines: re.Pattern[str]
    moves: bool
    source: str


def _lines(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:{pattern})[ \t]*,?[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.IGNORECASE)


_ID = r"""["'`]?(?=[\w.:-]*\d)[\w.:-]{6,128}["'`]?"""

KNOWN_NONCES = (
    KnownNonce(
        "billing_header",
        ("x-anthropic-billing-header",),
        _lines(r"x-anthropic-billing-header:[^\n]*"),
        False,
        "anthropics/claude-code #68900",
    ),
    KnownNonce(
        "trace_headers",
        ("trace", "b3", "baggage", "-id"),
        _lines(
            r"(?:traceparent|tracestate|b3|baggage|uber-trace-id|x-b3-[a-z]+|x-cloud-trace-context|x-amzn-trace-id"
            r"|x-(?:request|correlation|trace|client-request|amzn-request)-id)[ \t]*:[^\n]*"
        ),
        False,
        "W3C Trace Context; Zipkin B3; OpenTelemetry propagators",
    ),
    KnownNonce(
        "request_ids",
        ("id",),
        _lines(
            r"""["'`*#\- ]*(?:request|message|trace|session|conversation|run|turn|correlation|invocation|event)"""
            rf"""[ _-]?(?:id|uuid)(?:_full)?["'`*]*[ \t]*[:=][ \t]*{_ID}"""
        ),
        True,
        "openclaw/openclaw #19014",
    ),
)


def strip_nonces(text: str, rules: PromptRules, counts: Counter[str]) -> tuple[str, list[str]]:
    """Return a system prompt without the nonces of `rules`, and the lines that are to be moved. Counts each line."""
    moved: list[str] = []
    lower = text.lower()
    for nonce in KNOWN_NONCES:
        if nonce.rule not in rules or not any(word in lower for word in nonce.words):
            continue
        found = [line.group().strip() for line in nonce.lines.finditer(text)]
        if found:
            counts[nonce.rule] += len(found)
            text = nonce.lines.sub("", text)
            moved += found if nonce.moves else ()
    return text, moved


def nonce_rule_of_prompt_line(line: str) -> str:
    """Return the rule that removes or moves a line of a system prompt; empty if none does."""
    return next((nonce.rule for nonce in KNOWN_NONCES if nonce.lines.fullmatch(line)), "")


def strip_token_counts(text: str, counts: Counter[str]) -> str:
    """Return a text without statements of the tokens that are left. Counts each.

    They change with each turn, so a prompt that keeps the last one cannot extend the prompt before it.
    """
    if "token" not in text.lower():
        return text
    found, count = _COUNT_AND_SPACE.subn("", text)
    counts["token_counts"] += count
    return found.lstrip("\r\n") if count and not text.startswith(("\r", "\n")) else found


_COUNT_AND_SPACE = re.compile(rf"\s*(?:{TOKEN_COUNTS.pattern})", re.IGNORECASE)
