"""The diagnosis of one prompt against earlier ones: what differs, where, what that costs, and how to mend it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from headstart.explain.lint.avoidable_text import MIN_CHARS
from headstart.explain.lint.causes import CAUSES, RuleOf, no_rule, remedy
from headstart.explain.lint.log_report import CANDIDATES, best_match
from headstart.explain.lint.logged_prompt import CHARS_PER_TOKEN, LoggedPrompt
from headstart.explain.lint.near_prompts import NearPrompts


class Finding(NamedTuple):
    """One difference and its cost: tokens behind it that both prompts have."""

    cause: str  # a key of CAUSES
    field: str
    character: int
    tokens: int
    rule: str = ""  # of --prompt-rule, that mends it; empty: none is known

    @property
    def text(self) -> str:
        """The finding as a sentence."""
        what, _, _ = CAUSES[self.cause].partition(": ")
        mend = remedy(self.cause, [self.rule] if self.rule else []).replace(f"{what}: ", "")
        place = f"at character {self.character} of {self.field}"
        return f"{what[0].upper()}{what[1:]} {place} costs about {self.tokens:,} tokens: {mend}."


def diagnose(prompt: LoggedPrompt, earlier: Sequence[LoggedPrompt], rule_of: RuleOf = no_rule) -> list[Finding]:
    """Return the differences to the earlier prompt of the same group that has most text in common, the first first.

    Each cause is named once; its cost is the equal text behind it, so costs overlap. Small costs are left out.
    """
    near = NearPrompts()
    for index, other in enumerate(earlier):
        if other.group == prompt.group:
            near.add(index, other)
    best = best_match(prompt, earlier, near.nearest(prompt, CANDIDATES))
    if best is None:
        return []
    behind = 0
    found: dict[str, Finding] = {}
    for change in reversed(best[1].changes):
        behind += change.num_same
        if behind >= MIN_CHARS:
            found.pop(change.cause, None)
            tokens = behind // CHARS_PER_TOKEN
            found[change.cause] = Finding(change.cause, change.path, change.at, tokens, rule_of(change.line))
    return list(found.values())[::-1]
