"""Plan: what one step will compute so far, what is left of its budget, and which blocks it promises."""

from headstart.core.cache.hashing import BlockHash
from headstart.core.request import Sequence
from headstart.core.sched.limits import Limits, charge, chunk_len


class Plan:
    """The chunks of one step while it is being planned.

    A block is *promised* if a planned chunk touches it and its sequence will publish it. A sequence whose first missing
    block is promised waits a step and takes it over, instead of computing it too: leader and followers, without a
    registry. If the leader fails, is aborted or gives way, the promise is simply not made again.
    """

    def __init__(
        self, limits: Limits, block_size: int, *, num_decodes: int, max_prompt_tokens: int | None = None
    ) -> None:
        """`max_prompt_tokens`: what the step has time for beside its decodes; None: any number."""
        self.limits = limits
        self.budget = limits.max_batched_tokens
        self.entries: list[tuple[Sequence, int]] = []
        self._block_size = block_size
        self._prompt_tokens_left = max_prompt_tokens
        self._num_decodes = num_decodes  # running sequences with one token to go, not planned yet
        self._promised: set[BlockHash] = set()

    def chunk_len(self, seq: Sequence, start: int, *, alone: bool) -> int:
        """Tokens of `seq` from `start` on to compute now; a prefill leaves a token to every decode behind it."""
        want = len(seq.token_ids) - start
        budget = self.budget if want == 1 else self.budget - self._num_decodes
        return chunk_len(want, start, budget, self.limits, alone=alone, cap=self._prompt_tokens_left)

    def add(self, seq: Sequence, start: int, n: int, *, writes: bool, extra: int = 0) -> None:
        """Plans `n` tokens of `seq`; `writes`: it publishes what it computes. `extra` is charged on top."""
        decode = len(seq.token_ids) - start == 1
        self.budget -= charge(start, n, self.limits, decode=decode) + extra
        self.entries.append((seq, n))
        if decode and self._num_decodes:
            self._num_decodes -= 1
        if not decode and self._prompt_tokens_left is not None:
            self._prompt_tokens_left = max(self._prompt_tokens_left - n, 0)
        first = start // self._block_size
        if writes and first < len(seq.block_hashes):  # a block of output tokens has no name before it is full
            self._promised.update(seq.block_hashes[first : (start + n - 1) // self._block_size + 1])

    def promises(self, seq: Sequence, index: int) -> bool:
        """Whether the next blocks of `seq`, from `index` on, are promised, and enough of them to be worth a step."""
        names, promised = seq.block_hashes, self._promised
        if index >= len(names) or names[index] not in promised:
            return False
        end = index + 1
        least = index + -(-self.limits.min_followed_tokens // self._block_size)
        while end < least and end < len(names) and names[end] in promised:
            end += 1
        return end >= least
