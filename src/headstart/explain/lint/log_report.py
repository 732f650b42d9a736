"""LogReport: the reuse of a log of requests, what of its prefill was avoidable, by cause, and its miss ratios.

An infinite cache of blocks of 16 tokens is assumed, a token of four characters, and one tenant; prompts with another
`cache_salt` share nothing. A request is compared
with the earlier requests that have most text in common with it, wherever that text stands: text that both have, behind
their first difference, was computed again. The cost of a cause is the text behind its first occurrence in a request, so
costs of several causes overlap; `avoidable_tokens` counts each token once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median
from typing import Any

from headstart.explain.lint.avoidable_text import BLOCK_TOKENS, avoidable_text
from headstart.explain.lint.causes import RuleOf, no_rule, remedy
from headstart.explain.lint.logged_prompt import CHARS_PER_TOKEN, LoggedPrompt
from headstart.explain.lint.miss_ratios import MissRatio, miss_ratios
from headstart.explain.lint.near_prompts import NearPrompts
from headstart.explain.lint.prompt_changes import Comparison, PlacedChange, compare

CANDIDATES = 3  # earlier prompts that a prompt is compared with


@dataclass(slots=True)
class CauseCost:
    """One cause: the requests it occurs in, its cost in each, in tokens, and its first occurrence."""

    cause: str
    line: int
    against: int  # line of the earlier request
    change: PlacedChange
    costs: list[int] = field(default_factory=list[int])
    rules: list[str] = field(default_factory=list[str])  # that mend the lines it was found in

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "cause": self.cause,
            "requests": len(self.costs),
            "tokens": sum(self.costs),
            "tokens_per_request": int(median(self.costs)),
            "remedy": remedy(self.cause, self.rules),
            "rules": self.rules,
            "example": {
                "line": self.line,
                "against_line": self.against,
                "field": self.change.path,
                "character": self.change.at,
                "this": self.change.this[:80],
                "that": self.change.that[:80],
            },
        }


@dataclass(frozen=True, slots=True)
class LogReport:
    """The findings of one log, in tokens."""

    num_requests: int
    num_skipped: int
    prompt_tokens: int
    reused_tokens: int
    avoidable_tokens: int
    causes: tuple[CauseCost, ...]  # the most expensive first
    curve: tuple[MissRatio, ...]
    notes: tuple[str, ...] = ()  # on the log itself

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that an infinite cache computes."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def redundancy(self) -> float:
        """Computed tokens over those that remain if every cause is mended; 1 is best."""
        needed = self.computed_tokens - self.avoidable_tokens
        return self.computed_tokens / needed if needed > 0 else 1.0

    @property
    def avoidable_share(self) -> float:
        """Avoidable tokens over all prompt tokens."""
        return self.avoidable_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "requests": self.num_requests,
            "skipped_lines": self.num_skipped,
            "notes": list(self.notes),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "computed_tokens": self.computed_tokens,
            "avoidable_tokens": self.avoidable_tokens,
            "avoidable_share": round(self.avoidable_share, 4),
            "redundancy": round(self.redundancy, 3),
            "causes": [cost.as_dict() for cost in self.causes],
            "miss_ratios": [point._asdict() for point in self.curve],
        }


def report_log(
    prompts: Sequence[LoggedPrompt],
    num_skipped: int = 0,
    notes: Sequence[str] = (),
    rule_of: RuleOf = no_rule,
    on_request: Callable[[], object] = lambda: None,
) -> LogReport:
    """Return the report of the prompts of one log, in order of arrival."""
    groups: defaultdict[str, NearPrompts] = defaultdict(NearPrompts)
    known, costs = set[int](), dict[str, CauseCost]()
    chains: list[list[int]] = []
    num_chars = num_reused = num_avoidable = 0
    for index, prompt in enumerate(prompts):
        text, near = prompt.text, groups[prompt.group]
        chain = _chain(text, prompt.group)
        reused = _num_known(chain, known) * BLOCK_TOKENS * CHARS_PER_TOKEN
        best = best_match(prompt, prompts, near.nearest(prompt, CANDIDATES))
        if best is not None:
            num_avoidable += _charge(costs, prompt, prompts[best[0]].line, best[1], reused, rule_of)
        num_chars, num_reused = num_chars + len(text), num_reused + reused
        known.update(chain)
        chains.append(chain)
        near.add(index, prompt)
        on_request()
    return LogReport(
        num_requests=len(prompts),
        num_skipped=num_skipped,
        prompt_tokens=num_chars // CHARS_PER_TOKEN,
        reused_tokens=num_reused // CHARS_PER_TOKEN,
        avoidable_tokens=num_avoidable // CHARS_PER_TOKEN,
        causes=tuple(sorted(costs.values(), key=lambda cost: -sum(cost.costs))),
        curve=tuple(miss_ratios(chains, BLOCK_TOKENS)),
        notes=tuple(notes),
    )


def best_match(
    prompt: LoggedPrompt, prompts: Sequence[LoggedPrompt], candidates: Sequence[int]
) -> tuple[int, Comparison] | None:
    """Return the earlier prompt with most equal text, and the comparison with it."""
    found = [(index, compare(prompt, prompts[index])) for index in candidates]
    return max(found, key=lambda pair: pair[1].num_same, default=None)


def _charge(
    costs: dict[str, CauseCost],
    prompt: LoggedPrompt,
    against: int,
    comparison: Comparison,
    reused: int,
    rule_of: RuleOf,
) -> int:
    """Add the costs of one request to those of each cause; return its avoidable characters."""
    found = avoidable_text(comparison, reused)
    for cause, (num_chars, change) in found.causes.items():
        cost = costs.setdefault(cause, CauseCost(cause, prompt.line, against, change))
        cost.costs.append(num_chars // CHARS_PER_TOKEN)
        rule = rule_of(change.line)
        if rule and rule not in cost.rules:
            cost.rules.append(rule)
    return found.num_chars


def _chain(text: str, group: str) -> list[int]:
    """Return the hash of each full block of a text and all text before it, in its group."""
    size = BLOCK_TOKENS * CHARS_PER_TOKEN
    hashed = blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8)
    chain: list[int] = []
    for start in range(0, len(text) - size + 1, size):
        hashed.update(text[start : start + size].encode("utf-8", "surrogatepass"))
        chain.append(int.from_bytes(hashed.digest(), "little"))
    return chain


def _num_known(chain: Sequence[int], known: set[int]) -> int:
    """Return the number of leading blocks that are known."""
    return next((index for index, block in enumerate(chain) if block not in known), len(chain))
