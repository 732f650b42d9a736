"""Cache diagnostics in the form of Anthropic's Messages API.

The comparison is of the prompts alone, whether or not they were cached: what was evicted shows in the usage, and in
`cache_diagnostics`, which is Headstart's own.
"""

from headstart.openai.diagnostics.cache_comparison import CacheComparison, Change
from headstart.openai.responses import Json

_REASONS = {
    Change.TOOLS_CHANGED: "tools_changed",
    Change.TOOLS_REORDERED: "tools_changed",
    Change.SYSTEM_CHANGED: "system_changed",
    Change.MESSAGES_CHANGED: "messages_changed",
    Change.PROMPT_CHANGED: "messages_changed",
    Change.MESSAGES_DROPPED: "messages_changed",
}


def message_diagnostics(comparison: CacheComparison, block_size: int) -> Json | None:
    """Return the value of `diagnostics`: None if the earlier prompt is a prefix of this one."""
    if not comparison.is_found:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if comparison.change is None:
        return None
    reason = _REASONS.get(comparison.change)
    if reason is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    lost = comparison.num_lost(block_size)
    return {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": lost}}
