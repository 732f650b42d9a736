"""Verification of drafts: every position of a draft is sampled as if the tokens before it had come one by one.

The random number of an output is a function of its key and index, so the tokens are those without drafts, greedy or
drawn. Positions behind the first token that differs from the draft are not sampled, except for rows that need nothing
but the best token: these take one call, since a call costs more than some rows.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headstart.core.batch import Chunk, RowResult, TokenLogprob
from headstart.model.sampling.draw import select_rows

Sample = Callable[[Tensor, Sequence[Chunk]], list[RowResult]]


@dataclass(slots=True, eq=False)
class VerifiedChunk:
    """One chunk and the tokens found for it so far."""

    chunk: Chunk
    first: int  # row of the logits behind its own last token
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    error: RowResult | None = None

    @property
    def drafts(self) -> "array[int]":
        return self.chunk.token_ids[len(self.chunk.token_ids) + 1 - self.chunk.num_logits :]

    def chunk_after_verified(self) -> Chunk:
        """Return the chunk of one logit that would have come after the tokens found."""
        if not self.token_ids:
            return self.chunk
        return self.chunk._replace(history=self.chunk.history + array("i", self.token_ids))

    def add_sampled_row(self, row: RowResult) -> bool:
        """Add the sampled row; return whether the position behind it can be sampled.

        An error behind the first position is left out: it comes again in the next step, without the tokens before it.
        """
        if row.error is not None:
            self.error = None if self.token_ids else row
            return False
        self.token_ids += row.token_ids
        self.logprobs += row.logprobs
        found, drafts = len(self.token_ids), self.drafts
        if found > len(drafts) or row.token_ids[-1] in self.chunk.sampling.stop_token_ids:
            return False
        return drafts[:found].tolist() == self.token_ids

    def result(self) -> RowResult:
        return self.error or RowResult(tuple(self.token_ids), tuple(self.logprobs))


def verify_drafts(
    sample: Sample, logits: Tensor, chunks: Sequence[Chunk], is_greedy: Callable[[Chunk], bool]
) -> list[RowResult]:
    """Return the row of each chunk from logits [sum of num_logits, V]; `sample` does so for chunks of one logit.

    `is_greedy` chunks need only their best token, whatever their history is.
    """
    verified: list[VerifiedChunk] = []
    first = 0
    for chunk in chunks:
        verified.append(VerifiedChunk(chunk, first))
        first += chunk.num_logits
    greedy: list[VerifiedChunk] = []
    pending: list[VerifiedChunk] = []
    for one in verified:
        (greedy if one.chunk.num_logits > 1 and is_greedy(one.chunk) else pending).append(one)
    if greedy:
        _sample_greedy(sample, logits, greedy)
    while pending:
        rows = sample(
            select_rows(logits, [one.first + len(one.token_ids) for one in pending]),
            [o.chunk_after_verified() for o in pending],
        )
        pending = [one for one, row in zip(pending, rows, strict=True) if one.add_sampled_row(row)]
    return [one.result() for one in verified]


def _sample_greedy(sample: Sample, logits: Tensor, verified: list[VerifiedChunk]) -> None:
    """Sample all positions of these at once."""
    at = [one.first + index for one in verified for index in range(one.chunk.num_logits)]
    rows = iter(sample(select_rows(logits, at), [one.chunk for one in verified for _ in range(one.chunk.num_logits)]))
    for one in verified:
        own = [next(rows) for _ in range(one.chunk.num_logits)]
        for row in own:
            if not one.add_sampled_row(row):
                break
