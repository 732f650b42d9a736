"""AvoidableText: the text of one prompt that was computed again, and what it costs by cause. One definition for all.

Text that a prompt has in common with an earlier one, behind their first difference, would have been reused if the
difference stood behind it: it is avoidable, as far as it was computed. `headstart lint` and the server count it alike.
"""

from dataclasses import dataclass

from headstart.explain.lint.logged_prompt import CHARS_PER_TOKEN
from headstart.explain.lint.prompt_changes import Comparison, PlacedChange

BLOCK_TOKENS = 16
MIN_CHARS = 2 * BLOCK_TOKENS * CHARS_PER_TOKEN  # a smaller loss is not reported


@dataclass(frozen=True, slots=True)
class AvoidableText:
    """The avoidable characters of one prompt; per cause those behind its first occurrence, so they overlap."""

    num_chars: int
    causes: dict[str, tuple[int, PlacedChange]]


NOTHING = AvoidableText(0, {})


def avoidable_text(comparison: Comparison, reused: int) -> AvoidableText:
    """Return the avoidable text of a prompt of which `reused` characters were reused, compared with an earlier one."""
    avoidable = comparison.num_same - max(reused, comparison.num_before)
    if avoidable < MIN_CHARS:
        return NOTHING
    behind = 0
    firsts: dict[str, tuple[int, PlacedChange]] = {}
    for change in reversed(comparison.changes):
        behind += change.num_same
        firsts[change.cause] = min(behind, avoidable), change
    return AvoidableText(avoidable, {cause: found for cause, found in firsts.items() if found[0] >= MIN_CHARS})
