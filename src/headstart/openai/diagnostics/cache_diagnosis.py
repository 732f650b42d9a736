"""CacheDiagnosis: the outcome of a comparison together with what was really cached, and its forms in OpenAI's APIs.

OpenAI's reasons are a closed set. A cause that is not in it is `unavailable` there, and is named in the field
`cache_diagnostics`, which is Headstart's own.
"""

from dataclasses import dataclass
from typing import Any

from headstart.openai.diagnostics.cache_comparison import CacheComparison, Change

Json = dict[str, Any]

OPENAI_REASONS = {
    Change.TOOLS_CHANGED: "tools_changed",
    Change.TOOLS_REORDERED: "tools_changed",
    Change.SYSTEM_CHANGED: "input_changed",
    Change.MESSAGES_CHANGED: "input_changed",
    Change.PROMPT_CHANGED: "input_changed",
    Change.MESSAGES_DROPPED: "context_compacted",
    Change.REASONING_EFFORT_CHANGED: "reasoning_effort_changed",
}
EVICTED, NOT_CACHED, NOT_FOUND = "evicted", "not_cached", "not_found"


@dataclass(frozen=True, slots=True)
class CacheDiagnosis:
    """A comparison, and the tokens of the prompt that were cached, or had been evicted."""

    comparison: CacheComparison
    block_size: int
    num_cached: int
    num_evicted: int

    @property
    def is_hit(self) -> bool:
        """Whether all full blocks that the earlier prompt could spare were cached, from it or from another one."""
        found, size = self.comparison, self.block_size
        num_cached = self.num_cached // size
        if not found.is_found:
            return False
        if found.change is None:
            return num_cached >= found.num_reusable(size) // size
        return 0 < min(found.num_compared, found.num_tokens - 1) // size <= num_cached

    @property
    def cause(self) -> str | None:
        """The exact cause of a miss; None for a hit."""
        found = self.comparison
        if not found.is_found:
            return NOT_FOUND
        if self.is_hit:
            return None
        if found.change is not None:
            return found.change.value
        return EVICTED if self.num_evicted else NOT_CACHED

    def own(self) -> Json:
        """Return the value of `cache_diagnostics`."""
        found, size = self.comparison, self.block_size
        return {
            "compared_id": found.compared_id,
            "result": "hit" if self.is_hit else "miss" if found.is_found else NOT_FOUND,
            "cause": self.cause,
            "field": None if self.is_hit else found.field,
            "compared_tokens": found.num_compared,
            "common_tokens": found.num_common,
            "reusable_tokens": max(found.num_reusable(size), 0),
            "cached_tokens": self.num_cached,
            "evicted_tokens": self.num_evicted,
        }

    def openai(self) -> Json:
        """Return the value of `prompt_cache_diagnostics`."""
        found = self.comparison
        if not found.is_found:
            return {"type": "comparison_response_not_found"}
        if self.is_hit:
            return {"type": "cache_hit"}
        reason = None if found.change is None else OPENAI_REASONS.get(found.change)
        if reason is None:
            return {"type": "unavailable"}
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": found.num_tokens - max(found.num_reusable(self.block_size), 0),
            "comparison_reusable_tokens": found.num_common,
        }
