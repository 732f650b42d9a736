"""PromptFingerprint: a prompt as hashes and counts, to compare later prompts with. No text, no tokens.

The hashes are seeded per process, so fingerprints mean nothing outside it. The hash of a prefix is the sum of its token
ids, each times a random 64-bit weight of its position (modulo 2**64): every prefix of a prompt is hashed in one pass of
numpy. One hash is kept per BLOCK tokens, and one per token from the last EXACT_BLOCKS blocks on: the common prefix of
two prompts is exact at its end, where chats differ, and rounded down before.
"""

import secrets
from array import array
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # tokens per hash
EXACT_BLOCKS = 2  # full blocks at the end that are hashed token by token, with the partly filled one
ENTRY_BYTES = 1024  # of the objects of a fingerprint beside its hashes
_SEED = secrets.randbits(128)


class PromptShape(NamedTuple):
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

    shape: PromptShape
    num_tokens: int
    blocks: NDArray[np.int64]
    tail: NDArray[np.int64]  # from the token `_tail_start(num_tokens)` on

    @property
    def num_bytes(self) -> int:
        """The memory it takes."""
        num_hashes = len(self.blocks) + len(self.tail) + len(self.shape.messages) + len(self.shape.tools)
        return ENTRY_BYTES + 8 * num_hashes


def fingerprint(shape: PromptShape, token_ids: "array[int]") -> PromptFingerprint:
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
