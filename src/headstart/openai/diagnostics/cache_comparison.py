"""Comparison of a prompt with an earlier one: the tokens it could reuse, and what ended the common prefix. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headstart.openai.diagnostics.prompt_fingerprint import PromptFingerprint, PromptShape, num_common_tokens

END_TOKENS = 32  # at the end of a prompt, which may belong to the generation prompt: templates may rewrite it later


class Change(Enum):
    """A difference between two prompts that ends the reuse of the earlier one."""

    TOOLS_CHANGED = "tools_changed"
    TOOLS_REORDERED = "tools_reordered"
    SYSTEM_CHANGED = "system_changed"
    MESSAGES_CHANGED = "messages_changed"
    MESSAGES_DROPPED = "messages_dropped"  # earlier turns are gone or replaced by fewer: it was compacted
    REASONING_EFFORT_CHANGED = "reasoning_effort_changed"
    TEMPLATE_OPTIONS_CHANGED = "template_options_changed"  # chat_template_kwargs, add_generation_prompt
    RENDERED_DIFFERENTLY = "rendered_differently"  # the same messages; the chat template drops or changes earlier turns
    PROMPT_CHANGED = "prompt_changed"  # of a completion
    CACHE_SALT_CHANGED = "cache_salt_changed"
    NOT_PUBLISHED = "not_published"  # the earlier request was read-only, or bypassed the cache


@dataclass(frozen=True, slots=True)
class CacheComparison:
    """A prompt compared with the earlier one of `compared_id`. Counts in tokens; 0 for an earlier one not found."""

    compared_id: str
    is_found: bool
    num_tokens: int  # of the prompt
    num_compared: int = 0  # of the earlier prompt
    num_common: int = 0  # leading ones in common
    change: Change | None = None  # None: the earlier prompt is a prefix of this one
    field: str | None = None  # where the change is, as in a chat: "tools", "messages[3]"

    def num_reusable(self, block_size: int) -> int:
        """Return the tokens of full blocks that both prompts begin with, less the last token of the prompt."""
        return min(self.num_common // block_size * block_size, self.num_tokens - 1)

    def num_lost(self, block_size: int) -> int:
        """Return the tokens that the earlier prompt would have spared if nothing had changed."""
        whole = min(self.num_compared // block_size * block_size, self.num_tokens - 1)
        return max(whole - self.num_reusable(block_size), 0)


def compare_prompts(
    compared_id: str, earlier: PromptFingerprint | None, shape: PromptShape, token_ids: "Sequence[int]"
) -> CacheComparison:
    """Return the comparison of a prompt with an earlier one; None: there is none with this id for this tenant."""
    num_tokens = len(token_ids)
    if earlier is None:
        return CacheComparison(compared_id, is_found=False, num_tokens=num_tokens)
    before = earlier.shape
    if before.domain != shape.domain:  # nothing is told about prompts of another salt
        return CacheComparison(compared_id, is_found=True, num_tokens=num_tokens, change=Change.CACHE_SALT_CHANGED)
    num_common = num_common_tokens(earlier, token_ids)  # type: ignore[arg-type]
    change, field = _change(before, shape)
    if num_common >= min(earlier.num_tokens, num_tokens):
        change = field = None
    elif change is None and not before.is_chat:
        change = Change.PROMPT_CHANGED
    elif change is None and num_common < min(earlier.num_tokens - END_TOKENS, num_tokens):
        change = Change.RENDERED_DIFFERENTLY
    if change is None and not before.is_published:
        change = Change.NOT_PUBLISHED
    return CacheComparison(
        compared_id=compared_id,
        is_found=True,
        num_tokens=num_tokens,
        num_compared=earlier.num_tokens,
        num_common=num_common,
        change=change,
        field=field,
    )


def _change(before: PromptShape, now: PromptShape) -> tuple[Change | None, str | None]:
    """Return the first change, in the order of a prompt: tools, system prompt, messages; then the options."""
    if before.tools != now.tools:
        is_same_set = sorted(before.tools) == sorted(now.tools)
        return Change.TOOLS_REORDERED if is_same_set else Change.TOOLS_CHANGED, "tools"
    if before.system != now.system:
        return Change.SYSTEM_CHANGED, "messages[0]"
    if before.effort != now.effort:
        return Change.REASONING_EFFORT_CHANGED, "reasoning_effort"
    if before.options != now.options:
        return Change.TEMPLATE_OPTIONS_CHANGED, "chat_template_kwargs"
    at = next(
        (index for index, (one, other) in enumerate(zip(before.messages, now.messages, strict=False)) if one != other),
        min(len(before.messages), len(now.messages)),
    )
    if at == len(before.messages):
        return None, None
    field = f"messages[{now.num_system + at}]"
    is_shorter = len(now.messages) < len(before.messages)
    was_later = at < len(now.messages) and now.messages[at] in before.messages[at + 1 :]
    return Change.MESSAGES_DROPPED if is_shorter or was_later else Change.MESSAGES_CHANGED, field
