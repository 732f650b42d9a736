"""IdReport: the reuse of requests that a log states as ids, of tokens or of blocks, without text.

Ids say what two prompts have in common from their beginning, and so what an infinite cache reuses, what a cache of a
given size holds, and where a conversation stops being continued. They do not say why: causes and what of the prefill
was avoidable need the text. Pure.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from headstart.common_prefix import common_prefix_length
from headstart.reuse.logged_prompt import IdPrompt
from headstart.reuse.miss_ratios import MissRatio, miss_ratios
from headstart.reuse.prompt_changes import BLOCK_TOKENS

UNKNOWN = "There is no text in these requests: causes, and what of the prefill was avoidable, cannot be known."


@dataclass(frozen=True, slots=True)
class Leave:
    """A request that shares only the first `at` tokens with the one before in its session, of `tokens` that it had."""

    line: int
    against: int
    at: int
    tokens: int


@dataclass(frozen=True, slots=True)
class IdReport:
    """The findings of one log, in tokens. `own_tokens` of the reused ones are from earlier requests of the session."""

    num_requests: int
    num_sessions: int  # 0: the log names none
    num_skipped: int
    prompt_tokens: int
    reused_tokens: int
    own_tokens: int
    num_continued: int  # requests that begin with all full blocks of the one before in their session
    leaves: tuple[Leave, ...]  # requests that do not
    curve: tuple[MissRatio, ...]
    notes: tuple[str, ...] = ()

    @property
    def left_tokens(self) -> int:
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
            "left_tokens": self.left_tokens,
            "avoidable_tokens": None,
            "causes": None,
            "miss_ratios": [point._asdict() for point in self.curve],
        }


def report_ids(
    prompts: Sequence[IdPrompt],
    num_skipped: int = 0,
    notes: Sequence[str] = (),
    on_request: Callable[[], object] = lambda: None,
) -> IdReport:
    """Return the report of a log; blocks are those of the ids, 16 tokens if an id is one token."""
    known: dict[int, str] = {}  # block -> the session that had it last
    last: dict[str, tuple[IdPrompt, Sequence[int]]] = {}
    chains: list[Sequence[int]] = []
    leaves: list[Leave] = []
    num_reused = num_own = num_continued = 0
    for prompt in prompts:
        chain, size = _chain(prompt)
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
                leaves.append(Leave(prompt.line, before.line, same * size, len(earlier) * size))
        if prompt.session:
            last[prompt.session] = prompt, chain
        chains.append(chain)
        on_request()
    block_tokens = _chain(prompts[0])[1] if prompts else BLOCK_TOKENS
    return IdReport(
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


def id_report_text(report: IdReport) -> str:
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
            f"it early, with {report.left_tokens:,} tokens of it that are not shared"
        )
        largest = sorted(report.leaves, key=lambda leave: leave.at - leave.tokens)[:3]
        lines += [
            f"  request {leave.line:,} shares {leave.at:,} of {leave.tokens:,} tokens with request {leave.against:,}"
            for leave in largest
        ]
    lines += [UNKNOWN, "", "cache size in tokens: share of prompt tokens computed"]
    lines += [f"  {point.cache_tokens:>12,}: {100 * point.miss_ratio:5.1f} %" for point in report.curve[4:]]
    return "\n".join(lines)


def _chain(prompt: IdPrompt) -> tuple[Sequence[int], int]:
    """Return one id per full block, equal if all before it is equal too, and the tokens of a block."""
    if prompt.id_tokens > 1:
        return prompt.ids[: prompt.length // prompt.id_tokens], prompt.id_tokens
    return array("Q", _hashes(prompt)), BLOCK_TOKENS


def _hashes(prompt: IdPrompt) -> Iterator[int]:
    hashed = blake2b(prompt.group.encode("utf-8", "surrogatepass"), digest_size=8)
    ids = array("i", prompt.ids)
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        hashed.update(ids[start : start + BLOCK_TOKENS].tobytes())
        yield int.from_bytes(hashed.digest(), "little")
