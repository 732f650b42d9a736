"""Comparison of a prompt with an earlier one: the tokens it could reuse, and what ended the common prefix. Pure.

A CacheDiagnosis is the comparison together with what was really cached, in OpenAI's APIs and in `cache_diagnostics`,
which is Headstart's own and names every cause. Anthropic's Messages API compares the prompts alone.

A PromptFingerprint is a prompt as hashes and counts: no text, no tokens. The hashes are seeded per process. The hash of
a prefix is the sum of its token ids, each times a random 64-bit weight of its position (modulo 2**64): numpy hashes
every prefix in one pass. One hash is kept per BLOCK tokens, and one per token from the last EXACT_BLOCKS blocks on: the
common prefix of two prompts is exact at its end, where chats differ, and rounded down before.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.common_prefix import common_prefix_length

END_TOKENS = 32  # at the end of a prompt, which may belong to the generation prompt: templates may rewrite it later
EVICTED, NOT_CACHED, NOT_FOUND = "evicted", "not_cached", "not_found"

Json = dict[str, Any]
BLOCK = 16  # tokens per hash
EXACT_BLOCKS = 2  # full blocks at the end that are hashed token by token, with the partly filled one
ENTRY_BYTES = 1024  # of the objects of a fingerprint beside its hashes
_SEED = secrets.randbits(128)


class PromptSourceHashes(NamedTuple):
    """The hashes of what a prompt was made from; a completion has neither tools nor messages."""

    tools: tuple[int, ...]
    system: int  # the leading system messages; 0 without any
    messages: "array[int]"
    num_system: int  # messages before `messages`
    effort: int  # of reasoning
    options: int  # other parameters that the chat template sees
    domain: int  # isolation domain, with the cache_salt
    is_published: bool  # its blocks may be reused

    @property
    def is_chat(self) -> bool:
        """Whether it was made from messages."""
        return bool(self.messages) or self.num_system > 0


class PromptFingerprint(NamedTuple):
    """A prompt by hashes of its prefixes: `blocks` up to every full block, `tail` up to every token at the end."""

    shape: PromptSourceHashes
    num_tokens: int
    blocks: NDArray[np.int64]
    tail: NDArray[np.int64]  # from the token `_tail_start(num_tokens)` on

    @property
    def num_bytes(self) -> int:
        """The memory it takes."""
        num_hashes = len(self.blocks) + len(self.tail) + len(self.shape.messages) + len(self.shape.tools)
        return ENTRY_BYTES + 8 * num_hashes


def fingerprint_prompt(shape: PromptSourceHashes, token_ids: "array[int]") -> PromptFingerprint:
    """Return the fingerprint of a prompt."""
    hashes = _prefix_hashes(token_ids)
    blocks, tail = hashes[BLOCK - 1 :: BLOCK], hashes[_tail_start(len(token_ids)) :]
    return PromptFingerprint(shape, len(token_ids), blocks.copy(), tail.copy())


def num_common_tokens(earlier: PromptFingerprint, token_ids: "array[int]") -> int:
    """Return the number of leading tokens that a prompt has in common with an earlier one, as exact as that is kept."""
    hashes = _prefix_hashes(token_ids[: earlier.num_tokens])
    start = _tail_start(earlier.num_tokens)
    num_blocks = _num_equal(earlier.blocks[: start // BLOCK], hashes[BLOCK - 1 :: BLOCK])
    if num_blocks * BLOCK < start:
        return num_blocks * BLOCK
    return start + _num_equal(earlier.tail, hashes[start:])


def _prefix_hashes(token_ids: "array[int]") -> NDArray[np.int64]:
    """Return the hash of each prefix of a prompt, the first of one token."""
    num = len(token_ids)
    weights = _weights(1 << num.bit_length())
    return np.cumsum(np.frombuffer(token_ids, np.int32) * weights[:num])


@lru_cache(maxsize=4)
def _weights(size: int) -> NDArray[np.int64]:
    """Return the weights of the first `size` positions; those of a position are the same for every size."""
    return np.random.default_rng(_SEED).integers(-(1 << 63), 1 << 63, size, np.int64)


def _tail_start(num_tokens: int) -> int:
    """Return the number of tokens in front of those that have a hash each."""
    return max(num_tokens // BLOCK - EXACT_BLOCKS, 0) * BLOCK


def _num_equal(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Return the number of leading items that two arrays have in common."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


class PromptChangeKind(Enum):
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


API_REASONS = {  # in OpenAI's APIs, in Anthropic's; both are closed sets, in which the other changes are `unavailable`
    PromptChangeKind.TOOLS_CHANGED: ("tools_changed", "tools_changed"),
    PromptChangeKind.TOOLS_REORDERED: ("tools_changed", "tools_changed"),
    PromptChangeKind.SYSTEM_CHANGED: ("input_changed", "system_changed"),
    PromptChangeKind.MESSAGES_CHANGED: ("input_changed", "messages_changed"),
    PromptChangeKind.PROMPT_CHANGED: ("input_changed", "messages_changed"),
    PromptChangeKind.MESSAGES_DROPPED: ("context_compacted", "messages_changed"),
    PromptChangeKind.REASONING_EFFORT_CHANGED: ("reasoning_effort_changed", None),
}


@dataclass(frozen=True, slots=True)
class CacheComparison:
    """A prompt compared with the earlier one of `compared_id`. Counts in tokens; 0 for an earlier one not found."""

    compared_id: str
    is_found: bool
    num_tokens: int  # of the prompt
    num_compared: int = 0  # of the earlier prompt
    num_common: int = 0  # leading ones in common
    change: PromptChangeKind | None = None  # None: the earlier prompt is a prefix of this one
    field: str | None = None  # where the change is, as in a chat: "tools", "messages[3]"

    def num_reusable(self, block_size: int) -> int:
        """Return the tokens of full blocks that both prompts begin with, less the last token of the prompt."""
        return min(self.num_common // block_size * block_size, self.num_tokens - 1)

    def num_lost_to_change(self, block_size: int) -> int:
        """Return the tokens that the earlier prompt would have spared if nothing had changed."""
        whole = min(self.num_compared // block_size * block_size, self.num_tokens - 1)
        return max(whole - self.num_reusable(block_size), 0)


def compare_prompts(
    compared_id: str, earlier: PromptFingerprint | None, shape: PromptSourceHashes, token_ids: "Sequence[int]"
) -> CacheComparison:
    """Return the comparison of a prompt with an earlier one; None: there is none with this id for this tenant."""
    num_tokens = len(token_ids)
    if earlier is None:
        return CacheComparison(compared_id, is_found=False, num_tokens=num_tokens)
    before = earlier.shape
    if before.domain != shape.domain:  # nothing is told about prompts of another salt
        return CacheComparison(
            compared_id, is_found=True, num_tokens=num_tokens, change=PromptChangeKind.CACHE_SALT_CHANGED
        )
    num_common = num_common_tokens(earlier, token_ids)  # type: ignore[arg-type]
    change, field = _change(before, shape)
    if num_common >= min(earlier.num_tokens, num_tokens):
        change = field = None
    elif change is None and not before.is_chat:
        change = PromptChangeKind.PROMPT_CHANGED
    elif change is None and num_common < min(earlier.num_tokens - END_TOKENS, num_tokens):
        change = PromptChangeKind.RENDERED_DIFFERENTLY
    if change is None and not before.is_published:
        change = PromptChangeKind.NOT_PUBLISHED
    return CacheComparison(
        compared_id=compared_id,
        is_found=True,
        num_tokens=num_tokens,
        num_compared=earlier.num_tokens,
        num_common=num_common,
        change=change,
        field=field,
    )


def _change(before: PromptSourceHashes, now: PromptSourceHashes) -> tuple[PromptChangeKind | None, str | None]:
    """Return the first change, in the order of a prompt: tools, system prompt, messages; then the options."""
    if before.tools != now.tools:
        is_same_set = sorted(before.tools) == sorted(now.tools)
        return PromptChangeKind.TOOLS_REORDERED if is_same_set else PromptChangeKind.TOOLS_CHANGED, "tools"
    if before.system != now.system:
        return PromptChangeKind.SYSTEM_CHANGED, "messages[0]"
    if before.effort != now.effort:
        return PromptChangeKind.REASONING_EFFORT_CHANGED, "reasoning_effort"
    if before.options != now.options:
        return PromptChangeKind.TEMPLATE_OPTIONS_CHANGED, "chat_template_kwargs"
    at = common_prefix_length(before.messages, now.messages)
    if at == len(before.messages):
        return None, None
    field = f"messages[{now.num_system + at}]"
    is_shorter = len(now.messages) < len(before.messages)
    was_later = at < len(now.messages) and now.messages[at] in before.messages[at + 1 :]
    return PromptChangeKind.MESSAGES_DROPPED if is_shorter or was_later else PromptChangeKind.MESSAGES_CHANGED, field


@dataclass(frozen=True, slots=True)
class CacheDiagnosis:
    """A comparison, and the tokens of the prompt that were cached, or had been evicted."""

    comparison: CacheComparison
    block_size: int
    num_cached: int
    num_evicted: int

    @property
    def is_full_hit(self) -> bool:
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
        if self.is_full_hit:
            return None
        if found.change is not None:
            return found.change.value
        return EVICTED if self.num_evicted else NOT_CACHED

    def cache_diagnostics_json(self) -> Json:
        """Return the value of `cache_diagnostics`."""
        found, size = self.comparison, self.block_size
        return {
            "compared_id": found.compared_id,
            "result": "hit" if self.is_full_hit else "miss" if found.is_found else NOT_FOUND,
            "cause": self.cause,
            "field": None if self.is_full_hit else found.field,
            "compared_tokens": found.num_compared,
            "common_tokens": found.num_common,
            "reusable_tokens": max(found.num_reusable(size), 0),
            "cached_tokens": self.num_cached,
            "evicted_tokens": self.num_evicted,
        }

    def openai_json(self) -> Json:
        """Return the value of `prompt_cache_diagnostics`."""
        found = self.comparison
        if not found.is_found:
            return {"type": "comparison_response_not_found"}
        if self.is_full_hit:
            return {"type": "cache_hit"}
        reason = None if found.change is None else API_REASONS.get(found.change, (None, None))[0]
        if reason is None:
            return {"type": "unavailable"}
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": found.num_tokens - max(found.num_reusable(self.block_size), 0),
            "comparison_reusable_tokens": found.num_common,
        }


def anthropic_diagnostics(comparison: CacheComparison, block_size: int) -> Json | None:
    """Return the value of `diagnostics`: None if the earlier prompt is a prefix of this one."""
    if not comparison.is_found:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if comparison.change is None:
        return None
    reason = API_REASONS.get(comparison.change, (None, None))[1]
    if reason is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    lost = comparison.num_lost_to_change(block_size)
    return {"cache_miss_reason": {"type": reason, "cache_missed_input_tokens": lost}}
