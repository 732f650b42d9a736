"""LogReport: the reuse of a log of requests, what of its prefill was avoidable, by cause, and its miss ratios.

An infinite cache of blocks of 16 tokens is assumed, a token of four characters, and one tenant; prompts with another
`cache_salt` share nothing. A request is compared with the earlier requests that have most text in common with it,
wherever that text stands: text that both have, behind their first difference, was computed again. The cost of a cause
is the text behind its first occurrence in a request, so costs of several causes overlap; `avoidable_tokens` counts each
token once.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

from headstart.common_prefix import common_prefix_length
from headstart.reuse.causes import CAUSES, RuleOf, find_no_rule, remedy_for_cause
from headstart.reuse.logged_prompt import CHARS_PER_TOKEN, IdTracePrompt, LoggedPrompt
from headstart.reuse.miss_ratios import MissRatio, miss_ratios
from headstart.reuse.near_prompts import SimilarPromptIndex
from headstart.reuse.prompt_changes import (
    BLOCK_TOKENS,
    FieldChange,
    PromptComparison,
    avoidable_text,
    compare_logged_prompts,
)

CANDIDATES = 3  # earlier prompts that a prompt is compared with
UNKNOWN = "There is no text in these requests: causes, and what of the prefill was avoidable, cannot be known."


@dataclass(slots=True)
class CauseCost:
    """One cause: the requests it occurs in, its cost in each, in tokens, and its first occurrence."""

    cause: str
    line: int
    against: int  # line of the earlier request
    change: FieldChange
    costs: list[int] = field(default_factory=list[int])
    rules: list[str] = field(default_factory=list[str])  # that mend the lines it was found in

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "cause": self.cause,
            "requests": len(self.costs),
            "tokens": sum(self.costs),
            "tokens_per_request": int(median(self.costs)),
            "remedy": remedy_for_cause(self.cause, self.rules),
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
    def ideal_computed_tokens(self) -> int:
        """Prompt tokens that an infinite cache computes."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def redundancy_factor(self) -> float:
        """Computed tokens over those that remain if every cause is mended; 1 is best."""
        needed = self.ideal_computed_tokens - self.avoidable_tokens
        return self.ideal_computed_tokens / needed if needed > 0 else 1.0

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
            "computed_tokens": self.ideal_computed_tokens,
            "avoidable_tokens": self.avoidable_tokens,
            "avoidable_share": round(self.avoidable_share, 4),
            "redundancy": round(self.redundancy_factor, 3),
            "causes": [cost.as_dict() for cost in self.causes],
            "miss_ratios": [point._asdict() for point in self.curve],
        }


def lint_report(
    prompts: Sequence[LoggedPrompt],
    num_skipped: int = 0,
    notes: Sequence[str] = (),
    rule_of: RuleOf = find_no_rule,
    on_request: Callable[[], object] = lambda: None,
) -> LogReport:
    """Return the report of the prompts of one log, in order of arrival."""
    groups: defaultdict[str, SimilarPromptIndex] = defaultdict(SimilarPromptIndex)
    known, costs = set[int](), dict[str, CauseCost]()
    chains: list[list[int]] = []
    num_chars = num_reused = num_avoidable = 0
    for index, prompt in enumerate(prompts):
        text, near = prompt.text, groups[prompt.group]
        chain = _chain(text, prompt.group)
        reused = len(list(takewhile(known.__contains__, chain))) * BLOCK_TOKENS * CHARS_PER_TOKEN
        best = most_similar_earlier_prompt(prompt, prompts, near.nearest_prompt_indices(prompt, CANDIDATES))
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


def most_similar_earlier_prompt(
    prompt: LoggedPrompt, prompts: Sequence[LoggedPrompt], candidates: Sequence[int]
) -> tuple[int, PromptComparison] | None:
    """Return the earlier prompt with most equal text, and the comparison with it."""
    found = [(index, compare_logged_prompts(prompt, prompts[index])) for index in candidates]
    return max(found, key=lambda pair: pair[1].total_same_chars, default=None)


def _charge(
    costs: dict[str, CauseCost],
    prompt: LoggedPrompt,
    against: int,
    comparison: PromptComparison,
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
    blocks = (text[start : start + size] for start in range(0, len(text) - size + 1, size))
    return list(_hashes(group, (block.encode("utf-8", "surrogatepass") for block in blocks)))


def _hashes(group: str, blocks: Iterable[bytes]) -> Iterator[int]:
    hashed = blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8)
    for block in blocks:
        hashed.update(block)
        yield int.from_bytes(hashed.digest(), "little")


