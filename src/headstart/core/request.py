"""Requests and sequences: `SamplingParams` and `Request` are frozen; `Sequence` is the scheduler's mutable state."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headstart.core.cache.hashing import BlockHash


class CacheMode(Enum):
    """Use of the prefix cache by one request."""

    READ_WRITE = "read-write"
    READ_ONLY = "read-only"  # reuses cached blocks, publishes none: one-off prompts
    BYPASS = "bypass"  # neither


class FinishReason(Enum):
    """The cause of a sequence's end."""

    STOP = "stop"  # an end-of-sequence or stop token, or (decided by the front end) a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # this row failed alone; `RequestStepOutput.error` has the message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request; every value is already validated and in range (openai/generation_fields.py).

    `max_tokens` 0: the prompt is computed and nothing is sampled. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1
    switch those filters off. `logprobs` is the number of alternatives to report beside the sampled token (0: the
    sampled token only; None: nothing), `prompt_logprobs` the same for every prompt token but the first.
    `stop_token_ids` includes the model's end-of-sequence ids unless `ignore_eos`; the front end handles stop strings,
    since the engine processes tokens only.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None  # the output matches this grammar, in llguidance's text form; the executor compiles it
    ignore_eos: bool = False  # for callers of headstart.LLM; the engine knows stop tokens only


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults from a model's generation_config.json for parameters that a request omits; None: not set there.

    `max_tokens` is a default too, never a cap: less if less fits into the context.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


NO_DEFAULTS = SamplingDefaults()


class RetentionHint(NamedTuple):
    """A retention hint for the blocks of a request; best effort, no guarantee.

    Of idle blocks those of lower `priority` (0 to 100) are evicted first; a block has the highest of its users'. With a
    `ttl` (seconds after its last use; 0: none) the priority falls back to the default when that is over.
    """

    priority: int = 50
    ttl: float = 0.0


DEFAULT_RETENTION = RetentionHint()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; immutable. A client's n > 1 or list of prompts becomes several of these."""

    request_id: str  # generated here; a client's id is only a label
    prompt: "array[int]"  # packed int32, at least one token; never modified
    sampling: SamplingParams = GREEDY
    arrival: float = 0.0  # seconds, caller's clock
    domain: bytes = b""  # isolation domain, part of the hash of every block after the longest public pinned prefix
    adapter: str | None = None
    priority: int = 0  # smaller is more important, as in vLLM
    cache: CacheMode = CacheMode.READ_WRITE
    tenant: str = ""  # the tenant whose share its blocks count against; a tenant may have several domains
    retention: RetentionHint = DEFAULT_RETENTION
    is_traced: bool = False  # its outputs report the chunks of its prompt
    boundary: int = 0  # tokens of the prompt that others are expected to begin with; 0: not known


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
    recompute: NonFiniteRecompute | None = (
        None  # its second run, waiting or running: it neither reads nor writes the cache
    )
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
