"""Sequence: the scheduler's mutable state of a request."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash
from headstart.core.request import Request


def empty_block_table() -> "array[int]":
    """Return an empty block table, packed int32."""
    return array("i")


class SuspectBlock(NamedTuple):
    """A published block that a failed sequence shared; it is the same one while hash, block and version agree."""

    block_hash: BlockHash
    block: int
    version: int


class NonFiniteRecompute(NamedTuple):
    """The second run of a sequence whose row was not finite, in private blocks; see trust.py."""

    suspects: tuple[SuspectBlock, ...]
    until: int  # tokens; if it computes this many, the suspects are corrupt


class SequenceStatus(Enum):
    """The scheduling state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's mutable state of a request.

    0 ── num_cached_tokens ── num_computed_tokens ── next_start ── len(token_ids) ── num_tokens
                              │ num_scheduled_tokens │             │ 1 if pending_row is set
    """

    request: Request
    token_ids: "array[int]"  # prompt + output
    root: BlockHash  # parent of its first block
    region: BlockHash  # parent of its first private block: model, adapter, isolation domain, and the public prefix
    order: int = 0  # arrival order
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # KV of token_ids[:this] is in block_ids
    num_scheduled_tokens: int = 0  # of its chunks in flight
    needs_host: bool = False  # to plan its next decode, the last sampled token must be known
    pending_row: int | None = None  # row, of the last batch in flight, that samples the token behind token_ids
    num_covered_tokens: int = 0  # computed or reused before a preemption: positions below it are recomputed
    admitted: bool = False  # at least once
    scheduled_at: float = 0.0  # first admission
    num_hit_tokens: int | None = None  # cached at its first turn; what it reuses beyond that was followed
    num_pinned_tokens: int = 0  # of the hit of its first admission
    num_cached_tokens: int = 0  # reused at first admission, except blocks it waited for; constant after
    num_followed_tokens: int = 0  # computed by others while this one waited for them or ran beside them
    num_store_tokens: int = 0  # loaded from the store while this one waited for them
    num_loads: int = 0  # begun for it
    num_evicted_tokens: int = 0  # of its first admission: in the blocks behind the hit that had been evicted
    evicted_by: str | None = None  # tenant for whose request the first of them was evicted; None: for no request
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # reported so far; not reported again after a preemption
    block_ids: "array[int]" = field(default_factory=empty_block_table)  # block table, packed as an executor takes it
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])  # of full blocks, each computed once
    num_public_blocks: int = 0  # leading blocks of a public pinned prefix: shared by all domains
    num_published_blocks: int = 0  # leading blocks that are taken over, published, or equal to a published one
    taken: list[range] = field(default_factory=list[range])  # indices of the blocks taken over from others
    recompute: NonFiniteRecompute | None = None  # its second run: it neither reads nor writes the cache
    state: tuple[int, ...] = ()  # acquired blocks that its next chunk reads its recurrent state from
    started_from: BlockHash | None = None  # of the checkpoint that it has read last
    junction: int = 0  # blocks that were published when it began from an earlier checkpoint
    checkpoints: list[BlockHash] = field(default_factory=list[BlockHash])  # that it has left
    last_checkpoint: BlockHash | None = None  # that of its output so far
    was_recomputed: bool = False  # its second run has been requested; there is no third

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def next_start(self) -> int:
        """Position of the first token that is neither computed nor in flight."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_tokens_with_pending(self) -> int:
        """Number of its tokens when the steps in flight have ended."""
        return len(self.token_ids) + (self.pending_row is not None)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)