def lint_report_text(report: LogReport) -> str:
    """Return the report as lines of text."""
    total = report.prompt_tokens or 1
    lines = [
        f"{report.num_requests} requests with about {report.prompt_tokens:,} prompt tokens"
        + (f"; {report.num_skipped} lines without a request" if report.num_skipped else ""),
        *report.notes,
        f"reused in an infinite cache: {report.reused_tokens:,} ({100 * report.reused_tokens / total:.0f} %)",
        f"computed: {report.ideal_computed_tokens:,}, of which {report.avoidable_tokens:,} were avoidable "
        f"({100 * report.avoidable_share:.0f} % of all); redundancy {report.redundancy_factor:.2f}, 1 is best",
        "",
    ]
    for cost in report.causes:
        lines += _cause_lines(cost)
    if not report.causes:
        lines += ["No avoidable prefill was found.", ""]
    elif len(report.causes) > 1:
        lines += ["Costs of several causes overlap: one that is left costs what stands behind it.", ""]
    return "\n".join([*lines, *_curve_lines(report.curve)])


def _curve_lines(curve: Sequence[MissRatio]) -> list[str]:
    points = [f"  {point.cache_tokens:>12,}: {100 * point.miss_ratio:5.1f} %" for point in curve[4:]]
    return ["cache size in tokens: share of prompt tokens computed", *points]


def _cause_lines(cost: CauseCost) -> list[str]:
    plain = cost.as_dict()
    change = cost.change
    lines = [
        f"{cost.cause}: {plain['tokens_per_request']:,} tokens on each of {len(cost.costs)} requests, "
        f"{plain['tokens']:,} in all",
        f"  mend:  {plain['remedy']}",
        f"  first: line {cost.line}, {change.path}, character {change.at}, against line {cost.against}",
    ]
    if change.this or change.that:
        lines += [f"    that: {_shown(change.that)}", f"    this: {_shown(change.this)}"]
    return [*lines, ""]


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 60 else f"{text[:60]!a}..."


class CostlyDifference(NamedTuple):
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
        mend = remedy_for_cause(self.cause, [self.rule] if self.rule else []).replace(f"{what}: ", "")
        place = f"at character {self.character} of {self.field}"
        return f"{what[0].upper()}{what[1:]} {place} costs about {self.tokens:,} tokens: {mend}."


def find_costly_differences(
    prompt: LoggedPrompt, earlier: Sequence[LoggedPrompt], rule_of: RuleOf = find_no_rule
) -> list[CostlyDifference]:
    """Return the differences to the earlier prompt of the same group that has most text in common, the first first.

    Each cause is named once; its cost is the equal text behind it, so costs overlap. Small costs are left out.
    """
    near = SimilarPromptIndex()
    for index, other in enumerate(earlier):
        if other.group == prompt.group:
            near.add(index, other)
    best = most_similar_earlier_prompt(prompt, earlier, near.nearest_prompt_indices(prompt, CANDIDATES))
    if best is None:
        return []
    changes = best[1].changes
    causes = sorted(avoidable_text(best[1], 0).causes.values(), key=lambda found: changes.index(found[1]))
    return [
        CostlyDifference(change.cause, change.path, change.at, behind // CHARS_PER_TOKEN, rule_of(change.line))
        for behind, change in causes
    ]


@dataclass(frozen=True, slots=True)
class PrefixDivergence:
    """A request that shares only the first `at` tokens with the one before in its session, of `tokens` that it had."""

    line: int
    against: int
    at: int
    tokens: int


@dataclass(frozen=True, slots=True)
class IdTraceReport:
    """The findings of one log, in tokens. `own_tokens` of the reused ones are from earlier requests of the session."""

    num_requests: int
    num_sessions: int  # 0: the log names none
    num_skipped: int
    prompt_tokens: int
    reused_tokens: int
    own_tokens: int
    num_continued: int  # requests that begin with all full blocks of the one before in their session
    leaves: tuple[PrefixDivergence, ...]  # requests that do not
    curve: tuple[MissRatio, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens_unshared_with_next(self) -> int:
        """Tokens of earlier requests that the next one of the session did not share."""
        return sum(leave.tokens - leave.at for leave in self.leaves)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; what only texts tell is null."""
        return {
            "by": "ids",
            "requests": self.num_requests,
            "sessions": self.num_sessions,
            "skipped_lines": self.num_skipped,
            "notes": list(self.notes),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "reused_in_session_tokens": self.own_tokens,
            "computed_tokens": self.prompt_tokens - self.reused_tokens,
            "continued_requests": self.num_continued,
            "left_requests": len(self.leaves),
            "left_tokens": self.tokens_unshared_with_next,
            "avoidable_tokens": None,
            "causes": None,
            "miss_ratios": [point._asdict() for point in self.curve],
        }


def id_trace_report(
    prompts: Sequence[IdTracePrompt],
    num_skipped: int = 0,
    notes: Sequence[str] = (),
    on_request: Callable[[], object] = lambda: None,
) -> IdTraceReport:
    """Return the report of a log; blocks are those of the ids, 16 tokens if an id is one token."""
    known: dict[int, str] = {}  # block -> the session that had it last
    last: dict[str, tuple[IdTracePrompt, Sequence[int]]] = {}
    chains: list[Sequence[int]] = []
    leaves: list[PrefixDivergence] = []
    num_reused = num_own = num_continued = 0
    for prompt in prompts:
        chain, size = _id_chain(prompt)
        for block in takewhile(known.__contains__, chain):
            num_reused += size
            num_own += size if known[block] == prompt.session else 0
        known.update(dict.fromkeys(chain, prompt.session))
        if prompt.session in last:
            before, earlier = last[prompt.session]
            same = common_prefix_length(chain, earlier)
            if same == len(earlier):
                num_continued += 1
            else:
                leaves.append(PrefixDivergence(prompt.line, before.line, same * size, len(earlier) * size))
        if prompt.session:
            last[prompt.session] = prompt, chain
        chains.append(chain)
        on_request()
    block_tokens = _id_chain(prompts[0])[1] if prompts else BLOCK_TOKENS
    return IdTraceReport(
        num_requests=len(prompts),
        num_sessions=len(last),
        num_skipped=num_skipped,
        prompt_tokens=sum(prompt.length for prompt in prompts),
        reused_tokens=num_reused,
        own_tokens=num_own,
        num_continued=num_continued,
        leaves=tuple(leaves),
        curve=tuple(miss_ratios(chains, block_tokens)),
        notes=tuple(notes),
    )


def id_trace_report_text(report: IdTraceReport) -> str:
    """Return the report as lines of text."""
    total = report.prompt_tokens or 1
    sessions = f" in {report.num_sessions:,} sessions and sub-agents" if report.num_sessions else ""
    lines = [
        f"{report.num_requests:,} requests{sessions} with {report.prompt_tokens:,} prompt tokens, as ids"
        + (f"; {report.num_skipped:,} lines without a request" if report.num_skipped else ""),
        *report.notes,
        f"reused in an infinite cache: {report.reused_tokens:,} ({100 * report.reused_tokens / total:.1f} %), "
        f"of which {report.own_tokens:,} from the same session",
        f"computed: {report.prompt_tokens - report.reused_tokens:,}",
    ]
    if report.num_sessions:
        lines.append(
            f"{report.num_continued:,} requests continue the one before in their session; {len(report.leaves):,} leave "
            f"it early, with {report.tokens_unshared_with_next:,} tokens of it that are not shared"
        )
        largest = sorted(report.leaves, key=lambda leave: leave.at - leave.tokens)[:3]
        lines += [
            f"  request {leave.line:,} shares {leave.at:,} of {leave.tokens:,} tokens with request {leave.against:,}"
            for leave in largest
        ]
    return "\n".join([*lines, UNKNOWN, "", *_curve_lines(report.curve)])


def _id_chain(prompt: IdTracePrompt) -> tuple[Sequence[int], int]:
    """Return one id per full block, equal if all before it is equal too, and the tokens of a block."""
    if prompt.id_tokens > 1:
        return prompt.ids[: prompt.length // prompt.id_tokens], prompt.id_tokens
    ids = array("i", prompt.ids)
    blocks = (ids[start : start + BLOCK_TOKENS] for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS))
    return array("Q", _hashes(prompt.group, (block.tobytes() for block in blocks))), BLOCK_TOKENS
