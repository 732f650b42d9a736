"""Limits of compiled grammars, the same in the check and in the engine: they bound the time and memory of a mask."""

from llguidance import LLParserLimits

MAX_LEXER_STATES = 20_000  # about 2 KB each
STEP_LEXER_FUEL = 100_000  # of one mask: about 7 ms
STEP_MAX_ITEMS = 20_000  # of one mask: about 1 ms


def parser_limits() -> LLParserLimits:
    """Return the limits of compiled grammars."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )
