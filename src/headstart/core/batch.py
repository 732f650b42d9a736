"""Data that crosses the executor seam (Chunk, Batch, Row, StepResult) and leaves the engine (Output)."""

from array import array
from enum import Enum
from typing import NamedTuple

from headstart.core.request import FinishReason, SamplingParams

UNKNOWN_TOKEN = -1  # in the place of a token that the batch before this one is about to sample


Saves = tuple[tuple[int, tuple[int, ...]], ...]
"""Positions behind which the recurrent state is to be kept, and the blocks to write it to."""


class Chunk(NamedTuple):
    """Tokens `[start, start + len(token_ids))` of one sequence, computed in one step; a decode is a chunk of 1.

    KV of `[0, start)` is already in `block_ids`. Positions below `write_from` are there too, in shared blocks: compute
    them, but never write them. The last `num_logits` positions are sampled: 0 in a non-final chunk and for a request
    without output (`max_tokens` 0), else 1.

    A chunk that is planned while the batch before it runs (AsyncExecutor) may continue a row of that batch whose token
    is not known yet. It is a decode then: `token_ids` is one UNKNOWN_TOKEN at position `start`, and `from_previous` is
    the index of that row, in the batch submitted just before this one. The executor puts the token that it sampled
    there in place of UNKNOWN_TOKEN, on the device: `tokens[at] = sampled_before[from_previous]`, one gather for all
    such chunks. Such rows sample one token, without drafts, grammar or penalties. `history` ends before the unknown
    token, so `history[start]` does not exist: the number of outputs so far is `start + 1 - num_prompt_tokens`.
    """

    request_id: str
    token_ids: "array[int]"  # packed int32, n >= 1
    start: int
    block_ids: "tuple[int, ...] | list[int] | array[int]"  # covers [0, start + n); read-only, valid during submit()
    write_from: int
    num_logits: int
    sampling: SamplingParams
    num_prompt_tokens: int  # of the sequence: tokens from this position on are output
    history: "array[int]"  # all tokens known so far (prompt + output), >= start + n; read-only, valid during submit()
    adapter: str | None = None
    from_previous: int | None = None  # row of the previous batch whose sampled token is the one of this chunk
    state: tuple[
        int, ...
    ] = ()  # the blocks that hold the recurrent state at `start`; else it is that of the last chunk
    saves: Saves = ()

    @property
    def num_drafts(self) -> int:
        """The number of draft tokens at its end."""
        return max(self.num_logits - 1, 0)

    @property
    def num_non_draft_tokens(self) -> int:
        """The number of its tokens before the drafts."""
        num = self.num_logits
        return len(self.token_ids) + 1 - num if num > 1 else len(self.token_ids)

    def num_accepted(self, sampled: tuple[int, ...]) -> int:
        """Return the number of leading drafts that equal the tokens of its row.

        The last of these does not count: it is to be computed for the logits behind it.
        """
        drafts, num = self.token_ids[self.num_non_draft_tokens :], 0
        while num < min(len(drafts), len(sampled) - 1) and drafts[num] == sampled[num]:
            num += 1
        return num


class Batch(NamedTuple):
    """One forward pass, and the ids of requests whose per-row state the executor may drop."""

    chunks: tuple[Chunk, ...]
    finished: tuple[str, ...] = ()


class TokenLogprob(NamedTuple):
    """Log-probability (natural log) of one token and the best alternatives, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


class RowErrorKind(Enum):
    """Cause of a row's failure; it decides whether the KV blocks the row used are discarded."""

    NON_FINITE = "non-finite"  # hidden states, or unedited logits: the KV that was read or written may be corrupt
    REQUEST = "request"  # token ids out of bounds, sampling: the KV is valid
    GRAMMAR = "grammar"  # the request's grammar has exceeded its limits: the KV is valid, the mistake is the client's


class RowError(NamedTuple):
    """The failure of one row. `message` is sent to the client."""

    kind: RowErrorKind
    message: str


class RowResult(NamedTuple):
    """The result of one chunk. A row fails alone: `error` is set and the other rows are valid.

    `token_ids` are empty without logits to sample, else the sampled token and those that the request's grammar forces
    after it, which are not computed yet. While they equal the chunk's drafts, what is sampled behind them follows. With
    log-probabilities there is one entry per token.

    `prompt_logprobs` (only if requested) holds one entry per position of the chunk, for the *next* prompt token of
    each; positions whose next token is not a prompt token have none.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: RowError | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class StepResult(NamedTuple):
    """One row per chunk, in order.

    `elapsed` is the duration of the step in seconds, measured or predicted: if it was submitted while another one ran,
    without the time until that one ended.
    """

    rows: tuple[RowResult, ...]
    elapsed: float


class PromptTokenBreakdown(NamedTuple):
    """Sources of a prompt's KV, in tokens; always pinned + shared + store + followed + computed = prompt.

    `pinned`, `shared` and `store` were cached at the request's first turn in the waiting queue. `followed` was computed
    by other requests while this one waited for them or ran beside them. `computed` is the rest, counted once: tokens
    recomputed after a preemption are not included.
    """

    pinned: int = 0
    shared: int = 0
    store: int = 0
    followed: int = 0
    computed: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens reported to clients as cached_tokens."""
        return self.pinned + self.shared + self.store + self.followed


class PrefillChunkTiming(NamedTuple):
    """A chunk of a prompt: when its step was planned, how long the step took, in seconds, and its tokens."""

    planned_at: float
    elapsed: float
    num_tokens: int


class RequestStepOutput(NamedTuple):
    """The result of one step for one request: tokens since the last Output, and the finish reason if it finished."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    breakdown: PromptTokenBreakdown | None = None  # with the first output token, or at the end without any
    scheduled_at: float = 0.0  # first admission, on the clock given to the scheduler
    is_invalid: bool = False  # `error` is the client's mistake
    num_evicted_tokens: int = 0  # with the breakdown: computed prompt tokens whose blocks had been evicted
    prefill: tuple[PrefillChunkTiming, ...] = ()  # of a traced request, with the breakdown
    evicted_by: str | None = None  # tenant for whose request the first of them was evicted; None: for no request
